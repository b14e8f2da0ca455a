"""The search for the largest number of runs, against memory laws that are known."""

import pytest

from jaxmem.colocate.fitting import MOST_COMPILES, Tried, largest, line, try_runs
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

GIB = 2**30
LAWS = {
    "a line": lambda n: 300 + 37 * n,
    "a line from nothing": lambda n: 41 * n,
    "small ones are cheaper": lambda n: 30 * n if n < 20 else 55 * n,
    "temporaries that grow in steps": lambda n: 25 * n + 400 * (n // 16),
    "slightly bent": lambda n: 100 + 30 * n + n * n // 40,
    "nearly free at first": lambda n: 2 * n if n < 5 else 2 * n + 28 * (n - 4),  # a TPU's VMEM
}


def search(law, usable: int, *, refused: str = "numbers", step: int = 1):
    asked = []

    def tries(runs: int) -> tuple[Tried, int]:
        asked.append(runs)
        fits = law(runs) <= usable
        peak = law(runs) if fits or refused == "numbers" else None
        return Tried(runs=runs, fits=fits, peak_bytes=peak), usable
    return largest(tries, step=step), asked


@pytest.mark.parametrize("refused", ["numbers", "none"])
@pytest.mark.parametrize("usable", [40, 1000, 5000, 12345])
@pytest.mark.parametrize("law", LAWS)
def test_the_largest_fits_and_the_next_does_not(law, usable, refused):
    found, asked = search(LAWS[law], usable, refused=refused)
    brute = max((n for n in range(2000) if n == 0 or LAWS[law](n) <= usable), default=0)
    assert found.certain and found.runs == brute
    assert len(asked) == len(set(asked)) <= MOST_COMPILES
    assert [one.runs for one in found.tried] == sorted(asked)


def test_a_line_takes_four_compiles():
    found, asked = search(LAWS["a line"], 10_000)
    assert asked == [1, 2, 262, 263] and (found.runs, found.certain) == (262, True)
    assert line(found.tried) == (300, 37)


def test_a_few_runs_that_cost_nearly_nothing_do_not_mislead_for_long():
    """As found on a TPU: 2 MB a run for the first, 28.5 MB a run in the end, so that the first line leads 14 times too far."""
    found, asked = search(LAWS["nearly free at first"], 16_900)
    assert asked[:3] == [1, 2, 8450] and found.runs == 567 and found.certain and len(asked) <= 8


def test_groups_are_filled_together():
    found, asked = search(LAWS["a line"], 10_000, step=8)
    assert found.runs == 256 and found.certain and all(n % 8 == 0 for n in asked)


def test_without_an_end_the_answer_is_not_certain():
    found, asked = search(lambda n: 5, 10)
    assert not found.certain and len(asked) == MOST_COMPILES and found.runs == max(asked)


def test_not_even_one():
    found, asked = search(lambda n: 100, 99)
    assert (found.runs, found.certain, asked) == (0, True, [1])
    assert line(found.tried) is None


def test_a_cpu_has_no_memory_of_its_own():
    with pytest.raises(InputError, match="v5e-1 or h100:1"):
        try_runs(Workload.parse(model="mlp", batch=8), Plan(), parse_topology("cpu:1"), 2)


@pytest.mark.long
@pytest.mark.parametrize("topology", ["v5e-1", "h100:1"])
def test_memory_of_a_target_grows_by_a_run(topology):
    """Adam's state and the parameters are 12 bytes a parameter and run, and that is compiled: six runs more add at least six of them."""
    workload = Workload.parse(model="decoder-tiny,layers=1", batch=8, seq=128)
    found = {n: try_runs(workload, Plan(), parse_topology(topology), n)[0] for n in (2, 8)}
    each = (found[8].peak_bytes - found[2].peak_bytes) / 6
    assert 12 * workload.model.parameters <= each <= found[2].peak_bytes / 2 * 1.1
    assert found[8].fits and found[8].step_s < 8 * found[2].step_s
    refused, usable = try_runs(workload, Plan(), parse_topology(topology), round(2 * 10**11 / each / 8) * 8)
    assert not refused.fits and (refused.peak_bytes is None or refused.peak_bytes > usable) and usable > GIB

"""The closed forms against a simulation that follows a run second by second's worth of events, and the optimum against a search."""

import math
import random

import pytest

from jaxmem.cost.checkpointing import Account, Costs, daly, expected, job_mtbf_s, optimum, young
from jaxmem.hardware import parse_topology
from jaxmem.spec import InputError

CASES = [  # stall, commit, restart, interval, mtbf: the intervals are of the order of the mtbf, where first-order formulas fail
    (1.0, 1.0, 0.0, 10.0, 50.0),  # sync
    (2.0, 2.0, 5.0, 20.0, 30.0),
    (0.5, 4.0, 3.0, 10.0, 25.0),  # async
    (0.0, 6.0, 4.0, 8.0, 20.0),  # lazy, all of the copy hidden
    (1.0, 9.0, 2.0, 3.0, 20.0),  # the commit takes longer than the interval: the next checkpoint waits
    (3.0, 5.0, 8.0, 40.0, 15.0),
    (12.0, 15.0, 3.0, 6.0, 15.0),  # many failures strike in a stall
]


def simulated(stall: float, commit: float, restart: float, interval: float, mtbf: float, *, intervals: int, seed: int) -> dict[str, float]:
    """Shares of the wall time of one long run, followed event by event. Knows nothing of the formulas."""
    rng = random.Random(seed)
    clock, failure = 0.0, rng.expovariate(1 / mtbf)
    spent = {"stalls": 0.0, "restarts": 0.0, "work": 0.0}
    failures = 0

    def until(target: float, what: str) -> bool:
        """Spend time up to `target`; False when a failure came first."""
        nonlocal clock, failure, failures
        end = min(target, failure)
        spent[what] += end - clock
        clock = end
        if clock < failure:
            return True
        failures += 1
        failure = clock + rng.expovariate(1 / mtbf)
        return False

    committed, saving, begun = 0, None, 0.0  # intervals that are safe; the one that is being written, and since when
    held = 0  # intervals in the memory of the live process
    while committed < intervals:
        alive = True
        while alive and committed < intervals:  # one life of the process
            # work for one interval; a commit may fall into it
            alive = until(clock + interval, "work")
            if saving is not None and clock >= begun + commit:
                committed, saving = saving, None
            if not alive:
                break
            held += 1
            if saving is not None:  # what was written last is not committed yet
                alive = until(begun + commit, "stalls")
                if not alive:
                    break
                committed, saving = saving, None
            saving, begun = held, clock
            alive = until(clock + stall, "stalls")
            if commit == stall and alive:
                committed, saving = saving, None
        if committed >= intervals:
            break
        saving = None
        while not until(clock + restart, "restarts"):
            pass
        held = committed
    useful = committed * interval
    return {"goodput": useful / clock, "stalls": spent["stalls"] / clock, "restarts": spent["restarts"] / clock,
            "lost": (spent["work"] - useful) / clock, "failures": failures}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_part_of_the_account_is_what_a_simulation_finds(case):
    stall, commit, restart, interval, mtbf = case
    found = simulated(*case, intervals=20_000, seed=1)
    account = expected(Costs(stall_s=stall, commit_s=commit, restart_s=restart), interval, mtbf)
    assert found["failures"] > 2000
    for name in ("goodput", "stalls", "lost", "restarts"):
        assert getattr(account, name) == pytest.approx(found[name], abs=0.012), name
    assert account.goodput + account.stalls + account.lost + account.restarts == pytest.approx(1, abs=1e-12)


def test_without_a_commit_time_of_its_own_it_is_daly_s_formula():
    """Daly 2006: expected wall time of an interval, M exp(R / M) (exp((T + C) / M) - 1)."""
    for stall, restart, interval, mtbf in ((1.0, 0.0, 10.0, 50.0), (2.0, 5.0, 20.0, 30.0), (10.0, 600.0, 3600.0, 86400.0)):
        wall = mtbf * math.exp(restart / mtbf) * (math.exp((interval + stall) / mtbf) - 1)
        found = expected(Costs(stall_s=stall, commit_s=stall, restart_s=restart), interval, mtbf)
        assert found.goodput == pytest.approx(interval / wall, rel=1e-12)


@pytest.mark.parametrize("costs", [(1, 1, 0, 100), (1, 10, 5, 100), (0, 10, 5, 100), (50, 50, 5, 10), (1, 200, 5, 100), (5, 9, 0, 3),
                                   (1e-3, 1e-3, 0, 1e6), (3, 8, 100, 40)], ids=str)
def test_no_interval_is_better_than_the_optimum(costs):
    stall, commit, restart, mtbf = costs
    one = Costs(stall_s=stall, commit_s=commit, restart_s=restart)
    best = optimum(one, mtbf)
    searched = max((mtbf * 10 ** (k / 500) for k in range(-5000, 1000)), key=lambda t: expected(one, t, mtbf).goodput)
    assert best == pytest.approx(searched, rel=0.003)  # the search's own spacing is 0.5%
    assert all(expected(one, best, mtbf).goodput >= expected(one, best * factor, mtbf).goodput for factor in (0.5, 0.98, 1.02, 2))


def test_the_restart_and_a_commit_shorter_than_the_interval_do_not_move_the_optimum():
    """And each is lost once a failure: the goodput falls by exp(-(L + R) / M) against a run that has neither."""
    plain, later = (Costs(stall_s=2, commit_s=commit, restart_s=restart) for commit, restart in ((2, 0), (20, 60)))
    best = optimum(plain, 600.0)
    assert best == optimum(later, 600.0) and 45 < best < 50
    assert expected(later, best, 600.0).goodput == pytest.approx(expected(plain, best, 600.0).goodput * math.exp(-78 / 600), rel=1e-12)


def test_no_checkpoint_begins_before_the_last_is_committed():
    """The commit time is the shortest useful interval: with no stall that decides alone, and Young's formula says 0."""
    hidden = Costs(stall_s=0, commit_s=30, restart_s=10)
    assert optimum(hidden, 3600.0) == 30.0 and young(0, 3600.0) == daly(0, 3600.0) == 0
    assert expected(hidden, 10, 3600.0).stalls > 0.6  # of each 30 s, 20 are waited for


def test_young_and_daly_near_the_exact_optimum_and_where_they_leave_it():
    """Daly states that its error is small for C / M < 1/2; Young's grows as sqrt(C / M)."""
    for ratio, young_off, daly_off in ((1e-4, 0.01, 1e-4), (1e-2, 0.08, 1e-3), (0.1, 0.25, 0.01)):
        exact = optimum(Costs(stall_s=ratio, commit_s=ratio, restart_s=0), 1.0)
        assert exact == pytest.approx(daly(ratio, 1.0), rel=daly_off)
        assert exact * (1 + young_off / 3) < young(ratio, 1.0) < exact * (1 + young_off)
    assert daly(2.5, 1.0) == 1.0 and optimum(Costs(stall_s=2.5, commit_s=2.5, restart_s=0), 1.0) == pytest.approx(1.0, abs=0.05)
    assert young(1.0, 1800.0) == 60.0


def test_extremes():
    costs = Costs(stall_s=1, commit_s=5, restart_s=2)
    assert expected(costs, 9, math.inf) == Account(interval_s=9, goodput=0.9, stalls=pytest.approx(0.1), lost=0, restarts=0)
    assert expected(costs, 2, math.inf).goodput == 0.4  # waits for the commit
    assert optimum(costs, math.inf) is None
    assert optimum(Costs(stall_s=0, commit_s=0, restart_s=2), 100.0) is None
    hopeless = expected(Costs(stall_s=1, commit_s=1e9, restart_s=1e9), 1e9, 1.0)  # no overflow where nothing ever commits
    assert hopeless.goodput == 0 and hopeless.restarts == 1
    rare = expected(costs, 100, 1e15)
    assert rare.goodput == pytest.approx(100 / 101, rel=1e-9)


@pytest.mark.parametrize("make, words", [
    (lambda: Costs(stall_s=2, commit_s=1, restart_s=0), "commit_s=1 is before the end of the stall; nearest: commit_s=2"),
    (lambda: Costs(stall_s=-1, commit_s=1, restart_s=0), "stall_s=-1: expected seconds, 0 or more"),
    (lambda: Costs(stall_s=0, commit_s=1, restart_s=math.nan), "restart_s=nan"),
    (lambda: expected(Costs(stall_s=1, commit_s=1, restart_s=0), 0, 10), "interval_s=0: expected seconds, above 0"),
    (lambda: optimum(Costs(stall_s=1, commit_s=1, restart_s=0), 0), "between failures of 0 s: expected more than 0"),
])
def test_bad_input(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_a_job_s_mean_time_between_failures():
    """Llama 3: 419 interruptions in 54 days on 16,384 GPUs is one in 3.09 hours; an eighth of the GPUs has an eighth of the failures."""
    assert job_mtbf_s(parse_topology("h100:2048x8")) == pytest.approx(54 * 86400 / 419)
    assert job_mtbf_s(parse_topology("h100:256x8")) == pytest.approx(8 * 54 * 86400 / 419)
    assert job_mtbf_s(parse_topology("v5p-128")) is None and job_mtbf_s(parse_topology("b200:8")) is None
    assert job_mtbf_s(parse_topology("v5p-128"), device_hours=6400) == 100 * 3600  # v5p-128 has 64 devices
    with pytest.raises(InputError, match="expected more than 0"):
        job_mtbf_s(parse_topology("v5p-128"), device_hours=0)

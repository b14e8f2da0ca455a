"""How many runs fit in one program, by compiling: memory is near linear in the number of runs, so few compiles find the largest.

One run and two give a line; the number that it predicts is compiled, and the next one, until neighbours are found of which one fits and
the other does not. A refusal carries numbers too where the compiler gives them.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxmem.hardware import Topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

MOST_COMPILES = 16
BY_LINE = 7
MOST_RUNS = 65536


class Unknown(RuntimeError):
    """Neither fits nor does not: the compiler gave no figures, or had no time left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """`runs` in one program: its peak on the fullest device (compile; None where the compiler gave none), a step of it (estimate)."""

    runs: int
    fits: bool
    peak_bytes: int | None
    step_s: float | None = None
    reason: str | None = None
    backend: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """runs: the largest number that fits, 0 where not even the smallest does. certain: runs + 1 step was tried and does not fit."""

    runs: int
    certain: bool
    usable_bytes: int
    tried: list[Tried]


def try_runs(workload: Workload, plan: Plan, topology: Topology, runs: int, *, mem_fraction: float = 0.75, timeout_s: float = 1800,
             progress: Callable[[str], None] = lambda line: None) -> tuple[Tried, int]:
    """The train step of `runs` runs compiled for the topology, which need not be here; and the usable bytes of a device.

    Raises InputError for CPU, whose memory is nobody's, and Unknown for a program that does not compile for another reason than memory.
    """
    from jaxmem.targets.compile import Request, compile_programs
    from jaxmem.targets.flags import flags_for
    from jaxmem.verdict import assemble, check_fraction, step_programs, usable

    check_fraction(mem_fraction)
    limit, _ = usable(topology, mem_fraction)
    if limit is None:
        raise InputError(f"{topology} has no memory of its own to fill; give a TPU or a GPU, as in v5e-1 or h100:1")
    flags = flags_for(plan.flags, topology)
    request = Request(spec={"kind": "workload", "workload": str(workload), "plan": str(plan), "runs": runs}, programs=step_programs(plan),
                      topology=topology, flags=flags)
    artifacts = compile_programs(request, timeout_s=timeout_s, jobs=1, progress=progress)
    found = assemble(artifacts, topology, mem_fraction=mem_fraction, flags=flags, resident={}, model_flops=None)
    if found["verdict"] == "unknown":
        raise Unknown("; ".join(found["problems"]) or "the compiler gave no figures")
    fits = found["verdict"] in ("fits", "tight")
    worst = artifacts[found["worst_program"]].result
    return Tried(runs=runs, fits=fits, peak_bytes=found["peak_bytes"] or worst.get("oom_bytes"), step_s=found["step_s"] if fits else None,
                 reason=worst["reason"] if not fits else None, backend=found["backend"]), found["usable_bytes"]


def largest(tries: Callable[[int], tuple[Tried, int]], *, step: int = 1, say: Callable[[str], None] = lambda line: None) -> Largest:
    """The largest multiple of `step` (the groups of devices) for which `tries` says that it fits.

    Every guess lies strictly between what fits and what does not, so each compile narrows them. Stops after MOST_COMPILES: the answer is
    then not `certain`.
    """
    tried: dict[int, Tried] = {}
    usable = 0

    def attempt(blocks: int) -> Tried:
        nonlocal usable
        tried[blocks], usable = tries(blocks * step)
        one = tried[blocks]
        say(f"{one.runs} runs: {'fit' if one.fits else 'do not fit'}, "
            f"{one.peak_bytes if one.peak_bytes is not None else 'unknown'} of {usable} bytes")
        return one
    low, high = 0, MOST_RUNS // step + 1  # fits, does not (or is not asked)
    guess: int | None = 1
    while guess is not None and len(tried) < MOST_COMPILES:
        if attempt(guess).fits:
            low = max(low, guess)
        else:
            high = min(high, guess)
        guess = next_guess(tried, usable, low, high)
    return Largest(runs=low * step, certain=high in tried and high == low + 1, usable_bytes=usable, tried=[tried[n] for n in sorted(tried)])


def next_guess(tried: dict[int, Tried], usable: int, low: int, high: int) -> int | None:
    """What to try next, strictly between `low` and `high`; None where nothing is left between them.

    Where a line meets the limit: from the largest that fits to the smallest that does not, or on through the two largest that fit as long
    as no refusal had a number. The middle where there is no such line, or one was followed BY_LINE times.
    """
    if high - low <= 1:
        return None
    middle = (low + high) // 2
    peaks = {n: one.peak_bytes for n, one in tried.items() if one.peak_bytes is not None}
    below = sorted(n for n in peaks if n <= low)
    a, b = (below[-1], high) if below and high in peaks else (below[-1], below[-2]) if len(below) > 1 else (0, 0)
    if len(tried) > BY_LINE or (a and peaks[a] == peaks[b]):
        return middle
    if not a:
        return min(2 * low, high - 1) if low else middle
    wanted = math.floor(a + (usable - peaks[a]) * (b - a) / (peaks[b] - peaks[a]))
    if wanted >= high:  # it bends, and what it takes at `high` is not known
        return middle
    return max(wanted, low + 1)


def line(tried: list[Tried]) -> tuple[float, float] | None:
    """(bytes of no run, bytes of each further run) through the first two that fit; None where fewer do."""
    known: list[Any] = [(one.runs, one.peak_bytes) for one in tried if one.fits and one.peak_bytes is not None]
    if len(known) < 2:
        return None
    (a, at_a), (b, at_b) = known[0], known[1]
    each = (at_b - at_a) / (b - a)
    return at_a - each * a, each

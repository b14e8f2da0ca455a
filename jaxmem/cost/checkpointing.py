"""How often to write a checkpoint: what a run loses to writing, to work that is done again and to starting again.

Split: nothing.
Moves: the state, device to host and host to storage, once an interval.
Costs: `stall_s` of every interval; after a failure the work since the last *committed* checkpoint, and `restart_s`.
Use: with the stall and the commit time of a mode (sync, async, lazy), from shapes or measured, and the mean time between failures.
Avoid: where failures are not independent in time (a host that fails again and again): the formulas take them for exponential.

The model. Work stops for `stall_s` at each checkpoint; the checkpoint is of use `commit_s` after the stall began; the next one is not
begun before that. Failures come at a constant rate at any time, also in a stall and in a restart. A failure before the commit goes back
to the checkpoint before. Then the expected time of one interval T of work is exactly

    M exp((R + T + L) / M) (1 - exp(-P / M)),   P = max(T + C, L)

with M the mean time between failures, C the stall, L the commit time, R the restart. With L = C it is the model of J. Daly (2006).
Young: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974). Daly: A higher order estimate of
the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22 (2006). Everything is an estimate.
"""

import dataclasses
import math

from jaxmem.hardware import Topology
from jaxmem.spec import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one mode, seconds. `stall_s`: by which a checkpoint delays the steps, the steps' slowing down while it is written included.
    `commit_s`: from the begin of the stall to the commit. `restart_s`: from a failure to the first step again.

    Raises InputError for negative seconds and for a commit before the end of the stall.
    """

    stall_s: float
    commit_s: float
    restart_s: float

    def __post_init__(self) -> None:
        for name in ("stall_s", "commit_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name):g}: expected seconds, 0 or more")
        if self.commit_s < self.stall_s:
            raise InputError(f"commit_s={self.commit_s:g} is before the end of the stall; nearest: commit_s={self.stall_s:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """Parts of the expected time of a run, which add up to 1. `goodput`: work that counts. `stalls`: checkpoints, those that a failure
    made worthless too. `lost`: work that is done again. `restarts`: starting again, failures during it included."""

    interval_s: float
    goodput: float
    stalls: float
    lost: float
    restarts: float


def expected(costs: Costs, interval_s: float, mtbf_s: float) -> Account:
    """The account of a long run with a checkpoint after every `interval_s` of work; mtbf_s may be infinite. Raises InputError."""
    if not 0 < interval_s < math.inf:
        raise InputError(f"interval_s={interval_s:g}: expected seconds, above 0")
    require_mtbf(mtbf_s)
    stall, commit, restart = costs.stall_s, costs.commit_s, costs.restart_s
    period = max(interval_s + stall, commit)
    if math.isinf(mtbf_s):
        return Account(interval_s=interval_s, goodput=interval_s / period, stalls=1 - interval_s / period, lost=0.0, restarts=0.0)
    rate = 1 / mtbf_s
    ends = -math.expm1(-period * rate)
    # in these exponents nothing grows: exp(L / M) attempts at a commit, each with its stall, are divided out
    goodput = interval_s * rate * math.exp(-(restart + interval_s + commit) * rate) / ends
    begin = 1 - math.exp(-stall * rate)
    wait = math.exp(-(interval_s + stall) * rate) - math.exp(-period * rate)  # for the commit
    stalls = math.exp(-(restart + interval_s) * rate) * (begin + wait) / ends
    restarts = 1 - math.exp(-restart * rate)
    return Account(interval_s=interval_s, goodput=goodput, stalls=stalls, lost=max(0.0, 1 - goodput - stalls - restarts), restarts=restarts)


def optimum(costs: Costs, mtbf_s: float) -> float | None:
    """The interval of the largest expected goodput, seconds of work. None where none is best: without failures, the longer the better;
    with neither a stall nor a commit time, the shorter.

    Setting the derivative to 0 gives exp((T + C) / M) (1 - T / M) = 1, in which neither the commit time nor the restart stands; below
    the commit time the next checkpoint waits, so that a shorter interval would gain nothing.
    """
    require_mtbf(mtbf_s)
    if math.isinf(mtbf_s):
        return None
    best = max(_stationary(costs.stall_s / mtbf_s) * mtbf_s, min(mtbf_s, costs.commit_s - costs.stall_s))
    return best if best > 0 else None


def _stationary(c: float) -> float:
    """x in [0, 1) with exp(x + c) (1 - x) = 1, c >= 0: Newton on x + c + log(1 - x), which is concave, from above its root."""
    if not c:
        return 0.0
    x = -math.expm1(-(1 + c))
    for _ in range(100):
        step = -(x + c + math.log1p(-x)) * (1 - x) / x
        x -= step
        if step <= 1e-15 * x:
            break
    return x


def young(stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M): seconds of work between checkpoints, for C much shorter than M."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Daly's higher-order estimate; M from C = 2 M on."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(stall_s / (2 * mtbf_s))
    return young(stall_s, mtbf_s) * (1 + x / 3 + x * x / 9) - stall_s


def require_mtbf(mtbf_s: float) -> None:
    if not mtbf_s > 0:
        raise InputError(f"a mean time between failures of {mtbf_s:g} s: expected more than 0")


# ---------------------------------------------------------------- failures

# Hours of one device for each failure that stopped the job, and where that is from. What nobody publishes for a chip is not here.
DEVICE_HOURS = {"h100": (16_384 * 54 * 24 / 419, "The Llama 3 Herd of Models, arXiv 2407.21783: 419 unexpected interruptions in 54 days on "
                         "16,384 H100", "2024-07")}


def job_mtbf_s(topology: Topology, device_hours: float | None = None) -> float | None:
    """Mean seconds between failures of a job that any device stops; `device_hours` between those of one device, published where known."""
    if device_hours is None:
        device_hours = DEVICE_HOURS.get(topology.chip.name, (None,))[0]
    if device_hours is None:
        return None
    require_mtbf(device_hours * 3600)
    return device_hours * 3600 / topology.devices

"""Learning rate by step: plain arithmetic on the host, since the rate is an input of the step program. No jax.

A schedule is text: `cosine`, `cosine,floor=0.1`, `linear`, `constant`, `wsd,decay=0.2`, `rsqrt`, `infinite,level=0.5,cooldown=500`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxmem import spec
from jaxmem.spec import InputError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """After `warmup` steps of linear rise: `constant`; `cosine` or `linear` down to `floor` x peak at the last step; `wsd`, constant and
    then linear over the last `decay` part of the steps (Hu et al. 2024, arXiv 2404.06395); `rsqrt`, peak x sqrt(warmup / step);
    `infinite` (Ibrahim et al. 2024, arXiv 2403.08763), a half cosine over `cooldown` steps down to `level` x peak, constant there for as
    long as data keeps coming, and then geometrically down to `floor` x peak over the last `decay` part of the steps (0: not yet).

    `zero`: so many steps at rate 0 before all else, in which the optimizer's moments warm up and nothing moves.
    """

    kind: Literal["constant", "cosine", "linear", "wsd", "rsqrt", "infinite"]
    floor: float = 0.0
    decay: float = 0.2
    level: float = 0.5
    cooldown: int = 100
    zero: int = 0

    @property
    def goes_on(self) -> bool:
        """Its rate does not depend on where the run ends, until it decays: another run may go on with it."""
        return self.kind in ("constant", "wsd", "rsqrt", "infinite")


SCHEDULES = {kind: Schedule(kind=kind) for kind in ("constant", "cosine", "linear", "wsd", "rsqrt")}  # type: ignore[arg-type]
SCHEDULES["infinite"] = Schedule(kind="infinite", floor=0.1)


def parse(text: str) -> Schedule:
    schedule = spec.parse_preset(SCHEDULES, text, what="schedule")
    if not 0 <= schedule.floor <= 1 or not (0 < schedule.decay <= 1 or schedule.decay == 0 and schedule.kind == "infinite"):
        raise InputError(f"schedule {text}: floor and decay are parts of 1, decay above 0")
    if schedule.kind == "infinite" and not 0 < schedule.floor <= schedule.level <= 1:
        raise InputError(f"schedule {text}: expected 0 < floor <= level <= 1, for it decays geometrically from level={schedule.level:g} to "
                         f"floor={schedule.floor:g} of the peak")
    if schedule.cooldown < 0 or schedule.zero < 0:
        raise InputError(f"schedule {text}: cooldown={schedule.cooldown} and zero={schedule.zero} are steps, 0 or more")
    return schedule


def learning_rate(schedule: Schedule, *, peak: float, warmup: int, steps: int, origin: int = 0) -> Callable[[int], float]:
    """`rate(step)` of the update that makes step `step` (from 1) of a run of `steps`; the warm-up ends at the peak on step `warmup`.

    `origin`: so many steps of the same schedule were made before this run, which goes on with it: it does not warm up again.
    """
    s, low = schedule, schedule.floor
    end = origin + steps - s.zero

    def rate(step: int) -> float:
        if step <= s.zero:
            return 0.0
        now = origin + step - s.zero
        if now < warmup:
            return peak * now / warmup
        done = min(1.0, (now - warmup) / max(end - warmup, 1))
        start = end - s.decay * (steps - s.zero)  # of the decay
        match s.kind:
            case "constant":
                part = 1.0
            case "cosine":
                part = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                part = 1 - (1 - low) * done
            case "wsd":
                part = 1.0 if now <= start else low + (1 - low) * max(0.0, (end - now) / max(end - start, 1e-9))
            case "rsqrt":
                part = math.sqrt(max(warmup, 1) / max(now, 1, warmup))
            case "infinite":
                cooled = min(1.0, max(0.0, min(now, start) - warmup) / s.cooldown) if s.cooldown else 1.0
                part = s.level + (1 - s.level) * 0.5 * (1 + math.cos(math.pi * cooled))
                if now > start:  # from the rate that it has there, cooled down or not
                    part *= (low / part) ** min(1.0, (now - start) / max(end - start, 1e-9))
        return peak * part
    return rate

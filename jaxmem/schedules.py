"""Learning rate by step: plain arithmetic on the host, since the rate is an input of the step program. No jax.

A schedule is text: `cosine`, `cosine,floor=0.1`, `linear`, `constant`, `wsd,decay=0.2`, `rsqrt`.
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
    then linear over the last `decay` part of the steps (Hu et al. 2024, arXiv 2404.06395); `rsqrt`, peak x sqrt(warmup / step)."""

    kind: Literal["constant", "cosine", "linear", "wsd", "rsqrt"]
    floor: float = 0.0
    decay: float = 0.2


SCHEDULES = {kind: Schedule(kind=kind) for kind in ("constant", "cosine", "linear", "wsd", "rsqrt")}  # type: ignore[arg-type]


def parse(text: str) -> Schedule:
    schedule = spec.parse_preset(SCHEDULES, text, what="schedule")
    if not 0 <= schedule.floor <= 1 or not 0 < schedule.decay <= 1:
        raise InputError(f"schedule {text}: floor and decay are parts of 1, decay above 0")
    return schedule


def learning_rate(schedule: Schedule, *, peak: float, warmup: int, steps: int) -> Callable[[int], float]:
    """`rate(step)` of the update that makes step `step` (from 1); the warm-up ends at the peak on step `warmup`."""
    s, low = schedule, schedule.floor

    def rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        done = min(1.0, (step - warmup) / max(steps - warmup, 1))
        match s.kind:
            case "constant":
                part = 1.0
            case "cosine":
                part = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                part = 1 - (1 - low) * done
            case "wsd":
                start = steps - s.decay * steps
                part = 1.0 if step <= start else low + (1 - low) * max(0.0, (steps - step) / max(steps - start, 1e-9))
            case "rsqrt":
                part = math.sqrt(max(warmup, 1) / max(step, 1, warmup))
        return peak * part
    return rate

"""Where a run's time went, from its files alone: `logs/events.jsonl` for what happened, `metrics.jsonl` for the steps that count.

The total runs from the first `start` to the last sign of life (an event or a line of metrics), and every second of it is one of:

* productive: `step_s` of the training lines that count. `step_s` is the wall time from the completion of the step before, as the
  loop measured it, without the phases below: the loop writes those apart, so nothing is counted twice.
* compile, restore, data, checkpoint, eval: the `phase` events of these names, what the main thread waited there.
* waits: phases of any other name (`metrics`, `drain`).
* lost_work: `seconds` of the `dropped` events: steps that were done and thrown away after a kill or a rollback.
* down: from the last sign of life of one start to the next start. Steps that were done after the last sign of life and dropped later
  are lost work; where `dropped` does not say when its last line was written (`last_time`), they are taken out of down.
* unaccounted: the rest. Starting Python, hanging, and what the loop measures nowhere; below 0 only if the parts overlap.

Seconds that were measured are from clocks that do not jump. The total is from the time of day: where that was set back between two
records, no time is counted between them, and `set_back_s` says by how much.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxmem.runs.reading import Event, Metrics, finite

PHASES = ("compile", "restore", "data", "checkpoint", "eval")
OUTSIDE = ("supervisor",)  # written by another process: no sign of life of the run
DISORDER_S = 10.0  # events of several threads may be written this much out of order; more is a clock that was set back


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds by what they went to. All but `productive_s` are None for a run without a `start`; `starts` counts the attempts."""

    productive_s: float | None = None
    compile_s: float | None = None
    restore_s: float | None = None
    data_s: float | None = None
    checkpoint_s: float | None = None
    eval_s: float | None = None
    waits_s: float | None = None
    lost_work_s: float | None = None
    down_s: float | None = None
    unaccounted_s: float | None = None
    total_s: float | None = None
    set_back_s: float | None = None
    starts: int = 0

    @property
    def fraction(self) -> float | None:
        """productive / total."""
        return self.productive_s / self.total_s if self.productive_s is not None and self.total_s else None

    def parts(self) -> dict[str, float | None]:
        """Seconds by name, in the order of the docstring; they add up to `total_s`."""
        names = ("productive", *PHASES, "waits", "lost_work", "down", "unaccounted")
        return {name: getattr(self, f"{name}_s") for name in names}


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """One start and what followed until the next. Times are unix seconds; `last_step` is the last training step known of it."""

    start: Event
    events: list[Event]
    times: list[float] = dataclasses.field(default_factory=list)  # of its lines of metrics
    last_step: int | None = None

    @property
    def end(self) -> Event | None:
        """Its `end` event; None if it still runs or was killed."""
        return next((event for event in reversed(self.events) if event["kind"] == "end"), None)


def attempts(events: Iterable[Event], metrics: Metrics) -> list[Attempt]:
    """The starts in order with their events and lines. A line belongs to the last start, or rollback, from before its step."""
    found: list[Attempt] = []
    bases: list[tuple[int, int]] = []  # (step begun from, attempt), ascending: what a later restore undid is gone
    for event in events:
        if event["kind"] == "start":
            found.append(Attempt(start=event, events=[event]))
        elif found:
            found[-1].events.append(event)
        base = event.get({"start": "restored_from", "rollback": "to"}.get(event["kind"], ""))
        if found and event["kind"] in ("start", "rollback"):
            base = base if isinstance(base, int) else 0
            bases = [*(entry for entry in bases if entry[0] < base), (base, len(found) - 1)]
    if found:
        for series in (metrics.train, metrics.eval):
            for step, time in zip(series.steps, series.column("time"), strict=True):
                # An evaluation at the step that was restored was made before the restore.
                owner = found[bases[max(0, bisect.bisect_left(bases, (step, -1)) - 1)][1]]
                if math.isfinite(time):
                    owner.times.append(time)
                if series is metrics.train:
                    owner.last_step = step
    return found


def goodput(events: Sequence[Event], metrics: Metrics) -> Goodput:
    """The account of a run, also of one that still goes: its total then ends at the last record. Never raises for odd records."""
    productive = math.fsum(seconds for seconds in metrics.train.column("step_s") if math.isfinite(seconds) and seconds > 0)
    found = attempts(events, metrics)
    if not found:
        return Goodput(productive_s=productive if len(metrics.train) else None)
    seconds = dict.fromkeys((*PHASES, "waits"), 0.0)
    lost = 0.0
    for event in events:
        amount = max(0.0, finite(event.get("seconds")) or 0.0)
        if event["kind"] == "phase":
            name = str(event.get("name"))
            seconds[name if name in PHASES else "waits"] += amount
        elif event["kind"] == "dropped":
            lost += amount
    total, down, set_back, unseen = _walk(found)
    known = productive + math.fsum(seconds.values()) + lost
    if unseen:
        down -= min(down, max(0.0, known + down - total))
    return Goodput(
        productive_s=productive,
        **{f"{name}_s": value for name, value in seconds.items()},
        lost_work_s=lost,
        down_s=down,
        unaccounted_s=total - known - down,
        total_s=total,
        set_back_s=set_back,
        starts=len(found),
    )


def _walk(found: Sequence[Attempt]) -> tuple[float, float, float, bool]:
    """(total, down, set back) in seconds, and whether work may have been done after the last sign of life of an attempt."""
    total = down = set_back = 0.0
    unseen = False
    last: float | None = None
    for i, attempt in enumerate(found):
        start = finite(attempt.start.get("time"))
        if start is None:
            start = last if last is not None else min(attempt.times, default=0.0)
        if last is not None:
            down += max(0.0, start - last)
            set_back += max(0.0, last - start)
        events = [time for event in attempt.events if event["kind"] not in OUTSIDE and (time := finite(event.get("time"))) is not None]
        # What was dropped is said by the start after it.
        later = [event for event in found[i + 1].events if event["kind"] == "dropped"][:1] if i + 1 < len(found) else []
        gone = [time for event in later if (time := finite(event.get("last_time"))) is not None]
        unseen |= bool(later) and not gone
        ways = [_advance([start, *events]), _advance([start, *attempt.times]), _advance([start, *gone])]
        lived, last, back = max(ways, key=lambda way: way[0])
        total += lived
        set_back += back
    return total + down, down, set_back, unseen


def _advance(times: Sequence[float]) -> tuple[float, float, float]:
    """(seconds that passed, the clock at the end, seconds that it was set back) over times in the order of writing."""
    passed = back = 0.0
    clock = times[0]
    for time in times[1:]:
        if time > clock:
            passed += time - clock
            clock = time
        elif time < clock - DISORDER_S:
            back += clock - time
            clock = time
    return passed, clock, back

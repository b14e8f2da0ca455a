"""Where a run's time went, from its files alone: `logs/events.jsonl` for what happened, `metrics.jsonl` for the steps that count.

The total runs from the first sign of life to the last (an event, a line of metrics; a `phase` was begun its seconds before it was
written), and every second of it is one of:

* productive: `step_s` of the training lines that count. `step_s` is the wall time from the completion of the step before, as the
  loop measured it, without the phases below: the loop writes those apart, so nothing is counted twice.
* compile, restore, data, checkpoint, eval: the `phase` events of these names, what the main thread waited there.
* waits: phases of any other name (`metrics`, `drain`).
* lost_work: `seconds` of the `dropped` events: steps that were done and thrown away after a kill or a rollback.
* down: from the last sign of life of one attempt to the `start` of the next, without the phases in between. The last sign may be a
  line that was dropped later. Where `dropped` does not say when that was written (`last_time`), down is cut to what the other parts
  leave of the total.
* unaccounted: the rest. Hanging, and what the loop measures nowhere; below 0 only if the parts overlap.

Seconds that were measured are from clocks that do not jump. The total is from the time of day: where that was set back between two
records, no time is counted between them, and `set_back_s` says by how much.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from jaxmem.runs.reading import Event, Metrics, finite

PHASES = ("compile", "restore", "data", "checkpoint", "eval")
OUTSIDE = ("supervisor",)  # written by another process: no sign of life of the run
DISORDER_S = 10.0  # events of several threads may be written this much out of order; more is a clock that was set back


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds by what they went to. All but `productive_s` are None for a run without events; `starts` counts the attempts."""

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
    """What one process, or one group of them, left of a run. `times` are of its training lines, unix seconds.

    `before`: its events until `start`, which the loop writes when its programs and its state are there; `after`: those since.
    """

    before: list[Event] = dataclasses.field(default_factory=list)
    start: Event | None = None
    after: list[Event] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    last_step: int | None = None

    @property
    def end(self) -> Event | None:
        """Its `end` event; None if it still runs or was killed."""
        return next((event for event in reversed(self.after) if event["kind"] == "end"), None)

    @property
    def resume_drop(self) -> Event | None:
        """Its `dropped` event for steps of the attempts before it, not for its own that a rollback drops."""
        resuming = itertools.takewhile(lambda event: event["kind"] != "rollback", self.after)
        return next((event for event in resuming if event["kind"] == "dropped"), None)


def attempts(events: Iterable[Event], metrics: Metrics) -> list[Attempt]:
    """The attempts in order. A line belongs to the last start, or rollback, that began from before its step."""
    found: list[Attempt] = []
    bases: list[tuple[int, int]] = []  # (step begun from, attempt), ascending: what a later restore undid is gone
    number: object = None
    for event in events:
        kind = event["kind"]
        if kind in OUTSIDE:
            continue
        if not found or event.get("attempt", number) != number or (kind == "start" and found[-1].start):
            found.append(Attempt())
            number = event.get("attempt", number)
        if kind == "start":
            found[-1].start = event
        else:
            (found[-1].after if found[-1].start else found[-1].before).append(event)
        base = event.get({"start": "restored_from", "rollback": "to"}.get(kind, ""))
        if kind == "start" and base is None:
            base = 0
        if isinstance(base, int):
            bases = [*(entry for entry in bases if entry[0] < base), (base, len(found) - 1)]
    if found:
        for step, time in zip(metrics.train.steps, metrics.train.column("time"), strict=True):
            i = bisect.bisect_left(bases, (step, -1)) - 1
            owner = found[bases[i][1] if i >= 0 else 0]
            owner.last_step = step
            if math.isfinite(time):
                owner.times.append(time)
    return found


def goodput(events: Iterable[Event], metrics: Metrics) -> Goodput:
    """The account of a run, also of one that still goes: its total then ends at the last record. Never raises for odd records."""
    events = list(events)
    productive = math.fsum(seconds for seconds in metrics.train.column("step_s") if math.isfinite(seconds) and seconds > 0)
    found = attempts(events, metrics)
    clock = _clock(found)
    if clock is None:
        return Goodput(productive_s=productive if len(metrics.train) else None, starts=len(found))
    total, down, set_back, unseen = clock
    seconds = dict.fromkeys((*PHASES, "waits"), 0.0)
    for event in events:
        if event["kind"] == "phase":
            name = event.get("name")
            seconds[name if name in PHASES else "waits"] += _seconds(event)
    lost = math.fsum(_seconds(event) for event in events if event["kind"] == "dropped")
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


def _clock(found: Sequence[Attempt]) -> tuple[float, float, float, bool] | None:
    """(total, down, set back) in seconds, and whether an attempt may have worked on after its last sign of life; None without a time."""
    total = down = set_back = 0.0
    unseen = False
    last: float | None = None
    for attempt, following in itertools.zip_longest(found, found[1:]):
        if last is None:
            first = (*attempt.before, attempt.start or {})[0]
            last = None if (time := _time(first)) is None else time - _seconds(first)
        start = _time(attempt.start or (attempt.before[-1] if attempt.before else {}))
        if start is None:
            start = last
        if start is None or last is None:
            continue
        waited = max(0.0, start - last)
        total += waited
        down += max(0.0, waited - math.fsum(_seconds(event) for event in attempt.before if event["kind"] == "phase"))
        set_back += max(0.0, last - start)
        drop = following.resume_drop if following else None
        gone = finite(drop.get("last_time")) if drop else None
        unseen |= drop is not None and gone is None
        ways = [
            _advance([start, *(time for event in attempt.after if (time := _time(event)) is not None)]),
            _advance([start, *attempt.times]),
            _advance([start] if gone is None else [start, gone]),
        ]
        lived, last, back = max(ways, key=lambda way: way[0])
        total += lived
        set_back += back
    return None if last is None else (total, down, set_back, unseen)


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


def _seconds(event: Event) -> float:
    return max(0.0, finite(event.get("seconds")) or 0.0)


def _time(event: Event) -> float | None:
    return finite(event.get("time"))

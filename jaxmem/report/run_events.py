"""What happened in a run, for the marks under its loss and for the table: events as sentences, with the kills that nobody wrote."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem.report.units import UNKNOWN, bytes_text, seconds_text
from jaxmem.runs.goodput import attempts
from jaxmem.runs.reading import Run, finite

# The rows of marks, top to bottom: label, colour. Epochs, commits and starts are the ordinary course of things.
ROWS = {
    "epoch": ("epochs", "var(--soft)"),
    "start": ("starts", "var(--good)"),
    "commit": ("commits", "var(--kind-params)"),
    "commit_failed": ("not saved", "var(--warn)"),
    "corrupt": ("corrupt", "var(--bad)"),
    "fault": ("faults", "var(--unsure)"),
    "watchdog": ("watchdog", "var(--bad)"),
    "not_finite": ("not finite", "var(--bad)"),
    "rollback": ("rollbacks", "var(--warn)"),
    "kill": ("kills", "var(--bad)"),
    "end": ("ends", "var(--ink)"),
}
ROUTINE = frozenset({"commit", "epoch", "not_finite"})  # marks, but no lines of the table
WORDS = {"start": "start", "end": "end", "kill": "killed", "commit_failed": "save failed", "dropped": "dropped", "supervisor": "supervisor"}
BAD = frozenset({"kill", "corrupt", "watchdog", "rollback", "commit_failed"})
END_REASONS = {
    "done": "all steps are done",
    "sigterm": "saved and stopped on SIGTERM",
    "watchdog": "ended by the watchdog",
    "rollbacks": "stopped: as many rollbacks as were allowed",
    "error": "ended by an error",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Happening:
    """`step` is where it stands on the axis of steps; `time` in unix seconds; None is unknown."""

    kind: str
    time: float | None
    attempt: int | None
    step: int | None
    text: str


def happenings(run: Run) -> list[Happening]:
    """In the order of the log. Phases, stalls and measurements are no happenings: other sections sum them up."""
    out: list[Happening] = []
    killed = _kills(run)
    step: int | None = None
    attempt: int | None = None
    for event in run.events:
        number = event.get("attempt")
        if isinstance(number, int) and number != attempt:
            if attempt in killed:
                out.append(killed.pop(attempt))
            attempt = number
        kind = event["kind"]
        own = event.get("step", event.get("restored_from"))
        if isinstance(own, int) and kind != "corrupt":
            step = own
        elif kind == "start":
            step = 0
        text = _text(event)
        if text is not None:
            at = event["step"] if isinstance(event.get("step"), int) else step
            out.append(Happening(kind=kind, time=finite(event.get("time")), attempt=attempt, step=at, text=text))
    out += killed.values()
    train = run.metrics.train
    for i, value in enumerate(train.column("loss")):
        if not math.isfinite(value):
            when = finite(train.column("time")[i])
            out.append(Happening(kind="not_finite", time=when, attempt=None, step=train.steps[i], text="the loss is not a finite number"))
    return out


def counted(start: Mapping[str, Any]) -> list[str]:
    """`["8 devices", "1 process"]` of a `start`, as far as it says."""
    words = {"devices": "device", "processes": "process"}
    return [f"{start[name]} {words[name] if start[name] == 1 else name}" for name in words if start.get(name) is not None]


def skips(run: Run) -> list[Mapping[str, Any]]:
    """The rollbacks that left out batches: `skip` is [first, last], both left out."""
    return [event for event in run.events if event["kind"] == "rollback" and _pair(event.get("skip"))]


def time_text(unix_s: float | None) -> str:
    """`2025-03-01 12:30:05`, in UTC."""
    try:
        return UNKNOWN if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def _kills(run: Run) -> dict[int | None, Happening]:
    """By attempt: those without an end, the last of them only if no process holds the run."""
    found = attempts(run.events, run.metrics)
    out: dict[int | None, Happening] = {}
    for i, attempt in enumerate(found):
        last = i == len(found) - 1
        if attempt.end is not None or (last and run.holder is not None):
            continue
        records = [*attempt.before, *([attempt.start] if attempt.start else []), *attempt.after]
        number = next((event["attempt"] for event in records if isinstance(event.get("attempt"), int)), None)
        drop = (found[i + 1].resume_drop if not last else None) or {}
        times = [finite(event.get("time")) for event in records] + [finite(drop.get("last_time")), *attempt.times[-1:]]
        begun = attempt.start.get("restored_from") if attempt.start else None
        steps = [drop.get("to"), attempt.last_step, begun, *(event.get("step") for event in attempt.after)]
        out[number] = Happening(
            kind="kill",
            time=max((value for value in times if value is not None), default=None),
            attempt=number,
            step=max((value for value in steps if isinstance(value, int)), default=0),
            text="no end was written; this is its last sign of life" if attempt.start else "before it had started",
        )
    return out


def _text(event: Mapping[str, Any]) -> str | None:
    """What to say of an event; None for those that are no happening."""
    kind = event["kind"]
    reason = str(event.get("reason") or event.get("text") or "")
    if kind == "start":
        begun = event.get("restored_from")
        asked = [str(event[name]) for name in ("topology", "plan", "backend") if event.get(name)]
        return ", ".join([f"restored step {begun:,}" if isinstance(begun, int) else "from the seed", *counted(event), *asked])
    if kind == "end":
        status, state = str(event.get("status")), event.get("state_sha256")
        return ", ".join([END_REASONS.get(status, status), *([f"state sha256:{state}"] if state else [])])
    if kind == "commit":
        return f"{bytes_text(_whole(event.get('bytes')))} in {seconds_text(finite(event.get('seconds')))}"
    if kind == "epoch":
        return f"epoch {event.get('epoch')}"
    if kind == "rollback":
        pair = _pair(event.get("skip"))
        skip = f", leaving out batches {pair[0]:,} to {pair[1]:,}" if pair else ""
        return f"back to step {event.get('to')}{skip}: {reason or 'no reason given'}"
    if kind == "dropped":
        return f"steps {event.get('from')} to {event.get('to')}, {seconds_text(finite(event.get('seconds')))} of work"
    if kind == "watchdog":
        missing = event.get("missing")
        return f"missing processes: {', '.join(map(str, missing))}" if isinstance(missing, Sequence) and missing else "a process was silent"
    if kind == "fault":
        process = event.get("process")
        return reason + (f", process {process}" if process is not None else "")
    return reason if kind in ("corrupt", "commit_failed", "supervisor") else None


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return value[0], value[1]
    return None


def _whole(value: object) -> int | None:
    known = finite(value)
    return None if known is None else int(known)

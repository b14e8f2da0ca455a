"""Faults on demand: `--fault="kill:step=12,process=1;nan:step=5"`.

A fault exists to test the machinery that has to survive it, and for nothing else: a run without the flag executes none of this. Each
strikes once in a run, across restarts too: it is written to the run's events before it strikes, and what stands there is not repeated.
Written twice in the flag, it strikes twice: once each time its step is reached.
"""

import collections
import dataclasses
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxmem import spec
from jaxmem.damage import Ballast, corrupt, poisoned, refuse_large
from jaxmem.runs.folder import Lines, read_lines
from jaxmem.spec import InputError, nearest

# Each kind's fields. Those that change the state strike every process, for one program computes on all of them.
KINDS = {
    "kill": ("step", "process", "phase"),  # SIGKILL to itself; phase=commit: while that step is being saved; phase=committed: right after
    "term": ("step", "process"),  # SIGTERM to itself
    "hang": ("step", "process", "seconds"),  # sleeps, for ever without `seconds`
    "slow": ("step", "process", "seconds", "steps"),  # sleeps `seconds` before each of `steps` steps
    "nan": ("step",),  # one parameter becomes NaN
    "spike": ("step",),  # all parameters become larger, so the loss does, and stays finite
    "corrupt": ("step", "process", "how"),  # after the checkpoint of that step is committed, its largest data file
    "fill_disk": ("step", "process", "seconds"),  # until a save fails, or for `seconds`
}
EVERYWHERE = ("nan", "spike")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; `str` is as `parse` reads it. It strikes before `step` (counted from 1) is dispatched, unless its kind says otherwise."""

    kind: str
    step: int
    process: int = 0
    phase: Literal["step", "commit", "committed"] = "step"
    seconds: float | None = None
    steps: int = 1
    how: Literal["flip", "truncate", "delete"] = "flip"

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(spec.differences(self, Fault(kind=self.kind, step=0)))}"


def parse(text: str, *, processes: int | None = None, steps: int | None = None) -> list[Fault]:
    """`"kill:step=12,process=1;nan:step=5"` -> faults, in that order; an empty text has none.

    Raises InputError with every problem: unknown kinds and fields, a missing step, a process or step that the run doesn't have.
    """
    faults, problems = [], []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        found, wrong = _parse_one(item)
        if found is not None:
            if processes is not None and found.process >= processes:
                wrong.append(f"fault {item}: there is no process {found.process}; nearest: process={processes - 1}")
            if steps is not None and found.step > steps:
                wrong.append(f"fault {item}: the run has no step {found.step}; nearest: step={steps}")
            faults.append(found)
        problems += wrong
    if problems:
        raise InputError("\n".join(problems))
    return faults


def _parse_one(item: str) -> tuple[Fault | None, list[str]]:
    kind, _, rest = item.partition(":")
    kind, what = kind.strip(), f"fault {item}"
    if kind not in KINDS:
        return None, [f"{what}: unknown kind {kind!r}{nearest(kind, KINDS)}"]
    values: dict[str, Any] = {}
    problems = []
    for field in spec.split(rest):
        name = field.partition("=")[0].strip()
        if name not in KINDS[kind]:
            everywhere = " (it strikes every process)" if name == "process" else ""
            problems.append(f"{what}: {kind} has no field {name!r}{everywhere}{nearest(name, KINDS[kind])}")
        elif name in values:
            problems.append(f"{what}: {name} is given twice")
        else:
            try:
                values |= spec.fields_from(Fault, [field], what)
            except InputError as error:
                problems.append(str(error))
                values[name] = None
    problems += [f"{what}: {name} is missing, as in {kind}:{example}" for name, example in
                 (("step", "step=12"), *((("seconds", "step=12,seconds=2"),) if kind == "slow" else ())) if name not in values]
    for name, least in (("step", 1), ("process", 0), ("steps", 1)):
        if (value := values.get(name)) is not None and value < least:
            problems.append(f"{what}: {name}={value} is less than {least}")
    if (seconds := values.get("seconds")) is not None and seconds <= 0:
        problems.append(f"{what}: seconds={seconds:g} is not more than 0")
    return (None if problems else Fault(kind=kind, **values)), problems


class Faults:
    """The faults of a run as one process of it meets them; the loop calls the hooks. `folder` is the run's.

    `attempt` counts the run's starts and is the same in all processes: with it, a fault that changes the state strikes all of them or
    none, also when a start ended while only some had written it down. Raises InputError when `fill_disk` has too large a disk to fill.
    """

    def __init__(self, faults: Iterable[Fault], folder: pathlib.Path, process: int, *, attempt: int = 0) -> None:
        self._folder, self._process, self._attempt = folder, process, attempt
        self._events = folder / "logs" / "events.jsonl"
        struck = _struck(read_lines(self._events), process, attempt)
        self.pending: list[Fault] = []  # those that this process still has before it
        for fault in faults:
            if fault.kind not in EVERYWHERE and fault.process != process:
                continue
            if struck[str(fault)]:
                struck[str(fault)] -= 1
            else:
                self.pending.append(fault)
        if any(fault.kind == "fill_disk" for fault in self.pending):
            refuse_large(folder)
        self._slow: list[tuple[float, int]] = []  # seconds, and for how many more steps
        self._ballast: Ballast | None = None
        self._timer: threading.Timer | None = None

    # ---- hooks

    def before_step(self, step: int) -> None:
        """Before `step` is dispatched: kill, term, hang, slow, fill_disk."""
        for fault in self._strike(step, "kill", "term", "hang", "slow", "fill_disk"):
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            elif fault.kind == "hang":
                hang(fault.seconds)
            elif fault.kind == "slow":
                assert fault.seconds is not None
                self._slow.append((fault.seconds, fault.steps))
            else:
                self._fill(fault.seconds)
        for seconds, _ in self._slow:
            time.sleep(seconds)
        self._slow = [(seconds, left - 1) for seconds, left in self._slow if left > 1]

    def poison(self, step: int, params: Any, mesh: Any) -> Any | None:
        """nan, spike: parameters to go on with from before `step`, or None to keep them. Every process must call it, and `params` stay."""
        new = None
        for fault in self._strike(step, "nan", "spike"):
            new = poisoned(params if new is None else new, mesh, fault.kind)
        return new

    def on_save_started(self, step: int) -> None:
        """The state of `step` was handed over and is being written: kill with phase=commit."""
        for _ in self._strike(step, "kill", phase="commit"):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_committed(self, step: int, checkpoint: pathlib.Path) -> None:
        """The folder `checkpoint` is whole: corrupt, then kill with phase=committed. May be called in another thread."""
        for fault in self._strike(step, "corrupt"):
            corrupt(checkpoint, fault.how)
        for _ in self._strike(step, "kill", phase="committed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save_failed(self) -> None:
        """Ends fill_disk: there is space again from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._release()

    def close(self) -> None:
        """Give the disk back, if it is filled."""
        self.on_save_failed()
        if self._timer is not None and self._timer.is_alive():
            self._timer.join()

    # ---- pieces

    def _strike(self, step: int, *kinds: str, phase: Literal["step", "commit", "committed"] = "step") -> list[Fault]:
        """Those that are due, each written down first. One that cannot be written down would strike at every start, so it does not."""
        due = [f for f in dict.fromkeys(self.pending) if f.kind in kinds and f.step == step and f.phase == phase]
        for fault in due:
            self.pending.remove(fault)
        return [fault for fault in due if self._record(fault, step)]

    def _record(self, fault: Fault, step: int) -> bool:
        event = {"kind": "fault", "time": time.time(), "attempt": self._attempt, "step": step, "text": str(fault), "process": self._process}
        lines = Lines(self._events)
        written = lines.write(event)
        lines.close()
        if written:
            with open(self._events, "rb") as file:
                os.fsync(file.fileno())
        print(f"fault {fault} {'strikes' if written else 'cannot be written down and does not strike'} process {self._process}",
              file=sys.stderr, flush=True)
        return written

    def _fill(self, seconds: float | None) -> None:
        self.on_save_failed()
        self._ballast = Ballast(self._folder)
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._release)
            self._timer.daemon = True
            self._timer.start()

    def _release(self) -> None:
        ballast, self._ballast = self._ballast, None
        if ballast is not None:
            ballast.close()


def _struck(events: Iterable[Mapping[str, Any]], process: int, attempt: int) -> collections.Counter[str]:
    """How often each fault has struck already: what this process wrote down, and what any other did in an earlier attempt."""
    written: collections.Counter[tuple[str, int]] = collections.Counter()
    for event in events:
        if event.get("kind") == "fault" and (event.get("process") == process or event.get("attempt", 0) < attempt):
            written[event.get("text", ""), event.get("process", 0)] += 1
    struck: collections.Counter[str] = collections.Counter()
    for (text, _), times in written.items():
        struck[text] = max(struck[text], times)
    return struck


def hang(seconds: float | None) -> None:
    """Sleep; for ever without `seconds`."""
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 60.0))

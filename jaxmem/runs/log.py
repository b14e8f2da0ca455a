"""What a run writes while it goes: metrics, events, seconds by what the main thread waited for. No jax.

One process of a run writes; in the others every call is counted and nothing written.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from jaxmem.runs.folder import Folder, Lines, drop_after


class Log:
    """`writes`: this is the process that writes. Lines that a full disk refuses are kept and written later."""

    def __init__(self, folder: Folder, *, writes: bool) -> None:
        self.attempt, self._writes, self._complained = folder.attempt, writes, False
        self._path = folder.metrics
        self._metrics = Lines(folder.metrics) if writes else None
        self._events = Lines(folder.events) if writes else None
        self.waited_s = 0.0  # since `take_waited`, in phases that the devices had nothing to do in

    def metric(self, **line: Any) -> None:
        self._write(self._metrics, line | {"time": time.time()})

    def event(self, kind: str, **line: Any) -> None:
        self._write(self._events, {"kind": kind, "time": time.time(), "attempt": self.attempt} | line)

    def say(self, text: str) -> None:
        """One line for people, on stderr."""
        if self._writes:
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def phase(self, name: str, **more: Any) -> Iterator[None]:
        """Time in which no step runs: recorded as an event, and taken out of the step's time."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waited(name, time.monotonic() - start, **more)

    def waited(self, name: str, seconds: float, **more: Any) -> None:
        self.waited_s += seconds
        self.event("phase", name=name, seconds=seconds, **more)

    def take_waited(self) -> float:
        seconds, self.waited_s = self.waited_s, 0.0
        return seconds

    def _write(self, lines: Lines | None, line: dict[str, Any]) -> None:
        if lines is not None and not lines.write(line) and not self._complained:
            self._complained = True
            self.say("the disk takes no more lines; training goes on, and they are written when there is room")

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Take the metrics past `step` out; returns what `drop_after` says of them, in the process that writes."""
        if self._metrics is None:
            return None
        self._metrics.close()
        try:
            return drop_after(self._path, step)
        except OSError as error:  # a full disk ends nothing
            self.say(f"{self._path}: lines past step {step} stay ({error.strerror})")
            return None
        finally:
            self._metrics = Lines(self._path)

    def close(self) -> None:
        for lines in (self._metrics, self._events):
            if lines is not None:
                lines.close()

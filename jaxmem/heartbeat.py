"""Where each process of a run is: one small file a process, and who among them is missing.

`RUN/logs/heartbeat.K.json` is process K's own; it is replaced whole while K's interpreter lives, whether or not K gets on. So two
things can be read from it: that K lives (the file changes) and how far K is (step and phase). Clocks of hosts are never compared:
what counts is what changed between two looks from here.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import typing
from collections.abc import Mapping
from typing import Literal

# In the order in which a step passes them: of two processes at one step, the one in the earlier phase is behind.
Phase = Literal["start", "compile", "restore", "data", "step", "metrics", "eval", "checkpoint", "drain", "end"]
PHASES: tuple[Phase, ...] = typing.get_args(Phase)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """`restores` counts the restores that it began, for steps go back at one. `since` (it has been there) and `time` (this was
    written) are unix seconds by its own host's clock. `expired`: its watchdog is ending it."""

    process: int
    pid: int
    host: str
    attempt: int
    restores: int
    step: int
    phase: Phase
    since: float
    time: float
    expired: bool

    @property
    def place(self) -> tuple[int, int, int]:
        """Compares as "is behind" among the processes of one run."""
        return self.restores, self.step, PHASES.index(self.phase)


def path_of(folder: pathlib.Path, process: int) -> pathlib.Path:
    """`folder` is the run's."""
    return folder / "logs" / f"heartbeat.{process}.json"


def write(folder: pathlib.Path, heartbeat: Heartbeat) -> None:
    """Whole or not at all. Raises OSError."""
    path = path_of(folder, heartbeat.process)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(dataclasses.asdict(heartbeat)))
    os.replace(fresh, path)


class Peers:
    """The heartbeats of all processes as seen from here. What lies there at the first look is of an earlier start until it changes."""

    def __init__(self, folder: pathlib.Path, *, processes: int, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._texts = {k: self._read(k) for k in range(processes)}
        self._changed: dict[int, float] = {}

    def _read(self, process: int) -> str | None:
        try:
            return path_of(self._folder, process).read_text()
        except (OSError, ValueError):
            return None

    def look(self, now: float) -> None:
        """`now` is monotonic seconds."""
        for process, before in self._texts.items():
            text = self._read(process)
            if text is not None and text != before:  # a file that cannot be read now says nothing new
                self._texts[process], self._changed[process] = text, now

    def seen(self) -> dict[int, Heartbeat | None]:
        """The last heartbeat of every process in this attempt; None: none yet."""
        return {process: self._parse(text) if process in self._changed else None for process, text in self._texts.items()}

    def _parse(self, text: str | None) -> Heartbeat | None:
        try:
            found = Heartbeat(**json.loads(text or ""))
        except (ValueError, TypeError):
            return None
        return found if found.attempt == self._attempt and found.phase in PHASES else None

    def silent(self, now: float, silent_s: float) -> set[int]:
        """Processes whose heartbeat was not seen to change for so long."""
        return {process for process in self._texts if now - self._changed.get(process, -float("inf")) >= silent_s}


def dead(seen: Mapping[int, Heartbeat | None], silent: set[int]) -> list[int]:
    """Processes without a sign of life: killed, stopped, never started, or in a call that lets no other thread run. One that said
    that it was ending itself, or that it is through, owes no sign."""
    return [k for k, beat in seen.items() if beat is None or (k in silent and not beat.expired and beat.phase != "end")]


def missing(seen: Mapping[int, Heartbeat | None], silent: set[int]) -> list[int]:
    """The processes that the others wait for: the dead ones; if all live, those that are furthest behind; none if all are at one place.

    Among the living, how far they are says nothing once one is dead: each is stopped by whatever it needed of that one first.
    """
    if len(seen) == 1:
        return list(seen)
    if gone := dead(seen, silent):
        return gone
    places = {k: beat.place for k, beat in seen.items() if beat is not None}
    last = min(places.values())
    return [k for k, place in places.items() if place == last] if last < max(places.values()) else []


def describe(process: int, beat: Heartbeat | None, *, gone: bool, own: bool) -> str:
    """One missing process for a message; `own`: it is the one that speaks."""
    if beat is None:
        return f"process {process} gave no sign of life"
    name = f"process {process} ({beat.host}, pid {beat.pid}{', this one' if own else ''})"
    if gone:
        return f"{name} went silent at step {beat.step} ({beat.phase}), where it came at {clock(beat.since)}"
    return f"{name} has been at step {beat.step} ({beat.phase}) since {clock(beat.since)}"


def clock(unix_s: float) -> str:
    """Local time with its offset."""
    return datetime.datetime.fromtimestamp(unix_s).astimezone().isoformat(timespec="seconds")

"""Keeps a run going: starts its processes, and starts them again when one dies, until it is done or there is no sense in it.

Exit statuses of `jaxmem train`: 0 done and 75 saved on SIGTERM are passed on, and so are 2 (input) and 77 (rollbacks), which would
only come again; everything else, the watchdog's 76 too, is a reason to start again. SIGTERM and Ctrl-C ask the processes to save and
stop; a second one kills them.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem.runs.folder import read_lines
from jaxmem.spec import InputError
from jaxmem.supervise.group import Group
from jaxmem.supervise.roster import Roster

DONE, BAD_INPUT, SAVED, HUNG, ROLLBACKS = 0, 2, 75, 76, 77
FINAL = (BAD_INPUT, ROLLBACKS)
# What would make the processes believe in another cluster than this one.
_CLUSTERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "JOBSET_", "MEGASCALE_", "TPU_WORKER_", "TPU_PROCESS_ADDRESSES")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One attempt: which of the processes take part, with how many devices in all, and where they meet (None: one process)."""

    present: tuple[int, ...]
    devices: int
    text: str
    coordinator: str | None = None
    changes: Mapping[str, str] = field(default_factory=dict)  # flags of `train` that differ from the given ones


@dataclass(frozen=True, kw_only=True)
class Patience:
    """max_restarts: after failures, in all. backoff_s doubles to backoff_most_s with each start that took no step. grace_s: from
    SIGTERM to SIGKILL for the others when one failed (they can save nothing: it needs all of them)."""

    max_restarts: int = 10
    backoff_s: float = 1.0
    backoff_most_s: float = 60.0
    grace_s: float = 2.0
    poll_s: float = 0.02


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended: `status` to end with if that is the last; culprits by their number among the attempt's processes; rejoin:
    it was asked to save so that lost processes can come back."""

    status: int
    text: str
    failed: bool = False
    rejoin: bool = False
    culprits: tuple[int, ...] = ()


def supervise(command_of: Callable[[int, Layout], Sequence[str]], layout_of: Callable[[tuple[int, ...]], Layout], roster: Roster,
              folder: pathlib.Path, patience: Patience = Patience(), *,  # noqa: B008
              environ: Mapping[str, str] = os.environ, say: Callable[[str], None] | None = None) -> int:
    """Run to the end and return the exit status.

    `layout_of` plans for the processes that are present; it raises `InputError` where they are too few. `command_of(number, layout)`
    is the argv of process `number`. Everything goes to `folder`/logs: a log for each process, and a line an event in events.jsonl.
    """
    log = Log(folder, say or (lambda text: print(f"supervisor: {text}", file=sys.stderr, flush=True)))
    clean = {name: value for name, value in environ.items() if not name.startswith(_CLUSTERS)}
    tries = restarts = fruitless = 0
    last = Ending(status=BAD_INPUT, text="nothing was started")
    with Stop() as stop:
        while True:
            back = roster.begin(tries, time.monotonic())
            try:
                layout = layout_of(roster.present)
            except InputError as error:
                if not roster.lost:
                    raise
                if not _wait_for_more(roster, log, str(error), stop):
                    return SAVED if stop.count else last.status
                continue
            log.begin(layout)
            log.write(f"start {tries + 1}: {layout.text}{f'; back: {_list(back)}' if back else ''}")
            begun = time.time()
            commands = [command_of(number, layout) for number in range(len(layout.present))]
            group = Group(commands, logs=[folder / "logs" / f"process.{k}.log" for k in layout.present], attempt=log.attempt, environ=clean)
            with contextlib.closing(group):
                last = run(group, patience, stop, roster.rejoin_at(), functools.partial(log.missing, begun))
            tries += 1
            log.write(last.text)
            if stop.count or not (last.failed or (last.rejoin and last.status == SAVED)):
                return last.status
            if last.failed:
                gone = roster.failed((layout.present[k] for k in last.culprits), tries - 1, time.monotonic())
                if gone:
                    log.write(f"process {_list(gone)} is counted as lost; left: {_list(roster.present) or 'none'}")
                if restarts == patience.max_restarts:
                    log.write(f"gave up after {restarts} restarts (--max_restarts)")
                    return last.status
                restarts += 1
                fruitless = 0 if log.stepped(begun) else fruitless + 1
                pause_s = min(patience.backoff_most_s, patience.backoff_s * 2 ** max(0, fruitless - 1))
                if not stop.sleep(pause_s):
                    return SAVED


def run(group: Group, patience: Patience, stop: "Stop", rejoin_at: float | None, missing: Callable[[], tuple[int, ...]]) -> Ending:
    """Until every process of the group has ended. `rejoin_at`: when to ask for a save, so that lost processes can come back."""
    codes: dict[int, int] = {}
    first: tuple[int, int] | None = None  # the process that failed, and how
    kill_at, forwarded, asked = float("inf"), 0, False
    while group.alive:
        news = group.wait(patience.poll_s)
        codes |= {ended.number: ended.code for ended in news}
        for ended in news:
            over = ended.number == 0  # the others meet at its port; what it says of the run holds, however they end without it
            if first is None and ended.code not in (DONE, SAVED) and codes.get(0) not in (DONE, SAVED):
                first, over = (ended.number, ended.code), True
                group.send_all(signal.SIGTERM)
            if over:
                kill_at = min(kill_at, time.monotonic() + patience.grace_s)
        now = time.monotonic()
        if stop.count > forwarded:
            forwarded = stop.count
            group.send_all(signal.SIGTERM) if forwarded == 1 else group.kill()
        elif rejoin_at is not None and now >= rejoin_at and not asked and first is None:
            asked = True
            group.send_all(signal.SIGTERM)
        if now >= kill_at:
            group.kill()
    if first is None:
        status = codes.get(0, DONE)
        why = " on request" if stop.count else " so that lost processes come back" if asked else ""
        text = "done" if status == DONE else f"saved and stopped{why} (status {status})"
        return Ending(status=status, text=text, rejoin=asked)
    number, code = first
    status = code if code >= 0 else 128 - code
    if code == HUNG:
        absent = missing()
        who = f"the watchdog ended the run: process {_list(absent)} did not answer" if absent else "the watchdog ended the run"
        return Ending(status=status, text=f"{who} (status {HUNG})", failed=True, culprits=tuple(n for n in absent if n in codes))
    how = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return Ending(status=status, text=f"process {number} {how}", failed=status not in FINAL, culprits=(number,))


def free_port() -> int:
    """A port that nobody listens at. It may be taken until the run listens there; then the attempt fails, and the next has another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Stop:
    """Counts SIGTERM, SIGINT and SIGHUP while it is entered; outside the main thread nothing can."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1

    def sleep(self, seconds: float) -> bool:
        """False when a signal came."""
        deadline = time.monotonic() + seconds
        while not self.count and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        return not self.count


class Log:
    """Lines of the supervisor in the run's events.jsonl, which the run's process 0 writes too: each line is one append."""

    def __init__(self, folder: pathlib.Path, say: Callable[[str], None]) -> None:
        self._folder, self._say, self.attempt = folder, say, 0
        self._layout: Layout | None = None
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out={folder}: {error.strerror}") from None

    def begin(self, layout: Layout) -> None:
        """The run's own count of its attempts: its starts so far."""
        self._layout = layout
        self.attempt = sum(line.get("kind") == "start" for line in self._events())

    def write(self, text: str) -> None:
        self._say(text)
        line: dict[str, Any] = {"kind": "supervisor", "time": time.time(), "attempt": self.attempt, "text": text}
        if self._layout is not None:
            line |= {"processes": len(self._layout.present), "devices": self._layout.devices}
        with contextlib.suppress(OSError):  # a full disk ends nothing
            file = os.open(self._folder / "logs" / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, json.dumps(line).encode() + b"\n")
            finally:
                os.close(file)

    def missing(self, since: float) -> tuple[int, ...]:
        """Whom the run's watchdog missed."""
        named = [line["missing"] for line in self._events()
                 if line.get("kind") == "watchdog" and line.get("time", 0) >= since and line.get("missing")]
        return tuple(sorted(set(map(int, named[-1])))) if named else ()

    def stepped(self, since: float) -> bool:
        with contextlib.suppress(OSError):
            return (self._folder / "metrics.jsonl").stat().st_mtime >= since
        return False

    def _events(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(OSError):
            yield from read_lines(self._folder / "logs" / "events.jsonl")


def _wait_for_more(roster: Roster, log: Log, reason: str, stop: Stop) -> bool:
    """Too few processes are left: wait for those that come back; False when none will."""
    log.write(f"too few processes are left ({_list(roster.present) or 'none'}): {reason}")
    if (at := roster.rejoin_at()) is not None:
        return stop.sleep(max(0.0, at - time.monotonic()))
    if roster.rejoin.attempts is not None:
        roster.take_back(roster.lost)
        return True
    return False


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

"""Ends a run that no longer gets on, in bounded time, and says which process it waits for.

One stuck process stops all others without a word: they wait in a collective for ever. So every process watches itself. Its main
thread calls `beat` when something got done; a thread writes that to `RUN/logs/heartbeat.K.json`. When nothing got done for `timeout_s`
it dumps the stacks of all threads to `RUN/logs/stacks.K.txt`, reads everybody's heartbeats, names the missing processes on stderr and in
`RUN/logs/events.jsonl`, and ends the process with status 76, wherever its main thread is. Its peers follow at once. A process that is
stopped, or holds the interpreter's lock, cannot do any of this: its child (`last_resort.py`) dumps its stacks and kills it, so its
status is that of SIGKILL. All have ended within `timeout_s` + 10 s.

A watchdog is a context manager; `close` on every way out, an error's too, so that a process that fails because its peer was ended is
ended the same way. A process that was suspended and goes on is given the time back.
"""

import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from jaxmem import heartbeat, last_resort
from jaxmem.heartbeat import Heartbeat, Phase
from jaxmem.last_resort import ANSWER_S, LONGEST_GAP_S
from jaxmem.runs.folder import Lines
from jaxmem.spec import InputError, nearest

STATUS = 76
DUMP_SIGNAL = signal.SIGRTMIN + 9  # SIGUSR1 and 2 belong to schedulers and to the user
POLL_S = 0.5
SETTLE_S = 4.0  # how long it waits for the others to dump their stacks too
LAST_S = 1.0  # how much later process 0 goes: the others are aborted when its coordination service does
LEAVE_S = 8.0  # how long all of that may take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expiry:
    """What a watchdog found: `line` is what it printed; `missing` may be empty, when all processes are at one place."""

    step: int
    phase: Phase
    missing: tuple[int, ...]
    line: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _At:
    """Where the main thread is. A new object is progress; the limit is in it so that both change at once."""

    step: int
    phase: Phase
    restores: int
    since: float
    limit_s: float


class Watchdog:
    """`folder` is the run's; `attempt` must be the same in all processes and another at every start. `timeout_s` holds from the first
    moment, so put what may take long (compiling, restoring, joining the others, the first step) under `allow`, in every process alike.

    `on_expire(Expiry)` is called in the watchdog's thread instead of ending the process.
    """

    def __init__(self, folder: pathlib.Path, *, process: int, processes: int, timeout_s: float, attempt: int = 0,
                 on_expire: Callable[[Expiry], None] | None = None) -> None:
        if not timeout_s > 0:
            raise InputError(f"watchdog: {timeout_s:g} s is no time limit; give more than 0 s")
        if not 0 <= process < processes:
            raise ValueError(f"process {process} of {processes}")
        self._folder, self._process, self._processes, self._attempt = folder, process, processes, attempt
        self._on_expire = on_expire
        self._host = socket.gethostname()
        self._interval_s = min(max(timeout_s / 40, POLL_S), 5.0)
        self._silent_s = min(max(timeout_s / 4, 2.0), 30.0)  # several intervals, and what network file systems cache
        self._at = _At(step=0, phase="start", restores=0, since=time.time(), limit_s=timeout_s)
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._stacks_path = logs / f"stacks.{process}.txt"
        self._stacks = open(self._stacks_path, "ab", buffering=0)
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        self._child = self._start_child(logs)
        self._peers = heartbeat.Peers(folder, processes=processes, attempt=attempt)
        # before anything can hang: the child kills nobody that it was never told about, and nobody is missed who never was there
        self._tell(timeout_s + ANSWER_S)
        self._write()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    # ---- for the main thread

    def beat(self, step: int, phase: Phase) -> None:
        """Something got done: the process is now at `phase` of the loop's `step` (not of a step whose metrics come late). It may beat
        again at one place. Beat at "data" when a step begins and at "step" right before it is dispatched."""
        if phase not in heartbeat.PHASES:
            raise ValueError(f"unknown phase {phase!r}{nearest(phase, heartbeat.PHASES)}")
        at = self._at
        restores = at.restores + (phase == "restore" != at.phase)
        self._at = _At(step=step, phase=phase, restores=restores, since=time.time(), limit_s=at.limit_s)

    @contextlib.contextmanager
    def allow(self, seconds: float, phase: Phase | None = None) -> Iterator[None]:
        """Inside, the time without a beat is limited by `seconds` instead. With `phase`, the process is there now, at the same step."""
        before = self._at.limit_s
        self._limit(seconds)
        if phase is not None:
            self.beat(self._at.step, phase)
        try:
            yield
        finally:
            self._limit(before)

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Inside, there is no limit: for what waits for a person."""
        return self.allow(math.inf)

    def close(self) -> None:
        """Stop watching. Does not return when the process is being ended, or when an error is on its way out and a peer is being ended:
        the error is what that peer left behind."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a watchdog cannot be closed from on_expire")
        if self._stacks.closed:
            return
        self._closing.set()
        self._thread.join()
        if (error := sys.exception()) is not None:
            self._peers.look(time.monotonic())
            if self._peer_expired():
                self._expire(self._at, time.time() - self._at.since, error)
        self._write()
        self._child.kill()
        self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()
        faulthandler.unregister(DUMP_SIGNAL)
        self._stacks.close()
        if self._stacks_path.stat().st_size == 0:
            self._stacks_path.unlink()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _limit(self, seconds: float) -> None:
        self._at = dataclasses.replace(self._at, limit_s=seconds)
        self._tell(seconds + ANSWER_S)

    # ---- its thread

    def _watch(self) -> None:
        seen, idle_s, last, written, looked = self._at, 0.0, time.monotonic(), -math.inf, -math.inf
        while not self._closing.wait(POLL_S):
            now = time.monotonic()
            at = self._at
            # a gap is time in which this process did not run, and its main thread neither
            idle_s = idle_s + min(now - last, LONGEST_GAP_S) if at is seen else 0.0
            seen, last = at, now
            self._tell(at.limit_s - idle_s + ANSWER_S)
            if now - written >= self._interval_s:
                written = now
                self._write()
            if idle_s < at.limit_s / 2:  # the others' files are read on suspicion only, and by many processes seldom
                continue
            if now - looked >= self._processes / 100:
                looked = now
                self._peers.look(now)
            if idle_s >= at.limit_s or self._peer_expired():
                return self._expire(at, idle_s)

    def _expire(self, at: _At, idle_s: float, error: BaseException | None = None) -> None:
        what = f"no progress for {idle_s:.0f} s" if error is None else f"{type(error).__name__} while a peer is being ended"
        try:
            self._tell(LEAVE_S)
            self._dump(f"=== attempt {self._attempt}, process {self._process} ({self._host}, pid {os.getpid()}) at step {at.step} "
                       f"({at.phase}), {what}, {heartbeat.clock(time.time())}", error)
            self._write(expired=True)
            found = self._judge(at, what)
            _say(found.line)
            event = {"time": time.time(), "attempt": self._attempt, "step": at.step}
            self._append({"kind": "watchdog", **event, "process": self._process, "missing": found.missing})
            if self._on_expire is not None:
                self._tell(math.inf)
                return self._on_expire(found)
            if self._process == 0:
                self._append({"kind": "end", **event, "status": "watchdog", "state_sha256": None})
                time.sleep(LAST_S if self._processes > 1 else 0)
        finally:
            if self._on_expire is None:
                os._exit(STATUS)

    def _judge(self, at: _At, what: str) -> Expiry:
        """Who is missing, once the others have dumped their stacks, or had the time to."""
        end = time.monotonic() + SETTLE_S
        while True:
            now = time.monotonic()
            self._peers.look(now)
            seen, silent = self._seen(), self._peers.silent(now, self._silent_s) - {self._process}
            gone = heartbeat.dead(seen, silent)
            if now >= end or all(k in gone or beat is None or beat.expired or beat.phase == "end" for k, beat in seen.items()):
                break
            time.sleep(POLL_S)
        missing = heartbeat.missing(seen, silent)
        told = [heartbeat.describe(k, seen[k], gone=k in gone, own=k == self._process) for k in missing[:8]] + ["..."] * (len(missing) > 8)
        who = ", ".join(told) or f"all {self._processes} processes are there, so none of them is behind"
        line = (f"watchdog: process {self._process}: {what} at step {at.step} ({at.phase}); {who}; "
                f"stacks in {self._stacks_path}; ending with status {STATUS}")
        return Expiry(step=at.step, phase=at.phase, missing=tuple(missing), line=line)

    # ---- pieces

    def _start_child(self, logs: pathlib.Path) -> subprocess.Popen:
        given = {"parent": os.getpid(), "logs": str(logs.absolute()), "process": self._process, "processes": self._processes,
                 "attempt": self._attempt, "dump_signal": int(DUMP_SIGNAL)}
        child = subprocess.Popen([sys.executable, "-I", "-S", last_resort.__file__, json.dumps(given)], stdin=subprocess.PIPE,
                                 stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        return child

    def _tell(self, seconds: float) -> None:
        """To the child: another line will come within `seconds`."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, or stopped with its pipe full: then there is no last resort
            os.write(self._child.stdin.fileno(), f"{seconds:.3f} {self._at.step} {self._at.phase}\n".encode())

    def _heartbeat(self, *, expired: bool = False) -> Heartbeat:
        at = self._at
        return Heartbeat(process=self._process, pid=os.getpid(), host=self._host, attempt=self._attempt, restores=at.restores,
                         step=at.step, phase=at.phase, since=at.since, time=time.time(), expired=expired)

    def _write(self, *, expired: bool = False) -> None:
        with contextlib.suppress(OSError):  # a full disk
            heartbeat.write(self._folder, self._heartbeat(expired=expired))

    def _seen(self) -> dict[int, Heartbeat | None]:
        """This process's own from memory: its file may be on a full disk."""
        return self._peers.seen() | {self._process: self._heartbeat(expired=True)}

    def _peer_expired(self) -> bool:
        return any(beat is not None and beat.expired for k, beat in self._peers.seen().items() if k != self._process)

    def _dump(self, header: str, error: BaseException | None) -> None:
        unwound = "".join(traceback.format_exception(error)) if error else ""
        with contextlib.suppress(OSError):
            self._stacks.write(f"\n{header}\n{unwound}".encode())
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _append(self, event: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            lines = Lines(self._folder / "logs" / "events.jsonl")
            lines.write(event)
            lines.close()


def _say(line: str) -> None:
    """Past sys.stderr, whose lock a stuck thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())

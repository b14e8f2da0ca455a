"""The processes of one attempt: started together, heard, signalled, and never left behind.

Every process leads a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone and a process is ended together
with whatever it started. The kernel kills it when the supervisor dies, however that happens.
"""

import contextlib
import os
import pathlib
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# In the process itself, before it becomes the command: a fork with Python code of ours would not be safe in a parent with threads.
# 1 is PR_SET_PDEATHSIG; the parent may have died before it was set.
_TIED = ("import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "
         "os.getppid() == int(sys.argv[1]) or os._exit(137); os.execvp(sys.argv[2], sys.argv[2:])")
_NOISE = re.compile(rb"[^\n]*(\[Gloo\] Rank|connected peer ranks is :)[^\n]*\n")  # several threads write it, into one another
_LAST_WORDS_S = 1.0  # for output that is still in the pipes of a process that ended


@dataclass(frozen=True, kw_only=True)
class Ended:
    """`number` is the process of the attempt; `code` is as `subprocess` has it: an exit status, or minus a signal."""

    number: int
    code: int


class Group:
    """Runs `commands` until all have ended. Output goes to `logs[i]`, a line after `[ATTEMPT.NUMBER TIME]`; that of process 0 to the
    terminal too, as it comes."""

    def __init__(self, commands: Sequence[Sequence[str]], *, logs: Sequence[pathlib.Path], attempt: int,
                 environ: Mapping[str, str] | None = None, screen: tuple[IO[bytes], IO[bytes]] | None = None) -> None:
        out, err = screen or (sys.stdout.buffer, sys.stderr.buffer)
        self._selector = selectors.DefaultSelector()
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._files = contextlib.ExitStack()
        try:
            for number, (command, log) in enumerate(zip(commands, logs, strict=True)):
                file = self._files.enter_context(open(log, "ab", buffering=0))
                process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command], env=environ,
                                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
                self._alive[number] = process
                for pipe, terminal, whole_lines in ((process.stdout, out, True), (process.stderr, err, False)):
                    assert pipe is not None
                    os.set_blocking(pipe.fileno(), False)
                    listener = Listener(pipe, file, f"[{attempt}.{number} ", terminal if number == 0 else None, whole_lines=whole_lines)
                    self._selector.register(pipe, selectors.EVENT_READ, listener)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(self._alive)

    def wait(self, seconds: float) -> list[Ended]:
        """Pass output on for a while; who ended meanwhile, those first that a signal from outside ended: they took the others along."""
        if self._selector.get_map():
            for key, _ in self._selector.select(seconds):
                self._read(key.data)
        else:
            time.sleep(seconds)
        ended = [ended for number in self.alive if (ended := self._reap(number)) is not None]
        return sorted(ended, key=lambda e: (e.code >= 0, e.code == -signal.SIGABRT))

    def send(self, number: int, signal_number: int) -> None:
        """To one process, not to what it started."""
        if number in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._alive[number].pid, signal_number)

    def send_all(self, signal_number: int) -> None:
        for number in self.alive:
            self.send(number, signal_number)

    def kill(self) -> None:
        """All, with whatever they started; `wait` still tells how they ended."""
        for process in self._alive.values():
            _kill_session(process.pid)

    def close(self) -> None:
        self.kill()
        for process in self._alive.values():
            process.wait()
        self._alive.clear()
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._selector.get_map() and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                self._read(key.data)
        for key in list(self._selector.get_map().values()):
            self._drop(key.data)
        self._selector.close()
        self._files.close()

    def _reap(self, number: int) -> Ended | None:
        process = self._alive[number]
        # It stays a zombie until its session is ended, so that its number is not another process's by then.
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return None
        _kill_session(process.pid)
        code = process.wait()
        del self._alive[number]
        return Ended(number=number, code=code)

    def _read(self, listener: "Listener") -> None:
        if not listener.read():
            self._drop(listener)

    def _drop(self, listener: "Listener") -> None:
        self._selector.unregister(listener.pipe)
        listener.close()


class Listener:
    """One pipe into one log, line by line, and to the terminal."""

    def __init__(self, pipe: IO[bytes], log: IO[bytes], mark: str, terminal: IO[bytes] | None, *, whole_lines: bool) -> None:
        self.pipe, self._log, self._mark, self._terminal, self._whole_lines = pipe, log, mark, terminal, whole_lines
        self._part = b""

    def read(self) -> bool:
        """False at the end of the pipe."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        if not self._whole_lines:  # a progress bar moves within its line
            self._show(_NOISE.sub(b"", data))
        *lines, self._part = (self._part + data).split(b"\n")
        self._write(b"".join(line + b"\n" for line in lines))
        return True

    def close(self) -> None:
        if self._part:
            self._write(self._part + b"\n")
            self._part = b""
        self.pipe.close()

    def _write(self, lines: bytes) -> None:
        if not lines:
            return
        mark = f"{self._mark}{time.strftime('%H:%M:%S')}] ".encode()
        with contextlib.suppress(OSError):  # a full disk ends neither the run nor the screen
            # of a line that was written over and over, as progress bars do, the last state
            self._log.write(b"".join(mark + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines.split(b"\n")[:-1]))
        if self._whole_lines:
            self._show(lines)

    def _show(self, data: bytes) -> None:
        if self._terminal is None or not data:
            return
        try:
            self._terminal.write(data)
            self._terminal.flush()
        except (OSError, ValueError):  # nobody looks any more; the log has it
            self._terminal = None


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

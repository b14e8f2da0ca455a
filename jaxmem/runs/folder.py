"""A run's folder: created once, held by one live process group, resumed by the same command.

config.json, versions.json, metrics.jsonl, logs/, checkpoints/, report.html; `lock` is held with flock while a run lives, so a lock that
a killed run left is free by itself.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmem.spec import InputError

Config = dict[str, Any]

# What may differ when a command is repeated: it changes what is watched or how it is started, not what is computed.
FREE = ("fault", "profile", "print_hash", "max_restarts", "watchdog", "log", "elastic", "local_checkpoints", "keep", "checkpoint_every",
        "snapshot", "snapshot_pool", "max_rollbacks", "start_timeout")
# What a start that came to nothing leaves.
OWN = ("logs", "lock", "config.json", "config.json.new", "versions.json", "versions.json.new", "checkpoints", "metrics.jsonl")
ELASTIC = ("topology", "plan")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Paths of a run. `attempt` counts its starts from 0; `run_id` is made once."""

    path: pathlib.Path
    run_id: str
    attempt: int

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> pathlib.Path:
        return self.path / "logs" / "events.jsonl"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def skips(self) -> pathlib.Path:
        return self.path / "skips.json"


def read_config(path: pathlib.Path) -> Config | None:
    try:
        return json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{path}/config.json cannot be read ({error}); give another --out, or mend the file") from None


def open_folder(path: pathlib.Path, config: Config, versions: Mapping[str, str | None], *, elastic: bool) -> Folder:
    """Make the folder, or resume the one that is there. Raises InputError when it belongs to another configuration."""
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out={path}: {error.strerror}") from None
    before, starts = read_config(path), count_starts(path)
    if before is None or not starts:  # a command that was refused before its first step binds nobody
        foreign = [p.name for p in path.iterdir() if p.name not in OWN]
        if foreign:
            raise InputError(f"--out={path} is not empty and holds no run ({', '.join(sorted(foreign)[:3])}); "
                             "give an empty or a new folder")
        before = config | {"run_id": uuid.uuid4().hex[:12]}
        try:
            write_json(path / "config.json", before)
        except OSError as error:
            raise InputError(f"--out={path}: {error.strerror}") from None
    refuse_other(path, config, elastic=elastic)
    with contextlib.suppress(OSError):  # a full disk ends nothing
        write_json(path / "versions.json", dict(versions))
    return Folder(path=path, run_id=before["run_id"], attempt=starts)


def refuse_other(path: pathlib.Path, config: Config, *, elastic: bool) -> None:
    """Raises InputError when a run of another configuration has started in `path`; changes nothing, so any process may ask."""
    before = read_config(path)
    if before is None or not count_starts(path):
        return
    if difference := differences(before, config, free=FREE + (ELASTIC if elastic else ())):
        hint = "; --elastic continues a run under another plan and topology" if not elastic and any(
            line.startswith(ELASTIC) for line in difference) else ""
        raise InputError(f"{path} holds a run of another configuration{hint}:\n" + "\n".join(difference)
                         + "\ngive the same flags to resume it, or another --out")


def finished(path: pathlib.Path, steps: int) -> dict[str, Any] | None:
    """The `end` event of a run that took step `steps`, if that is the latest thing that happened to it."""
    ends = [line for line in read_lines(path / "logs" / "events.jsonl") if line.get("kind") in ("start", "end")]
    if ends and ends[-1]["kind"] == "end" and ends[-1].get("status") == "done" and ends[-1].get("step", 0) >= steps:
        return ends[-1]
    return None


def count_starts(path: pathlib.Path) -> int:
    return sum(1 for line in read_lines(path / "logs" / "events.jsonl") if line.get("kind") == "start")


def join_folder(path: pathlib.Path) -> Folder:
    """The folder that process 0 opened, as the others see it; they call this before process 0 writes its `start` event."""
    config = read_config(path)
    if config is None:
        raise InputError(f"--out={path} is not the folder that process 0 opened: every process must see the same file system")
    return Folder(path=path, run_id=config["run_id"], attempt=count_starts(path))


def differences(before: Config, now: Config, *, free: tuple[str, ...]) -> list[str]:
    """`name: was X, now Y` for each entry that differs and is not free to."""
    names = [n for n in (*before, *now) if n != "run_id" and n not in free]
    return [f"{n}: was {before.get(n)!r}, now {now.get(n)!r}" for n in dict.fromkeys(names) if before.get(n) != now.get(n)]


class Held(InputError):
    """Another live process holds the folder."""


class Lock:
    """The folder, held until `release` or the end of the process. Raises Held."""

    def __init__(self, path: pathlib.Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = open(path / "lock", "a+")
        except OSError as error:
            raise InputError(f"--out={path}: {error.strerror}; give a folder that can be written") from None
        until = time.monotonic() + 1.0
        while not self._taken():  # a reader that asks who holds it has it for an instant
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise Held(f"{path} is held by a live run ({_who(holder)}); "
                       "wait for it, stop it, or give another --out") from None
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}))
        self._file.flush()

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks: better a run that nobody guards than none
            print(f"no lock on {self._file.name} ({error.strerror}): nothing refuses a second run in this folder", file=sys.stderr)
        return True

    def release(self) -> None:
        self._file.close()


class Lines:
    """An append-only file of JSON lines, each flushed as it is written. Lines that a full disk refuses wait for the next call."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._waiting, self._one_at_a_time = path, "", threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if path.stat().st_size and not _ends_whole(path):
            self._waiting = "\n"  # a line torn by a kill stays one bad line

    def write(self, line: Mapping[str, Any]) -> bool:
        """True when everything is in the file. Any thread may call it."""
        with self._one_at_a_time:
            self._waiting += json.dumps(line) + "\n"
            data = self._waiting.encode()
            try:
                done = os.write(self._fd, data)
            except OSError:
                return False
            self._waiting = data[done:].decode(errors="surrogateescape") if done < len(data) else ""
            return not self._waiting

    def close(self) -> None:
        if self._waiting:
            try:
                os.write(self._fd, self._waiting.encode(errors="surrogateescape"))
            except OSError:
                pass
        os.close(self._fd)


def _who(holder: str) -> str:
    try:
        at = json.loads(holder)
        return f"process {at['pid']} on {at['host']}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at['time']))}"
    except (ValueError, KeyError, TypeError):
        return "of an unknown process"


def _ends_whole(path: pathlib.Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Every whole JSON object of a file; a torn line is passed over."""
    out = []
    if path.exists():
        for text in path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                out.append(line)
    return out


def drop_after(path: pathlib.Path, step: int) -> dict[str, Any] | None:
    """Take the lines past `step` out of metrics.jsonl; returns `{from, to, steps, seconds, last_time}` of the training steps among them,
    or None."""
    lines = read_lines(path)
    kept = [line for line in lines if line.get("step", 0) <= step]
    gone = [line for line in lines if line.get("step", 0) > step and line.get("kind") == "train"]
    if len(kept) < len(lines) or (path.exists() and path.stat().st_size and not _ends_whole(path)):
        fresh = path.with_name(path.name + ".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        fresh.replace(path)
    if not gone:
        return None
    return {"from": gone[0]["step"], "to": gone[-1]["step"], "steps": len(gone), "seconds": sum(line.get("step_s") or 0.0 for line in gone),
            "last_time": gone[-1].get("time")}


def write_json(path: pathlib.Path, value: Any) -> None:
    """Whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)

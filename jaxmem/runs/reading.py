"""The files of a run as they lie: what a live process is writing, what a killed one left torn, what a disk damaged.

Nothing here raises for the contents of a file. A cut last line is what a kill leaves and is skipped; an unreadable line before it
is skipped, counted and said in `problems`.
"""

import array
import bisect
import dataclasses
import fcntl
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CONFIG, VERSIONS, METRICS, EVENTS, LOCK = "config.json", "versions.json", "metrics.jsonl", "logs/events.jsonl", "lock"
TRAIN_FIELDS = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "epoch", "batch", "time")
EVAL_FIELDS = ("loss", "accuracy", "tokens", "images", "seconds", "time")

Event = Mapping[str, Any]


class Series:
    """Lines of one kind by step, in columns: `steps[i]` goes with `column("loss")[i]`. Unknown, null and not finite are NaN or inf."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.steps = array.array("q")
        self._columns = {name: array.array("d") for name in fields}

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> array.array:
        """One float a line."""
        return self._columns[name]

    def add(self, line: Mapping[str, Any]) -> bool:
        """Take one line; False if it has no usable step. A step that was reached before supersedes what follows it."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**62:
            return False
        if self.steps and step <= self.steps[-1]:
            keep = bisect.bisect_left(self.steps, step)
            del self.steps[keep:]
            for column in self._columns.values():
                del column[keep:]
        self.steps.append(step)
        for name, column in self._columns.items():
            value = line.get(name)
            if type(value) is not float:
                value = number(value)
            column.append(math.nan if value is None else value)
        return True

    def last(self, name: str) -> float | None:
        """The newest value; None where there is no line or the value is not finite."""
        return finite(self._columns[name][-1]) if self.steps else None

    def at(self, name: str, step: int) -> float | None:
        """The value at a step, None where it is not known."""
        i = bisect.bisect_left(self.steps, step)
        return finite(self._columns[name][i]) if i < len(self.steps) and self.steps[i] == step else None

    def recent(self, name: str, lines: int = 100) -> float | None:
        """The median of the last known values among so many lines: what the run does now, not its warm-up."""
        known = sorted(value for value in self._columns[name][-lines:] if math.isfinite(value))
        middle = len(known) // 2
        return None if not known else known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2


@dataclasses.dataclass(frozen=True)
class Metrics:
    """`metrics.jsonl`: the training lines and the evaluations that count."""

    train: Series = dataclasses.field(default_factory=lambda: Series(TRAIN_FIELDS))
    eval: Series = dataclasses.field(default_factory=lambda: Series(EVAL_FIELDS))

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "Metrics":
        """From lines in their order."""
        metrics = cls()
        for line in lines:
            metrics.add(line)
        return metrics

    def add(self, line: Mapping[str, Any]) -> bool:
        """Take one line; False if it is of no known kind or has no step."""
        series = {"train": self.train, "eval": self.eval}.get(str(line.get("kind")))
        return series is not None and series.add(line)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run's folder says. `problems` are what could not be read, as sentences; `holder` is the live process, if any."""

    folder: pathlib.Path
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    metrics: Metrics
    events: list[Event]
    holder: Mapping[str, Any] | None
    problems: list[str]

    def asked(self, name: str) -> str | None:
        """One of the three strings, `workload`, `plan` or `topology`, or a flag, as text."""
        flags = self.config.get("flags")
        found = self.config.get(name, flags.get(name) if isinstance(flags, Mapping) else None)
        if found is None and name == "workload":
            parts = {part: self.asked(part) for part in ("model", "optimizer", "batch", "seq")}
            return ",".join(f"{part}={value}" for part, value in parts.items() if value) or None
        return None if found is None else str(found)

    @property
    def steps_asked(self) -> int | None:
        """The value of `--steps`."""
        asked = self.asked("steps")
        return int(asked) if asked and asked.isdecimal() else None


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Every file of a run's folder, as far as it can be read."""
    folder = pathlib.Path(folder)
    problems: list[str] = []
    holder = live_holder(folder)  # before the files: a run that ends in between is running, not killed
    config, versions = (_object(folder / name, problems) for name in (CONFIG, VERSIONS))
    metrics = Metrics()
    strange = sum(not metrics.add(line) for line in lines(folder / METRICS, problems))
    if strange:
        problems.append(f"{METRICS}: {strange} {'line' if strange == 1 else 'lines'} without a known kind and step")
    events: list[Event] = [event for event in lines(folder / EVENTS, problems) if isinstance(event.get("kind"), str)]
    return Run(folder=folder, config=config, versions=versions, metrics=metrics, events=events, holder=holder, problems=problems)


def lines(path: pathlib.Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; a file that is not there has none."""
    broken, first, torn = 0, 0, False
    try:
        with open(path, "rb") as file:
            for i, raw in enumerate(file, 1):
                try:
                    value = json.loads(raw)
                except (ValueError, RecursionError):
                    value = None
                torn = False
                if isinstance(value, dict):
                    yield value
                elif raw.strip():
                    broken, first = broken + 1, first or i
                    torn = not raw.endswith(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
    broken -= torn  # by a kill, or it is being written now
    if broken:
        problems.append(f"{path.name}: {broken} unreadable {'line' if broken == 1 else 'lines'}, the first is line {first}")


def live_holder(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What the process that holds the run's lock wrote into it, None where none lives: the kernel drops a dead process's lock.

    The test takes a shared lock for an instant, so whoever takes the lock should try again for a moment before giving up.
    """
    try:
        with open(pathlib.Path(folder) / LOCK, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    holder = json.loads(file.read())
                except ValueError:
                    holder = None
                return holder if isinstance(holder, dict) else {}
    except OSError:
        return None
    return None


def number(value: object) -> float | None:
    """A JSON number as a float; None for anything else. NaN and infinities stay what they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite(value: object) -> float | None:
    """A JSON number that can be reckoned with; None for anything else."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def _object(path: pathlib.Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
        return {}
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no object")
        return {}
    return value

"""Records of experiments: one line of JSON for each point that was tried, only ever appended to. No jax.

A *point* is (workload, topology, plan, seed, settings). Its key is a hash of those, of the experiment's name and of the versions that
the numbers depend on; a point whose key is on record is done. Several processes may append to one file: a record is one write to a
file opened for appending, and a line that a kill or a full disk tore is passed over by readers and closed off by the next writer.

A record: `experiment key workload topology plan seed settings versions status reason values sources backend time wall_s`.
`status`: `done`; `refused` (the input cannot be used: it would be refused again); `failed` (tried again by the next sweep).
`values` are numbers, words, or lists (for curves); `sources` says for each of them estimate, compile or measure. Unknown is null.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxmem import spec
from jaxmem.plan import Plan
from jaxmem.runs.folder import read_lines
from jaxmem.spec import InputError

Record = dict[str, Any]
Source = Literal["estimate", "compile", "measure"]
FILE = "records.jsonl"
SOURCES = ("estimate", "compile", "measure")
STRINGS = ("workload", "topology", "plan")
WORKLOAD = ("model", "optimizer", "batch", "seq")
PLAN = tuple(field.name for field in dataclasses.fields(Plan))
# columns of every record's row; settings and values need other names
OWN = ("experiment", "key", *STRINGS, *WORKLOAD, *PLAN, "seed", "settings", "status", "reason", "backend", "time",
       "wall_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One thing to try. `settings` are whatever else the numbers depend on (steps, learning rate, ...).

    alone: it measures time, so nothing else may run beside it. seeded: its numbers depend on the seed; others are tried once.
    """

    workload: str
    topology: str
    plan: str
    seed: int = 0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alone: bool = False
    seeded: bool = True

    def key(self, experiment: str, versions: Mapping[str, Any]) -> str:
        parts = [experiment, self.workload, self.topology, self.plan, self.seed, dict(self.settings), dict(versions)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        more = "".join(f" {name}={spec.show(value)}" for name, value in self.settings.items())
        return f"{self.workload} on {self.topology}, plan {self.plan or 'default'}{more}" + (f", seed {self.seed}" if self.seeded else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What came of a point: name -> (value, source), and what it was found with (`cpu`, `tpu v5e`, `cuda NVIDIA H200`)."""

    values: Mapping[str, tuple[Any, Source]]
    backend: str | None = None


# ---------------------------------------------------------------- writing

def record(experiment: str, point: Point, versions: Mapping[str, Any], *, status: str, time: float, reason: str | None = None,
           values: Mapping[str, tuple[Any, Source]] | None = None, backend: str | None = None, wall_s: float | None = None) -> Record:
    """`values`: name -> (value, source). Raises InputError for a name that is a column of its own, or an unknown source."""
    values = values or {}
    for name in (*values, *point.settings):
        if name in OWN or (name in values and name in point.settings):
            raise InputError(f"{experiment}: {name!r} is a column of every record already; another name is needed")
    for name, (_, source) in values.items():
        if source not in SOURCES:
            raise InputError(f"{experiment}: {name} has source {source!r}; expected {', '.join(SOURCES)}")
    return {"experiment": experiment, "key": point.key(experiment, versions), "workload": point.workload, "topology": point.topology,
            "plan": point.plan, "seed": point.seed, "settings": dict(point.settings), "versions": dict(versions), "status": status,
            "reason": reason, "values": {name: _known(value) for name, (value, _) in values.items()},
            "sources": {name: source for name, (value, source) in values.items() if _known(value) is not None},
            "backend": backend, "time": time, "wall_s": wall_s}


def _known(value: Any) -> Any:
    """JSON has no infinity and no NaN: what is not finite is not known."""
    if isinstance(value, (list, tuple)):
        return [_known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: pathlib.Path, line: Record) -> None:
    """Add one record in one write. Raises OSError where it does not arrive whole: it is then not on record."""
    data = json.dumps(line, allow_nan=False).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":  # a torn line stays one bad line
            data = b"\n" + data
        if (written := os.write(fd, data)) < len(data):
            raise OSError(f"{path}: {written} of {len(data)} bytes written; the disk is full?")
    finally:
        os.close(fd)


# ---------------------------------------------------------------- reading

def find(folder: pathlib.Path) -> list[pathlib.Path]:
    """The record files in a folder and below it; a file is itself."""
    return [folder] if folder.is_file() else sorted(folder.rglob(FILE))


def read(*paths: pathlib.Path) -> list[Record]:
    """One record a key, in the order in which the keys came first: what is done before what failed, then the latest."""
    out: dict[str, Record] = {}
    for path in paths:
        for line in read_lines(path):
            if isinstance(line.get("key"), str) and isinstance(line.get("status"), str) and isinstance(line.get("values"), dict):
                old = out.get(line["key"])
                if old is None or line["status"] == "done" or old["status"] != "done":
                    out[line["key"]] = line
    return list(out.values())


def settled(records: Iterable[Record]) -> set[str]:
    """Keys that a sweep need not try again."""
    return {one["key"] for one in records if one["status"] in ("done", "refused")}


def newest(records: Iterable[Record]) -> list[Record]:
    """One record a point, the latest: what other versions said before is left out."""
    out: dict[str, Record] = {}
    for one in records:
        same = json.dumps([one["experiment"], *(one[name] for name in STRINGS), one["seed"], one["settings"]], sort_keys=True)
        if same not in out or (one["status"] == "done", one["time"]) >= (out[same]["status"] == "done", out[same]["time"]):
            out[same] = one
    return list(out.values())

"""Handing the points of an experiment to a cluster: each is a task of its own on some node, and leaves its record in the shared folder.

`python -m jaxmem.handing FILE INDEX` is the task. FILE has a line for the experiment and then one for each point. A task whose point is
on record does nothing, so handing the same points again is safe. Every task writes a records file of its own below the experiment's
folder: appends of several hosts to one file on a network drive may be torn.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem import environment
from jaxmem.hardware import parse_topology
from jaxmem.records import FILE, Point, find, read, settled
from jaxmem.spec import InputError, nearest
from jaxmem.sweep import sweep

WHERE = ("local", "slurm", "gke")
COMPILES = "compiles"  # the group of points that need no accelerator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Points that want the same node: `needs` is the topology that must be there, or None for points that only compile."""

    needs: str | None
    points: Sequence[Point]
    file: pathlib.Path

    @property
    def text(self) -> str:
        return "".join(json.dumps(dataclasses.asdict(point)) + "\n" for point in self.points)


def batches(points: Sequence[Point], folder: pathlib.Path) -> list[Batch]:
    """The points by the node they want. Raises InputError for one that would need several processes."""
    groups: dict[str | None, list[Point]] = {}
    for point in points:
        topology = parse_topology(point.topology)
        if point.alone and topology.hosts > 1:
            raise InputError(f"{point}: a point runs in one process, and {topology} has {topology.hosts} hosts; "
                             "give a topology of one host")
        groups.setdefault(topology.text if point.alone else None, []).append(point)
    out = []
    for needs, own in groups.items():
        name = hashlib.sha256(json.dumps([dataclasses.asdict(one) for one in own], sort_keys=True).encode()).hexdigest()[:12]
        out.append(Batch(needs=needs, points=own, file=folder / "handed" / f"{name}.jsonl"))
    return out


def hand(points: Sequence[Point], *, where: str, experiment: str, module: str, folder: pathlib.Path, timeout_s: float, jobs: int | None,
         words: Sequence[str], dry_run: bool) -> int:
    """Submits the points, or prints what would be submitted; returns the scheduler's status. `words`: the launcher's own flags."""
    if where not in WHERE[1:]:
        raise InputError(f"--launch={where}: expected one of {', '.join(WHERE)}{nearest(where, WHERE)}")
    try:
        launcher: Any = importlib.import_module("launch.points")
    except ModuleNotFoundError:
        raise InputError(f"--launch={where} needs jaxmem's folder launch, which comes with its source: run it from there") from None
    own = batches(points, folder.resolve())
    head = {"experiment": experiment, "module": module, "folder": str(folder.resolve()), "timeout_s": timeout_s,
            "versions": environment.versions()}
    texts = launcher.texts(where, own, name=experiment.replace("_", "-"), jobs=jobs, timeout_s=timeout_s, words=words)
    if dry_run:
        for text in texts:
            print(text, end="")
        return 0
    for batch in own:
        batch.file.parent.mkdir(parents=True, exist_ok=True)
        batch.file.write_text(json.dumps(head) + "\n" + batch.text)
    return max((launcher.submit(where, text) for text in texts), default=0)


# ---------------------------------------------------------------- the task

def take(file: pathlib.Path, index: int) -> str:
    """Runs one point of a file, if it is not on record, and says how that ended. Raises InputError."""
    head, point = read_points(file, index)
    folder, versions = pathlib.Path(head["folder"]), environment.versions()
    key = point.key(head["experiment"], versions)
    if key in settled(read(*find(folder))):
        return "on record"
    if different := {name: (had, versions.get(name)) for name, had in head["versions"].items() if versions.get(name) != had}:
        print(f"versions differ here, so the point will not be known as done there: {different}", file=sys.stderr)
    own = folder / "handed" / key
    counts = sweep([point], experiment=head["experiment"], module=head["module"], folder=own, versions=versions, jobs=1,
                   timeout_s=head["timeout_s"], say=lambda line: print(line, file=sys.stderr, flush=True))
    return next(iter(counts))


def read_points(file: pathlib.Path, index: int) -> tuple[Mapping[str, Any], Point]:
    try:
        head, *points = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not a file of points ({error})") from None
    if not 0 <= index < len(points):
        raise InputError(f"{file} has points 0 to {len(points) - 1}, and no {index}")
    return head, Point(**points[index])


def main(argv: Sequence[str]) -> int:
    """Status 0 as soon as the point is on record, also as failed: the scheduler need not try it again."""
    environment.quiet()

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, interrupt)
    try:
        file, index = argv
        print(f"{file} {index}: {take(pathlib.Path(file), int(index))}", file=sys.stderr)
    except (InputError, ValueError) as error:
        print(f"jaxmem.handing: {error}; it takes FILE and INDEX, and reads {FILE} below the experiment's folder", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

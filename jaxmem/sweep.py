"""Runs the points of a sweep, each in a child process, and puts what comes of it on record.

A child that dies or takes too long is a record with its reason. Points that measure time run alone, after the others. Whatever ends
the sweep, no child stays behind and what was done is on record.

`python -m jaxmem.sweep MODULE POINTS OUT` is the child: it calls `MODULE.run(point)`, or `MODULE.run_many(points)` for points that belong
together, and writes what it returns to the file OUT. Each point has its own record all the same.
"""

import collections
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmem import environment
from jaxmem.records import FILE, Found, Point, append, record
from jaxmem.report.units import duration_text
from jaxmem.spec import InputError

PATIENCE_S = 15.0  # for a child that was asked to stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Child:
    points: tuple[Point, ...]
    process: subprocess.Popen
    out: pathlib.Path
    log: pathlib.Path
    began: float


def sweep(points: Sequence[Point], *, experiment: str, module: str, folder: pathlib.Path, versions: Mapping[str, Any], jobs: int,
          timeout_s: float, say: Callable[[str], None],
          together: Callable[[Point], str | None] | None = None) -> collections.Counter[str]:
    """How many of `points` ended in which status. `jobs` children run at a time, each with a point, or with all for which `together`
    gives the same text; `timeout_s` is for a point. Raises what interrupts it."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    waiting = collections.deque(sorted(grouped(points, together), key=lambda group: group[0].alone))
    running: list[Child] = []
    counts: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    try:
        while waiting or running:
            while waiting and may_start(waiting[0][0], [child.points[0] for child in running], jobs):
                running.append(start_child(waiting.popleft(), experiment, module, logs, versions))
            time.sleep(0.05)
            for child in list(running):
                wall_s = time.monotonic() - child.began
                limit_s = timeout_s * len(child.points)
                late = wall_s > limit_s
                if child.process.poll() is None and not late:
                    continue
                if late:
                    stop(child)
                running.remove(child)
                for line, point in zip(outcome(child, experiment, versions, wall_s, f"no result within {limit_s:g} s" if late else None),
                                       child.points, strict=True):
                    append(folder / FILE, line)
                    counts[line["status"]] += 1
                    ended = counts.total()
                    left_s = (time.monotonic() - start) / ended * (len(points) - ended)
                    about = f", about {duration_text(left_s)} left" if ended < len(points) else ""
                    why = f" ({line['reason'].splitlines()[0]})" if line["reason"] else ""
                    place = f"{ended:>{len(str(len(points)))}}/{len(points)}"
                    say(f"{place} {line['status']} in {duration_text(wall_s)}{about}: {point}{why}")
    finally:
        for child in running:
            stop(child)
    return counts


def grouped(points: Sequence[Point], together: Callable[[Point], str | None] | None) -> list[tuple[Point, ...]]:
    """Points that share a child; a point without a text has one of its own."""
    groups: dict[object, list[Point]] = {}
    for i, point in enumerate(points):
        text = together(point) if together else None
        groups.setdefault(i if text is None else (text, point.alone), []).append(point)
    return [tuple(group) for group in groups.values()]


def may_start(point: Point, beside: Sequence[Point], jobs: int) -> bool:
    if point.alone or any(other.alone for other in beside):
        return not beside
    return len(beside) < jobs


def start_child(points: tuple[Point, ...], experiment: str, module: str, logs: pathlib.Path, versions: Mapping[str, Any]) -> Child:
    key = points[0].key(experiment, versions)
    out, log = logs / f"{key}.json", logs / f"{key}.txt"
    out.unlink(missing_ok=True)
    path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # the child finds what this process would
    with open(log, "wb") as file:
        own = [dataclasses.asdict(point) for point in points]
        given = json.dumps(own if len(own) > 1 else own[0])
        process = subprocess.Popen([sys.executable, "-m", "jaxmem.sweep", module, given, str(out)],
                                   stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                                   env={**os.environ, "PYTHONPATH": path})
    return Child(points=points, process=process, out=out, log=log, began=time.monotonic())


def stop(child: Child) -> None:
    """Ask first: a child has children of its own, and ends them when it is interrupted. Whoever interrupts again does not want to wait."""
    try:
        if child.process.poll() is None:
            os.killpg(child.process.pid, signal.SIGINT)
            child.process.wait(PATIENCE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    if child.process.poll() is None:
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()


def outcome(child: Child, experiment: str, versions: Mapping[str, Any], wall_s: float, late: str | None) -> list[dict[str, Any]]:
    """The records of the points whose child has ended; `wall_s` of each is its share."""
    try:
        said = json.loads(child.out.read_text())
    except (OSError, ValueError):
        said = {"status": "failed", "reason": death(child)}
    if late and said["status"] != "done":
        said = {"status": "failed", "reason": late}
    child.out.unlink(missing_ok=True)
    found = said.get("found") or [said] * len(child.points)
    return [record(experiment, point, versions, status=said["status"], reason=said.get("reason"), values=one.get("values"),
                   backend=one.get("backend"), time=time.time(), wall_s=wall_s / len(child.points))
            for point, one in zip(child.points, found, strict=True)]


def death(child: Child) -> str:
    code = child.process.returncode
    lines = [line for line in child.log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code} and no result"
    hint = "; out of this machine's memory is the usual cause" if code == -signal.SIGKILL else ""
    return f"{how}{hint}" + (f": {lines[-1].strip()[:300]}" if lines else "")


# ---------------------------------------------------------------- the child

def run_here(module: str, points: Sequence[Point]) -> dict[str, Any]:
    """What `MODULE.run` or `MODULE.run_many` says about the points, or why it says nothing."""
    try:
        own = importlib.import_module(module)
        found: list[Found] = [own.run(points[0])] if len(points) == 1 else list(own.run_many(points))
        if len(found) != len(points):
            raise RuntimeError(f"{module}.run_many gave {len(found)} results for {len(points)} points")
    except InputError as error:
        return {"status": "refused", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return {"status": "failed", "reason": f"{type(error).__name__}: {first}"[:500]}
    for point, one in zip(points, found, strict=True):  # names and sources are seen to here, where they were chosen
        record("", point, {}, status="done", time=0.0, values=one.values)
    said = [{"values": {name: list(pair) for name, pair in one.values.items()}, "backend": one.backend} for one in found]
    return {"status": "done", **(said[0] if len(said) == 1 else {"found": said})}


def main(argv: Sequence[str]) -> None:
    environment.quiet()  # before anything can import jax
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the sweep runs in the background of a shell
    module, text, out = argv
    given = json.loads(text)
    said = run_here(module, [Point(**one) for one in (given if isinstance(given, list) else [given])])
    path = pathlib.Path(out)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(said))
    fresh.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])

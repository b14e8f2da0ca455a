"""One run in a few figures, and the runs under a folder: what `jaxmem runs` lists."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from jaxmem.runs.goodput import Goodput, attempts, goodput
from jaxmem.runs.reading import CONFIG, EVENTS, LOCK, METRICS, VERSIONS, Run, finite, read_run
from jaxmem.spec import InputError

DEEPEST = 4  # levels below a folder that are searched for runs
END_WORDS = {"done": "done", "sigterm": "stopped (sigterm)"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of one run, None where unknown. `step_s`, `tokens_per_s` and `mfu` are medians of the last 100 steps, all measured.

    `status`: running, done, stopped (sigterm), failed (REASON), killed or not started. `age_s`: since its last record.
    `damaged` says why nothing could be read.
    """

    folder: str
    name: str
    status: str | None = None
    workload: str | None = None
    model: str | None = None
    plan: str | None = None
    topology: str | None = None
    backend: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None  # of classifiers
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    predicted_step_s: float | None = None
    goodput: Goodput = Goodput()
    age_s: float | None = None
    problems: tuple[str, ...] = ()
    damaged: str | None = None

    def as_json(self) -> dict[str, Any]:
        """With `goodput` as its fraction and its parts."""
        parts = self.goodput.parts() | {"total": self.goodput.total_s}
        return dataclasses.asdict(self) | {
            "goodput": self.goodput.fraction,
            "seconds": {name: None if value is None else round(value, 6) for name, value in parts.items()},
            "starts": self.goodput.starts,
        }


def status(run: Run) -> str:
    """What has become of a run: from its last `end`, and from its lock."""
    found = attempts(run.events, run.metrics)
    end = found[-1].end if found else None
    if run.holder is not None:
        # Who took the lock before that end wrote it, and is about to go; who took it later has begun again.
        taken, ended = finite(run.holder.get("time")), finite(end.get("time")) if end else None
        if taken is None or ended is None or taken > ended:
            return "running"
    if not found:
        return "not started"
    if end is None:
        return "killed"
    word = str(end.get("status"))
    return END_WORDS.get(word, f"failed ({word})")


def last_record(run: Run) -> float | None:
    """Unix seconds of the newest line of any file."""
    times = [finite(event.get("time")) for event in run.events] + [run.metrics.train.last("time"), run.metrics.eval.last("time")]
    return max((value for value in times if value is not None), default=None)


def model_of(run: Run) -> str | None:
    """`decoder-tiny,layers=2`, from the workload's one line."""
    workload = run.asked("workload") or ""
    return workload.removeprefix("model=").partition(",optimizer=")[0] if workload.startswith("model=") else None


def newest(run: Run, kind: str) -> dict[str, Any]:
    """The last event of a kind; empty if there is none."""
    return dict(next((event for event in reversed(run.events) if event["kind"] == kind), {}))


def summarize(run: Run, now: float | None = None) -> Summary:
    """The figures of a run that was read; `now` in unix seconds."""
    train, last, start = run.metrics.train, last_record(run), newest(run, "start")
    memory = newest(run, "memory")
    bad = [f"the loss of step {train.steps[-1]} is not finite"] if len(train) and train.last("loss") is None else []
    return Summary(
        folder=str(run.folder),
        name=run.folder.resolve().name,
        status=status(run),
        workload=run.asked("workload"),
        model=model_of(run),
        # The last start's, which differ from the configuration after a restart on fewer devices.
        plan=str(start["plan"]) if start.get("plan") else run.asked("plan"),
        topology=str(start["topology"]) if start.get("topology") else run.asked("topology"),
        backend=str(start["backend"]) if start.get("backend") else None,
        step=train.steps[-1] if len(train) else 0 if start else None,
        steps=run.steps_asked,
        loss=train.last("loss"),
        eval_loss=run.metrics.eval.last("loss"),
        eval_accuracy=run.metrics.eval.last("accuracy"),
        step_s=train.recent("step_s"),
        tokens_per_s=train.recent("tokens_per_s"),
        mfu=train.recent("mfu"),
        predicted_bytes=_whole(memory.get("predicted_bytes")),
        measured_bytes=_whole(memory.get("measured_bytes")),
        predicted_step_s=finite(newest(run, "step_time").get("predicted_s")),
        goodput=goodput(run.events, run.metrics),
        age_s=None if last is None else max(0.0, (time.time() if now is None else now) - last),
        problems=tuple(bad + run.problems),
    )


def read_summary(folder: pathlib.Path, now: float | None = None) -> Summary:
    """A run of a list, where a damaged folder is an entry with its reason."""
    run = read_run(folder)
    if run.config or run.events or len(run.metrics.train):
        return summarize(run, now)
    reason = "; ".join(run.problems) or "nothing is written in it yet"
    return Summary(folder=str(folder), name=folder.resolve().name, damaged=reason, problems=tuple(run.problems))


def is_run(folder: pathlib.Path) -> bool:
    """By its files: a `config.json` alone may be anybody's."""
    there = [name for name in (CONFIG, METRICS, EVENTS, VERSIONS, LOCK) if (folder / name).exists()]
    return METRICS in there or EVENTS in there or (CONFIG in there and len(there) > 1) or (LOCK in there and (folder / "logs").is_dir())


def find_runs(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The runs at or under a folder, not within one another; hidden folders and links are left out."""
    for place, inside, _ in os.walk(folder):
        path = pathlib.Path(place)
        if is_run(path):
            inside.clear()
            yield path
        elif len(path.relative_to(folder).parts) >= DEEPEST:
            inside.clear()
        inside[:] = sorted(name for name in inside if not name.startswith("."))


def require_run(text: str) -> pathlib.Path:
    """A run's folder that a user named. Raises `InputError` where there is none."""
    folder = pathlib.Path(text)
    if not folder.is_dir():
        raise InputError(f"{text}: {'is a file, not a run folder' if folder.exists() else 'no such folder'}")
    if not is_run(folder):
        under = [str(path) for path in find_runs(folder)]
        hint = f"; runs under it: {', '.join(under[:3])}{' ...' if len(under) > 3 else ''}" if under else ""
        raise InputError(f"{text} is not a run: it has no {METRICS} and no {EVENTS}{hint}")
    return folder


def _whole(value: object) -> int | None:
    known = finite(value)
    return None if known is None else int(known)

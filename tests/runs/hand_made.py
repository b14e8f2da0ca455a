"""Runs written by hand: the files of a run's folder with figures that a reader can add up."""

import contextlib
import fcntl
import json
import pathlib
from typing import Any

CONFIG = {
    "workload": "model=decoder-tiny,optimizer=adamw,batch=8,seq=64",
    "topology": "cpu:8",
    "plan": "data=2,fsdp=2,tensor=2,remat=block",
    "data": "text:python-docs",
    "steps": 10,
    "lr": 0.001,
    "seed": 0,
    "run_id": "0123456789ab",
}
VERSIONS = {"jaxmem": "0.1.0", "jax": "0.12.0.1", "python": "3.12.3"}


def train(step: int, time: float, **fields: Any) -> dict[str, Any]:
    """A training line of 1 s."""
    line = {"kind": "train", "step": step, "loss": 5.0 - 0.1 * step, "grad_norm": 1.0, "lr": 1e-3, "step_s": 1.0, "tokens_per_s": 512.0}
    return line | {"mfu": None, "epoch": 0, "batch": step - 1, "time": time} | fields


def event(kind: str, time: float, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "attempt": attempt} | fields


def start(time: float, attempt: int = 0, restored_from: int | None = None, **fields: Any) -> dict[str, Any]:
    given = {"restored_from": restored_from, "processes": 1, "devices": 8, "topology": CONFIG["topology"], "plan": CONFIG["plan"]}
    return event("start", time, attempt, **given, backend="cpu", versions=VERSIONS) | fields


def phase(name: str, time: float, seconds: float, attempt: int = 0) -> dict[str, Any]:
    """It ended at `time`."""
    return event("phase", time, attempt, name=name, seconds=seconds)


def killed_and_resumed() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`(metrics, events)` of ten steps from 1000 to 1040, killed in mid-step 7 after a checkpoint of step 4:

    attempt 0: compile 1000-1005, restore (init) 1005-1007, start 1007, steps 1-4 of 1 s, checkpoint 1 s, steps 5-6, killed at 1014.
    attempt 1: compile from 1020 for 3 s, restore 2 s, start 1025, steps 5-8, data 0.5 s, steps 9-10, eval 4 s, checkpoint 1 s, end 1037.
    """
    events = [
        phase("compile", 1005, 5),
        phase("restore", 1007, 2),
        start(1007),
        event("epoch", 1007, step=1, epoch=0),
        phase("checkpoint", 1012, 1),
        event("checkpoint", 1012, step=4, stall_s=1.0, snapshot="async"),
        event("commit", 1012.5, step=4, seconds=0.5, bytes=4096),
        phase("compile", 1023, 3, 1),
        phase("restore", 1025, 2, 1),
        start(1025, 1, 4),
        event("dropped", 1025, 1, **{"from": 5, "to": 6, "steps": 2, "seconds": 2.0, "last_time": 1014.0}),
        phase("data", 1029.5, 0.5, 1),
        phase("eval", 1035.5, 4, 1),
        phase("checkpoint", 1036.5, 1, 1),
        event("memory", 1036.5, 1, predicted_bytes=2_000_000, measured_bytes=1_500_000, backend="cpu"),
        event("step_time", 1036.5, 1, predicted_s=None, measured_s=1.0, backend="cpu"),
        event("end", 1037, 1, step=10, status="done", state_sha256=None),
    ]
    metrics = [train(step, 1007 + step) for step in range(1, 5)]
    metrics += [train(step, 1025 + step - 4 + (0.5 if step > 8 else 0)) for step in range(5, 11)]
    metrics.append({"kind": "eval", "step": 10, "loss": 4.5, "tokens": 4096, "seconds": 4.0, "time": 1035.5})
    return metrics, events


def write(folder: pathlib.Path, metrics: list[dict[str, Any]], events: list[dict[str, Any]], **config: Any) -> pathlib.Path:
    """A run's folder with these lines."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "versions.json").write_text(json.dumps(VERSIONS))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "logs" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return folder


@contextlib.contextmanager
def held(folder: pathlib.Path, **holder: Any):
    """The run's lock, as a live process holds it: an open file of its own conflicts with every other, in one process too."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"pid": 4242, "host": "here", "time": 1000.0} | holder))
        file.flush()
        yield

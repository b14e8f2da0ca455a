"""Small runs for the tests of training: in this process on its eight devices, or as the command itself."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from absl import flags as absl_flags

TINY = {"model": "decoder-tiny,layers=1", "plan": "data=2,fsdp=2,tensor=2,remat=block", "topology": "cpu:8", "batch": "8", "seq": "32",
        "steps": "16", "lr": "0.01", "warmup": "2", "data": "synthetic", "checkpoint_every": "4", "watchdog": "120"}


def arguments(out: pathlib.Path, **flags: object) -> list[str]:
    return [f"--{name}={value}" for name, value in (TINY | flags | {"out": out}).items() if value is not None]


def train_here(out: pathlib.Path, **flags: object) -> int:
    """`jaxmem train` without its start of processes; returns the exit status."""
    from jaxmem import environment, train
    from jaxmem.cli import arguments as parsing
    from jaxmem.cli import train as verb
    from jaxmem.runs import settings as settings_module
    from jaxmem.runs.folder import Lock, open_folder

    values = absl_flags.FlagValues()
    verb.define(values)
    parsing.parse(values, arguments(out, **flags))
    settings = verb.read_settings(values)
    settings_module.check(settings)
    lock = Lock(settings.out)
    try:
        return train.train(settings, open_folder(settings.out, settings.config(), environment.versions(), elastic=settings.elastic))
    finally:
        lock.release()


def train_apart(out: pathlib.Path, *, timeout_s: float = 240, **flags: object) -> subprocess.CompletedProcess:
    """The command, as a user runs it."""
    return subprocess.run([sys.executable, "-m", "jaxmem", "train", *arguments(out, **flags)], capture_output=True, text=True,
                          timeout=timeout_s, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def metrics(out: pathlib.Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


def events(out: pathlib.Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (out / "logs" / "events.jsonl").read_text().splitlines()) if line["kind"] in kinds]


def final_hash(out: pathlib.Path) -> str:
    return events(out, "end")[-1]["state_sha256"]

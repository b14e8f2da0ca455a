"""Where trained weights come from, as a JSON file beside them."""

import dataclasses
import hashlib
import pathlib
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import jaxmem
from jaxmem.optim.learned.meta.recipe import Recipe
from jaxmem.optim.learned.meta.tasks import Task
from jaxmem.running import measured
from jaxmem.runs.folder import write_json


def write(folder: pathlib.Path, r: Recipe, families: Mapping[str, Task], at: int, commit: str | None) -> None:
    """`folder`/weights.json, for the `folder`/weights.npz that is there."""
    write_json(folder / "weights.json", {
        "iterations": at, "recipe": dataclasses.asdict(r), "backend": measured.backend(), "versions": measured.versions(),
        "commit": commit, "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "data": {name: data_sha256(task) for name, task in families.items()},
        "weights_sha256": hashlib.sha256((folder / "weights.npz").read_bytes()).hexdigest()})


def data_sha256(task: Task) -> str:
    """Of the rows that meta-training sees: training and validation."""
    digest = hashlib.sha256()
    for rows in (*task.train, *task.valid):
        digest.update(rows.tobytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """Of the checkout that this package runs from, with `+` where what computes (optim, data) differs from it; None elsewhere."""
    top = pathlib.Path(jaxmem.__file__).parent.parent

    def git(*words: str) -> str:
        done: Any = subprocess.run(["git", "-C", str(top), *words], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    try:
        return git("rev-parse", "HEAD")[:12] + ("+" if git("status", "--porcelain", "--", "jaxmem/optim", "jaxmem/data") else "")
    except (OSError, subprocess.SubprocessError):
        return None

"""Copies of the metrics for TensorBoard, Weights & Biases and MLflow, through their own packages where they are installed."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.runs.folder import Folder
from jaxmem.spec import InputError

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
KEYS = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu")


class Trackers:
    """`names` of PACKAGES. metrics.jsonl is written in any case, and by the run itself."""

    def __init__(self, names: Sequence[str], folder: Folder, *, writes: bool) -> None:
        check(names)
        self._sinks = [open_tracker(name, folder) for name in names] if writes else []

    def write(self, line: dict[str, Any]) -> None:
        prefix = "" if line["kind"] == "train" else f"{line['kind']}/"
        values = {prefix + key: line[key] for key in KEYS if line.get(key) is not None}
        for write, _ in self._sinks:
            write(values, line["step"])

    def close(self) -> None:
        for _, close in self._sinks:
            close()


def check(names: Sequence[str]) -> None:
    """Raises InputError for a package that is missing."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise InputError(f"--log={name}: the package {PACKAGES[name]} is not installed; pip install {PACKAGES[name]}")


def open_tracker(name: str, folder: Folder) -> tuple[Callable[[dict[str, float], int], None], Callable[[], None]]:
    """`(write(values, step), close())`. A resumed run goes on in the same record."""
    package = importlib.import_module(PACKAGES[name])
    if name == "tensorboard":
        writer = package.SummaryWriter(str(folder.path / "tensorboard"))

        def write(values: dict[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)
        return write, writer.close
    if name == "wandb":
        run = package.init(id=folder.run_id, name=folder.path.name, dir=str(folder.path), resume="allow")
        return (lambda values, step: run.log(values, step=step)), run.finish
    package.set_tracking_uri(str(folder.path / "mlruns"))
    found = package.search_runs(filter_string=f"tags.jaxmem_run = '{folder.run_id}'", output_format="list", search_all_experiments=True)
    package.start_run(run_id=found[0].info.run_id if found else None, run_name=folder.path.name, tags={"jaxmem_run": folder.run_id})
    return (lambda values, step: package.log_metrics(values, step=step)), package.end_run

"""`--start_from=RUN[@STEP][,field=value]`: a new run that begins with the parameters of another. No jax."""

import pathlib
from dataclasses import dataclass
from typing import Literal

from jaxmem import spec
from jaxmem.spec import InputError


@dataclass(frozen=True, kw_only=True)
class Options:
    """optimizer: `keep` takes the moments along, `reset` begins with fresh ones. schedule: `continue` goes on with the other run's
    schedule where it stood, `restart` begins at step 0 of this run's. shrink, perturb: weights are `shrink` x old + `perturb` x fresh
    ones (Ash and Adams 2020). grow: the model may be larger, and computes the same at first."""

    optimizer: Literal["reset", "keep"] = "reset"
    schedule: Literal["restart", "continue"] = "restart"
    shrink: float = 1.0
    perturb: float = 0.0
    grow: bool = False


@dataclass(frozen=True, kw_only=True)
class StartFrom(Options):
    """`run`: a run's folder; `step`: of one of its checkpoints, None for the latest."""

    run: pathlib.Path
    step: int | None


def parse(text: str) -> StartFrom:
    """Raises InputError. A path may have commas and `@`: fields come last, and a step is digits."""
    path = text.strip()
    items: list[str] = []
    while "," in path and "=" in path.rpartition(",")[2]:
        path, _, item = path.rpartition(",")
        items.insert(0, item)
    what = f"--start_from={text}"
    fields = spec.fields_from(Options, items, what)
    run, at, step = path.rpartition("@")
    found = StartFrom(run=pathlib.Path((run if at and step.isdigit() else path).strip()), step=int(step) if at and step.isdigit() else None,
                      **fields)  # type: ignore[arg-type]
    if found.run == pathlib.Path():
        raise InputError(f"{what}: the folder of a run comes first, as in --start_from=runs/first@2000,optimizer=keep")
    if not 0 <= found.shrink <= 1 or found.perturb < 0:
        raise InputError(f"{what}: shrink={found.shrink:g} is a part of 1, and perturb={found.perturb:g} 0 or more")
    if found.optimizer == "keep" and (found.shrink != 1 or found.perturb != 0):
        raise InputError(f"{what}: the moments belong to weights that are neither shrunk nor perturbed; optimizer=reset")
    return found

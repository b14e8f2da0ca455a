"""The parameters of a run's checkpoint without the rest of its state: one at a time, on this machine's CPU, verified as they come."""

import pathlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.formats.writing import Later
from jaxmem.checkpoint.store import committed_steps, read_meta, read_tree
from jaxmem.models.configs import parameter_shapes
from jaxmem.optim.dims import nested
from jaxmem.spec import InputError
from jaxmem.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Saved:
    """`params`: nested dicts of `Later`, in the dtype of the run's plan."""

    step: int
    workload: Workload
    params: Any


def saved_params(checkpoints: pathlib.Path, step: int | None = None) -> Saved:
    """Of the latest committed step, or of `step`. Raises InputError when it is not there; a parameter raises it when it is loaded and is
    not what was written."""
    checkpoints = checkpoints.absolute()  # Orbax refuses others
    steps = committed_steps(checkpoints)
    if not steps:
        raise InputError(f"{checkpoints} holds no committed checkpoint")
    if step is not None and step not in steps:
        raise InputError(f"step={step} is not in {checkpoints}; committed steps: {', '.join(map(str, steps))}")
    chosen = steps[-1] if step is None else step
    folder = checkpoints / str(chosen)
    before = [s for s in steps if s < chosen]
    hint = f"; step={before[-1]} is the one before" if before else ""
    try:
        meta = read_meta(folder)
        workload = Workload.parse_line(meta["workload"])
        dtypes = {"/".join(str(key.key) for key in path): np.dtype(m.dtype) for path, m in jax.tree_util.tree_flatten_with_path(
            ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree["params"])[0]}
    except Exception as error:  # noqa: BLE001 - json, zarr and the file system each have their own
        raise InputError(f"{folder} cannot be read: {type(error).__name__}: {error}{hint}") from error

    def later(path: str, shape: tuple[int, ...]) -> Later:
        one = jax.ShapeDtypeStruct(shape, dtypes[path], sharding=SingleDeviceSharding(jax.local_devices(backend="cpu")[0]))

        def load() -> jax.Array:
            try:
                tree = read_tree(folder / "state", {"params": nested({path: one})})
                found = digests(tree)[0]
            except InputError:
                raise
            except Exception as error:  # noqa: BLE001 - zstd, tensorstore and the file system each have their own
                raise InputError(f"step {chosen} cannot be read: {path}: {str(error).strip().splitlines()[:1]}{hint}") from error
            if any(meta["digests"].get(name) != value for name, value in found.items()):
                raise InputError(f"step {chosen} is damaged: {path} differs from what was written{hint}")
            return jax.tree.leaves(tree)[0]
        return Later(shape=shape, dtype=dtypes[path], load=load)

    shapes = parameter_shapes(workload.model)
    if set(shapes) != set(dtypes):
        raise InputError(f"{folder} holds other parameters than {workload.model_text}: {', '.join(sorted(set(shapes) ^ set(dtypes))[:3])}")
    return Saved(step=chosen, workload=workload, params=nested({path: later(path, shape) for path, (shape, _) in shapes.items()}))

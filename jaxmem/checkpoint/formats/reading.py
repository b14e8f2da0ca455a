"""Weights from a folder: `read` into host arrays, `read_into` straight onto devices, each reading its own slices only.

A folder is a `config.json` with safetensors beside it, as `writing.write` leaves it and as `save_pretrained` of Hugging Face
transformers does for Llama, GPT-2, Qwen2 and Qwen3. What is read is checked whole before the first tensor is.
"""

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmem.checkpoint.formats import config_json, turning
from jaxmem.checkpoint.formats.folder import DTYPES, Folder, Index, read_json
from jaxmem.checkpoint.formats.layouts import HUGGING_FACE, Place, by_layer, expected, places
from jaxmem.models.configs import DecoderConfig, ModelConfig
from jaxmem.optim.dims import flatten, nested
from jaxmem.spec import InputError

Params = dict[str, Any]
ROWS = 1024  # of a matrix, at a time


def config_of(folder: pathlib.Path | str) -> tuple[str, ModelConfig]:
    """(layout, config) that the folder's config.json describes."""
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; weights are a local folder with config.json and safetensors files")
    return config_json.from_json(read_json(path / "config.json"), str(path / "config.json"))


def read(folder: pathlib.Path | str, config: ModelConfig | None = None) -> tuple[ModelConfig, Params]:
    """(config, params): params as nested dicts of NumPy arrays in the stored dtype, blocks stacked over layers.

    Beyond the result the host holds one layer's tensor. Raises InputError where `config` is given and another model is there, and with
    every missing, unexpected and wrongly shaped tensor.
    """
    layout, found = config_of(folder)
    _same(pathlib.Path(folder), found, config)
    with _opened(pathlib.Path(folder), layout, found) as (files, placed):
        return found, nested({path: _part(files, place, (slice(None),) * len(place.shape), None) for path, place in placed.items()})


def read_into(folder: pathlib.Path | str, config: ModelConfig, targets: Any, *, on_read: Callable[[int], None] | None = None) -> Params:
    """Params as arrays with the shardings and dtypes of `targets` (nested dicts of `ShapeDtypeStruct`s, as `step.build` gives them).

    A process reads each slice that its devices hold once; beyond the arrays the host holds one parameter's slices.
    `on_read(bytes)` is told what was read for each parameter. Raises InputError as `read` does.
    """
    layout, found = config_of(folder)
    _same(pathlib.Path(folder), found, config)
    structs = {"/".join(path): struct for path, struct in flatten(targets).items()}
    params = {}
    with _opened(pathlib.Path(folder), layout, found) as (files, placed):
        if wrong := [f"{path}: {list(getattr(structs.get(path), 'shape', ()))}, the model has {list(place.shape)}"
                     for path, place in placed.items() if path not in structs or structs[path].shape != place.shape]:
            raise ValueError("targets of another model: " + "; ".join(wrong))
        for path, place in placed.items():
            before, struct, seen = files.bytes_read, structs[path], dict[tuple, np.ndarray]()

            def slices(index: Any, place: Place = place, struct: Any = struct, seen: dict = seen) -> np.ndarray:
                key = tuple(s.indices(n) for s, n in zip(index, place.shape, strict=True))
                if key not in seen:
                    seen[key] = _part(files, place, index, struct.dtype)
                return seen[key]
            params[path] = jax.make_array_from_callback(place.shape, struct.sharding, slices, dtype=struct.dtype)
            if on_read:
                on_read(files.bytes_read - before)
    return nested(params)


# ---------------------------------------------------------------- pieces

def _part(files: Folder, place: Place, index: Index, dtype: np.dtype | None) -> np.ndarray:
    """The slice `index` of a parameter, put together from its tensors."""
    ranges = {d: range(n)[s] for d, n, s in zip(place.dims, place.shape, index, strict=True)}
    stored, shape, within = [], [], []
    for i, group in enumerate(place.groups):
        # a run of the tensor's dim covers the asked range of the group's first dim, whole in the others, which are cut after reading
        first, *rest = group
        inner, asked = math.prod(place.size[d] for d in rest), ranges[first]
        offset = place.part[0] * place.size[first] * inner if i == len(place.groups) - 1 else 0
        stored.append(slice(offset + asked.start * inner, offset + asked.stop * inner))
        shape += [len(asked), *(place.size[d] for d in rest)]
        within += [slice(None), *(slice(ranges[d].start, ranges[d].stop) for d in rest)]

    layers, turned = (ranges["layers"] if place.per_layer else [0]), place.turned
    if dtype is None:  # layers of unlike dtypes meet in f32, which holds all of them
        dtypes = {DTYPES[files.tensors[place.name(layer)][1]] for layer in layers}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    out = np.empty([len(ranges[d]) for d in place.dims], dtype)
    for i, layer in enumerate(layers):
        into = out[i] if place.per_layer else out
        found = files.take(place.name(layer), tuple(stored)).reshape(shape)[tuple(within)]
        if turned:
            rows = math.prod(len(ranges[d]) for d in place.groups[0])
            turning.turned(found.reshape(rows, -1), into.reshape(-1, rows))
        else:
            into[...] = found.reshape(into.shape)
    return out


@contextlib.contextmanager
def _opened(path: pathlib.Path, layout: str, config: ModelConfig) -> Iterator[tuple[Folder, dict[str, Place]]]:
    """The files, and the place of every parameter, once every tensor that is needed is there as expected and no other is."""
    described, placed = HUGGING_FACE.get(layout), places(layout, config)
    with Folder(path, described) as files:
        want, have = expected(placed), files.tensors
        extra = [name for name in have if name not in want and not (described and described.ignored.fullmatch(name))]
        tied = isinstance(config, DecoderConfig) and config.tied
        if tied and "lm_head.weight" in extra and _equal(files, "lm_head.weight", placed["embed"].tensor):
            extra.remove("lm_head.weight")
        found = [f"missing: {line}" for line in by_layer([name for name in want if name not in have])]
        found += [f"not expected: {line}" for line in by_layer(extra)]
        found += [f"shape: {name} is {list(shape)}, expected {list(want[name])}" for name, (shape, _) in have.items()
                  if name in want and shape != want[name]]
        found += [f"dtype: {name} is {dtype}, expected {', '.join(DTYPES)}" for name, (_, dtype) in have.items()
                  if name in want and dtype not in DTYPES]
        if found:
            raise InputError(f"{path} does not hold the model of its config.json:\n" + "\n".join(found))
        yield files, placed


def _equal(files: Folder, one: str, other: str) -> bool:
    """Whether two matrices hold the same bytes, read some rows at a time."""
    if files.tensors.get(one) != files.tensors.get(other):
        return False
    height = files.tensors[one][0][0]
    rows = [(slice(at, min(at + ROWS, height)), slice(None)) for at in range(0, height, ROWS)]
    return all(files.take(one, row).tobytes() == files.take(other, row).tobytes() for row in rows)


def _same(path: pathlib.Path, found: ModelConfig, config: ModelConfig | None) -> None:
    if config is not None and (other := config_json.differences(found, config)):
        raise InputError(f"{path} holds another model, with {other}; as --model={config_json.model_text(found)} it can be read")

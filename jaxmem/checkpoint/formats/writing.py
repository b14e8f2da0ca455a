"""Weights into a folder: `config.json` and safetensors files of a bounded size, written one layer of one parameter at a time.

A safetensors file is eight bytes of header length, a JSON header with every tensor's dtype, shape and place, and the bytes
(https://huggingface.co/docs/safetensors). The header follows from the model alone, so the tensors can be written in any order.
"""

import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmem.checkpoint.formats import config_json, turning
from jaxmem.checkpoint.formats.folder import INDEX, SINGLE
from jaxmem.checkpoint.formats.layouts import Place, places
from jaxmem.models.configs import ModelConfig, parameter_shapes
from jaxmem.optim.dims import flatten
from jaxmem.spec import InputError, nearest

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class Later:
    """A parameter that is loaded when it is written, so that a model larger than the host's memory can be."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a tensor goes: bytes from `start` of `file`."""

    file: str
    start: int
    shape: tuple[int, ...]


def write(folder: pathlib.Path | str, config: ModelConfig, params: Any, *, layout: str, dtype: str | None = None,
          max_positions: int | None = None, file_bytes: int = FILE_BYTES) -> pathlib.Path:
    """Writes `params` (nested dicts of NumPy arrays, of JAX arrays that this process can see whole, or of `Later`) as a new `folder`,
    which appears when it is complete.

    `dtype` is f32, bf16 or f16, rounded to nearest; None keeps what the parameters have, which must then be one of these for all.
    `max_positions`: the longest sequence, which a configuration with rope does not have. Beyond `params` the host holds one layer's tensor.
    Raises InputError where `layout` cannot hold the model or `folder` is there already.
    """
    out, flat = pathlib.Path(folder), {"/".join(path): value for path, value in flatten(params).items()}
    if wrong := _unlike(flat, config):
        raise ValueError("params of another model: " + "; ".join(wrong))
    dtype = dtype or _dtype_of(flat)
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype}: unknown{nearest(dtype, DTYPES)}")
    described = config_json.to_json(layout, config, dtype=dtype, max_positions=max_positions)
    if out.exists():
        raise InputError(f"{out} exists, and nothing is overwritten; give another folder")
    placed = places(layout, config)
    half = out.parent / f".{out.name}.{os.getpid()}.partial"
    try:
        half.mkdir(parents=True)
        slots = _lay_out(half, placed, DTYPES[dtype], dtype, file_bytes)
        _write_tensors(half, placed, flat, slots, DTYPES[dtype])
        (half / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        half.rename(out)
    except OSError as error:
        raise InputError(f"{out} was not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return out


# ---------------------------------------------------------------- files and their headers

def _lay_out(folder: pathlib.Path, placed: Mapping[str, Place], dtype: np.dtype, name: str, file_bytes: int) -> dict[str, Slot]:
    """Writes the headers and the index; where each tensor goes."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    room = file_bytes
    for tensor, shape in _shapes(placed).items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and files[-1]:
            files.append({})
            room = file_bytes
        files[-1][tensor], room = shape, room - size
    slots: dict[str, Slot] = {}
    for number, tensors in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # the marker that transformers asks for
        end = 0
        for tensor, shape in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[tensor] = {"dtype": name.upper(), "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        slots |= {tensor: Slot(file=file, start=8 + len(text) + header[tensor]["data_offsets"][0], shape=shape)
                  for tensor, shape in tensors.items()}
    if len(files) > 1:
        total = sum(math.prod(slot.shape) for slot in slots.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": {tensor: slot.file for tensor, slot in slots.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return slots


def _shapes(placed: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, layer by layer, so that a reader who wants some layers needs some files."""
    layers = max(place.layers for place in placed.values())
    found = {place.tensor: place.tensor_shape for place in placed.values() if not place.per_layer}
    return found | {place.name(layer): place.tensor_shape for layer in range(layers) for place in placed.values() if place.per_layer}


# ---------------------------------------------------------------- bytes

def _write_tensors(folder: pathlib.Path, placed: Mapping[str, Place], params: Mapping[str, Any], slots: Mapping[str, Slot],
                   dtype: np.dtype) -> None:
    for places_of_one in _shared(placed):
        first = places_of_one[0]
        values = {place.path: _loaded(params[place.path]) for place in places_of_one}
        for layer in range(first.shape[0]) if "layers" in first.dims else [None]:
            parts = [_stored(place, _cast(place.path, _host(values[place.path], layer), dtype)) for place in places_of_one]
            data = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
            slot = slots[first.name(layer or 0)]
            inside = 0 if first.per_layer or layer is None else layer * data.nbytes
            with open(folder / slot.file, "r+b") as out:
                out.seek(slot.start + inside)
                out.write(np.ascontiguousarray(data).view(np.uint8).data)


def _shared(placed: Mapping[str, Place]) -> Iterator[list[Place]]:
    """The parameters that lie in one tensor, in the order of their parts."""
    for tensor in dict.fromkeys(place.tensor for place in placed.values()):
        yield sorted((place for place in placed.values() if place.tensor == tensor), key=lambda place: place.part)


def _loaded(value: Any) -> Any:
    return value.load() if isinstance(value, Later) else value


def _host(value: Any, layer: int | None) -> np.ndarray:
    """One layer of a parameter, or all of it. All of it from a copy: a JAX array that was looked at keeps what was seen."""
    if layer is not None:
        return np.asarray(value[layer])
    return np.asarray(jnp.copy(value) if isinstance(value, jax.Array) else value)


def _cast(path: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return value.astype(dtype, copy=False)
    except FloatingPointError:
        raise InputError(f"{path}: values beyond the range of {dtype}; use bf16 or f32") from None


def _stored(place: Place, value: np.ndarray) -> np.ndarray:
    """A parameter's (or its layer's) array with the tensor's dims; a layer of a tensor that holds all layers as it is."""
    if not place.per_layer and "layers" in place.dims:
        return value
    columns = math.prod(place.size[d] for d in place.groups[-1])
    if place.turned:
        return turning.turned(value.reshape(columns, -1), np.empty((value.size // columns, columns), value.dtype))
    return value.reshape(*([] if len(place.groups) == 1 else [-1]), columns)


def _unlike(flat: Mapping[str, Any], config: ModelConfig) -> list[str]:
    shapes = {path: shape for path, (shape, _) in parameter_shapes(config).items()}
    return [f"{path}: {list(flat[path].shape) if path in flat else 'absent'}, the model has {list(shapes.get(path, ())) or 'none'}"
            for path in sorted({*flat, *shapes}) if path not in flat or flat[path].shape != shapes.get(path)]


def _dtype_of(flat: Mapping[str, Any]) -> str:
    found = {np.dtype(value.dtype) for value in flat.values()}
    names = [name for name, dtype in DTYPES.items() if found == {dtype}]
    if not names:
        raise InputError(f"parameters are {', '.join(sorted(map(str, found)))}; give one dtype: {', '.join(DTYPES)}")
    return names[0]

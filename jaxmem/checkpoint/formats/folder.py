"""A folder of safetensors files, read one slice at a time. https://huggingface.co/docs/safetensors"""

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401 - gives NumPy the dtype bfloat16
import numpy as np

from jaxmem.checkpoint.formats.layouts import Layout
from jaxmem.spec import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype("float32"), "BF16": np.dtype("bfloat16"), "F16": np.dtype("float16")}
Index = tuple[slice, ...]


class Folder(contextlib.ExitStack):
    """`tensors`: `{name: (shape, safetensors' name of the dtype)}` from the files' headers alone; `take` reads. A context manager.

    Raises InputError where the folder, its index or a file's header cannot be used.
    """

    def __init__(self, path: pathlib.Path, layout: Layout | None) -> None:
        super().__init__()
        self.path, self.bytes_read = path, 0
        self._slices: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            for file, names in _files(path).items():
                handle = opened.enter_context(_open(path / file))
                held = set(handle.keys())
                self._slices |= {name: handle.get_slice(name) for name in (held if names is None else held & names)}
            self.push(opened.pop_all())
        if layout and not any(name.startswith(layout.prefix) for name in self._slices):
            heads = {name for name in self._slices if name.startswith("lm_head.")}
            self._slices = {name if name in heads else layout.prefix + name: s for name, s in self._slices.items()}
        self.tensors = {name: (tuple(s.get_shape()), str(s.get_dtype())) for name, s in sorted(self._slices.items())}

    def take(self, name: str, index: Index) -> np.ndarray:
        """The part `index` of a tensor (a slice a dim), in its own dtype; nothing else of it is read."""
        found = self._slices[name][index]
        self.bytes_read += found.nbytes
        return found


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object")
    return found


def _files(path: pathlib.Path) -> dict[str, set[str] | None]:
    """`{file: names that the index sends there}`; None where there is no index and all names count."""
    if (path / SINGLE).is_file():
        return {SINGLE: None}
    if not (path / INDEX).is_file():
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf", ".msgpack"))
        hint = f"; {', '.join(others[:3])} is not read: save as safetensors, with save_pretrained of transformers" if others else ""
        raise InputError(f"{path} has neither {SINGLE} nor {INDEX}{hint}")
    places = read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) and pathlib.Path(file).name == file for file in places.values()):
        raise InputError(f"{path / INDEX}: expected weight_map, an object from tensor to a file's name in this folder")
    if absent := sorted({file for file in places.values() if not (path / file).is_file()}):
        raise InputError(f"{path}: {len(absent)} of {len(set(places.values()))} files that {INDEX} names are missing: {', '.join(absent)}")
    return {file: {name for name, place in places.items() if place == file} for file in sorted(set(places.values()))}


def _open(path: pathlib.Path) -> Any:
    from safetensors import SafetensorError, safe_open
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged or no safetensors file: {error}") from None

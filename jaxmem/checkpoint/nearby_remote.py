"""Slices of a checkpoint on shared storage, without reading the rest of it.

Orbax restores whole addressable shards, and a process that owns all its devices has no way to ask it for one slice. What Orbax
writes is documented and open: each leaf is a zarr array named by its path with dots, in one OCDBT key-value store (or, with
use_ocdbt=False, a folder each), and tensorstore reads any slice of it.
"""

import json
import math
import threading
from os import PathLike, fspath
from typing import Any, Protocol

import numpy as np

from jaxmem.checkpoint.nearby_boxes import Box, slices
from jaxmem.spec import InputError

NODE_CACHE_BYTES = 64 << 20  # OCDBT's index is read once and not once a slice


class Remote(Protocol):
    """Storage that outlives every process."""

    def read(self, path: str, box: Box) -> np.ndarray: ...


class OrbaxRemote:
    """The tree that `ocp.args.PyTreeSave` or `StandardSave` wrote in the folder (or gs:// address) `item`, as in `STEP/state`.

    `slice_bytes` counts what was asked for. Whole chunks are read and decoded for it, counted in `chunk_bytes`: Orbax's chunk is the
    shard that one device wrote at saving (of replicated leaves a part of one), so that what a lost process held is whole chunks,
    and more is read only where the new mesh cuts through them. On storage the chunks are compressed (zstd).
    """

    def __init__(self, item: str | PathLike) -> None:
        where = fspath(item)
        self.item = (where if "://" in where else f"file://{where}").rstrip("/") + "/"
        self.slice_bytes = self.chunk_bytes = 0
        self._lock = threading.Lock()
        self._arrays: dict[str, Any] = {}
        self._context: Any = None

    def read(self, path: str, box: Box) -> np.ndarray:
        """`box` of leaf `path` ("params/blocks/norm"). Raises InputError for a leaf that is not there or too small."""
        array = self._open(path)
        if array.rank != len(box) or any(stop > size for (_, stop), size in zip(box, array.shape, strict=True)):
            raise InputError(f"{self.item}: {path} has shape {list(array.shape)} there, {box} was asked for")
        found = array[slices(box)].read().result()
        with self._lock:
            self.slice_bytes += found.nbytes
            self.chunk_bytes += chunk_bytes(box, array)
        return found

    def _open(self, path: str) -> Any:
        import tensorstore

        with self._lock:
            if self._context is None:
                about = json.loads(tensorstore.KvStore.open(self.item).result()["_METADATA"])
                self._driver, self._ocdbt = "zarr3" if about.get("use_zarr3") else "zarr", about.get("use_ocdbt", True)
                self._context = tensorstore.Context({"cache_pool#index": {"total_bytes_limit": NODE_CACHE_BYTES}})
        if path not in self._arrays:
            name = path.replace("/", ".") + "/"
            store: Any = ({"driver": "ocdbt", "base": self.item, "path": name, "cache_pool": "cache_pool#index"} if self._ocdbt
                          else f"{self.item}{name}")
            try:
                self._arrays[path] = tensorstore.open({"driver": self._driver, "kvstore": store}, open=True, read=True,
                                                      context=self._context).result()
            except ValueError as error:
                raise InputError(f"{self.item}: no array {path} there ({str(error).splitlines()[0][:200]})") from error
        return self._arrays[path]


def chunk_bytes(box: Box, array: Any) -> int:
    """Decoded bytes of the chunks that touch `box`."""
    chunk = array.chunk_layout.read_chunk.shape or ()
    touched = [min(-(-stop // step) * step, size) - start // step * step
               for (start, stop), step, size in zip(box, chunk, array.shape, strict=True)]
    return math.prod(touched) * array.dtype.numpy_dtype.itemsize

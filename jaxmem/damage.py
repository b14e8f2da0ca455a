"""What faults damage, and how: parameters on the devices, a checkpoint, the disk."""

import errno
import math
import os
import pathlib
import tempfile
from typing import Any, Literal

from jaxmem.spec import InputError

SPIKE = 8.0  # the last norm and the head both grow, so logits grow by its square
FLIPPED_BYTES = 4096
SPARE_BYTES = 64 * 1024  # left free: the lines of logs still fit, a checkpoint does not
LARGEST_BYTES = 8 * 2**30


def poisoned(params: Any, mesh: Any, kind: str) -> Any:
    """`params`, a tree of arrays, with the first floating leaf NaN, or for "spike" with all of them SPIKE times as large. Dtypes and
    shardings stay; nothing is donated."""
    import jax
    import jax.numpy as jnp

    leaves, structure = jax.tree.flatten(params)
    floating = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    chosen, factor = (floating[:1], math.nan) if kind == "nan" else (floating, SPIKE)
    old = [leaves[i] for i in chosen]
    with jax.set_mesh(mesh):
        scale = jax.jit(lambda xs: [x * jnp.asarray(factor, x.dtype) for x in xs], out_shardings=[x.sharding for x in old])
        for i, new in zip(chosen, scale(old), strict=True):
            leaves[i] = new
    return jax.tree.unflatten(structure, leaves)


def corrupt(checkpoint: pathlib.Path, how: Literal["flip", "truncate", "delete"]) -> pathlib.Path:
    """Damage the largest file of array data under `checkpoint`; returns its path. Raises FileNotFoundError when there is none."""
    files = [p for p in sorted(checkpoint.rglob("d/*")) if p.is_file()]  # where OCDBT, Orbax's storage, keeps array data
    if not files:
        raise FileNotFoundError(f"{checkpoint} has no file of array data to corrupt")
    victim = max(files, key=lambda p: p.stat().st_size)
    if how == "delete":
        victim.unlink()
        return victim
    size = victim.stat().st_size
    with open(victim, "r+b") as file:
        if how == "truncate":
            file.truncate(size // 2)
        else:
            length = min(FLIPPED_BYTES, (size + 1) // 2)
            file.seek((size - length) // 2)
            old = file.read(length)
            file.seek((size - length) // 2)
            file.write(bytes(byte ^ 0xFF for byte in old))
        file.flush()
        os.fsync(file.fileno())
    return victim


def free_bytes(folder: pathlib.Path) -> int:
    """What this user may still write on the folder's file system."""
    found = os.statvfs(folder)
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)


def refuse_large(folder: pathlib.Path) -> None:
    """Raises InputError when filling the folder's file system would take more than LARGEST_BYTES."""
    if (free := free_bytes(folder)) > LARGEST_BYTES:
        raise InputError(f"fill_disk: {folder} is on a file system with {free / 2**30:.1f} GiB free, and at most "
                         f"{LARGEST_BYTES / 2**30:.0f} GiB are filled; put --out on a small file system, e.g. a tmpfs of 64 MB")


class Ballast:
    """Takes all free space but SPARE_BYTES of the folder's file system until `close`.

    The file has no name, so its space is free again when the process ends, however it ends.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        refuse_large(folder)
        self._file = tempfile.TemporaryFile(dir=folder)
        end, piece = 0, free_bytes(folder) - SPARE_BYTES
        while piece >= 4096:
            try:
                os.posix_fallocate(self._file.fileno(), end, piece)
                end, piece = end + piece, min(piece, free_bytes(folder) - SPARE_BYTES)
            except OSError as error:  # the file system needs some for its own tables
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    self._file.close()
                    raise
                piece //= 2
        self.bytes = end

    def close(self) -> None:
        self._file.close()

"""A process's own shards of the last steps, on its local disk: written whole or not at all, checked piece by piece when read.

    FOLDER/step.40/data        the pieces' bytes, one after the other
    FOLDER/step.40/index.json  step, content, and for each piece its leaf, dtype, whole shape, box, offset and crc32; written last
    FOLDER/step.40/committed   the step is committed on shared storage too

A folder belongs to one process, which alone writes it. A step is written under another name, synced and renamed, so a killed
process leaves no step that looks complete.
"""

import contextlib
import json
import math
import mmap
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import ml_dtypes  # noqa: F401 - teaches numpy the names bfloat16, float8_...
import numpy as np

from jaxmem.checkpoint.nearby_boxes import Box, inside, shape_of, slices

INDEX, DATA, COMMITTED, WRITING = "index.json", "data", "committed", ".writing"
SCHEMA = 1


@dataclass(frozen=True)
class Piece:
    """One box of one leaf, and where its bytes are (row-major, little endian)."""

    path: str
    dtype: str
    shape: tuple[int, ...]  # of the whole leaf
    box: Box
    offset: int
    crc32: int

    @property
    def bytes(self) -> int:
        return math.prod(shape_of(self.box)) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.path}[{', '.join(f'{start}:{stop}' for start, stop in self.box)}]"


@dataclass(frozen=True)
class Shards:
    """What one process holds of one leaf on the host."""

    shape: tuple[int, ...]  # of the whole leaf
    boxes: Sequence[tuple[Box, np.ndarray]]


class Held:
    """The intact pieces of one step in one folder; `damaged` has a line for each piece that is not, and is not used."""

    def __init__(self, pieces: Sequence[Piece], data: np.ndarray, damaged: Sequence[str]) -> None:
        self.pieces, self.damaged, self._data = tuple(pieces), tuple(damaged), data
        self._by_path: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._by_path.setdefault(piece.path, []).append(piece)

    def boxes(self) -> dict[str, list[Box]]:
        return {path: [piece.box for piece in pieces] for path, pieces in self._by_path.items()}

    def read(self, path: str, box: Box) -> np.ndarray:
        """A view of `box`, which lies inside one piece; LookupError if it lies in none."""
        for piece in self._by_path.get(path, ()):
            if inside(box, piece.box):
                raw = self._data[piece.offset:piece.offset + piece.bytes]
                return raw.view(np.dtype(piece.dtype)).reshape(shape_of(piece.box))[slices(box, piece.box)]
        raise LookupError(f"{path} {box} is not held")


def nothing(*why: str) -> Held:
    return Held((), np.zeros(0, np.uint8), why)


def write_step(folder: pathlib.Path, step: int, content: str, leaves: Mapping[str, Shards]) -> int:
    """Write a step whole, in place of an older one of that number; returns its bytes. `content` is the same for the same state in
    every process. Raises OSError (a full disk, say); the other steps are as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"step.*{WRITING}"):
        shutil.rmtree(left)
    half = folder / f"step.{step}{WRITING}"
    half.mkdir()
    try:
        pieces, offset = [], 0
        with _synced(half / DATA) as file:
            for path, leaf in leaves.items():
                for box, array in leaf.boxes:
                    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    pieces.append(Piece(path, array.dtype.name, tuple(leaf.shape), box, offset, zlib.crc32(raw)))
                    file.write(raw.data)
                    pad = -raw.size % 64  # a piece begins where any dtype may
                    file.write(bytes(pad))
                    offset += raw.size + pad
        body = {"schema": SCHEMA, "step": step, "content": content, "pieces": [asdict(piece) for piece in pieces]}
        with _synced(half / INDEX) as file:
            text = json.dumps(body)
            file.write(f"{zlib.crc32(text.encode()):08x} {text}\n".encode())
        _sync_folder(half)
        remove_step(folder, step)
        half.rename(folder / f"step.{step}")
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return sum(piece.bytes for piece in pieces)


def open_step(folder: pathlib.Path, step: int, content: str, threads: int = 8) -> Held:
    """The pieces of a step after reading every byte once. No such step, or one of another content: nothing is held."""
    where = folder / f"step.{step}"
    try:
        checksum, _, text = (where / INDEX).read_text().partition(" ")
    except FileNotFoundError:
        return nothing()
    except (OSError, UnicodeDecodeError) as error:
        return nothing(f"{where}: {type(error).__name__}: {error}")
    text = text.removesuffix("\n")
    if checksum != f"{zlib.crc32(text.encode()):08x}":
        return nothing(f"{where / INDEX}: its checksum does not agree")
    body = json.loads(text)
    if (body["schema"], body["step"], body["content"]) != (SCHEMA, step, content):
        return nothing()
    pieces = [Piece(**p | {"shape": tuple(p["shape"]), "box": tuple((start, stop) for start, stop in p["box"])}) for p in body["pieces"]]
    try:
        data = _map(where / DATA)
        with ThreadPoolExecutor(threads) as pool:
            problems = list(pool.map(lambda piece: _problem(piece, data), pieces))
    except OSError as error:
        return nothing(f"{where / DATA}: {type(error).__name__}: {error}")
    return Held([piece for piece, problem in zip(pieces, problems, strict=True) if not problem], data,
                [f"{where}: {piece}: {problem}" for piece, problem in zip(pieces, problems, strict=True) if problem])


def steps(folder: pathlib.Path) -> list[int]:
    """Complete steps, ascending."""
    return sorted(int(found) for p in folder.glob("step.*") if (found := p.name.removeprefix("step.")).isdigit() and (p / INDEX).exists())


def mark_committed(folder: pathlib.Path, step: int, keep: int) -> None:
    """Note that `step` is committed on shared storage too. Of the steps up to it the last `keep` that are committed stay; later
    ones, which may still be on their way, all do."""
    if step in steps(folder):
        (folder / f"step.{step}" / COMMITTED).touch()
    known = [s for s in steps(folder) if s <= step]
    stay = [s for s in known if (folder / f"step.{s}" / COMMITTED).exists()][-keep:]
    for old in known:
        if old not in stay:
            remove_step(folder, old)


def remove_step(folder: pathlib.Path, step: int) -> None:
    """The index goes first: what is left of an interrupted removal is no step."""
    where = folder / f"step.{step}"
    (where / INDEX).unlink(missing_ok=True)
    shutil.rmtree(where, ignore_errors=True)


def _problem(piece: Piece, data: np.ndarray) -> str:
    raw = data[piece.offset:piece.offset + piece.bytes]
    if raw.size != piece.bytes:
        return f"{raw.size} of its {piece.bytes} bytes are there"
    return "" if zlib.crc32(raw) == piece.crc32 else "its checksum does not agree"


def _map(path: pathlib.Path) -> np.ndarray:
    """The file's bytes, uint8, paged in as they are read and never held twice."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return np.zeros(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


@contextlib.contextmanager
def _synced(path: pathlib.Path) -> Iterator:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

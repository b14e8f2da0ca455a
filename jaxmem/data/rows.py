"""What a data set is to the rest: a number of rows, the shape of one, and a function from row number to row."""

import hashlib
import importlib
import json
import types
from collections.abc import Buffer, Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxmem.spec import InputError

Split = Literal["train", "eval"]
Row = dict[str, np.ndarray]
IGNORED = -1  # a target that is no target: the loss leaves it out
TARGETS = ("targets", "labels")


@dataclass(frozen=True, kw_only=True)
class Data:
    """`row(i)`, 0 <= i < `rows`, is a dict with exactly `fields`' names, shapes and dtypes; the same i gives the same row, in any order
    and from any thread. An epoch is every row once.

    Text and synthetic: `tokens targets segment_ids positions`, each int32 [S]. A target < 0 is ignored. Segments count from 1 in
    each row, 0 is padding; positions restart in each segment. Images: `images` [H, W, C], f32 in 0..1 or bytes, and `labels` int32 [].
    `fingerprint` is a sha256 of the content and of every setting that decides the rows. `described` is one line for people.
    `order`: from a seed to a function from places of the endless sequence to rows, where that is not a shuffle of all rows, epoch after
    epoch. `sources`: what a mixture is made of, as (name, share of the rows, data).
    """

    name: str
    kind: Literal["text", "images", "synthetic"]
    rows: int
    fields: dict[str, tuple[tuple[int, ...], np.dtype]]
    fingerprint: str
    row: Callable[[int], Row]
    described: str
    order: Callable[[int], Callable[[int], int]] | None = None
    sources: "tuple[tuple[str, float, Data], ...]" = ()

    def empty_row(self) -> Row:
        """A row in which nothing counts: what fills up the last batch of an evaluation."""
        return {name: np.full(shape, IGNORED if name in TARGETS else 0, dtype) for name, (shape, dtype) in self.fields.items()}


def text_fields(seq: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: ((seq,), np.dtype(np.int32)) for name in ("tokens", "targets", "segment_ids", "positions")}


def fingerprint(settings: dict[str, object], *content: Buffer) -> str:
    """sha256 in hex of settings (JSON values) and bytes."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for part in content:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()


def optional(module: str, package: str, what: str) -> types.ModuleType:
    """A module of the optional extra `data`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise missing(what, package, "data") from None


def missing(what: str, package: str, extra: str = "experiments") -> InputError:
    """What to say of a package that is not there, and which extra brings it."""
    return InputError(f"{what} needs {package}, which is not installed: pip install 'jaxmem[{extra}]'")

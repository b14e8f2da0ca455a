"""Boxes of arrays: which held boxes cover the needed ones, and what nobody holds. No jax: bounds in, reads out.

A box is `((start, stop), ...)`, one pair a dim of the whole array; `()` is the one element of a scalar. A new mesh has shards of
other shapes, so a needed box is cut along the bounds of the boxes that hold its parts.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Box = tuple[tuple[int, int], ...]
Boxes = Mapping[str, Sequence[Box]]  # leaf's path -> boxes


@dataclass(frozen=True)
class Read[Source: Hashable]:
    """`box` of leaf `path`, a part of the needed box `into`, comes from `source`; None: nobody holds it."""

    path: str
    into: Box
    box: Box
    source: Source | None


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of a shard's index, as in `jax.Shard.index`."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def slices(box: Box, origin: Box | None = None) -> tuple:
    """Index of `box` in the whole array, or in an array that holds the box `origin`; of a scalar too it gives an array."""
    return *(slice(start - at, stop - at) for (start, stop), (at, _) in zip(box, origin or ((0, 0),) * len(box), strict=True)), ...


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def size(box: Box) -> int:
    """Elements."""
    return math.prod(shape_of(box))


def overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def inside(box: Box, whole: Box) -> bool:
    return all(low <= start and stop <= high for (start, stop), (low, high) in zip(box, whole, strict=True))


def without(box: Box, hole: Box) -> list[Box]:
    """`box` minus `hole` as disjoint boxes: at most two a dim."""
    common = overlap(box, hole)
    if common is None:
        return [box]
    parts: list[Box] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        before, after = common[:dim], box[dim + 1:]
        parts += [(*before, bounds, *after) for bounds in ((start, low), (high, stop)) if bounds[0] < bounds[1]]
    return parts


def plan_reads[Source: Hashable](needed: Boxes, holdings: Iterable[tuple[Source, Boxes]]) -> list[Read[Source]]:
    """Every element of every needed box exactly once, from the first of `holdings` that holds it, in pieces that each lie in one
    held box; what nobody holds has source None. Elements that two needed boxes share are read for each."""
    table = [(source, {path: _Held(held) for path, held in boxes.items() if path in needed}) for source, boxes in holdings]
    reads: list[Read[Source]] = []
    for path, boxes in needed.items():
        for into in boxes:
            rest = [into] if size(into) else []
            for source, held_of in table:
                if rest and path in held_of:
                    parts, rest = held_of[path].cut(into, rest)
                    reads += [Read(path, into, part, source) for part in parts]
            reads += [Read(path, into, part, None) for part in rest]
    return reads


def share_missing(needs: Mapping[int, Boxes], held: Sequence[Boxes], itemsizes: Mapping[str, int]) -> dict[int, dict[str, list[Box]]]:
    """Process -> leaf -> boxes to fetch from afar: every needed element that none of `held` has is fetched by exactly one of the
    processes that need it, the one with the fewest bytes to fetch so far. Every process computes the same from the same arguments."""
    fetches: dict[int, dict[str, list[Box]]] = {process: {} for process in needs}
    load = dict.fromkeys(needs, 0)
    for path, itemsize in itemsizes.items():
        here = _Held([box for boxes in held for box in boxes.get(path, ())])
        taken: list[Box] = []
        done: set[Box] = set()
        for process in sorted(needs, key=lambda p: (load[p], p)):
            for into in needs[process].get(path, ()):
                rest = here.cut(into, [into])[1] if size(into) and into not in done else []
                rest = _Held(taken).cut(into, rest)[1] if rest else []
                done.add(into)
                if rest:
                    fetches[process].setdefault(path, []).extend(rest)
                    taken += rest
                    load[process] += sum(map(size, rest)) * itemsize
    return fetches


class _Held:
    """The boxes that one source holds of one leaf, distinct; their bounds as arrays, since there may be thousands and few that touch."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = list(dict.fromkeys(boxes))
        bounds = np.array(self.boxes, np.int64).reshape(len(self.boxes), len(self.boxes[0]) if self.boxes else 0, 2)
        self.starts, self.stops = bounds[..., 0], bounds[..., 1]

    def cut(self, into: Box, rest: list[Box]) -> tuple[list[Box], list[Box]]:
        """Of `rest`, disjoint boxes inside `into`: the parts that are held, and what remains."""
        if not self.boxes:
            return [], rest
        starts, stops = np.array(into, np.int64).reshape(-1, 2).T
        touching = ((np.maximum(self.starts, starts) < np.minimum(self.stops, stops)).all(axis=1)).nonzero()[0]
        found: list[Box] = []
        for i in touching:
            hold, after = self.boxes[i], []
            for box in rest:
                common = overlap(box, hold)
                if common is None:
                    after.append(box)
                else:
                    found.append(common)
                    after += without(box, common)
            rest = after
        return found, rest

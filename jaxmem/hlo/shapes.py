"""Shapes in HLO text: element type, dims, layout with tiles, memory space; their bytes with and without padding."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

DTYPE_BITS: Mapping[str, int] = {
    "pred": 8,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "f4e2m1fn": 4,
    "s8": 8,
    "u8": 8,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3fn": 8,
    "f8e4m3b11fnuz": 8,
    "f8e4m3fnuz": 8,
    "f8e5m2": 8,
    "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
    "s16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
HBM, VMEM, HOST = 0, 1, 5  # memory spaces as TPU text writes them: none, S(1), S(5); S(2) and others hold synchronization flags


@dataclass(frozen=True)
class Shape:
    """An array (`dtype`, `dims`, layout) or, when `elements` is not None, a tuple of shapes."""

    dtype: str = "tuple"
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int | None, ...], ...] = ()  # outermost tile first; None stands for `*`, a dim merged into the next one
    memory_space: int = HBM
    element_bits: int = 0  # bits of one stored element
    elements: "tuple[Shape, ...] | None" = None

    @property
    def is_tuple(self) -> bool:
        return self.elements is not None

    def leaves(self, index: tuple[int, ...] = ()) -> "Iterator[tuple[tuple[int, ...], Shape]]":
        """Every array inside, with its index path."""
        if self.elements is None:
            yield index, self
        else:
            for position, element in enumerate(self.elements):
                yield from element.leaves((*index, position))

    def at(self, index: tuple[int, ...]) -> "Shape":
        shape = self
        for position in index:
            if shape.elements is None:
                raise IndexError(f"{shape} is no tuple, so it has no element {position} (path {index})")
            shape = shape.elements[position]
        return shape

    @cached_property
    def bytes(self) -> int:
        """Bytes of the values alone, without padding; of a tuple, the sum of its arrays."""
        if self.elements is not None:
            return sum(element.bytes for element in self.elements)
        return math.ceil(math.prod(self.dims) * self.element_bits / 8)

    @cached_property
    def tiled_bytes(self) -> int:
        """Bytes as laid out, every tile filled up; of a tuple, the sum of its arrays."""
        if self.elements is not None:
            return sum(element.tiled_bytes for element in self.elements)
        physical = [self.dims[dim] for dim in reversed(self.minor_to_major)] if self.minor_to_major else list(self.dims)
        for tile in self.tiles:
            physical = _split_into_tiles(physical, tile)
        return math.ceil(math.prod(physical) * self.element_bits / 8)

    @property
    def text(self) -> str:
        """As a reader wants it: `bf16[8,1024]`, `(f32[], s32[2])`."""
        if self.elements is not None:
            return "(" + ", ".join(element.text for element in self.elements) + ")"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _split_into_tiles(physical: list[int], tile: tuple[int | None, ...]) -> list[int]:
    """Physical dims, major to minor, after the last `len(tile)` of them are cut into tiles: counts of tiles, then the tile."""
    physical = [1] * (len(tile) - len(physical)) + physical
    outer, inner = physical[: len(physical) - len(tile)], physical[len(physical) - len(tile) :]
    merged: list[tuple[int, int]] = []
    carried = 1
    for size, length in zip(inner, tile, strict=True):
        carried *= size
        if length is not None:
            merged.append((carried, length))
            carried = 1
    return outer + [-(-size // length) for size, length in merged] + [length for _, length in merged]


ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
COMMENT = re.compile(r"/\*.*?\*/")


def parse_shape(text: str, cache: dict[str, Shape] | None = None) -> Shape:
    """`f32[8,128]{1,0:T(8,128)S(1)}` or a tuple of such. Raises ValueError for anything else."""
    cache = {} if cache is None else cache
    shape = cache.get(text)
    if shape is None:
        stripped = COMMENT.sub("", text).strip()
        shape, end = _shape_at(stripped, 0)
        if end != len(stripped):
            raise ValueError(f"not a shape: {text!r}")
        cache[text] = shape
    return shape


def _shape_at(text: str, start: int) -> tuple[Shape, int]:
    if text[start] == "(":
        elements = []
        position = start + 1
        while text[position] != ")":
            element, position = _shape_at(text, position)
            elements.append(element)
            while text[position] in ", ":
                position += 1
        return Shape(elements=tuple(elements)), position + 1
    match = ARRAY.match(text, start)
    if match is None or match.group(1) not in DTYPE_BITS:
        raise ValueError(f"not a shape: {text[start : start + 80]!r}")
    dtype, dims, layout = match.groups()
    order, _, properties = (layout or "").partition(":")
    tiles: tuple[tuple[int | None, ...], ...] = ()
    memory_space, bits = HBM, DTYPE_BITS[dtype]
    if properties:
        found = dict(re.findall(r"([A-Z])((?:\([^)]*\))+)", properties))
        tiles = tuple(
            tuple(None if size == "*" else int(size) for size in tile.split(","))
            for tile in re.findall(r"\(([^)]*)\)", found.get("T", ""))
        )
        memory_space = int(found.get("S", "(0)")[1:-1])
        bits = int(found["E"][1:-1]) if "E" in found else bits
    sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",")) if dims else ()
    return Shape(
        dtype=dtype,
        dims=sizes,
        minor_to_major=tuple(map(int, order.split(","))) if order else (),
        tiles=tiles,
        memory_space=memory_space,
        element_bits=bits,
    ), match.end()

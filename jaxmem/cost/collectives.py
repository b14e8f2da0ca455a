"""Bytes and seconds of collectives over mesh axes: on a TPU torus, in an NVLink domain, over the network between hosts or slices.

Split: a mesh axis lies on whole or split dimensions of the torus (as `jax.experimental.mesh_utils` lays it), or on GPUs in device
    order: the innermost axes inside the NVLink domain, the others across.
Moves: S bytes of the larger side (gathered output, input to be scattered, buffer to be reduced) over n devices: (n-1)/n S to
    gather or scatter, twice that to reduce everywhere, (n-1)/n S to exchange, S to permute.
Costs: those bytes over all links that the axis owns, both directions of a closed ring, one of a line, and a latency for each hop.
Use: time of one collective that has the links for itself. Avoid: adding up what runs at once on the same links.

Collectives on tori: jax-ml.github.io/scaling-book/sharding. All figures are estimates.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxmem.hardware import Link, Topology

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
Coordinates = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """What an axis has of torus dimension `dim`: `size` chips, `stride` apart; closed, or a line."""

    dim: int
    size: int
    stride: int
    closed: bool

    @property
    def links(self) -> float:
        """Links over which a device of this ring receives at once; interleaved rings (stride > 1) share theirs."""
        return (2 if self.closed else 1) / self.stride

    @property
    def hops(self) -> int:
        """From a device to the one furthest from it."""
        return (self.size // 2 if self.closed else self.size - 1) * self.stride

    @property
    def exchange_load(self) -> float:
        """Link-times a byte of local buffer of an all-to-all: the busiest link's bytes over the bytes that a device holds."""
        half = self.size * self.size // 4  # sum of distances on a closed ring; pairs across the middle of a line
        return half / self.size / (2 if self.closed else 1) * self.stride


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """One medium of a route. `bytes_per_s` is of one torus link, or of a device's whole share elsewhere, one direction."""

    medium: Literal["ici", "die to die", "NVLink", "PCIe", "network"]
    size: int
    bytes_per_s: float | None
    latency_s: float
    rings: tuple[Ring, ...] = ()

    @property
    def rate(self) -> float | None:
        """Bytes/s at which a device receives when everybody gathers."""
        if self.bytes_per_s is None:
            return None
        return self.bytes_per_s * (sum(ring.links for ring in self.rings) if self.rings else 1)

    @property
    def hops(self) -> int:
        return sum(ring.hops for ring in self.rings) if self.rings else self.size - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """The media under one or more mesh axes, innermost first. Levels stream through each other on GPUs (a ring passes both in
    small pieces) and take turns between TPU slices (the compiler makes separate collectives)."""

    levels: tuple[Level, ...]
    together: Literal["streamed", "in_turn"]

    @property
    def size(self) -> int:
        return math.prod(level.size for level in self.levels)


def bytes_sent(collective: Collective, size_bytes: float, devices: int) -> float:
    """What one device sends; `size_bytes` is of the larger side on one device (see above)."""
    if devices == 1:
        return 0.0
    share = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "all-to-all": 1.0}
    if collective == "collective-permute":
        return float(size_bytes)
    return share[collective] * size_bytes * (devices - 1) / devices


def seconds(collective: Collective, size_bytes: float, route: Route) -> float | None:
    """Time of one collective with the links for itself; None where a link's figure is unknown, 0 for one device."""
    times, latency = [], 0.0
    remaining = float(size_bytes)
    levels = [level for level in route.levels if level.size > 1]
    if collective == "collective-permute":
        levels = levels[:1]  # neighbours along the axis; the few that cross an outer level send at the same time
    for level in levels:
        one = _level_seconds(collective, remaining, level)
        if one is None:
            return None
        times.append(one)
        latency += level.latency_s * level.hops * (2 if collective == "all-reduce" else 1)
        if collective in ("all-gather", "reduce-scatter", "all-reduce"):
            remaining /= level.size  # an outer level handles what the inner one left to each device
    if collective == "collective-permute" and levels:
        latency = levels[0].latency_s * min((ring.stride for ring in levels[0].rings), default=1)
    return (max(times, default=0.0) if route.together == "streamed" else sum(times)) + latency


def _level_seconds(collective: Collective, size_bytes: float, level: Level) -> float | None:
    """Without latency."""
    if level.bytes_per_s is None or level.rate is None:
        return None
    match collective:
        case "collective-permute":
            return size_bytes / level.bytes_per_s * min((ring.stride for ring in level.rings), default=1)
        case "all-to-all" if level.rings:  # messages go along one dimension after the other; dimensions work at once
            return max(ring.exchange_load for ring in level.rings) * size_bytes / level.bytes_per_s
        case _:
            return bytes_sent(collective, size_bytes, level.size) / level.rate


def route(topology: Topology, sizes: Mapping[str, int], axes: Sequence[str]) -> Route:
    """The media under a collective over `axes` (names) of a mesh of `sizes` (name -> size, outermost first), product = devices.

    The outermost axis of size > 1 crosses the slices. Raises ValueError for a mesh that does not fit the topology, for an axis
    that it does not have, and where the slices do not divide the axis that crosses them.
    """
    if unknown := [axis for axis in axes if axis not in sizes]:
        raise ValueError(f"mesh has axes {', '.join(sizes)}, not {', '.join(unknown)}")
    if math.prod(sizes.values()) != topology.devices:
        product = " * ".join(f"{axis}({size})" for axis, size in sizes.items())
        raise ValueError(f"{product} = {math.prod(sizes.values())} devices, and {topology} has {topology.devices}")
    if topology.chip.kind == "tpu":
        return _tpu_route(topology, dict(sizes), axes)
    return _gpu_route(topology, sizes, axes)


# ---------------------------------------------------------------- GPU: NVLink domain and network

def _gpu_route(topology: Topology, sizes: Mapping[str, int], axes: Sequence[str]) -> Route:
    """Devices are numbered row-major over the mesh, hosts and domains are contiguous in that order."""
    chip, inside, outside, stride = topology.chip, 1, 1, 1
    domain_size = min(chip.domain_size, topology.devices)
    if chip.domain_size <= chip.chips_per_host:  # a domain does not reach beyond its host, which may be partly used
        domain_size = min(domain_size, topology.devices_per_host)
    for axis, size in reversed(list(sizes.items())):
        if axis in axes:
            reach = max(domain_size // stride, 1)
            near = max(n for n in range(1, size + 1) if size % n == 0 and n <= reach)
            inside, outside = inside * near, outside * size // near
        stride *= size
    return Route(together="streamed", levels=(Level(medium=chip.domain_kind or "PCIe", size=inside, **_figures(chip.domain)),
                                              Level(medium="network", size=outside, **_figures(chip.network))))


# ---------------------------------------------------------------- TPU: torus and slices

def _tpu_route(topology: Topology, sizes: dict[str, int], axes: Sequence[str]) -> Route:
    chip, slices = topology.chip, topology.slices
    crossing = next((axis for axis, size in sizes.items() if size > 1), next(iter(sizes)))
    if sizes[crossing] % slices:
        raise ValueError(f"{crossing}({sizes[crossing]}) is the outermost axis and not a multiple of the {slices} slices")
    sizes[crossing] //= slices
    names = list(sizes)
    chosen = [names.index(axis) for axis in axes]
    rings, dies = _rings(topology, tuple(sizes.values()), chosen)
    return Route(together="in_turn", levels=(
        Level(medium="die to die", size=dies, **_figures(chip.domain)),
        Level(medium="ici", size=math.prod(ring.size for ring in rings), rings=rings,
              bytes_per_s=chip.ici.bytes_per_s if chip.ici else None, latency_s=chip.ici.latency_s if chip.ici else 0.0),
        Level(medium="network", size=slices if crossing in axes else 1, **_figures(chip.network))))


def _figures(link: Link | None) -> dict[str, Any]:
    """A device's whole share of a link, as fields of a level."""
    return {"bytes_per_s": link.total_bytes_per_s if link else None, "latency_s": link.latency_s if link else 0.0}


def _rings(topology: Topology, sizes: tuple[int, ...], chosen: Sequence[int]) -> tuple[tuple[Ring, ...], int]:
    """(torus rings, devices a chip) that the mesh axes with indices `chosen` cover together within one slice."""
    physical = torus_shape(topology)
    order = device_order(topology, sizes)
    if order is None:
        grid = torus_assignment(physical, sizes, first=(3,) if len(physical) == 4 else ())
        pieces = []
        for row in grid:
            size = math.prod(row[i] for i in chosen)
            stride = min((math.prod(row[i + 1:]) for i in chosen if row[i] > 1), default=1)
            pieces.append((size, stride))
    else:
        pieces = _box(_group(order, sizes, chosen), len(physical))
    wrap = [*topology.wrap, *(False,) * 2]
    rings = tuple(Ring(dim=dim, size=size, stride=stride, closed=wrap[dim] and size * stride == physical[dim])
                  for dim, (size, stride) in enumerate(pieces[:3]) if size > 1)
    return rings, pieces[3][0] if len(pieces) == 4 else 1


def torus_shape(topology: Topology) -> tuple[int, ...]:
    """Devices of one slice by x, y, z, and on tpu7x by device within the chip."""
    x, y, z = (*topology.shape, 1)[:3]
    return (x, y, z) if topology.chip.devices_per_chip == 1 else (x, y, z, topology.chip.devices_per_chip)


def torus_assignment(physical: tuple[int, ...], sizes: tuple[int, ...], *,
                     first: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """`result[d][i]`: how much of torus dimension d mesh axis i gets; the innermost axis chooses first.

    The rule of jax 0.12's `mesh_utils.create_device_mesh(..., allow_split_physical_axes=True)`: an axis takes as many whole
    dimensions as have its size as product; if one axis finds none, all are laid anew and may split dimensions. `first` names
    dimensions tried before others.
    """
    left: list[int] = list(physical)
    whole = [[1] * len(sizes) for _ in physical]
    for i in reversed(range(len(sizes))):
        found = next((dims for count in range(len(physical), 0, -1) for dims in _by_rank(len(physical), count, first)
                      if math.prod(left[d] for d in dims) == sizes[i]), None)
        if found is None and sizes[i] > 1:
            return _split_assignment(physical, sizes)
        for d in found or ():
            whole[d][i] = physical[d]
            left[d] = 0
    return tuple(map(tuple, whole))


def _by_rank(dims: int, count: int, first: tuple[int, ...]) -> list[tuple[int, ...]]:
    rank = [first.index(d) if d in first else len(first) + d for d in range(dims)]
    return sorted(itertools.combinations(range(dims), count),
                  key=lambda chosen: (min(rank[d] for d in chosen), sum(rank[d] for d in chosen)) if first else ())


def _split_assignment(physical: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Prefers parts that cover whole dimensions, then more of those, then dimensions that an inner axis already has a part of."""
    grid = [[1] * len(sizes) for _ in physical]
    for i in reversed(range(len(sizes))):
        taken = [math.prod(row) for row in grid]
        free = [size // used for size, used in zip(physical, taken, strict=True)]
        options = [part for part in itertools.product(*([n for n in range(1, f + 1) if f % n == 0] for f in free))
                   if math.prod(part) == sizes[i]]
        if not options:
            raise ValueError(f"mesh sizes {sizes} do not divide the torus {physical}")

        def preference(part: tuple[int, ...], taken: list[int] = taken) -> tuple[object, ...]:
            entire = [p for p, size in zip(part, physical, strict=True) if p == size]
            shared = math.prod(p for p, used in zip(part, taken, strict=True) if used > 1)
            return math.prod(entire), len([p for p in entire if p > 1]), shared, part
        for row, size in zip(grid, sorted(options, key=preference)[-1], strict=True):
            row[i] = size
    return tuple(map(tuple, grid))


def device_order(topology: Topology, sizes: tuple[int, ...]) -> list[Coordinates] | None:
    """Coordinates in the order in which `mesh_utils` fills the mesh of a small slice; None where it assigns torus dimensions."""
    chip, (x, y, z) = topology.chip.name, torus_shape(topology)[:3]
    chips = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]

    def pick(*order: int) -> list[Coordinates]:
        return [chips[i] for i in order]
    if chip in ("v5e", "v6e"):
        if (x, y) == (2, 2):
            return pick(0, 1, 3, 2)
        if x * y == 8:
            return pick(0, 1, 2, 3, 7, 6, 5, 4)
        if (x, y) == (4, 4) and max(sizes) == 16:
            return pick(0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)
    if chip == "v5p" and (x, y, z) == (2, 2, 2):
        return pick(0, 1, 3, 2, 6, 7, 5, 4)
    if chip == "tpu7x" and x * y == 4 and x == 2 and z <= 4:
        return [(*chips[4 * k + i], die) for k in range(z) for i in (0, 1, 3, 2) for die in (0, 1)]
    return None


def _group(order: list[Coordinates], sizes: tuple[int, ...], chosen: Sequence[int]) -> list[Coordinates]:
    """The devices that differ from the first only along the chosen axes of a row-major mesh."""
    strides = [math.prod(sizes[i + 1:]) for i in range(len(sizes))]
    indices = itertools.product(*(range(sizes[i]) for i in chosen))
    return [order[sum(k * strides[i] for k, i in zip(index, chosen, strict=True))] for index in indices]


def _box(group: list[Coordinates], dims: int) -> list[tuple[int, int]]:
    """(size, stride) along each dimension of a group that is a box, in which collectives may take any way. Else one line along
    the dimension of the most devices, with the longest way between neighbours as stride."""
    values = [sorted({c[d] for c in group}) for d in range(dims)]
    if math.prod(map(len, values)) == len(group):
        return [(len(v), v[1] - v[0] if len(v) > 1 else 1) for v in values]
    steps = [sum(abs(a - b) for a, b in zip(one, other, strict=True)) for one, other in itertools.pairwise(group)]
    line = max(range(min(dims, 3)), key=lambda d: len(values[d]))
    return [(len(group), max(steps)) if d == line else (1, 1) for d in range(dims)]

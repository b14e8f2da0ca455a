"""Where the devices of a collective sit on the TPU torus, and so over which links it runs.

Split: the group's coordinates, as the compiler was given them, become rings or lines along the dims of the torus; what differs in
    the slice crosses the network between slices, after the part inside.
Moves: see `cost/collectives.py`, which has the closed forms.
Costs: bytes over all links of the group at once; `link_efficiency` of their bandwidth is reached.
Use: compiled TPU programs. Avoid: a plan that is not compiled; `cost.collectives.route` lays out its mesh.
"""
import dataclasses
import functools
import math
from collections.abc import Sequence

from jaxmem.cost.collectives import Level, Ring, Route
from jaxmem.hardware import Topology

Place = Sequence[int]  # x, y, z, core, slice, process: as `result.json` has it


def route_of(group: Sequence[int], places: Sequence[Place], topology: Topology) -> Route:
    """The media under a group of device ids. A group that is no box of the torus runs along one line through it."""
    chip = topology.chip
    where = [places[device] for device in group]
    slices = len({place[4] for place in where})
    cores = len({place[3] for place in where})
    rings = []
    for dim, size in enumerate(topology.shape):
        seen = sorted({place[dim] for place in where})
        if len(seen) > 1:
            stride = min(b - a for a, b in zip(seen, seen[1:], strict=False))
            closed = topology.wrap[dim] and len(seen) * stride == size
            rings.append(Ring(dim=dim, size=len(seen), stride=stride, closed=closed))
    chips = len(where) // (slices * cores)
    if math.prod(ring.size for ring in rings) != chips and rings:
        rings = [Ring(dim=rings[0].dim, size=chips, stride=1, closed=False)]
    levels = [Level(medium="die to die", size=cores, bytes_per_s=chip.domain.total_bytes_per_s if chip.domain else None,
                    latency_s=chip.domain.latency_s if chip.domain else 0.0)]
    if chip.ici:
        levels.append(Level(medium="ici", size=chips, rings=tuple(rings), bytes_per_s=chip.ici.bytes_per_s,
                            latency_s=chip.ici.latency_s))
    if chip.network:
        levels.append(Level(medium="network", size=slices, bytes_per_s=chip.network.total_bytes_per_s,
                            latency_s=chip.network.latency_s))
    return Route(together="in_turn", levels=tuple(levels))


@functools.cache
def at_efficiency(route: Route, link_efficiency: float) -> Route:
    """The route with that part of its bandwidths; latencies stay."""
    levels = (dataclasses.replace(level, bytes_per_s=None if level.bytes_per_s is None else level.bytes_per_s * link_efficiency)
              for level in route.levels)
    return dataclasses.replace(route, levels=tuple(levels))


def permute_seconds(size_bytes: float, pairs: Sequence[Sequence[int]], places: Sequence[Place], topology: Topology,
                    link_efficiency: float = 1.0) -> tuple[float, str]:
    """(seconds, direction `+` or `-`) of a permute between (source, target) pairs. The longest way decides: in a shift by n hops
    every link carries n of the transfers."""
    chip = topology.chip
    longest, direction = 0, "+"
    crosses = any(places[source][4] != places[target][4] for source, target in pairs)
    for source, target in pairs:
        hops, sign = 0, 0
        for dim, size in enumerate(topology.shape):
            step = places[target][dim] - places[source][dim]
            if topology.wrap[dim] and abs(step) > size / 2:
                step -= size if step > 0 else -size
            hops, sign = hops + abs(step), sign + step
        if hops > longest:
            longest, direction = hops, "+" if sign >= 0 else "-"
    if crosses and chip.network:
        return size_bytes / (chip.network.total_bytes_per_s * link_efficiency) + chip.network.latency_s, direction
    if not longest or chip.ici is None:
        return 0.0, direction
    return longest * (size_bytes / (chip.ici.bytes_per_s * link_efficiency) + chip.ici.latency_s), direction

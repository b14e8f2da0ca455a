"""Seconds of collectives on a TPU slice's torus, and between slices.

Split: a group of devices has an extent along some dims of the torus; each dim brings links: two directions where it closes to a ring,
    one where it is a line, as its end receives everything over one link. Groups that interleave along a dim share its links.
Moves: what `collectives.sent_bytes` says, over all links of the group at once (the compiler's multi-colour rings).
Costs: bytes / (links x bandwidth) + hops x latency. Between slices: the data centre network, after the part inside a slice.
Use: TPU. Avoid: GPU domains, which are switches.

Rings and tori: https://jax-ml.github.io/scaling-book/sharding/ (the same forms).
"""
import dataclasses
from collections.abc import Sequence

from jaxmem.hardware import Topology
from jaxmem.hlo.collectives import sent_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """Where a group's devices are: `links` (may be fractional where groups share) and `hops` of its longest way inside a slice, devices in
    a slice and slices."""
    links: float
    hops: int
    in_slice: int
    slices: int


def reach_of(group: Sequence[int], places: Sequence[Sequence[int]], topology: Topology) -> Reach:
    """`places[id]` is `[x, y, z, core, slice, process]`; coordinates beyond the topology's dims are 0."""
    where = [places[device] for device in group]
    slices = len({place[4] for place in where})
    links, hops = 0.0, 0
    for dim, size in enumerate(topology.shape):
        seen = sorted({place[dim] for place in where})
        if len(seen) < 2:
            continue
        span = seen[-1] - seen[0] + 1
        step = max(1, min(b - a for a, b in zip(seen, seen[1:], strict=False)))
        ring = topology.wrap[dim] and len(seen) * step == size
        links += (2.0 if ring else 1.0) / step
        hops += size // 2 if ring else span - 1
    if not links and len({tuple(place[:4]) for place in where}) > 1:
        links, hops = 1.0, 1  # two devices of one chip: the link between its dies
    return Reach(links=links, hops=hops, in_slice=max(1, len(where) // slices), slices=slices)


def seconds(opcode: str, whole_bytes: float, reach: Reach, topology: Topology, *, link_efficiency: float) -> tuple[float, float]:
    """(seconds inside the slices, seconds between them) of one collective over `whole_bytes`."""
    chip = topology.chip
    inside = between = 0.0
    if reach.in_slice > 1 and chip.ici:
        moved = sent_bytes(opcode, whole_bytes, reach.in_slice)
        inside = moved / (reach.links * chip.ici.bytes_per_s * link_efficiency) + reach.hops * chip.ici.latency_s
        if opcode in ("all-to-all", "ragged-all-to-all"):  # a byte crosses a quarter of a ring on average, not one link
            inside *= max(1.0, reach.hops / 2)
    if reach.slices > 1 and chip.network:
        shared = whole_bytes / reach.in_slice
        between = sent_bytes(opcode, shared, reach.slices) / (chip.network.total_bytes_per_s * link_efficiency) + chip.network.latency_s
    return inside, between


def permute_seconds(whole_bytes: float, pairs: Sequence[Sequence[int]], places: Sequence[Sequence[int]], topology: Topology, *,
                    link_efficiency: float) -> tuple[float, str]:
    """(seconds, direction `+` or `-`) of a permute between source and target pairs: the longest way decides, as a link on it carries
    as many of the transfers as the way has hops."""
    chip = topology.chip
    hops, lane, slices_differ = 0, "+", False
    for source, target in pairs:
        a, b = places[source], places[target]
        slices_differ |= a[4] != b[4]
        way, sign = 0, 0
        for dim, size in enumerate(topology.shape):
            step = b[dim] - a[dim]
            if topology.wrap[dim] and abs(step) > size / 2:
                step -= size if step > 0 else -size
            way += abs(step)
            sign += step
        if way > hops:
            hops, lane = way, "+" if sign >= 0 else "-"
    if slices_differ and chip.network:
        return whole_bytes / (chip.network.total_bytes_per_s * link_efficiency) + chip.network.latency_s, lane
    link = chip.ici
    assert link is not None, f"{chip.name} has no torus"
    hops = max(1, hops)
    return hops * (whole_bytes / (link.bytes_per_s * link_efficiency) + link.latency_s), lane

"""A topology cut into equal parts, so that each run has devices of its own.

Split: devices over runs; nothing is shared but the host. Moves: nothing between runs. Costs: a run's own step on fewer devices.
Use: runs that differ in shape, or that must not wait for each other. Avoid: runs too small for a device: `vmapped` fills it.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem import step
from jaxmem.hardware import Topology
from jaxmem.plan import Plan, divisors
from jaxmem.spec import InputError
from jaxmem.workload import Workload


def parts_for(plan: Plan, topology: Topology) -> int:
    """How many runs the topology has devices for; `plan` is of one. Raises InputError where some would be left over."""
    parts, rest = divmod(topology.devices, plan.devices)
    if rest or not parts:
        raise InputError(f"{plan.product()} uses {plan.devices} devices a run, which do not divide the {topology.devices} of {topology}")
    return parts


def part_of(topology: Topology, parts: int) -> Topology:
    """One of `parts` equal parts: a box of a TPU slice's chips, GPUs of one host or whole hosts. Raises InputError where there is none."""
    return dataclasses.replace(topology, shape=box(topology, parts))


def box(topology: Topology, parts: int) -> tuple[int, ...]:
    """The shape of one part: the most nearly cubic box that tiles the whole, so that its own network is the fastest."""
    shape = topology.shape
    if topology.slices > 1:
        raise InputError(f"{topology} has {topology.slices} slices; runs of their own are placed within one: give the runs a slice each")
    boxes = [one for one in tilings(shape) if math.prod(shape) == parts * math.prod(one)]
    if topology.chip.kind == "gpu":  # a part that crosses hosts and does not fill them would have a slow link inside
        boxes = [one for one in boxes if one[0] == 1 or one[1] == shape[1]]
    if not boxes:
        legal = sorted({math.prod(shape) // math.prod(one) for one in tilings(shape)})
        below, above = [n for n in legal if n < parts][-1:], [n for n in legal if n > parts][:1]
        raise InputError(f"{topology} cannot be cut into {parts} equal parts; nearest: {' or '.join(map(str, below + above))}")
    return min(boxes, key=lambda one: (max(one) / min(one), one))


def tilings(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Boxes that tile a grid of this shape."""
    if not shape:
        return [()]
    return [(first, *rest) for first in divisors(shape[0]) for rest in tilings(shape[1:])]


def groups(topology: Topology, parts: int, devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each part, `topology.devices / parts` of them, in the order in which they were given."""
    shape = box(topology, parts)
    per_chip = topology.chip.devices_per_chip
    found: dict[tuple[int, ...], list[Any]] = {}
    for i, device in enumerate(devices):
        where = zip(place(topology, device, i // per_chip), shape, strict=True)
        found.setdefault(tuple(at // size for at, size in where), []).append(device)
    out = [found[key] for key in sorted(found)]
    if len(out) != parts or len({len(one) for one in out}) > 1:
        raise InputError(f"{len(devices)} devices do not make {parts} parts of {topology}")
    return out


def place(topology: Topology, device: Any, chip: int) -> tuple[int, ...]:
    """Where a chip is in the grid of `topology.shape`: a TPU says it, others are in row-major order."""
    if topology.chip.kind == "tpu" and (coords := getattr(device, "coords", None)) is not None:
        return tuple(coords[:len(topology.shape)])
    out = []
    for size in reversed(topology.shape):
        chip, at = divmod(chip, size)
        out.append(at)
    return tuple(reversed(out))


def programs(workload: Workload, plan: Plan, topology: Topology, parts: int, devices: Sequence[Any]) -> Iterator[step.Programs]:
    """The run's programs on each part's devices, one after another; `plan` is of one part. They are what `step.build` makes for a
    topology of that size, so a run on a part computes what it would compute alone, bit for bit."""
    one = part_of(topology, parts)
    for group in groups(topology, parts, devices):
        yield step.build(workload, plan, one, group)

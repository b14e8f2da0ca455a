"""Collectives of a compiled program: what they move, between which devices, along which axes of the mesh.

Split: a group of n devices works together; groups follow from the text and become mesh axes by where the ids lie in the mesh.
Moves: bytes that one device sends, by the closed forms of `cost/collectives.py` for the whole array: an all-gather's result, a
    reduce-scatter's operand.
Costs: seconds are the chip's matter (`speed_tpu.py`, `speed_gpu.py`).
Use: traffic tables, speed. Avoid: text before partitioning, which has no collectives.

The text hides collectives in fusions (TPU: `all-reduce-scatter`, asynchronous chains) and in asynchronous wrappers; both are
looked into. Between TPU slices they are pairs of `send` and `recv` to the Megascale runtime: the text is that of one slice.
"""
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxmem.cost.collectives import bytes_sent
from jaxmem.hlo.parse import Computation, Instruction, Module, Shape, trip_count

# Opcode -> the closed form that it moves bytes like.
OPCODES = {"all-gather": "all-gather", "all-reduce": "all-reduce", "reduce-scatter": "reduce-scatter", "all-to-all": "all-to-all",
           "ragged-all-to-all": "all-to-all", "collective-permute": "collective-permute",
           "collective-broadcast": "collective-permute"}
_MEGASCALE = {"ALL_REDUCE": "all-reduce", "ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter",
              "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute"}
_FLAGS = (2, 4)  # memory spaces of synchronization flags; data may be in HBM, VMEM, a v4's CMEM (3) or on the host
Role = Literal["whole", "start", "continue", "done"]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the text.

    `groups` hold partition ids (of a permute: source and target pairs); None: the text has them in a form that is not known.
    `whole_bytes`: of the whole array. `key` is shared by the instructions of one asynchronous chain.
    """
    opcode: str
    instruction: Instruction
    groups: Groups | None
    whole_bytes: float
    role: Role
    key: str

    @property
    def size(self) -> int:
        """Devices that work together; of a permute 2."""
        return max((len(group) for group in self.groups or ()), default=1)

    @property
    def sent_bytes(self) -> float:
        return sent_bytes(self.opcode, self.whole_bytes, self.size)


def sent_bytes(opcode: str, whole_bytes: float, size: int) -> float:
    """Bytes that each of `size` devices sends for an array of `whole_bytes`."""
    if size <= 1:
        return 0.0
    return bytes_sent(OPCODES[opcode], whole_bytes, size)  # type: ignore[arg-type]


def collectives_of(module: Module, instruction: Instruction) -> list[Collective]:
    """The collectives that `instruction` runs, starts, goes on with or waits for; none of a loop or a call, which are schedules
    of their own."""
    opcode = instruction.opcode
    base = re.sub(r"-(start|done)$", "", opcode)
    if base in OPCODES:
        if opcode.endswith("-done"):
            return [_later(base, instruction, "done")]
        role: Role = "start" if opcode.endswith("-start") else "whole"
        return [_read(module, instruction, base, role, instruction.name)]
    if opcode in ("async-start", "async-done", "async-update"):
        if opcode != "async-start":
            return [_later("", instruction, "done" if opcode == "async-done" else "continue")]
        return [_read(module, inner, kind, "start", instruction.name) for kind, inner in _inside(module, instruction)]
    if opcode in ("send", "recv-done"):
        return _between_slices(module, instruction)
    if opcode != "fusion":
        return []
    found = _inside(module, instruction)
    if not found:
        return []
    targets = {inner.custom_call_target for inner in _computation(module, instruction).instructions}
    role = "start" if "AsyncCollectiveStart" in targets else "done" if "AsyncCollectiveDone" in targets else "whole"
    out = []
    for kind, inner in found:
        chained = re.search(r'chain_id="(\d+)"', inner.raw_attributes)
        inner_role: Role = "continue" if role == "whole" and chained else role
        out.append(_read(module, inner, kind, inner_role, f"chain {chained.group(1)}" if chained else instruction.name))
    return out


def _between_slices(module: Module, instruction: Instruction) -> list[Collective]:
    """A `send` to the other slices starts, the `recv-done` of the same rendezvous ends it.

    Slices are numbered from 1 in the text, their devices from 0: device d of slice s is number (s - 1) x partitions + d of the mesh.
    """
    said = instruction
    if instruction.opcode == "recv-done":
        named = [computation.by_name.get(instruction.operands[0]) for computation in module.computations.values()]
        said = next((one for one in named if one is not None), instruction)
    text = dict(re.findall(r'(_xla_\w+)=("[^"]*"|\{.*?\}\})', said.raw_attributes))
    opcode = _MEGASCALE.get(text.get("_xla_megascale_transfer_type", "").strip('"'))
    if opcode is None:
        return []
    key = "megascale " + text.get("_xla_host_transfer_rendezvous", said.name)
    if instruction.opcode == "recv-done":
        return [Collective(opcode=opcode, instruction=instruction, groups=None, whole_bytes=0.0, role="done", key=key)]
    target, partitions = text.get("_xla_megascale_target", ""), module.partitions
    groups: Groups | None = None
    if slices := re.match(r'"\{([\d,]+)\}x', target):
        groups = (tuple((int(number) - 1) * partitions for number in slices.group(1).split(",")),)
    elif pairs := re.findall(r"\{(\d+)->(\d+)\}", target):
        groups = tuple(tuple((int(end) // 100_000 - 1) * partitions + int(end) % 100_000 for end in pair) for pair in pairs)
    size = max((len(group) for group in groups or ()), default=1)
    sent = float(_data_bytes(instruction.shape.elements[0] if instruction.shape.elements else instruction.shape))
    return [Collective(opcode=opcode, instruction=instruction, groups=groups, role="start", key=key,
                       whole_bytes=sent * size if opcode == "all-gather" else sent)]


def _later(opcode: str, instruction: Instruction, role: Role) -> Collective:
    """What a `start` began goes on or ends."""
    return Collective(opcode=opcode, instruction=instruction, groups=None, whole_bytes=0.0, role=role,
                      key=instruction.operands[0])


def _computation(module: Module, instruction: Instruction) -> Computation:
    return module.computations[next(iter(instruction.called.values()))[0]]


def _inside(module: Module, instruction: Instruction) -> list[tuple[str, Instruction]]:
    """(opcode, instruction) of the collectives in the computation that a fusion or a wrapper calls."""
    computation = _computation(module, instruction)
    found = []
    for inner in computation.instructions:
        if inner.opcode in OPCODES:
            scattered = inner.opcode == "all-reduce" and computation.name.startswith("all-reduce-scatter")
            found.append(("reduce-scatter" if scattered else inner.opcode, inner))
        elif inner.opcode == "fusion":
            found += _inside(module, inner)
    return found


def _read(module: Module, instruction: Instruction, opcode: str, role: Role, key: str) -> Collective:
    groups = groups_of(instruction, module.partitions * module.replicas)
    size = max((len(group) for group in groups or ()), default=1)
    shape = instruction.shape
    # A start's result holds its operands and its results: (operand, result, ...). An all-reduce-start has the results alone on
    # TPU, and ((operands), results) on GPU.
    both = instruction.opcode != "all-reduce-start" or (shape.elements and shape.elements[0].is_tuple)
    if instruction.opcode.endswith("-start") and both and shape.elements:
        shape = shape.elements[1]
    whole = float(_data_bytes(shape))
    # inside `all-reduce-scatter` fusions, the all-reduce has the whole array already
    if instruction.opcode in ("reduce-scatter", "reduce-scatter-start"):
        whole *= size
    return Collective(opcode=opcode, instruction=instruction, groups=groups, whole_bytes=whole, role=role, key=key)


def _data_bytes(shape: Shape) -> int:
    return sum(leaf.bytes for _, leaf in shape.leaves() if leaf.memory_space not in _FLAGS)


def groups_of(instruction: Instruction, partitions: int) -> Groups | None:
    """Device groups in any of the text's forms: `{{0,1},{2,3}}`, `[2,2]<=[2,2]T(1,0)`, `mesh['a'=2,'b'=2] {'a'}`, `{}` (all)."""
    pairs = instruction.attributes.get("source_target_pairs")
    text = pairs or instruction.attributes.get("replica_groups")
    if text is None:
        return None
    text = text.strip()
    if text == "{}":
        return (tuple(range(partitions)),)
    if text.startswith("{{"):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,\s]+)\}", text))
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        sizes, dims = (tuple(map(int, part.split(","))) for part in iota.groups()[:2])
        ids = np.arange(int(np.prod(dims))).reshape(dims)
        if iota.group(3):
            ids = ids.transpose(tuple(map(int, iota.group(3).split(","))))
        return tuple(map(tuple, ids.reshape(sizes).tolist()))
    named = re.match(r"mesh\[([^\]]*)\](.*?)\{([^}]*)\}\s*$", text, re.S)
    if named:
        return _mesh_groups(*named.groups())
    return None


def _mesh_groups(mesh: str, order: str, axes: str) -> Groups | None:
    names = re.findall(r"'([^']+)'=(\d+)", mesh)
    wanted = re.findall(r"'([^']+)'(:\S+)?", axes)
    listed = re.search(r"device_ids=\(?\[?([\d,\s]+)", order)
    if any(part for _, part in wanted) or (order.strip(" ,") and not listed):
        return None  # part of an axis, or an order of devices in a form not met yet
    sizes = [int(size) for _, size in names]
    ids = np.array(list(map(int, listed.group(1).split(",")))) if listed else np.arange(int(np.prod(sizes)))
    ids = ids.reshape(sizes)
    inner = [i for i, (name, _) in enumerate(names) if name in {name for name, _ in wanted}]
    outer = [i for i in range(len(names)) if i not in inner]
    count = int(np.prod([sizes[i] for i in inner]))
    return tuple(map(tuple, ids.transpose(outer + inner).reshape(-1, count).tolist()))


def axes_of(groups: Groups, axes: Mapping[str, int]) -> str:
    """The mesh axis along which the devices of a group differ; several joined by `+` in mesh order; "none" for groups of one.

    Device ids are positions in the mesh. "devices" when the mesh is unknown or has another number of devices.
    """
    sizes = tuple(axes.values())
    ids = [device for group in groups for device in group]
    if not sizes or max(ids, default=0) >= int(np.prod(sizes)):
        return "devices"
    varying: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(np.array(group), sizes))
        varying |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return "+".join(name for position, name in enumerate(axes) if position in varying) or "none"


def collectives(module: Module, mesh: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Traffic of one step: `[{axis, opcode, count, bytes, group_size, exposed_s: None}]`.

    Count and bytes (those one device sends) are times trip counts, and None where a trip count is unknown. `speed.predict` says
    how many seconds of it are exposed.
    """
    axes = dict((mesh or {}).get("axes") or {})
    totals: dict[tuple[str, str, int], list[float | None]] = defaultdict(lambda: [0, 0.0])

    def walk(computation: Computation, times: int | None) -> None:
        for instruction in computation.instructions:
            for role, names in instruction.called.items():
                if role == "body":
                    trips = trip_count(module, instruction)
                    walk(module.computations[names[0]], None if times is None or trips is None else times * trips)
                elif instruction.opcode in ("call", "conditional"):
                    for name in names:
                        walk(module.computations[name], times)
            for found in collectives_of(module, instruction):
                if found.role in ("whole", "start"):
                    total = totals[axes_of(found.groups, axes) if found.groups else "devices", found.opcode, found.size]
                    total[0] = None if total[0] is None or times is None else total[0] + times
                    total[1] = None if total[1] is None or times is None else total[1] + times * found.sent_bytes

    walk(module.entry, 1)
    return [{"axis": axis, "opcode": opcode, "count": count, "bytes": size, "group_size": group, "exposed_s": None}
            for (axis, opcode, group), (count, size) in totals.items()]

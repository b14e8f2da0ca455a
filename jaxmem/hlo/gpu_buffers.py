"""The memory timeline of a program compiled for a GPU, from XLA's own buffer assignment and live ranges.

XLA gives every argument and result an allocation of its own and lays out everything in between in one preallocated block, whose
size is the compiler's temp figure. Two of its dumps (`--xla_dump_to=DIR --xla_dump_hlo_as_text=true`) say all about it:
`*buffer-assignment.txt` at which offset each array lies, `*live-range.txt` from which to which point of the flattened schedule.
Bytes where several arrays lie at a point (a loop's carry and its update in place) count once, for the array that came last.

The peak that `*live-range.txt` prints by itself is not used: it leaves out what lives in loop bodies, 60 of the 258 MiB of a
small train step.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxmem.hlo.attribute import Attribution, Label, scope
from jaxmem.hlo.parse import Module, parse_shape
from jaxmem.hlo.schedule import Value, replay
from jaxmem.hlo.timeline import Block, Timeline, assemble

Role = Literal["parameter", "temp", "output", "constant", "thread-local"]
Index = tuple[int, ...]
HOST_COLOR = 5  # memory space of an allocation as XLA prints it: none is device memory


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array in an allocation: `bytes` from `offset`, made by the instruction `name` as leaf `index` of its result."""

    name: str
    index: Index
    offset: int
    bytes: int
    shape: str


@dataclass(frozen=True, kw_only=True)
class Allocation:
    number: int
    bytes: int
    role: Role
    color: int
    parameter: int | None  # entry parameter number
    parameter_index: Index
    arrays: tuple[Array, ...]


@dataclass(frozen=True, kw_only=True)
class LiveRanges:
    """The flattened schedule: `points` are instruction names, `intervals` first and last point of each array, both included."""

    points: tuple[str, ...]
    intervals: Mapping[tuple[str, Index], tuple[int, int]]


_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*):$")
_ARRAY = re.compile(r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_POINT = re.compile(r"    (\d+):(\S+)$")
_INTERVAL = re.compile(r"    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")


def timeline(text: str, module: Module, result: Mapping[str, Any]) -> Timeline:
    """Live bytes of one device over the schedule and the peak's composition.

    `text` is the buffer assignment followed by the live ranges, `module` the optimized program, `result` the artifact's
    `result.json`. What the preallocated block never has in use is a buffer of its own, kind `padding`, module `fragmentation`.
    Raises ValueError when either dump is missing or the two do not belong together.
    """
    allocations, ranges = parse_assignment(text), parse_live_ranges(text)
    last = max(len(ranges.points) - 1, 0)
    namer = _Namer(module, ranges, result, allocations)
    blocks: list[Block] = []
    host: list[Block] = []
    for allocation in allocations:
        if allocation.role == "thread-local":  # registers of the scalar computations inside kernels, not memory of the pool
            continue
        into = host if allocation.color == HOST_COLOR else blocks
        if allocation.role == "temp":
            into.extend(_temp_blocks(allocation, ranges, namer, last))
        else:
            into.append(_whole_block(allocation, namer, last))
    return assemble(blocks, peak_instruction=dict(enumerate(ranges.points)), host_peak_bytes=assemble(host).peak_bytes)


def parse_assignment(text: str) -> tuple[Allocation, ...]:
    """The allocations of a `*buffer-assignment.txt`. Raises ValueError when there is none."""
    heads: list[re.Match[str]] = []
    arrays: list[list[Array]] = []
    for line in text.splitlines():
        if head := _ALLOCATION.match(line):
            heads.append(head)
            arrays.append([])
        elif (array := _ARRAY.match(line)) and arrays:
            name, index, size, offset, shape = array.groups()
            arrays[-1].append(Array(name=name, index=_index(index), offset=int(offset), bytes=int(size), shape=shape))
    if not heads:
        raise ValueError("no allocations: this is not the text of an XLA buffer assignment")
    return tuple(_allocation(head, tuple(inside)) for head, inside in zip(heads, arrays, strict=True))


def _allocation(head: re.Match[str], arrays: tuple[Array, ...]) -> Allocation:
    number, size, words = head.groups()
    parameter = re.search(r"parameter (\d+), shape \|.*?\| at ShapeIndex \{([\d,]*)\}", words)
    color = re.search(r"color (\d+)", words)
    role: Role = "output"
    if parameter:
        role = "parameter"
    elif "preallocated-temp" in words:
        role = "temp"
    elif "thread-local" in words:
        role = "thread-local"
    elif "constant" in words:
        role = "constant"
    return Allocation(number=int(number), bytes=int(size), role=role, color=int(color[1]) if color else 0,
                      parameter=int(parameter[1]) if parameter else None,
                      parameter_index=_index(parameter[2]) if parameter else (), arrays=arrays)


def parse_live_ranges(text: str) -> LiveRanges:
    """The schedule and intervals of a `*live-range.txt`. Raises ValueError when there is none."""
    points: list[str] = []
    intervals: dict[tuple[str, Index], tuple[int, int]] = {}
    section = None
    for line in text.splitlines():
        if line.startswith("  ") and not line.startswith("   "):
            section = line.strip()
        elif section == "InstructionSequence:" and (point := _POINT.match(line)):
            if int(point[1]) != len(points):
                raise ValueError(f"live ranges: point {point[1]} follows {len(points) - 1}")
            points.append(point[2])
        elif section == "BufferLiveRange:" and (interval := _INTERVAL.match(line)):
            intervals[interval[1], _index(interval[2])] = (int(interval[3]), int(interval[4]))
    if not intervals:
        raise ValueError("no live ranges: the text must hold *live-range.txt after *buffer-assignment.txt")
    return LiveRanges(points=tuple(points), intervals=intervals)


def _index(digits: str | None) -> Index:
    return tuple(int(digit) for digit in (digits or "").split(",") if digit)


class _Namer:
    """Kind and module of XLA's arrays, through the replayed schedule of the program's text."""

    def __init__(self, module: Module, ranges: LiveRanges, result: Mapping[str, Any], allocations: Sequence[Allocation]):
        self.schedule = schedule = replay(module)
        self.attribution = Attribution(module, schedule, result)
        self.values = {(value.instruction.name, value.index): value for value in schedule.values}
        self.instructions = {instruction.name: instruction for instruction in schedule.points}
        # The text writes an asynchronous collective as one `-start`; XLA's names are those of the instruction that it wraps,
        # which stands just before it in the flattened schedule.
        self.wrappers = {name: after for name, after in zip(ranges.points, ranges.points[1:], strict=False)
                         if name not in self.instructions and after in self.instructions}
        self.parameters: dict[tuple[int, Index], int] = {(value.parameter, value.index): value.group for value in schedule.values
                                                         if value.parameter is not None}
        last_read: dict[int, int] = {}  # group -> last point at which its memory is read
        for allocation in allocations:
            for array, end in self.last_reads(allocation, ranges):
                value = self.value(array)
                if value is not None:
                    last_read[value.group] = max(end, last_read.get(value.group, 0))
        phases = [scope(self.op_name(point))[0] for point in ranges.points]
        turn = next((at for at, phase in enumerate(phases) if phase in ("backward", "recomputed")), len(phases))
        self.read_backward = {group for group, end in last_read.items()
                              if turn <= end < len(phases) and phases[end] != "forward"}  # readers may have no name

    def last_reads(self, allocation: Allocation, ranges: LiveRanges) -> Iterator[tuple[Array, int]]:
        """Arrays with the last point that reads them or what a dynamic-update-slice made of them in the same place."""
        updated: dict[tuple[int, int], tuple[int, int]] = {}  # offset, bytes -> start and last read of the update that follows
        lives = [(array, ranges.intervals[array.name, array.index]) for array in allocation.arrays
                 if (array.name, array.index) in ranges.intervals]
        for array, (start, end) in sorted(lives, key=lambda life: life[1], reverse=True):
            place = (array.offset, array.bytes)
            if place in updated and updated[place][0] <= end:
                end = max(end, updated[place][1])
            yield array, end
            if "dynamic_update_slice" in (array.name + (self.op_name(array.name) or "")):
                updated[place] = (start, end)
            else:
                updated.pop(place, None)

    def op_name(self, point: str) -> str | None:
        instruction = self.instructions.get(self.wrappers.get(point, point))
        return instruction.op_name if instruction is not None else None

    def value(self, array: Array) -> Value | None:
        """The array in the replayed schedule."""
        name, index = array.name, array.index
        if name in self.wrappers:
            name, index = self.wrappers[name], (1, *index)
        # A tuple's own buffer is a table of addresses: it belongs to what it points at.
        keys = ((name, index), (name, (*index, 0)), (name, index[1:]))
        return next((self.values[key] for key in keys if key in self.values), None)

    def array(self, array: Array) -> Label:
        value = self.value(array)
        if value is None:
            return Label()
        label = self.attribution.of_group(value.group)
        if label.kind != "activations":
            return label
        phase = scope(label.op_name)[0]
        # XLA's live ranges say who reads last, also where a loop's carry or a called computation hides the reader.
        if phase == "forward" and value.group in self.read_backward:
            return replace(label, kind="saved")
        # The compiler permutes the dims of a gradient while it is made; the loop's carry still has those of the parameter.
        shapes = {member.shape.dims for member in self.schedule.groups[value.group]}
        if phase == "backward" and shapes & self.attribution.parameter_dims:
            return replace(label, kind="gradients")
        return label

    def parameter(self, number: int, index: Index) -> Label:
        group = self.parameters.get((number, index))
        return self.attribution.of_group(group) if group is not None else Label()


def _whole_block(allocation: Allocation, namer: _Namer, last: int) -> Block:
    """An argument, a result or a constant: held for the whole program, whatever else lies there before the result is made."""
    labels = [namer.array(array) for array in allocation.arrays]
    results = [position for position, label in enumerate(labels) if label.path is not None]
    largest = max(range(len(labels)), key=lambda position: allocation.arrays[position].bytes, default=None)
    chosen = results[0] if results else largest
    label = labels[chosen] if chosen is not None else Label()
    if allocation.parameter is not None:
        label = namer.parameter(allocation.parameter, allocation.parameter_index)
    elif chosen not in results:
        kind = "other" if allocation.role == "constant" else "output"
        label = Label(kind=kind, module=label.module or allocation.role, source=label.source, op_name=label.op_name)
    array = allocation.arrays[chosen] if chosen is not None else None
    name = array.name if array else f"allocation {allocation.number}"
    return _block(((0, last),), allocation.bytes, label, name, array.shape if array else None)


def _temp_blocks(allocation: Allocation, ranges: LiveRanges, namer: _Namer, last: int) -> Iterator[Block]:
    """The arrays of the preallocated block while they live, and what it never uses at the same time."""
    missing = [array.name for array in allocation.arrays if (array.name, array.index) not in ranges.intervals]
    if missing:
        raise ValueError(f"live ranges of {len(missing)} of {len(allocation.arrays)} arrays are missing, {missing[0]} first: "
                         "buffer assignment and live ranges are of different programs")
    changes = [0] * (last + 2)
    for array, size, intervals in owned(allocation.arrays, ranges):
        for start, end in intervals:
            changes[start] += size
            changes[end + 1] -= size
        yield _block(intervals, size, namer.array(array), array.name, array.shape)
    in_use = most = 0
    for change in changes:
        in_use += change
        most = max(most, in_use)
    if allocation.bytes > most:
        label = Label(kind="padding", module="fragmentation")
        yield _block(((0, last),), allocation.bytes - most, label, f"allocation {allocation.number}", None)


def owned(arrays: Sequence[Array], ranges: LiveRanges) -> Iterator[tuple[Array, int, tuple[tuple[int, int], ...]]]:
    """Each array with bytes and intervals such that no byte belongs to two arrays at one point: the latest to start has it."""
    lives = [(array, *ranges.intervals[array.name, array.index]) for array in arrays]
    for together in _overlapping(lives):
        if len(together) == 1:
            array, start, end = together[0]
            yield array, array.bytes, ((start, end),)
            continue
        cuts = sorted({cut for array, _, _ in together for cut in (array.offset, array.offset + array.bytes)})
        times = sorted({time for _, start, end in together for time in (start, end + 1)})
        pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}  # position in `together`, bytes -> intervals
        for begin, after in zip(times, times[1:], strict=False):
            live = [(start, position) for position, (_, start, end) in enumerate(together) if start <= begin <= end]
            bytes_of: dict[int, int] = {}
            for low, high in zip(cuts, cuts[1:], strict=False):
                here = [(start, position) for start, position in live
                        if together[position][0].offset <= low < together[position][0].offset + together[position][0].bytes]
                if here:
                    owner = max(here)[1]
                    bytes_of[owner] = bytes_of.get(owner, 0) + high - low
            for position, size in bytes_of.items():
                held = pieces.setdefault((position, size), [])
                if held and held[-1][1] == begin - 1:
                    held[-1] = (held[-1][0], after - 1)
                else:
                    held.append((begin, after - 1))
        for (position, size), intervals in pieces.items():
            yield together[position][0], size, tuple(intervals)


def _overlapping(lives: list[tuple[Array, int, int]]) -> Iterator[list[tuple[Array, int, int]]]:
    """Arrays that have bytes in common at some point, directly or through others; alone where they have none."""
    parents = list(range(len(lives)))

    def find(position: int) -> int:
        while parents[position] != position:
            parents[position] = parents[parents[position]]
            position = parents[position]
        return position
    active: list[int] = []
    for position in sorted(range(len(lives)), key=lambda p: lives[p][1]):
        array, start, _ = lives[position]
        active = [other for other in active if lives[other][2] >= start]
        for other in active:
            there = lives[other][0]
            if there.offset < array.offset + array.bytes and array.offset < there.offset + there.bytes:
                parents[find(other)] = find(position)
        active.append(position)
    components: dict[int, list[tuple[Array, int, int]]] = {}
    for position, life in enumerate(lives):
        components.setdefault(find(position), []).append(life)
    yield from components.values()


def _block(intervals: tuple[tuple[int, int], ...], size: int, label: Label, name: str, shape: str | None) -> Block:
    array = parse_shape(shape) if shape and not shape.startswith("(") else None
    return Block(intervals=intervals, bytes=size, padding_bytes=0, kind=label.kind, module=label.module, name=name,
                 shape=array.dims if array else None, dtype=array.dtype if array else None, sharding=label.sharding,
                 source=label.source, op_name=label.op_name, path=label.path)

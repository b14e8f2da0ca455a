"""The memory timeline of a program compiled for a TPU, from the schedule in its text.

Arguments and results are held for the whole program, a donated argument and the result that reuses it once. Everything else
lives from the operation that makes it to the last that reads it. VMEM and flags are not HBM; host memory is counted apart.
"""

from collections.abc import Mapping
from typing import Any

from jaxmem.hlo.attribute import Attribution
from jaxmem.hlo.parse import HBM, HOST, Module
from jaxmem.hlo.schedule import Schedule, Value, replay
from jaxmem.hlo.timeline import Block, Timeline, assemble

FRAGMENTATION = "fragmentation"


def timeline(module: Module, result: Mapping[str, Any]) -> Timeline:
    """Live HBM bytes of one device over the schedule and the peak's composition. `result` is the artifact's `result.json`.

    The compiler packs what is live into one heap, and no packing is perfect: where `result` says how much it allocates in all
    (`memory.allocated_bytes`), what is never in use at the peak is a buffer of its own, kind `padding`, module `fragmentation`.
    Raises ValueError when the text is not a schedule.
    """
    schedule = replay(module)
    attribution = Attribution(module, schedule, result)
    blocks = [block for group in schedule.groups if (block := _block(schedule, attribution, group, HBM)) is not None]
    host = [block for group in schedule.groups if (block := _block(schedule, attribution, group, HOST)) is not None]
    allocated = (result.get("memory") or {}).get("allocated_bytes")
    gap = allocated - assemble(blocks).peak_bytes if allocated is not None else 0
    if gap > 0:
        everywhere = ((0, schedule.length - 1),)
        blocks.append(
            Block(intervals=everywhere, bytes=gap, padding_bytes=gap, kind="padding", module=FRAGMENTATION, name=FRAGMENTATION)
        )
    names = {index: instruction.name for index, instruction in enumerate(schedule.points)}
    return assemble(blocks, peak_instruction=names, host_peak_bytes=assemble(host).peak_bytes)


def _block(schedule: Schedule, attribution: Attribution, group: int, memory_space: int) -> Block | None:
    """The memory of one group in one space, or None when it holds nothing there."""
    values = [value for value in schedule.groups[group] if value.shape.memory_space == memory_space and value.shape.bytes]
    if not values:
        return None
    largest = max(values, key=lambda value: value.shape.tiled_bytes)
    permanent = any(value.parameter is not None or value.number in attribution.output_order for value in values)
    label = attribution.of_group(group)
    return Block(
        intervals=((0, schedule.length - 1),) if permanent else _merged(values),
        bytes=largest.shape.tiled_bytes,
        padding_bytes=largest.shape.tiled_bytes - largest.shape.bytes,
        kind=label.kind,
        module=label.module,
        name=largest.instruction.name,
        shape=largest.shape.dims,
        dtype=largest.shape.dtype,
        sharding=label.sharding,
        source=label.source,
        op_name=label.op_name,
        path=label.path,
    )


def _merged(values: list[Value]) -> tuple[tuple[int, int], ...]:
    """Lifetimes of values in one memory, those that touch or overlap made one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((value.start, value.end) for value in values):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)

"""Live memory over a schedule and what the peak is made of: one shape of answer, whatever the compiler's text was.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of memory of one device and the schedule points (both included) between which it holds something."""

    intervals: tuple[tuple[int, int], ...]
    bytes: int  # as allocated: padding included
    padding_bytes: int | None  # of which only fill tiles; None when the text does not say
    kind: str | None  # None together with `module` when nothing says what it is
    module: str | None
    name: str  # of the instruction that makes it
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sharding: str | None = None
    source: str | None = None
    op_name: str | None = None
    path: str | None = None  # of the argument or result in the program's tree


@dataclass(frozen=True, kw_only=True)
class Point:
    index: int  # schedule points, not seconds
    bytes: int
    by_kind: Mapping[str, int]  # bytes with no kind are missing here


@dataclass(frozen=True, kw_only=True)
class Share:
    kind: str
    module: str | None
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bytes of one device. `composition` and `unattributed_bytes` add up to `peak_bytes`."""

    points: tuple[Point, ...]  # where the live bytes change, in schedule order; between two of them nothing changes
    peak_index: int
    peak_bytes: int
    peak_instruction: str | None
    buffers: tuple[Block, ...]  # live at the peak, largest first
    composition: tuple[Share, ...]  # largest first; padding is a kind of its own
    unattributed_bytes: int  # live at the peak without kind or module
    host_peak_bytes: int | None = None  # live in host memory at its own worst point; None when the text does not say


def assemble(
    blocks: Sequence[Block], *, peak_instruction: Mapping[int, str] | None = None, host_peak_bytes: int | None = None
) -> Timeline:
    """The timeline of `blocks`: the peak is the first point with the most live bytes."""
    changes: dict[int, dict[str | None, int]] = defaultdict(lambda: defaultdict(int))
    for block in blocks:
        padding = block.padding_bytes or 0
        kind = block.kind if block.module is not None else None
        for start, end in block.intervals:
            for what, size in ((kind, block.bytes - padding), ("padding", padding)):
                changes[start][what] += size
                changes[end + 1][what] -= size
    live: dict[str | None, int] = defaultdict(int)
    points: list[Point] = []
    last = max(changes, default=0)
    for index in sorted(changes):
        for kind, size in changes[index].items():
            live[kind] += size
        if index < last or not points:
            points.append(
                Point(
                    index=index,
                    bytes=sum(live.values()),
                    by_kind={kind: size for kind, size in live.items() if kind is not None and size},
                )
            )
    if not points:
        points = [Point(index=0, bytes=0, by_kind={})]
    peak = max(points, key=lambda point: point.bytes)
    held = [block for block in blocks if any(start <= peak.index <= end for start, end in block.intervals)]
    shares: dict[tuple[str, str | None], int] = defaultdict(int)
    unattributed = 0
    for block in held:
        padding = block.padding_bytes or 0
        if padding:
            shares["padding", block.module] += padding
        if block.kind is None or block.module is None:
            unattributed += block.bytes - padding
        else:
            shares[block.kind, block.module] += block.bytes - padding
    return Timeline(
        points=tuple(points),
        peak_index=peak.index,
        peak_bytes=peak.bytes,
        peak_instruction=(peak_instruction or {}).get(peak.index),
        buffers=tuple(sorted(held, key=lambda block: -block.bytes)),
        composition=tuple(
            Share(kind=kind, module=module, bytes=size)
            for (kind, module), size in sorted(shares.items(), key=lambda item: -item[1])
            if size
        ),
        unattributed_bytes=unattributed,
        host_peak_bytes=host_peak_bytes,
    )

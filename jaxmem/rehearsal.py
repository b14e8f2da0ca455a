"""What `--rehearsal=r=16,capacity=4096,every=4` says: rows that were trained on are kept and trained on again. No jax.

A step trains on b + r rows: the b incoming ones and r that are drawn from the buffer (Bouvier et al., CCGrid 2024, arXiv 2406.03285).
"""

import math
from dataclasses import dataclass
from typing import Literal

from jaxmem import spec
from jaxmem.plan import Plan, nearest_multiple
from jaxmem.spec import InputError
from jaxmem.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Counts are global, over all shards; there is a shard on each device along the axes that split the batch.

    r: stored rows in a step. capacity: rows that are kept, over all classes. classes: sub-buffers of equal size; a row's class is its
    label. policy: a reservoir over all that came, or random replacement. candidates: with policy=replace, rows of a batch that may
    replace a stored one, on average. every: steps that one draw serves; the exchange between devices happens once in so many.
    memory: where the buffer lies.
    """

    r: int
    capacity: int
    policy: Literal["reservoir", "replace"] = "reservoir"
    candidates: int | None = None
    every: int = 1
    memory: Literal["device", "pinned_host"] = "device"
    classes: int = 1

    @classmethod
    def parse(cls, text: str) -> "Rehearsal":
        """Raises InputError."""
        items = spec.split(text)
        given = {item.partition("=")[0].strip() for item in items}
        if missing := [name for name in ("r", "capacity") if name not in given]:
            spec.fields_from(cls, items, "rehearsal")  # a misspelt field says more
            raise InputError(f"rehearsal {text!r}: {' and '.join(missing)} missing, as in r=16,capacity=4096")
        return cls(**spec.fields_from(cls, items, "rehearsal"))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join([f"r={self.r}", f"capacity={self.capacity}",
                         *spec.differences(self, Rehearsal(r=self.r, capacity=self.capacity))])

    def probability(self, batch: int) -> float:
        """That an incoming row replaces a stored one of a full class (policy=replace)."""
        return 1.0 if self.candidates is None else self.candidates / batch

    def slots(self, shards: int) -> int:
        """Rows of one class in one shard."""
        return self.capacity // (shards * self.classes)

    def rows_per_pair(self, shards: int) -> int:
        """Rows that each shard sends to each, itself included, in one draw."""
        return self.r * self.every // shards**2

    def buffer_bytes(self, row_bytes: int, shards: int) -> int:
        """Of one shard, in closed form."""
        return row_bytes * self.capacity // shards

    def device_bytes(self, row_bytes: int, shards: int) -> int:
        """On one device, in closed form: its shard, unless that is in the host's memory, and its staged rows, which exist twice while a
        draw is made."""
        return (self.buffer_bytes(row_bytes, shards) if self.memory == "device" else 0) + 2 * row_bytes * self.r * self.every // shards

    def problems(self, *, batch: int, shards: int) -> list[str]:
        """Every reason why this cannot run beside `batch` incoming rows on `shards` shards, with the nearest choice that can."""
        out = [f"rehearsal: {name}={value}: at least 1" for name, value in
               (("r", self.r), ("capacity", self.capacity), ("every", self.every), ("classes", self.classes)) if value < 1]
        if out:
            return out
        if batch % shards:
            out.append(f"rehearsal: batch({batch}) is not a multiple of the {shards} shards; nearest: {nearest_multiple(batch, shards)}")
        if self.r % shards:
            out.append(f"rehearsal: r({self.r}) is not a multiple of the {shards} shards; nearest: r={nearest_multiple(self.r, shards)}")
        elif self.r * self.every % shards**2:
            unit = shards**2 // math.gcd(self.r, shards**2)
            out.append(f"rehearsal: a draw of r({self.r}) * every({self.every}) = {self.r * self.every} rows is not a multiple of "
                       f"{shards}^2 = {shards**2}, so that each of {shards} shards could send the same number to each; "
                       f"nearest: every={nearest_multiple(self.every, unit)}, or r={nearest_multiple(self.r, shards**2)} with every=1")
        unit = shards * self.classes
        if self.capacity % unit:
            out.append(f"rehearsal: capacity({self.capacity}) is not a multiple of {shards} shards * {self.classes} classes = {unit}; "
                       f"nearest: capacity={nearest_multiple(self.capacity, unit)}")
        if self.policy == "reservoir" and self.candidates is not None:
            out.append(f"rehearsal: candidates={self.candidates} is for policy=replace; a reservoir is offered every row")
        if self.policy == "replace" and not 0 < (self.candidates or 0) <= batch:
            was = "" if self.candidates is None else f"; it is {self.candidates}"
            out.append(f"rehearsal: policy=replace takes candidates, from 1 to batch({batch}){was}; "
                       f"a quarter of the batch is candidates={max(batch // 4, 1)}")
        return out


def row_bytes(workload: Workload) -> int:
    """Bytes of one row of a batch."""
    return sum({"f32": 4, "int32": 4, "uint8": 1}[dtype] * math.prod(shape) for shape, dtype in workload.rows.values())


def shards_of(plan: Plan) -> int:
    """Into how many parts the plan splits a batch."""
    return plan.data * plan.fsdp

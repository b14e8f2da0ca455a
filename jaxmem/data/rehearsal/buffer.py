"""A rehearsal buffer as a pytree: a fixed number of slots for each class, filled from a stream of rows.

    buffer = init({"images": ((28, 28, 1), np.uint8), "labels": ((), np.int32)}, classes=10, slots=100)
    buffer = insert(buffer, rows, classes, key, policy="reservoir")  # rows {name: [B, ...]}, classes int32 [B]
    rows, stored = draw(buffer, key, count)                          # {name: [count, ...]}, bool []: False while nothing is stored

All three are pure, so `jax.jit(insert, donate_argnums=0, static_argnames=("policy", "probability"))` updates in place. A plain buffer
has one class, and every row is of class 0. One such buffer is one shard; `programs.py` has one on each device.

Policies. `reservoir` is Algorithm R (Vitter 1985) for each class: after n rows every one of them is stored with probability slots / n.
`replace` is what Bouvier et al. run (CCGrid 2024, arXiv 2406.03285): a full class gives up a uniformly random slot with probability
`probability` = candidates / batch, so old rows die out geometrically, at a mean age of about slots / probability rows of the class.

B rows offered, K classes, S slots.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.data.rehearsal.slots import Memory, put, take

Buffer = dict[str, Any]  # {"rows": {name: [K, S, ...]}, "filled": int32 [K], "seen": int32 [K]}
Fields = Mapping[str, tuple[tuple[int, ...], Any]]  # name -> (shape of one row, dtype)
Rows = Mapping[str, jax.Array]
Policy = Literal["reservoir", "replace"]
POLICIES: tuple[Policy, ...] = ("reservoir", "replace")


def init(fields: Fields, *, classes: int, slots: int) -> Buffer:
    """An empty buffer. `seen` counts the rows that were offered, up to 2^31 - 1 a class."""
    return {"rows": {name: jnp.zeros((classes, slots, *shape), dtype) for name, (shape, dtype) in fields.items()},
            "filled": jnp.zeros((classes,), jnp.int32), "seen": jnp.zeros((classes,), jnp.int32)}


def insert(buffer: Buffer, rows: Rows, classes: jax.Array, key: jax.Array, *, policy: Policy = "reservoir",
           probability: float = 1.0) -> Buffer:
    """The buffer after the rows were offered one by one. `classes` int32 [B]; a row of a class outside 0..K-1 is not offered.

    `probability` is for policy `replace` alone. What each row would do is known from its class's counters and its rank among the
    batch's rows of that class, so all are placed at once: where several take one slot, the last one has it.
    """
    return insert_into(buffer, rows, classes, key, policy=policy, probability=probability)


def insert_into(buffer: Buffer, rows: Rows, classes: jax.Array, key: jax.Array, *, policy: Policy, probability: float,
                memory: Memory = "device") -> Buffer:
    """`insert` for a buffer whose arrays may have further leading dims of size 1, and may lie in pinned host memory."""
    lead = buffer["filled"].shape[:-1]
    slots = next(iter(buffer["rows"].values())).shape[len(lead) + 1]
    filled, seen = buffer["filled"].reshape(-1), buffer["seen"].reshape(-1)
    slot, count = places(filled, seen, classes, key, slots=slots, policy=policy, probability=probability)
    where = _index(len(lead), jnp.clip(classes, 0, filled.shape[0] - 1), slot)
    stored = {name: put(x, where, jnp.asarray(rows[name]).astype(x.dtype), memory) for name, x in buffer["rows"].items()}
    return {"rows": stored, "filled": jnp.minimum(filled + count, slots).reshape(*lead, -1), "seen": (seen + count).reshape(*lead, -1)}


def places(filled: jax.Array, seen: jax.Array, classes: jax.Array, key: jax.Array, *, slots: int, policy: Policy,
           probability: float) -> tuple[jax.Array, jax.Array]:
    """`(slot [B], offered [K])`: where each row goes, a number from `slots` on for nowhere, and how many rows each class was offered."""
    b, kinds = classes.shape[0], jnp.arange(filled.shape[0], dtype=jnp.int32)
    mine = classes[:, None] == kinds[None, :]  # [B, K]
    kind, offered = jnp.clip(classes, 0, kinds[-1]), mine.any(1)
    rank = (jnp.cumsum(mine, axis=0, dtype=jnp.int32) - mine.astype(jnp.int32))[jnp.arange(b), kind]
    before, free = seen[kind] + rank, filled[kind] + rank  # as they are when this row's turn comes
    if policy == "reservoir":
        other = jax.random.randint(key, (b,), 0, before + 1)
    else:
        where, whether = jax.random.split(key)
        kept = jax.random.uniform(whether, (b,)) < probability
        other = jnp.where(kept, jax.random.randint(where, (b,), 0, slots), slots)
    nowhere = slots + jnp.arange(b, dtype=jnp.int32)  # different for each row: the scatter is told that places are unique
    slot = jnp.where(free < slots, free, jnp.where(other < slots, other, nowhere))
    later = jnp.triu(jnp.ones((b, b), bool), 1) & (kind[:, None] == kind[None, :]) & (slot[:, None] == slot[None, :]) & offered[None, :]
    return jnp.where(offered & ~later.any(1), slot, nowhere), mine.sum(0, dtype=jnp.int32)


def draw(buffer: Buffer, key: jax.Array, count: int) -> tuple[dict[str, jax.Array], jax.Array]:
    """`count` rows, each independently and uniformly one of the rows that are stored, whatever their class; with replacement."""
    return draw_from(buffer, key, count), buffer["filled"].sum(dtype=jnp.int32) > 0


def draw_from(buffer: Buffer, key: jax.Array, count: int, memory: Memory = "device") -> dict[str, jax.Array]:
    """The rows of `draw`, on the device, for a buffer as `insert_into` takes it."""
    where = _index(buffer["filled"].ndim - 1, *chosen(buffer["filled"].reshape(-1), key, count))
    return {name: take(x, where, memory) for name, x in buffer["rows"].items()}


def chosen(filled: jax.Array, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`(class [count], slot [count])` of uniformly drawn stored rows; zeros while nothing is stored."""
    ends = jnp.cumsum(filled, dtype=jnp.int32)
    number = jax.random.randint(key, (count,), 0, jnp.maximum(ends[-1], 1))
    kind = jnp.minimum((number[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32), filled.shape[0] - 1)
    return kind, jnp.where(ends[-1] > 0, number - (ends - filled)[kind], 0)


def row_bytes(fields: Fields) -> int:
    """Bytes of one stored row."""
    return sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in fields.values())


def _index(lead: int, kind: jax.Array, slot: jax.Array) -> jax.Array:
    return jnp.stack([*[jnp.zeros_like(kind)] * lead, kind, slot], axis=1)

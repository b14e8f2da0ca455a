"""The buffer of one number of shards dealt out again to another, or to another number of slots.

Split: the stored rows of each class, in random order, go to the new shards in turn, so that fills differ by one row at most.
Moves: every stored row once, and never more than one array at a time is whole: XLA gathers it, on each device.
Costs: a restore on another number of devices, once. Memory for the largest array of the buffer on each device while it is dealt.
Keeps: every stored row while there is room. Where there is not, a uniformly random part of each class stays. The number of rows that
    each class was offered in all shards is kept and dealt out likewise, so that a reservoir goes on at the rate that it had.

K classes, S slots; old W x S places of a class, new V x R.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.data.rehearsal.buffer import Buffer


def redeal(buffer: Buffer, key: jax.Array, *, shards: int, slots: int, shardings: Any = None,
           row_shapes: Mapping[str, tuple[int, ...]] | None = None) -> Buffer:
    """`buffer` {"rows": {name: [W, K, S, ...]}, "filled": [W, K], "seen": [W, K]} as one of `shards` x K x `slots`, with `shardings`
    (a tree of the same form; None: wherever XLA puts it). `row_shapes`: how rows are stored now, if not as before."""
    place = functools.partial(jax.jit, out_shardings=None if shardings is None else shardings["filled"])
    filled, seen = place(functools.partial(_counts, shards=shards, slots=slots))(buffer["filled"], buffer["seen"])
    old_slots = next(iter(buffer["rows"].values())).shape[2]
    source = jax.jit(functools.partial(sources, slots=old_slots, places=shards * slots))(buffer["filled"], key)
    rows = {}
    for name, x in buffer["rows"].items():  # one at a time: each is whole on every device for a moment
        out = None if shardings is None else shardings["rows"][name]
        row = x.shape[3:] if row_shapes is None else row_shapes[name]
        device = x if x.sharding.memory_kind == "device" else jax.device_put(x, x.sharding.with_memory_kind("device"))
        rows[name] = jax.jit(functools.partial(_dealt, shards=shards, row=row), out_shardings=out)(device, source)
    return {"rows": rows, "filled": filled, "seen": seen}


def _counts(filled: jax.Array, seen: jax.Array, *, shards: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """`(filled, seen)` [V, K] of the new shards: rows in turn, at most `slots` of them."""
    turn = jnp.arange(shards, dtype=jnp.int32)[:, None]

    def dealt(count: jax.Array) -> jax.Array:
        total = count.sum(0, dtype=jnp.int32)[None, :]
        return (total + shards - 1 - turn) // shards
    return jnp.minimum(dealt(filled), slots), dealt(seen)


def sources(filled: jax.Array, key: jax.Array, *, slots: int, places: int) -> jax.Array:
    """For each class and place the old place whose row comes there: int32 [K, places]. Beyond what is stored it is any."""
    w, k = filled.shape
    stored = (jnp.arange(slots, dtype=jnp.int32)[None, None, :] < filled.T[:, :, None]).reshape(k, w * slots)
    order = jnp.argsort(jnp.where(stored, jax.random.uniform(key, stored.shape), 2.0), axis=1).astype(jnp.int32)
    return order[:, jnp.minimum(jnp.arange(places), w * slots - 1)]


def _dealt(x: jax.Array, source: jax.Array, *, shards: int, row: tuple[int, ...]) -> jax.Array:
    """[W, K, S, ...] -> [V, K, R, *row]: place j of a class is slot j // V of shard j % V."""
    w, k, slots = x.shape[:3]
    flat = jnp.moveaxis(x, 1, 0).reshape(k, w * slots, *x.shape[3:])
    taken = flat[jnp.arange(k)[:, None], source]
    return jnp.moveaxis(taken.reshape(k, -1, shards, *row), 2, 0)


def redeal_staged(staged: Any, *, shards: int, shardings: Any = None) -> Any:
    """The rows of every step stay those of that step: [W, T, Q, ...] -> [V, T, W * Q / V, ...]."""
    def one(x: jax.Array) -> jax.Array:
        w, steps, own = x.shape[:3]
        rows = jnp.moveaxis(x, 1, 0).reshape(steps, shards, w * own // shards, *x.shape[3:])
        return jnp.moveaxis(rows, 0, 1)
    return jax.jit(lambda tree: jax.tree.map(one, tree), out_shardings=shardings)(staged)

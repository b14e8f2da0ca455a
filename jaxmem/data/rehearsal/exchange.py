"""One balanced exchange: every shard draws the same number of its stored rows for every other.

Split: shard w of W draws q rows for each shard, independently and uniformly from all rows that it stores, with replacement.
Moves: one all-to-all of W * q packed rows a device; (W - 1) / W of them leave it. All arrays of a row and the shard's fill travel in
    the same words, so there is no second collective.
Costs: bytes a device = W * q * (bytes of a row + 4), known before.
Use: global sampling every few steps, as the prefetch of those steps. Avoid: where W * W does not divide what is drawn.

What comes out. Shards are strata: each sends the same number of rows, so where all store equally many, every stored row of every shard
has the same chance. Where they do not, rows of an emptier shard come too often, by mean fill / its fill. `unequal` says what is done:
`weight` gives each row the weight fill / mean fill, with which sums over the draw are unbiased for the mean over all stored rows;
`reject` keeps a row with probability fill / largest fill and gives the others weight 0, so that a row that is kept is uniformly one of
all stored rows, and R * mean fill / largest fill rows are expected to be. While nothing is stored every weight is 0.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.data.rehearsal.buffer import Buffer, draw_from
from jaxmem.data.rehearsal.slots import Memory

Unequal = Literal["weight", "reject"]
FILL = "jaxmem_fill"


def exchange(shard: Buffer, key: jax.Array, *, rows_per_pair: int, shards: int, axes: tuple[str, ...], unequal: Unequal,
             empty: Mapping[str, Any], memory: Memory = "device") -> tuple[dict[str, jax.Array], jax.Array]:
    """Inside `shard_map`: `({name: [W * q, ...]}, weights f32 [W * q])` for this shard, in random order.

    `shard` has one leading dim of size 1; `key` is the same in all. `empty` is a row: what one of weight 0 holds.
    """
    count = rows_per_pair * shards
    mine = jax.random.fold_in(key, lax.axis_index(axes)) if axes else key
    picking, mixing, keeping = jax.random.split(mine, 3)
    rows = {name: x.reshape(count, *jnp.shape(empty[name])) for name, x in draw_from(shard, picking, count, memory).items()}
    fill = shard["filled"].sum(dtype=jnp.int32)
    if axes:
        with jax.named_scope("rehearsal_exchange"):
            words, layout = pack({**rows, FILL: jnp.full((count,), fill, jnp.int32)})
            words = lax.all_to_all(words.reshape(shards, rows_per_pair, -1), axes, split_axis=0, concat_axis=0, tiled=True)
            rows = unpack(words.reshape(count, -1), layout)
        fills = rows.pop(FILL).reshape(shards, rows_per_pair)
    else:
        fills = jnp.full((1, rows_per_pair), fill, jnp.int32)
    share = fills.astype(jnp.float32).reshape(-1)
    if unequal == "weight":
        weights = share / jnp.maximum(fills[:, 0].astype(jnp.float32).mean(), 1.0 / shards)
    else:
        most = jnp.maximum(share.max(), 1.0)
        weights = (jax.random.uniform(keeping, (count,)) * most < share).astype(jnp.float32)
    order = jax.random.permutation(mixing, count)  # else the rows of one step would all come from the same shards
    rows, weights = {name: x[order] for name, x in rows.items()}, weights[order]
    return {name: jnp.where((weights > 0).reshape(count, *(1,) * (x.ndim - 1)), x, jnp.asarray(empty[name], x.dtype)[None])
            for name, x in rows.items()}, weights


# ---------------------------------------------------------------- rows as words

Layout = list[tuple[str, tuple[int, ...], jnp.dtype]]


def pack(rows: Mapping[str, jax.Array]) -> tuple[jax.Array, Layout]:
    """`[N, words]` of all arrays' bits and how to read them back: 32-bit words where every dtype has as many bits, bytes otherwise."""
    unit = jnp.dtype(jnp.uint32) if all(x.dtype.itemsize == 4 for x in rows.values()) else jnp.dtype(jnp.uint8)
    layout = [(name, x.shape[1:], x.dtype) for name, x in rows.items()]
    parts = [lax.bitcast_convert_type(x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x, unit).reshape(x.shape[0], -1)
             for x in rows.values()]
    return jnp.concatenate(parts, axis=1), layout


def unpack(words: jax.Array, layout: Layout) -> dict[str, jax.Array]:
    out, at = {}, 0
    for name, shape, dtype in layout:
        units = dtype.itemsize // words.dtype.itemsize
        size = units
        for n in shape:
            size *= n
        part = words[:, at:at + size].reshape(words.shape[0], *shape, *((units,) if units > 1 else ()))
        out[name] = part.astype(jnp.bool_) if dtype == jnp.bool_ else lax.bitcast_convert_type(part, dtype)
        at += size
    return out

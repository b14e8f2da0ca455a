"""Rows into and out of slots of one array, on the device or in pinned host memory.

Moves: only the rows, between host and device. Costs: `put` is in place when the array is donated, with one exception that the compiled
programs show: on GPU an update of a host array copies the whole array within host memory, each time.

On the device rows are written one after the other: a scatter of rows of several dims made libtpu 0.0.50 change the layout of the whole
array, and back. In host memory the update itself runs on the host (`compute_on`), whose operands must all lie there, constants too:
hence the plain gather and scatter, whose indices are made on the device. Rows there are flat, since libtpu aborts on tiled ones.

N rows, D leading dims that are indexed.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on

Memory = Literal["device", "pinned_host"]
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def stored_shape(row: tuple[int, ...], memory: Memory) -> tuple[int, ...]:
    """How a row of shape `row` is stored."""
    return row if memory == "device" or not row else (math.prod(row),)


def put(x: jax.Array, index: jax.Array, rows: jax.Array, memory: Memory = "device") -> jax.Array:
    """`x` with `rows` [N, ...] at `index` int32 [N, D]. Places must differ; one beyond the end of `x` is left out."""
    count, depth = index.shape
    rows = rows.reshape(count, *x.shape[depth:])
    if memory == "device":
        inside = (index < jnp.asarray(x.shape[:depth], jnp.int32)[None, :]).all(1)
        zeros = (jnp.int32(0),) * (x.ndim - depth)

        def one(i: jax.Array, x: jax.Array) -> jax.Array:
            at = (*(index[i, d] for d in range(depth)), *zeros)
            old = lax.dynamic_slice(x, at, (*(1,) * depth, *x.shape[depth:]))
            return lax.dynamic_update_slice(x, jnp.where(inside[i], rows[i].reshape(old.shape), old), at)
        return lax.fori_loop(0, count, one, x)
    lead = tuple(range(depth))
    where = lax.ScatterDimensionNumbers(update_window_dims=tuple(range(1, rows.ndim)), inserted_window_dims=lead,
                                        scatter_dims_to_operand_dims=lead)

    def update(x: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
        return lax.scatter(x, index, rows, where, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)
    on_host = compute_on(update, compute_type="device_host", out_memory_spaces=HOST)
    return on_host(x, jax.device_put(index, HOST), jax.device_put(rows, HOST))


def take(x: jax.Array, index: jax.Array, memory: Memory = "device") -> jax.Array:
    """The rows [N, ...] of `x`, as they are stored, at `index` int32 [N, D], on the device. Places must be inside of `x`."""
    lead, row = tuple(range(index.shape[1])), x.shape[index.shape[1]:]
    where = lax.GatherDimensionNumbers(offset_dims=tuple(range(1, 1 + len(row))), collapsed_slice_dims=lead, start_index_map=lead)

    def rows(x: jax.Array, index: jax.Array) -> jax.Array:
        return lax.gather(x, index, where, (*(1,) * len(lead), *row), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    if memory == "device":
        return rows(x, index)
    return jax.device_put(compute_on(rows, compute_type="device_host", out_memory_spaces=HOST)(x, jax.device_put(index, HOST)), DEVICE)

"""A checksum of arrays that does not depend on how they are split, so that what one mesh wrote another can verify.

Moves: one all-reduce of two words an array. Costs: one read of the arrays, on the devices where they already are.
Use: state before it is written and after it is read. Avoid: as protection against forgery; it is no cryptographic hash.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from jaxmem.optim.dims import names

Digests = dict[str, str]
PART_BYTES = 2**28  # of an array in host memory that is on the device at a time


class Pending:
    """Digests on their way: dispatched behind the program that makes `tree`, which may be donated afterwards.

    Elements' bits are mixed with their index in the whole array and added modulo 2^32, twice with different constants: an exchange
    of two elements, a zeroed block and a flipped bit all change the sum, the order of adding does not.
    """

    def __init__(self, tree: Any) -> None:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        self._names = ["/".join(names(path)) for path, _ in leaves]
        self._sums, self._bad = _sums(tuple(leaf for _, leaf in leaves))

    def result(self) -> tuple[Digests, int]:
        """`{"params/blocks/...": 16 hex digits}` and how many floating-point elements are not finite."""
        return {name: f"{a:08x}{b:08x}" for name, (a, b) in zip(self._names, np.asarray(self._sums), strict=True)}, int(self._bad)


def digests(tree: Any) -> tuple[Digests, int]:
    return Pending(tree).result()


@jax.jit
def _sums(leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("digest"):
        bad = sum((_not_finite(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)), jnp.uint32(0))
        return jnp.stack([_one(x) for x in leaves]), bad


def _one(x: jax.Array) -> jax.Array:
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return sum((_part(part, x.shape, dim, first) for part, dim, first in _from_host(x)), jnp.zeros((2,), jnp.uint32))
    return _part(x, x.shape, 0, 0)


def _not_finite(x: jax.Array) -> jax.Array:
    on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return sum(((~jnp.isfinite(part)).sum(dtype=jnp.uint32) for part in ([part for part, _, _ in _from_host(x)] if on_host else [x])),
               jnp.uint32(0))


def _from_host(x: jax.Array) -> Iterator[tuple[jax.Array, int, int]]:
    """`(part, dim, first)`: an array in pinned host memory in parts that come to the device one by one, along its largest dim but the
    first, over which it may be split."""
    if not x.ndim:
        yield jax.device_put(x, jax.memory.Space.Device), 0, 0
        return
    dim = max(range(1, x.ndim), key=lambda d: x.shape[d], default=0)
    parts = min(max(x.shape[dim], 1), -(-math.prod(x.shape) * x.dtype.itemsize // PART_BYTES))
    for i in range(parts):
        first, last = i * x.shape[dim] // parts, (i + 1) * x.shape[dim] // parts
        cut = functools.partial(jax.lax.slice_in_dim, start_index=first, limit_index=last, axis=dim)
        part = compute_on(cut, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)(x)
        yield jax.device_put(part, jax.memory.Space.Device), dim, first


def _part(x: jax.Array, shape: tuple[int, ...], along: int, first: int) -> jax.Array:
    """The sums of a part of an array of `shape`: the one that begins at `first` of dim `along`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")) if x.dtype != jnp.bool_ else x
    bits = bits.astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim, size in enumerate(shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) + jnp.uint32(first if dim == along else 0)
        index = index * jnp.uint32(size % 2**32) + place
    mixed = _mix(bits ^ _mix(index + jnp.uint32(0x9E3779B9)))
    return jnp.stack([mixed.sum(dtype=jnp.uint32), _mix(mixed ^ jnp.uint32(0x5BD1E995)).sum(dtype=jnp.uint32)])


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby, public domain): every input bit flips about half of the output's."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))

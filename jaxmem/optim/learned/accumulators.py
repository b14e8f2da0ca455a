"""What a learned rule remembers of one tensor, and in which bits: momenta, a second moment, factored second moments.

Every accumulator has its decays in its first axis, so that the other axes are split like the parameter's. Slow averages do not
survive rounding to nearest: an average with decay 0.999 moves by 0.1% of a gradient a step, less than half a step of bf16 or int8,
and stands still. Narrow momenta are therefore rounded up or down at random, with odds that make the mean right; the random bits are
a hash of the value and the step, so that a program has no random state and any split of it rounds alike.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Moments = Literal["f32", "bf16", "int8"]
STORED = {"f32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8}


def factored_dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(largest, second largest) dim of a tensor of two or more dims, the later one where sizes are equal; None below that.
    Row statistics are means over the first and column statistics means over the second (arXiv 1804.04235)."""
    if len(shape) < 2:
        return None
    order = sorted(range(len(shape)), key=lambda i: shape[i])
    return order[-1], order[-2]


def decays(initial: tuple[float, ...], offsets: jax.Array) -> jax.Array:
    """1 - (1 - initial) exp(10 offset): learned offsets in the variable log(1 - decay) / 10 (arXiv 2203.11860)."""
    return 1 - (1 - jnp.asarray(initial, jnp.float32)) * jnp.exp(10 * offsets)


def encode(x: jax.Array, moments: Moments, count: jax.Array, axis: int) -> tuple[jax.Array, jax.Array | None]:
    """(stored, scales) of f32 momenta; `scales` (int8 only) has one number for each line along `axis`, which stays as a dim of one."""
    if moments == "f32":
        return x, None
    if moments == "bf16":
        bits = lax.bitcast_convert_type(x, jnp.uint32) + (_noise(x, count) & jnp.uint32(0xFFFF))
        return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16), None
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
    up = (_noise(x, count) >> 8).astype(jnp.float32) * 2.0**-24
    codes = jnp.floor(x * jnp.where(scale > 0, 1 / scale, 0) + up)
    return jnp.clip(codes, -127, 127).astype(jnp.int8), scale


def decode(stored: jax.Array, scales: jax.Array | None) -> jax.Array:
    return stored.astype(jnp.float32) if scales is None else stored.astype(jnp.float32) * scales


def _noise(x: jax.Array, count: jax.Array) -> jax.Array:
    """32 bits for each value of an f32 array, from its own bits and the step (the finalizer of MurmurHash3)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)

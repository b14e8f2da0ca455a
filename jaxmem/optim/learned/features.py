"""What a learned rule's network sees of one tensor (Metz et al. 2022, arXiv 2203.11860).

Elementwise features differ for each element; line features are the same along one dim (row and column statistics) and enter the
first layer as one number for each row or column. A tensor of fewer than two dims has no lines: its full second moments stand in.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

TIMESCALES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)

Channels = dict[int, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """One block after its accumulators took in the gradient. All f32, broadcast against each other: g, p, v [layers, ...], lists of
    three by decay; row_factor * col_factor normalises as Adafactor does."""

    g: jax.Array
    p: jax.Array
    m: list[jax.Array]
    v: jax.Array
    rows: list[jax.Array]
    cols: list[jax.Array]
    row_factor: list[jax.Array]
    col_factor: list[jax.Array]
    momentum_factor: list[jax.Array] | None  # without lines: what multiplies momenta instead of the two factors
    mean_square_g: jax.Array


def step_embedding(count: jax.Array) -> jax.Array:
    """tanh(t / T - 1) for the eleven timescales; `count` is the number of steps done before this one."""
    return jnp.tanh(count.astype(jnp.float32) / jnp.asarray(TIMESCALES, jnp.float32) - 1)


def factored_momenta(s: Seen) -> list[jax.Array]:
    if s.momentum_factor is not None:
        return [m * f for m, f in zip(s.m, s.momentum_factor, strict=True)]
    return [m * r * c for m, r, c in zip(s.m, s.row_factor, s.col_factor, strict=True)]


def factored_gradients(s: Seen) -> list[jax.Array]:
    return [s.g * r * c for r, c in zip(s.row_factor, s.col_factor, strict=True)]


def small_fc_elements(s: Seen) -> Channels:
    root = lax.rsqrt(s.v + 1e-6)
    first = [s.g, s.p, *s.m, s.v, *(m * root for m in s.m), root, *factored_gradients(s)]
    return dict(enumerate(first)) | dict(enumerate(factored_momenta(s), 25))


def small_fc_lines(rows: list[jax.Array], cols: list[jax.Array]) -> Channels:
    roots = [lax.rsqrt(x + 1e-8) for x in (*rows, *cols)]
    return dict(enumerate([*rows, *cols, *roots], 13))


def celo_elements(s: Seen) -> Channels:
    root = lax.rsqrt(s.v + 1e-30)
    bound = 0.1 * jnp.sqrt(s.mean_square_g)
    first = [s.g, jnp.clip(s.g, -bound, bound), s.p, *s.m, s.v, *(m * root for m in s.m), root, *factored_gradients(s), s.g * root]
    return dict(enumerate(first)) | dict(enumerate(factored_momenta(s), 27))


def celo_lines(rows: list[jax.Array], cols: list[jax.Array]) -> Channels:
    roots = [lax.rsqrt(x + 1e-30) for x in (*rows, *cols)]
    return dict(enumerate([*rows, *cols, *roots], 15))

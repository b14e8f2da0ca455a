"""Gradients of a meta-loss by evolution strategies: two copies of an inner problem under opposite perturbations of the weights.

An inner problem is unrolled in truncations of equal length. Each truncation draws a perturbation eps ~ N(0, sigma^2), runs one copy
under theta + eps and the other under theta - eps, on the same data, and weighs the difference of their losses:

    gradient = (loss(theta + eps) - loss(theta - eps)) * w / (2 sigma^2)

* `pes` (Vicol, Metz, Sohl-Dickstein 2021, arXiv 2112.13835): w is the sum of all perturbations since the problem began, and each copy
  keeps its own state. Unbiased for the whole unroll, with a variance that grows with the number of truncations.
* `es`: w = eps, and both copies go on from one state. What a truncation does to later ones is not seen: biased, with less variance.
* `full_es`: w = eps, and a truncation is the whole problem from a new state. Unbiased, and the weights stand still all the while.

A loss of `loss_limit` or more, or none (NaN), counts as `loss_limit`; the difference is clipped at `difference_limit`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Estimator = Literal["pes", "es", "full_es"]
ESTIMATORS: tuple[Estimator, ...] = ("pes", "es", "full_es")

Theta = Any  # a tree of f32 arrays
State = Any  # of one copy of the inner problem
Unroll = Callable[[Theta, State], tuple[State, jax.Array]]  # one truncation -> (state after it, mean meta-loss [])


class Pair(NamedTuple):
    """Both copies of one inner problem: `states` has a leading axis of 2 (plus, minus); `drift` is the sum of its perturbations so far."""

    states: State
    drift: Theta


class Estimate(NamedTuple):
    gradient: Theta
    loss: jax.Array  # [], the mean of both copies, after the limit
    finite: jax.Array  # [] bool: both copies had a finite loss


def start(state: State, theta: Theta) -> Pair:
    """A problem that begins: both copies in `state`."""
    return Pair(jax.tree.map(lambda x: jnp.stack([x, x]), state), jax.tree.map(jnp.zeros_like, theta))


def perturbation(key: jax.Array, theta: Theta, sigma: float) -> Theta:
    leaves, tree = jax.tree.flatten(theta)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [sigma * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])


def truncation(estimator: Estimator, theta: Theta, pair: Pair, key: jax.Array, unroll: Unroll, *, sigma: float,
               loss_limit: float = 20.0, difference_limit: float = float("inf")) -> tuple[Pair, Estimate]:
    """One truncation of one inner problem. For `full_es`, `pair` has just begun and `unroll` runs to the problem's end."""
    eps = perturbation(key, theta, sigma)
    both = jax.tree.map(lambda x, e: jnp.stack([x + e, x - e]), theta, eps)
    states, losses = jax.vmap(unroll)(both, pair.states)
    drift = jax.tree.map(jnp.add, pair.drift, eps)
    if estimator == "es":
        states = jax.tree.map(lambda x: jnp.stack([x[0], x[0]]), states)
    finite = jnp.isfinite(losses).all()
    losses = jnp.minimum(jnp.where(jnp.isfinite(losses), losses, loss_limit), loss_limit)
    difference = jnp.clip(losses[0] - losses[1], -difference_limit, difference_limit)
    gradient = jax.tree.map(lambda w: difference * w / (2 * sigma ** 2), drift if estimator == "pes" else eps)
    return Pair(states, drift), Estimate(gradient, losses.mean(), finite)

"""What a method needs to know of a model: how to make its parameters, and its logits. Any model can be put into these two functions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """init: key -> parameters. logits: (parameters, inputs [B, ...]) -> f32 [B, classes], each row from its own input alone."""

    classes: int
    init: Callable[[jax.Array], Params]
    logits: Callable[[Params, jax.Array], jax.Array]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """f32 [B], in nats."""
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Of `values` [B]; 0 where all weights are 0."""
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1e-9)

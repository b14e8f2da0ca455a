"""What a method needs to know of a model: how to make its parameters, and its logits. Any model can be put into these two functions."""

import dataclasses
import math
from collections.abc import Callable, Sequence
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


def mlp(sizes: Sequence[int]) -> Classifier:
    """Dense layers with ReLU in between: `(784, 128, 10)` has 101,770 parameters. Weights as He et al. (arXiv 1502.01852), biases 0.

    Inputs are flattened; uint8 ones are taken to be in 0..255 and divided by 255.
    """
    last = len(sizes) - 2

    def init(key: jax.Array) -> Params:
        shapes = list(zip(sizes[:-1], sizes[1:], strict=True))
        return {f"layer{i}": {"weight": jax.random.normal(one, shape) * math.sqrt(2 / shape[0]), "bias": jnp.zeros(shape[1])}
                for i, (one, shape) in enumerate(zip(jax.random.split(key, len(shapes)), shapes, strict=True))}

    def logits(params: Params, inputs: jax.Array) -> jax.Array:
        x = inputs.reshape(len(inputs), -1)
        x = x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x
        for i in range(last + 1):
            x = x @ params[f"layer{i}"]["weight"] + params[f"layer{i}"]["bias"][None]
            x = jax.nn.relu(x) if i < last else x
        return x
    return Classifier(classes=sizes[-1], init=init, logits=logits)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """f32 [B], in nats."""
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Of `values` [B]; 0 where all weights are 0."""
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1e-9)

"""A scale-free learned rule in the manner of Celo2: the same accumulators, a network 30-8-8-1, no step count, no loss, no horizon.

direction = Adam's direction + the network's output, divided by its root mean square over the tensor (over each layer of a stack).
Every feature is divided by its own, with nothing added that has a unit: the step does not change when gradients or parameters are
multiplied by a number, and its size is the learning rate. With an output layer of zeros it is Adam at that size, which is the
control that any trained weights have to beat.

Differences from the published Celo2: the second moment is bias-corrected in Adam's direction, the gradient is clipped at 0.1 of its
own root mean square, and there is one output. Its weights do not fit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmem.optim.learned import features
from jaxmem.optim.learned.accumulators import Moments
from jaxmem.optim.learned.features import Seen
from jaxmem.optim.learned.fused import Kernel
from jaxmem.optim.learned.rule import CHUNK, Rule, Weights, scale_by

MOMENTUM_DECAYS = (0.9, 0.99, 0.999)
SECOND_DECAY = 0.95
FACTORED_DECAYS = (0.9, 0.99, 0.999)


def adam_direction(seen: Seen, count: jax.Array) -> jax.Array:
    """Bias-corrected fastest momentum over the root of the bias-corrected second moment."""
    done = count.astype(jnp.float32) + 1
    first, second = 1 - MOMENTUM_DECAYS[0] ** done, 1 - SECOND_DECAY ** done
    return seen.m[0] * lax.rsqrt(seen.v + 1e-30) * (jnp.sqrt(second) / first)


def celo_rule() -> Rule:
    return Rule(
        momentum_decays=lambda w: jnp.asarray(MOMENTUM_DECAYS, jnp.float32), second_decay=lambda w: jnp.float32(SECOND_DECAY),
        factored_decays=lambda w: jnp.asarray(FACTORED_DECAYS, jnp.float32),
        elements=features.celo_elements, lines=features.celo_lines, floor=1e-30, momentum_floor=1e-30,
        normaliser=lambda mean_square: lax.rsqrt(jnp.maximum(mean_square, 1e-37)),
        bias=lambda w, count: w["b0"], step=lambda outputs, seen, count: outputs[0] + adam_direction(seen, count), size="unit")


def scale_by_celo(weights: Weights, *, stacked: Any = None, moments: Moments = "f32",
                  chunk: int | None = CHUNK, fenced: bool = False, kernel: Kernel | None = None) -> optax.GradientTransformationExtraArgs:
    """`weights`: see `weights.py`; other arguments: see `rule.scale_by`."""
    return scale_by(celo_rule(), weights, stacked=stacked, moments=moments, chunk=chunk, fenced=fenced, kernel=kernel)

"""small_fc exactly as published: 39 features, a network 39-4-4-2 for each parameter, 7 learned decays, 197 meta-parameters.

Metz, Freeman, Harrison, Maheswaranathan, Sohl-Dickstein 2022, arXiv 2203.11860. The step is 0.001 * direction * exp(0.001 *
magnitude): a learning rate of 1 is the published rule, which has no other learning rate, no schedule and no weight decay.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmem.optim.learned import accumulators, features
from jaxmem.optim.learned.accumulators import Moments
from jaxmem.optim.learned.fused import Kernel
from jaxmem.optim.learned.rule import CHUNK, Rule, StepOf, Weights, scale_by

MOMENTUM_DECAYS = (0.9, 0.99, 0.999)
SECOND_DECAY = (0.999,)
FACTORED_DECAYS = (0.9, 0.99, 0.999)


def published_step(outputs: list[jax.Array], seen: features.Seen, count: jax.Array) -> jax.Array:
    del seen, count
    return outputs[0] * jnp.exp(0.001 * outputs[1]) * 0.001


def small_fc_rule(step: StepOf = published_step) -> Rule:
    return Rule(
        momentum_decays=lambda w: accumulators.decays(MOMENTUM_DECAYS, w["momentum_decays"]),
        second_decay=lambda w: accumulators.decays(SECOND_DECAY, w["rms_decays"])[0],
        factored_decays=lambda w: accumulators.decays(FACTORED_DECAYS, w["adafactor_decays"]),
        elements=features.small_fc_elements, lines=features.small_fc_lines, floor=1e-9, momentum_floor=1e-6,
        normaliser=lambda mean_square: lax.rsqrt(1e-5 + mean_square),
        bias=lambda w, count: w["b0"] + (features.step_embedding(count)[:, None] * w["w0"][28:]).sum(0),
        step=step, size="learned")


def scale_by_small_fc(weights: Weights, *, stacked: Any = None, moments: Moments = "f32", chunk: int | None = CHUNK, fenced: bool = False,
                      kernel: Kernel | None = None) -> optax.GradientTransformationExtraArgs:
    """`weights`: see `weights.py`; other arguments: see `rule.scale_by`."""
    return scale_by(small_fc_rule(), weights, stacked=stacked, moments=moments, chunk=chunk, fenced=fenced, kernel=kernel)

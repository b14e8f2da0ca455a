"""small_fc beside a nominal step: a hand-made direction carries the optimization and the network corrects it.

Published with `learned_optimization` (its MLPNomLOpt): the network has four outputs, 39-4-4-4, of which the first two make small_fc's
step; with a learned controller the third scales the nominal step by exp(0.001 * output) for each parameter. Its weight decay, and
the fourth output that scales it, belong outside.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmem.optim.learned.accumulators import Moments
from jaxmem.optim.learned.features import Seen
from jaxmem.optim.learned.fused import Kernel
from jaxmem.optim.learned.rule import CHUNK, StepOf, Weights, scale_by
from jaxmem.optim.learned.small_fc import published_step, small_fc_rule

# sgd: the gradient; momentum: the slowest; aggregated: the mean over the three momenta; adam and adam_aggregated: divided by the
# root of the second moment (without bias correction, as published)
Nominal = Literal["sgd", "momentum", "aggregated", "adam", "adam_aggregated"]


def nominal_direction(seen: Seen, nominal: Nominal) -> jax.Array:
    root = lax.rsqrt(seen.v + 1e-6)
    match nominal:
        case "sgd":
            return seen.g
        case "momentum":
            return seen.m[2]
        case "aggregated":
            return (seen.m[0] + seen.m[1] + seen.m[2]) / 3
        case "adam":
            return seen.m[2] * root
        case "adam_aggregated":
            return (seen.m[0] + seen.m[1] + seen.m[2]) / 3 * root


def nominal_step(nominal: Nominal, step_size: float, controller: Literal["none", "learned"]) -> StepOf:
    def step(outputs: list[jax.Array], seen: Seen, count: jax.Array) -> jax.Array:
        # without a controller the published code has an output of one here, and not zero
        scale = jnp.exp(0.001 * (outputs[2] if controller == "learned" else jnp.ones_like(outputs[2])))
        return published_step(outputs, seen, count) + step_size * scale * nominal_direction(seen, nominal)
    return step


def scale_by_small_fc_nominal(weights: Weights, *, nominal: Nominal = "adam_aggregated", step_size: float = 1e-3,
                              controller: Literal["none", "learned"] = "none", stacked: Any = None, moments: Moments = "f32",
                              chunk: int | None = CHUNK, fenced: bool = False,
                              kernel: Kernel | None = None) -> optax.GradientTransformationExtraArgs:
    """`step_size` is of the nominal step; arguments after `controller`: see `rule.scale_by`."""
    return scale_by(small_fc_rule(nominal_step(nominal, step_size, controller)), weights, stacked=stacked, moments=moments, chunk=chunk,
                    fenced=fenced, kernel=kernel)

"""Dark experience replay (Buzzega et al., arXiv 2004.07211): rows come back with the logits that the model gave them when they were new.

DER++ adds to the loss of the incoming batch `alpha` x the squared error against those logits, on one draw from the buffer, and `beta` x
the cross-entropy against the labels, on a second, independent draw. DER is beta = 0. A buffered row costs `classes` numbers more.

B rows of a draw, C classes.
"""

import jax
import jax.numpy as jnp

from jaxmem.continual.classifier import cross_entropy, weighted_mean


def stored(logits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Logits [B, C] as the buffer holds them, cut off from the gradient."""
    return jax.lax.stop_gradient(logits).astype(dtype)


def distillation(logits: jax.Array, before: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean over rows and classes of (logits - before)^2; `weights` [B] are 0 for rows that are no rows."""
    return weighted_mean(jnp.square(logits - before.astype(logits.dtype)).mean(-1), weights)


def loss(incoming: jax.Array, labels: jax.Array, first: tuple[jax.Array, jax.Array, jax.Array],
         second: tuple[jax.Array, jax.Array, jax.Array], *, alpha: float, beta: float) -> jax.Array:
    """DER++. `incoming` [B, C] and `labels` [B]; `first` = (logits, logits before, weights), `second` = (logits, labels, weights)."""
    own = cross_entropy(incoming, labels).mean()
    return own + alpha * distillation(*first) + beta * weighted_mean(cross_entropy(second[0], second[1]), second[2])

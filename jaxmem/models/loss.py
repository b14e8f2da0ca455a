"""Cross-entropy of next tokens and of labels, without ever a replicated logit: with the vocabulary split, only [B, S] sums cross devices.

B batch, S sequence, D embed, V vocab, or classes.
"""

import functools

import jax
import jax.numpy as jnp

from jaxmem.dims import constrain


@jax.custom_vjp
def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], f32 [B, S]. Saves the logits in their own dtype and one f32 a token for the backward pass."""
    return _forward(logits_BSV, targets_BS)[0]


def _forward(logits_BSV, targets_BS):
    logits = logits_BSV.astype(jnp.float32)
    top = logits.max(-1, keepdims=True)
    normaliser = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    # a masked sum, not a gather: with V split every device sums its part
    hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets_BS[..., None]
    return normaliser - jnp.where(hit, logits, 0).sum(-1), (logits_BSV, targets_BS, normaliser)


def _backward(saved, grad_BS):
    logits_BSV, targets_BS, normaliser = saved
    probability = jnp.exp(logits_BSV.astype(jnp.float32) - normaliser[..., None])
    hit = jax.lax.broadcasted_iota(jnp.int32, logits_BSV.shape, logits_BSV.ndim - 1) == targets_BS[..., None]
    return ((probability - hit.astype(jnp.float32)) * grad_BS[..., None]).astype(logits_BSV.dtype), None


cross_entropy.defvjp(_forward, _backward)


def head_loss(hidden_BSD: jax.Array, weights_DV: jax.Array, targets_BS: jax.Array, *, softcap: float | None, chunks: int) -> jax.Array:
    """Summed cross-entropy over targets >= 0, f32 scalar. With `chunks` > 1 the logits of one part of the sequence exist at a time
    and are computed again in the backward pass."""

    def part(hidden, targets):
        with jax.named_scope("head"):
            hidden = constrain(hidden, "batch", "seq_logits", None)
            logits = constrain(jnp.einsum("bsd,dv->bsv", hidden, weights_DV), "batch", "seq_logits", "vocab_logits")
            if softcap is not None:
                logits = softcap * jnp.tanh(logits / softcap)
        with jax.named_scope("loss"):
            return jnp.where(targets >= 0, cross_entropy(logits, targets), 0).sum()

    if chunks == 1:
        return part(hidden_BSD, targets_BS)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, policy=None)
    def step(total, piece):
        return total + part(*piece), None
    return jax.lax.scan(step, jnp.float32(0), (split(hidden_BSD), split(targets_BS)))[0]


def counted(targets: jax.Array) -> jax.Array:
    """How many targets (or labels) count, f32 scalar: those that are not below 0, and at least 1, for it divides."""
    return jnp.maximum((targets >= 0).sum(), 1).astype(jnp.float32)


def label_loss(logits_BV: jax.Array, labels_B: jax.Array) -> jax.Array:
    """Summed cross-entropy over labels >= 0, f32 scalar."""
    with jax.named_scope("loss"):
        return jnp.where(labels_B >= 0, cross_entropy(logits_BV, labels_B), 0).sum()


def correct(logits_BV: jax.Array, labels_B: jax.Array) -> jax.Array:
    """How many labels have the largest score, f32 scalar. A label below 0 never has."""
    with jax.named_scope("loss"):
        return (logits_BV.argmax(-1).astype(labels_B.dtype) == labels_B).sum().astype(jnp.float32)

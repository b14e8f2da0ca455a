"""One training step of a method: the loss over incoming and remembered rows, the update, and what the buffer takes in.

What a step trains on was drawn at the end of an earlier one, so neither waits for the other: the exchange between devices and the
insertion need nothing of this step's gradients. The rows of all sources go through the model together; each device joins its own, so
that none moves for it.

B incoming rows, R remembered rows, C classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.continual import der
from jaxmem.continual.classifier import Classifier, cross_entropy, weighted_mean
from jaxmem.continual.memory import Memory
from jaxmem.continual.methods import Method
from jaxmem.data.rehearsal.programs import shards_on


class State(NamedTuple):
    """`buffer` is None for a method without one."""

    params: Any
    opt_state: Any
    buffer: Any


Given = dict[str, jax.Array]  # inputs [B, ...], labels [B]; for replay also old_inputs, old_labels, old_weights [R]
Step = Callable[[State, Given], tuple[State, jax.Array]]


def make_step(model: Classifier, tx: optax.GradientTransformationExtraArgs, method: Method, memory: Memory | None, mesh: Mesh,
              like: State) -> Step:
    """(state, given) -> (state, loss), jitted; the state is donated and stays where `like` lies. The loss leaves out EWC's penalty."""
    width = shards_on(mesh)

    def step(state: State, given: Given) -> tuple[State, jax.Array]:
        drawn = memory.staged(state.buffer) if memory else []
        if method.replay:
            drawn = [{name: given[f"old_{name}"] for name in ("inputs", "labels", "weights")}]

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            sources = [given["inputs"], *(one["inputs"] for one in drawn)]
            incoming, *remembered = parted(model.logits(params, together(sources, width)), [len(one) for one in sources], width)
            return total(incoming, given["labels"], remembered, drawn, method), incoming
        (value, incoming), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        buffer = state.buffer
        if memory:
            rows = {"inputs": given["inputs"], "labels": given["labels"]}
            if method.distils:
                rows["logits"] = der.stored(incoming, jnp.dtype(jnp.float32))
            buffer = memory.after(buffer, rows)
        return State(optax.apply_updates(state.params, updates), opt_state, buffer), value
    places = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(step, donate_argnums=0, out_shardings=(places, NamedSharding(mesh, P())))


def total(incoming: jax.Array, labels: jax.Array, remembered: Sequence[jax.Array], drawn: Sequence[Given], method: Method) -> jax.Array:
    """The method's loss from logits [B, C] and a [R, C] for each draw. Rehearsal and replay: the mean over all rows that are rows."""
    if method.alpha is not None and method.beta is not None:
        first, second = zip(remembered, drawn, strict=True)
        return der.loss(incoming, labels, (first[0], first[1]["logits"], first[1]["weights"]),
                        (second[0], second[1]["labels"], second[1]["weights"]), alpha=method.alpha, beta=method.beta)
    own = cross_entropy(incoming, labels)
    if not drawn:
        return own.mean()
    values = [own, *(cross_entropy(one, rows["labels"]) for one, rows in zip(remembered, drawn, strict=True))]
    return weighted_mean(jnp.concatenate(values), jnp.concatenate([jnp.ones_like(own), *(rows["weights"] for rows in drawn)]))


def together(sources: Sequence[jax.Array], width: int) -> jax.Array:
    """The rows of all sources, each device's own beside one another: [B + R + ...]. `width` devices divide every source."""
    if len(sources) == 1:
        return sources[0]
    split = [one.reshape(width, -1, *one.shape[1:]) for one in sources]
    return jnp.concatenate(split, axis=1).reshape(-1, *sources[0].shape[1:])


def parted(rows: jax.Array, sizes: Sequence[int], width: int) -> list[jax.Array]:
    """What `together` joined, a source each."""
    if len(sizes) == 1:
        return [rows]
    split, out, start = rows.reshape(width, -1, *rows.shape[1:]), [], 0
    for size in sizes:
        out.append(split[:, start:start + size // width].reshape(size, *rows.shape[1:]))
        start += size // width
    return out

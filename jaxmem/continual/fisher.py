"""The diagonal of a classifier's Fisher information: how much each parameter matters to what the model says about some inputs.

F_i = mean over inputs x of E_y [ (d log p(y|x) / d theta_i)^2 ], with y from the model's own p(y|x). How it is computed changes what
EWC does and is often unreported (van de Ven, arXiv 2502.11756). Here gradients are always those of single examples: the square of a
batch's mean gradient is another quantity, and smaller by about the batch's size.
* `exact`: the expectation over all classes; as many backward passes an input as there are classes.
* `sampled`: one class drawn from p(y|x) for each input; unbiased, one backward pass.
* `empirical`: the data's labels. Not the Fisher information: near 0 where the model fits them, whatever the curvature is.

N inputs, C classes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.continual.classifier import Classifier, Params
from jaxmem.data.rehearsal.programs import batch_axes, shards_on

Kind = Literal["exact", "sampled", "empirical"]


def fisher_diagonal(model: Classifier, params: Params, inputs: np.ndarray, labels: np.ndarray, *, kind: Kind = "exact", mesh: Mesh,
                    key: jax.Array, chunk: int = 16) -> Params:
    """F as f32 arrays of the shapes and shardings of `params`, from `inputs` [N, ...] (and int `labels` [N] where `kind` is empirical).

    `chunk` inputs a device are seen at a time, split over the mesh axes of the batch: the gradients of that many examples (times C where
    `kind` is exact) are held at once. Raises ValueError where there are no inputs.
    """
    if not len(inputs):
        raise ValueError("no inputs: the mean over none is not known")
    size = chunk * shards_on(mesh)
    steps = -(-len(inputs) // size)

    def chunked(rows: np.ndarray) -> jax.Array:
        padded = np.concatenate([rows, np.zeros((steps * size - len(rows), *rows.shape[1:]), rows.dtype)])
        return jax.device_put(padded.reshape(steps, size, *rows.shape[1:]), NamedSharding(mesh, P(None, batch_axes(mesh) or None)))
    rows = (chunked(inputs), chunked(labels.astype(np.int32)), chunked(np.ones(len(inputs), np.float32)))
    leaves, tree = jax.tree.flatten(params)
    with jax.set_mesh(mesh):
        return _mean(model, kind, tree, tuple(leaf.sharding for leaf in leaves))(params, key, rows)


@functools.lru_cache(maxsize=8)
def _mean(model: Classifier, kind: Kind, tree: Any, shardings: tuple) -> Callable[..., Params]:
    """The jitted mean over rows [steps, size, ...] of weight 1; kept, so that the tasks of a sequence compile it once."""
    def mean(params: Params, key: jax.Array, rows: tuple[jax.Array, ...]) -> Params:
        def one_chunk(sums: Params, given: tuple[jax.Array, ...]) -> tuple[Params, None]:
            inputs, labels, weights, key = given
            keys = jax.random.split(key, len(labels))
            squares = jax.vmap(lambda x, y, k: _squares(model, params, x, y, k, kind))(inputs, labels, keys)
            return jax.tree.map(lambda s, q: s + jnp.tensordot(weights, q, 1), sums, squares), None
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        sums, _ = jax.lax.scan(one_chunk, zeros, (*rows, jax.random.split(key, len(rows[2]))))
        return jax.tree.map(lambda leaf: leaf / rows[2].sum(), sums)
    return jax.jit(mean, out_shardings=tree.unflatten(shardings))


def _squares(model: Classifier, params: Params, x: jax.Array, label: jax.Array, key: jax.Array, kind: Kind) -> Params:
    """The squared gradients of one example, f32."""
    def log_p(params: Params) -> jax.Array:
        return jax.nn.log_softmax(model.logits(params, x[None])[0].astype(jnp.float32))

    def squared(of: Any) -> Params:
        return jax.tree.map(lambda leaf: jnp.square(leaf.astype(jnp.float32)), of)
    if kind == "exact":
        values, pullback = jax.vjp(log_p, params)
        each = jax.vmap(lambda one: squared(pullback(one)[0]))(jnp.eye(model.classes, dtype=jnp.float32))
        return jax.tree.map(lambda leaf: jnp.tensordot(jnp.exp(values), leaf, 1), each)
    chosen = jax.random.categorical(key, log_p(params)) if kind == "sampled" else label
    return squared(jax.grad(lambda p: jnp.take(log_p(p), chosen))(params))

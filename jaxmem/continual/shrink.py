"""Shrink and perturb (Ash and Adams, NeurIPS 2020, arXiv 1910.08475): before new data, weights are scaled down and some noise is added.

A warm start reaches the training loss of a fresh one and generalises worse; this gives most of the generalisation back and keeps most
of the start. Every array keeps its sharding and its dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.spec import InputError

Tree = Any


def shrink_and_perturb(params: Tree, fresh: Tree, *, shrink: float, perturb: float) -> Tree:
    """`shrink * params + perturb * fresh`, with the shardings of `params`.

    `fresh`: parameters as a new model would have them, from a key of their own; their noise has the scale of each layer's
    initialisation, and what begins at 0 or 1 is moved towards it. Raises InputError for a `shrink` outside 0..1 or a negative `perturb`.
    """
    if not 0 <= shrink <= 1:
        raise InputError(f"shrink={shrink:g}: expected a factor between 0 (forget all) and 1 (keep all)")
    if perturb < 0:
        raise InputError(f"perturb={perturb:g}: expected 0 or more")

    def mixed(old: Tree, new: Tree) -> Tree:
        return jax.tree.map(lambda a, b: (shrink * a.astype(jnp.float32) + perturb * b.astype(jnp.float32)).astype(a.dtype), old, new)
    return jax.jit(mixed, out_shardings=_shardings(params))(params, fresh)


def made_like(make: Callable[..., Tree], like: Tree, *args: Any) -> Tree:
    """`make(*args)` with the shardings of `like`: fresh parameters, or an optimizer's state with its moments at zero."""
    return jax.jit(make, out_shardings=_shardings(like))(*args)


def _shardings(tree: Tree) -> Tree:
    """Of every array that lies on as many devices as any; None, wherever XLA puts it, for one that lies on fewer: a counter, say."""
    most = max((len(leaf.sharding.device_set) for leaf in jax.tree.leaves(tree)), default=0)
    return jax.tree.map(lambda leaf: leaf.sharding if len(leaf.sharding.device_set) == most else None, tree)

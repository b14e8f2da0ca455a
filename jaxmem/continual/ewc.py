"""Elastic weight consolidation (Kirkpatrick et al., arXiv 1612.00796) as an optax transformation.

The penalty strength/2 * sum_i F_i (theta_i - anchor_i)^2 keeps parameters near `anchor`, where they were after the last task, as far as
the Fisher information F says that they matter. Over several tasks there is one F, the sum of all, and one anchor, the latest: what
Huszar (arXiv 1712.03847) shows to follow from the Bayesian argument. So the state costs 8 bytes a parameter, however many tasks.

    tx = optax.chain(ewc.add_penalty(100.0), optax.adam(1e-3))
    state = tx.init(params)
    ...                                                     # train on a task
    state = ewc.consolidate(state, params, fisher_diagonal(...))

Its state has the shapes and the shardings of the parameters. The transformation comes first in a chain: the penalty is a part of the
loss, and what clips or normalises gradients has to see it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.spec import InputError


class EwcState(NamedTuple):
    """fisher, anchor: f32 trees like the parameters. Before the first `consolidate`, fisher is 0 and nothing is held."""

    fisher: optax.Params
    anchor: optax.Params


def add_penalty(strength: float) -> optax.GradientTransformation:
    """Adds the penalty's gradient, `strength * F * (params - anchor)`, to the updates. Raises InputError for a negative `strength`."""
    if strength < 0:
        raise InputError(f"ewc={strength:g}: expected 0 or more; a negative penalty drives parameters away")

    def init(params: optax.Params) -> EwcState:
        anchor = _f32(jax.tree.map(jnp.copy, params))  # a step may donate the parameters
        return EwcState(fisher=jax.tree.map(jnp.zeros_like, anchor), anchor=anchor)

    def update(updates: optax.Updates, state: EwcState, params: optax.Params | None = None) -> tuple[optax.Updates, EwcState]:
        if params is None:
            raise ValueError("the penalty is on parameters: update(updates, state, params)")

        def held(u: jax.Array, f: jax.Array, p: jax.Array, a: jax.Array) -> jax.Array:
            return u + (jnp.float32(strength) * f * (p.astype(jnp.float32) - a)).astype(u.dtype)
        return jax.tree.map(held, updates, state.fisher, params, state.anchor), state
    return optax.GradientTransformation(init, update)


def penalty(state: EwcState, params: optax.Params, strength: float) -> jax.Array:
    """strength/2 * sum F (params - anchor)^2, f32: what belongs in a reported loss."""
    each = jax.tree.map(lambda f, p, a: (f * jnp.square(p.astype(jnp.float32) - a)).sum(), state.fisher, params, state.anchor)
    return jnp.float32(strength / 2) * sum(jax.tree.leaves(each))


def consolidate(opt_state: optax.OptState, params: optax.Params, fisher: optax.Params, *, keep: float = 1.0) -> optax.OptState:
    """The optimizer's state after a task: F becomes `keep * F + fisher`, the anchor `params`; everything else is as it was.

    `keep` below 1 lets old tasks fade (online EWC, arXiv 1805.06370). Raises ValueError where no `add_penalty` is in the chain.
    """
    found = 0

    def renewed(node: object) -> object:
        nonlocal found
        if not isinstance(node, EwcState):
            return node
        found += 1
        total = jax.tree.map(lambda old, new: keep * old + new, node.fisher, fisher)
        return EwcState(fisher=total, anchor=_f32(jax.tree.map(jnp.copy, params)))
    out = jax.tree.map(renewed, opt_state, is_leaf=lambda node: isinstance(node, EwcState))
    if not found:
        raise ValueError("the optimizer's state holds no EwcState: put ewc.add_penalty(strength) into its chain")
    return out


def _f32(tree: optax.Params) -> optax.Params:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

"""One meta-step: every inner problem does a truncation, and Adam takes the mean of their meta-gradients.

Split: problems over the mesh axis `data`, each device its share of every family; weights, moments and data sets on every device.
Moves: one all-reduce of the meta-gradient (some hundred numbers) a meta-step; a problem needs no other. Costs: a device waits for the
slowest. One program: families are separate loops in it, problems of a family a `vmap`, inner steps a scan.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.meta import es, problem
from jaxmem.optim.learned.meta.problem import Data, Problem
from jaxmem.optim.learned.meta.recipe import Recipe
from jaxmem.optim.learned.meta.tasks import Task


class MetaState(NamedTuple):
    """All that a run needs to go on: with the recipe it decides every later number."""

    theta: es.Theta
    adam: optax.OptState
    problems: dict[str, Problem]  # by family, each with a leading axis of `recipe.tasks`
    iteration: jax.Array  # int32 [], meta-steps done


class Measured(NamedTuple):
    """Of one meta-step. `losses` are mean validation losses in nats by family, over both copies of every problem; `broken` counts problems
    whose loss was not finite."""

    losses: dict[str, jax.Array]
    gradient_norm: jax.Array
    broken: jax.Array


def mesh_of(devices: int | None = None) -> Mesh:
    found = jax.devices()[:devices]
    return Mesh(np.array(found), ("data",))


def data_of(tasks: Mapping[str, Task], mesh: Mesh) -> dict[str, Data]:
    """Training and validation rows, whole on every device."""
    return jax.device_put({name: problem.data_of(task) for name, task in tasks.items()}, NamedSharding(mesh, P()))


def outer(recipe: Recipe) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(recipe.outer_lr, recipe.iterations))


def keys_of(recipe: Recipe, family: int, iteration: jax.Array) -> jax.Array:
    """One key for each problem of a family in one meta-step (-1: what is drawn before the first)."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), iteration + 1), family)
    return jax.random.split(key, recipe.tasks)


def shardings(state: MetaState, mesh: Mesh) -> Any:
    """A tree like `state`: problems over `data`, everything else on every device."""
    def all_of(tree: Any, spec: P) -> Any:
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), tree)
    return state._replace(theta=all_of(state.theta, P()), adam=all_of(state.adam, P()), problems=all_of(state.problems, P("data")),
                          iteration=all_of(state.iteration, P()))


def start(recipe: Recipe, tasks: Mapping[str, Task], mesh: Mesh, theta: es.Theta | None = None) -> MetaState:
    """The state before the first meta-step, from untrained weights or from `theta`."""
    def make() -> MetaState:
        own = learned_weights.initial(recipe.rule, jax.random.key(recipe.seed)) if theta is None else theta
        problems = {}
        for i, (name, task) in enumerate(tasks.items()):
            keys = keys_of(recipe, i, jnp.int32(-1))
            problems[name] = jax.vmap(lambda key, task=task: problem.first(recipe, task, own, key))(keys)
        return MetaState(own, outer(recipe).init(own), problems, jnp.zeros((), jnp.int32))
    return jax.jit(make, out_shardings=shardings(jax.eval_shape(make), mesh))()


def build(recipe: Recipe, tasks: Mapping[str, Task], mesh: Mesh) -> jax.stages.Wrapped:
    """The meta-step, to be lowered and compiled: (state, data) -> (state, Measured); its state is donated."""
    def share(theta: es.Theta, problems: dict[str, Problem], keys: dict[str, jax.Array], data: dict[str, Data]) -> tuple:
        """One device's problems -> (problems, the sums of what they say over all devices)."""
        moved, said = {}, {}
        for name, task in tasks.items():
            def one(own: Problem, key: jax.Array, task: Task = task, rows: Data = data[name]) -> tuple[Problem, problem.Seen]:
                move = problem.whole if recipe.estimator == "full_es" else problem.advance
                return move(recipe, task, rows, theta, own, key)
            moved[name], seen = jax.vmap(one)(problems[name], keys[name])
            bad = sum(jnp.where(jnp.isfinite(g).reshape(g.shape[0], -1).all(1), 0, 1) for g in jax.tree.leaves(seen.gradient)) > 0
            gradient = jax.tree.map(lambda g, bad=bad: jnp.where(bad.reshape(-1, *(1,) * (g.ndim - 1)), 0, g).sum(0), seen.gradient)
            said[name] = gradient, seen.loss.sum(), (~seen.finite).astype(jnp.int32).sum()
        return moved, jax.lax.psum(said, "data")

    def meta_step(state: MetaState, data: dict[str, Data]) -> tuple[MetaState, Measured]:
        keys = {name: keys_of(recipe, i, state.iteration) for i, name in enumerate(tasks)}
        problems = state.problems
        if recipe.estimator == "full_es":
            length = problem.draw(recipe, jax.random.fold_in(jax.random.key(recipe.seed), -1 - state.iteration)).length
            problems = {name: p._replace(length=jnp.full_like(p.length, length)) for name, p in problems.items()}
        problems, said = jax.shard_map(share, mesh=mesh, in_specs=(P(), P("data"), P("data"), P()), out_specs=(P("data"), P()),
                                       check_vma=False)(state.theta, problems, keys, data)
        count = recipe.tasks * len(tasks)
        gradient = jax.tree.map(lambda *g: sum(g) / count, *(s[0] for s in said.values()))
        with jax.numpy_dtype_promotion("standard"):
            updates, adam = outer(recipe).update(gradient, state.adam, state.theta)
        theta = optax.apply_updates(state.theta, updates)
        measured = Measured({name: s[1] / recipe.tasks for name, s in said.items()}, optax.tree.norm(gradient),
                            sum(s[2] for s in said.values()))
        return MetaState(theta, adam, problems, state.iteration + 1), measured
    return jax.jit(meta_step, donate_argnums=0)

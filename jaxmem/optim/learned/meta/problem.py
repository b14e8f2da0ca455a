"""Inner problems: a task trained from new parameters, for a length and with a peak learning rate drawn for it.

Lengths are log-uniform, in whole truncations, so that problems begin and end between truncations only. The very first problems get a
part of their length, uniform in 0..1: from then on tasks are at different places of their problems, and a meta-gradient sees all of
them. The learning rate follows a cosine to zero over the problem's length.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.optim.learned.celo import scale_by_celo
from jaxmem.optim.learned.meta import es
from jaxmem.optim.learned.meta.recipe import LIMITS, Recipe
from jaxmem.optim.learned.meta.tasks import Task
from jaxmem.optim.learned.nominal import scale_by_small_fc_nominal
from jaxmem.optim.learned.small_fc import scale_by_small_fc

MAKE = {"celo": scale_by_celo, "small_fc": scale_by_small_fc, "small_fc_nominal": scale_by_small_fc_nominal}


class Split(NamedTuple):
    inputs: jax.Array  # [rows, ...]
    labels: jax.Array  # int32 [rows]


class Data(NamedTuple):
    train: Split
    valid: Split


class Problem(NamedTuple):
    """One inner problem under way, or a stack of them. `position` steps are done of `length`."""

    pair: es.Pair
    position: jax.Array  # int32
    length: jax.Array  # int32, a multiple of the truncation
    lr: jax.Array  # f32, at the peak


class Seen(NamedTuple):
    """What one truncation of one problem says."""

    gradient: es.Theta
    loss: jax.Array  # f32 [], mean validation loss in nats over the truncation and both copies (of log_loss the geometric mean of both)
    finite: jax.Array  # bool []


def data_of(task: Task) -> Data:
    def split(pair: tuple[Any, Any]) -> Split:
        return Split(jnp.asarray(pair[0]), jnp.asarray(pair[1], jnp.int32))
    return Data(split(task.train), split(task.valid))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What is drawn when a problem begins."""

    length: jax.Array
    lr: jax.Array


def draw(recipe: Recipe, key: jax.Array) -> Drawn:
    """A length in truncations times `recipe.truncation`, and a learning rate, both log-uniform."""
    a, b = jax.random.split(key)
    low, high = (math.log(n / recipe.truncation) for n in recipe.lengths)
    truncations = jnp.round(jnp.exp(jax.random.uniform(a, (), jnp.float32, low, high))).astype(jnp.int32)
    low, high = map(math.log, recipe.learning_rates)
    return Drawn(jnp.maximum(truncations, 1) * recipe.truncation, jnp.exp(jax.random.uniform(b, (), jnp.float32, low, high)))


def begin(recipe: Recipe, task: Task, theta: es.Theta, key: jax.Array, *, length: jax.Array | None = None) -> Problem:
    """A new problem; `length` in place of a drawn one."""
    own, drawn = jax.random.split(key)
    params = task.init(own)
    found = draw(recipe, drawn)
    state = params, MAKE[recipe.rule](theta).init(params)
    return Problem(es.start(state, theta), jnp.zeros((), jnp.int32), found.length if length is None else length, found.lr)


def first(recipe: Recipe, task: Task, theta: es.Theta, key: jax.Array) -> Problem:
    """A problem of the first generation, cut short by a uniform part."""
    key, cut = jax.random.split(key)
    problem = begin(recipe, task, theta, key)
    truncations = problem.length // recipe.truncation
    kept = jnp.ceil(truncations.astype(jnp.float32) * (1 - jax.random.uniform(cut, ()))).astype(jnp.int32)
    return problem._replace(length=jnp.clip(kept, 1, truncations) * recipe.truncation)


def unroll(recipe: Recipe, task: Task, data: Data, key: jax.Array, problem: Problem, position: jax.Array, theta: es.Theta,
           state: Any) -> tuple[Any, jax.Array]:
    """`recipe.truncation` inner steps from `position`: (state, meta-loss). The meta-loss, in nats, is the mean over the steps of the
    validation loss of the parameters after each, or its logarithm."""
    tx = MAKE[recipe.rule](theta)
    shape = recipe.truncation, recipe.batch
    a, b = jax.random.split(key)
    rows = (jax.random.randint(a, shape, 0, data.train.labels.shape[0]), jax.random.randint(b, shape, 0, data.valid.labels.shape[0]))

    def step(state: Any, xs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        params, opt_state = state
        train, valid, i = xs
        gradients = jax.grad(task.loss)(params, data.train.inputs[train], data.train.labels[train])
        direction, opt_state = tx.update(gradients, opt_state, params)
        done = (position + i).astype(jnp.float32) / problem.length.astype(jnp.float32)
        lr = problem.lr * 0.5 * (1 + jnp.cos(jnp.pi * done))
        params = jax.tree.map(lambda p, u: p - lr * u, params, direction)
        return (params, opt_state), task.loss(params, data.valid.inputs[valid], data.valid.labels[valid])

    state, losses = jax.lax.scan(step, state, (*rows, jnp.arange(recipe.truncation, dtype=jnp.int32)))
    loss = losses.mean()
    return state, jnp.log(loss) if recipe.objective == "log_loss" else loss


def estimate(recipe: Recipe, theta: es.Theta, problem: Problem, key: jax.Array, run: es.Unroll) -> tuple[Problem, Seen]:
    """What the two copies say; `problem` with their states after it."""
    pair, found = es.truncation(recipe.estimator, theta, problem.pair, key, run, sigma=recipe.sigma,
                                loss_limit=LIMITS[recipe.objective], difference_limit=recipe.difference_limit)
    loss = jnp.exp(found.loss) if recipe.objective == "log_loss" else found.loss
    return problem._replace(pair=pair), Seen(found.gradient, loss, found.finite)


def advance(recipe: Recipe, task: Task, data: Data, theta: es.Theta, problem: Problem, key: jax.Array) -> tuple[Problem, Seen]:
    """One truncation (`pes`, `es`); a problem that ended, or lost its footing, begins anew first."""
    fresh, noise, rows = jax.random.split(key, 3)
    ended = problem.position >= problem.length
    problem = jax.tree.map(lambda new, old: jnp.where(ended, new, old), begin(recipe, task, theta, fresh), problem)

    def run(theta: es.Theta, state: Any) -> tuple[Any, jax.Array]:
        return unroll(recipe, task, data, rows, problem, problem.position, theta, state)
    problem, seen = estimate(recipe, theta, problem, noise, run)
    return problem._replace(position=jnp.where(seen.finite, problem.position + recipe.truncation, problem.length)), seen


def whole(recipe: Recipe, task: Task, data: Data, theta: es.Theta, problem: Problem, key: jax.Array) -> tuple[Problem, Seen]:
    """A whole problem from new parameters (`full_es`). Its length, equal for all problems of a meta-step so that none waits, is
    `problem.length`."""
    fresh, noise, rows = jax.random.split(key, 3)
    problem = begin(recipe, task, theta, fresh, length=problem.length)
    truncations = problem.length // recipe.truncation

    def run(theta: es.Theta, state: Any) -> tuple[Any, jax.Array]:
        def one(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            state, total = carry
            state, loss = unroll(recipe, task, data, jax.random.fold_in(rows, i), problem, i * recipe.truncation, theta, state)
            return state, total + loss
        state, total = jax.lax.fori_loop(0, truncations, one, (state, jnp.zeros((), jnp.float32)))
        return state, total / truncations.astype(jnp.float32)
    problem, seen = estimate(recipe, theta, problem, noise, run)
    return problem._replace(position=problem.length), seen

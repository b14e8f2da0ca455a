"""The numbers of a learned rule: shapes, a start without training, files, and weights that live in the optimizer's state.

A file is `.npz` or `.json` with one array for each name of `LEARNED_WEIGHTS` in `optim/configs.py`, matrices as (in, out).
"""

import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.optim.configs import LEARNED_WEIGHTS, LearnedRule
from jaxmem.optim.learned.rule import Weights
from jaxmem.spec import InputError


class Carried(NamedTuple):
    weights: Weights
    inner: Any


def initial(rule: LearnedRule, key: jax.Array) -> Weights:
    """Untrained: truncated normals of deviation 1 / sqrt(inputs) as published, zero biases, decays at their initial values. Celo's
    output layer is zero: it starts as Adam with steps of unit size."""
    shapes = LEARNED_WEIGHTS[rule]
    new = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
    for i, own in enumerate(jax.random.split(key, 3)):
        if not (rule == "celo" and i == 2):
            shape = shapes[f"w{i}"]
            new[f"w{i}"] = jax.random.truncated_normal(own, -2, 2, shape, jnp.float32) / np.float32(np.sqrt(shape[0]))
    return new


def shipped(rule: LearnedRule) -> pathlib.Path | None:
    """The trained numbers that come with jaxmem, None where `rule` has none. The JSON file beside them says where they come from."""
    path = pathlib.Path(__file__).parent / "trained" / f"{rule}.npz"
    return path if path.is_file() else None


def count(weights: Weights) -> int:
    return sum(x.size for x in weights.values())


def load(path: str | pathlib.Path, rule: LearnedRule) -> Weights:
    """Raises InputError for a file that is not there, cannot be read, or holds other names or shapes than `rule` has."""
    path = pathlib.Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {name: np.asarray(file[name], np.float32) for name in file.files}
        else:
            found = {name: np.asarray(value, np.float32) for name, value in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"weights={path}: cannot be read as .npz or .json of arrays: {error}") from None
    wanted = LEARNED_WEIGHTS[rule]
    if problems := [f"{name}: {found[name].shape if name in found else 'missing'}, expected {wanted.get(name, 'no such array')}"
                    for name in sorted(wanted | found) if name not in found or found[name].shape != wanted.get(name)]:
        raise InputError(f"weights={path} does not fit rule={rule}: " + "; ".join(problems))
    if broken := [name for name, x in found.items() if not np.isfinite(x).all()]:
        raise InputError(f"weights={path}: {', '.join(broken)} is not finite")
    return {name: jnp.asarray(found[name]) for name in wanted}


def save(path: str | pathlib.Path, weights: Weights) -> None:
    path = pathlib.Path(path)
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {name: np.asarray(x) for name, x in weights.items()}
        np.savez(path, **arrays)
    else:
        path.write_text(json.dumps({name: np.asarray(x, np.float64).tolist() for name, x in weights.items()}))


def carrying(make: Callable[[Weights], optax.GradientTransformationExtraArgs],
             start: Callable[[], Weights]) -> optax.GradientTransformationExtraArgs:
    """`make(weights)` with the weights in its state: they are inputs of the update and no constants of the program, and a checkpoint
    brings them along. `start` gives them at init."""
    def init(params: optax.Params) -> Carried:
        weights = start()
        return Carried(weights, make(weights).init(params))

    def update(updates: optax.Updates, state: Carried, params: optax.Params | None = None, **extra: object) -> tuple:
        updates, inner = make(state.weights).update(updates, state.inner, params, **extra)
        return updates, Carried(state.weights, inner)
    return optax.GradientTransformationExtraArgs(init, update)


def placed(opt_state: Any, weights: Weights) -> Any:
    """`opt_state` with `weights` in every `Carried`, split as the arrays that stood there. For the start of a run, outside of jit."""
    def put(x: Any) -> Any:
        if not isinstance(x, Carried):
            return x
        return Carried({name: jax.device_put(weights[name], old.sharding) for name, old in x.weights.items()}, x.inner)
    return jax.tree.map(put, opt_state, is_leaf=lambda x: isinstance(x, Carried))


_said: set[str] = set()


def warn_untrained(rule: str) -> None:
    """Once a process, on stderr."""
    if rule not in _said:
        _said.add(rule)
        logging.getLogger("absl").warning("optimizer learned: rule=%s has UNTRAINED weights; weights=FILE gives trained ones", rule)

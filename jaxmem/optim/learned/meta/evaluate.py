"""What an optimizer is worth on a task: its constants chosen by validation loss, the test loss at what was chosen.

All configurations and seeds of a task train in one program. A seed decides the first parameters and the batches, for every optimizer
alike, so that results compare seed by seed. The learning rate falls from its peak to zero along a cosine, whatever the optimizer.

S seeds, K configurations.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.optim.learned.meta.tasks import Params, Rows, Task
from jaxmem.optim.transforms import standard_promotion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    lr: float  # at the peak
    weight_decay: float = 0.0


# (learning rate by step, weight decay) -> the optimizer; both may be traced
Make = Callable[[optax.Schedule, Any], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """`valid_losses` [K] are means over seeds, infinite where one seed has no finite loss; the test's figures are [S], at `chosen`."""

    chosen: Configuration
    valid_losses: tuple[float, ...]
    test_losses: tuple[float, ...]
    test_accuracies: tuple[float, ...]

    @property
    def valid_loss(self) -> float:
        return min(self.valid_losses)


def evaluate(task: Task, make: Make, configurations: Sequence[Configuration], *, steps: int, batch: int, seeds: int) -> Result:
    """Raises RuntimeError where every configuration diverged."""
    params = train(task, make, configurations, steps=steps, batch=batch, seeds=seeds)
    runs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), params)
    found = np.asarray(held_out(task, runs, task.valid)[0], np.float64).reshape(seeds, -1)
    valid = [float(x) if math.isfinite(x) else math.inf for x in found.mean(0)]
    best = int(np.argmin(valid))
    if valid[best] == math.inf:
        raise RuntimeError(f"{task.name}: all {len(valid)} configurations diverged within {steps} steps")
    losses, accuracies = held_out(task, jax.tree.map(lambda x: x[:, best], params), task.test)
    return Result(chosen=configurations[best], valid_losses=tuple(valid), test_losses=tuple(losses.tolist()),
                  test_accuracies=tuple(accuracies.tolist()))


def train(task: Task, make: Make, configurations: Sequence[Configuration], *, steps: int, batch: int, seeds: int) -> Params:
    """Parameters [S, K, ...] after `steps` steps on `batch` training rows each, drawn with replacement."""
    def one(rows: tuple[jax.Array, jax.Array], key: jax.Array, lr: jax.Array, weight_decay: jax.Array) -> Params:
        start, order = jax.random.split(key)
        inputs, labels = rows
        tx = standard_promotion(optax.with_extra_args_support(make(optax.cosine_decay_schedule(lr, steps), weight_decay)))
        params = task.init(start)

        def step(state: tuple[Params, optax.OptState], i: jax.Array) -> tuple[tuple[Params, optax.OptState], None]:
            params, opt_state = state
            chosen = jax.random.randint(jax.random.fold_in(order, i), (batch,), 0, labels.shape[0])
            gradients = jax.grad(task.loss)(params, inputs[chosen], labels[chosen])
            updates, opt_state = tx.update(gradients, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None
        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[0][0]

    over_configurations = jax.vmap(one, (None, None, 0, 0))
    over_seeds = jax.jit(jax.vmap(over_configurations, (None, 0, None, None)))
    lrs, decays = (jnp.asarray([getattr(c, name) for c in configurations], jnp.float32) for name in ("lr", "weight_decay"))
    return over_seeds(_arrays(task.train), jax.vmap(jax.random.key)(jnp.arange(seeds)), lrs, decays)


def held_out(task: Task, runs: Params, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """(losses, accuracies), f32 [runs] each, of parameters [runs, ...]: one run after the other, which bounds the memory."""
    @jax.jit
    def all_runs(runs: Params, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(lambda params: (task.loss(params, inputs, labels), task.accuracy(params, inputs, labels)), runs)
    losses, accuracies = all_runs(runs, *_arrays(rows))
    return np.asarray(losses), np.asarray(accuracies)


def _arrays(rows: Rows) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(rows[0]), jnp.asarray(rows[1])

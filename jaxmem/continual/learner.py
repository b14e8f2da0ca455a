"""Trains one classifier on a sequence of tasks by a `Method`, on a mesh, and fills the accuracy matrix.

One jitted step serves a whole sequence: it takes the incoming rows, what the buffer gives back, and the method's penalty. Rows are
split over the mesh axes of the batch; parameters are whole on each device, or as `shardings` says, and the optimizer's state like them.
A batch that an epoch cannot fill is left out, so an epoch of n rows has n // batch steps.

B incoming rows, R rows of a draw.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.continual import ewc, shrink
from jaxmem.continual.classifier import Classifier
from jaxmem.continual.fisher import fisher_diagonal
from jaxmem.continual.memory import Memory
from jaxmem.continual.methods import Method
from jaxmem.continual.step import State, make_step
from jaxmem.continual.tasks import Labelled, Task, joined
from jaxmem.data.rehearsal.programs import batch_axes, shards_on
from jaxmem.optim.dims import names, owner_of
from jaxmem.optim.transforms import standard_promotion
from jaxmem.spec import InputError

TEST_ROWS = 1024  # a call of the evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """accuracy: [tasks, tasks], row i after task i, column j on task j. before: [tasks], untrained. steps, train_s: a task; train_s is
    the time of its steps, without compilation, evaluation and the Fisher information. losses: of each task's last step. buffer_bytes:
    of the buffer and the rows drawn for the next steps, over all devices. params: at the end."""

    accuracy: np.ndarray
    before: np.ndarray
    steps: tuple[int, ...]
    train_s: tuple[float, ...]
    losses: tuple[float, ...]
    buffer_bytes: int
    params: Any


def learn(model: Classifier, tasks: Sequence[Task], method: Method, tx: optax.GradientTransformation, *, mesh: Mesh, batch: int,
          epochs: int, seed: int = 0, shardings: Callable[[Any], Any] | None = None) -> Outcome:
    """`batch` rows of the task in each step, over all devices; `epochs` over the rows of each task. `tx` includes the learning rate.

    `shardings`: abstract parameters -> their shardings. `seed` decides the initialisation, the order of rows and what the buffer does;
    the initialisation and the order are the same for every method. Raises InputError for sizes that do not fit the mesh or the data.
    """
    _check(tasks, method, batch, shards_on(mesh))
    with jax.set_mesh(mesh):
        return _learn(model, tasks, method, tx, mesh, batch, epochs, seed, shardings)


def _learn(model: Classifier, tasks: Sequence[Task], method: Method, tx: optax.GradientTransformation, mesh: Mesh, batch: int, epochs: int,
           seed: int, shardings: Callable[[Any], Any] | None) -> Outcome:
    key, fisher_key = jax.random.split(jax.random.key(seed))
    whole = NamedSharding(mesh, P())
    struct = jax.eval_shape(model.init, key)
    placed = shardings(struct) if shardings else jax.tree.map(lambda _: whole, struct)
    tx = standard_promotion(optax.with_extra_args_support(optax.chain(ewc.add_penalty(method.ewc), tx) if method.ewc else tx))

    def fresh(i: int) -> Any:
        return jax.jit(model.init, out_shardings=placed)(jax.random.fold_in(key, i))
    params = fresh(0)
    opt_state = jax.jit(tx.init, out_shardings=like_parameters(jax.eval_shape(tx.init, struct), struct, placed, whole))(params)
    memory = Memory.of(method, tasks, model.classes, batch, mesh)
    state = State(params=params, opt_state=opt_state, buffer=memory.start(seed) if memory else None)
    step = make_step(model, tx, method, memory, mesh, state)
    evaluate = _evaluator(model, mesh)
    before = np.array([evaluate(state.params, task.test) for task in tasks])
    accuracy, steps, seconds, losses = np.zeros((len(tasks), len(tasks))), [], [], []
    for i, task in enumerate(tasks):
        if i and method.start != "last":
            new = fresh(i)
            if method.start == "shrunk":
                new = shrink.shrink_and_perturb(state.params, new, shrink=method.shrink, perturb=method.perturb)
            state = state._replace(params=new, opt_state=shrink.made_like(tx.init, state.opt_state, new))
        rows = joined(tasks[:i + 1]) if method.rows == "all" else task.train
        earlier = joined(tasks[:i]) if i and method.replay else None
        batches = _batches(rows, earlier, method.replay, batch, epochs, mesh, seed=(seed, i))
        count, loss, begin = 0, jnp.float32(0), None
        for given in batches:
            state, loss = step(state, given)
            if not count:  # the first step may compile: it is counted, and its time is taken to be that of the others
                jax.block_until_ready(state.params)
                begin = time.perf_counter()
            count += 1
        jax.block_until_ready(state.params)
        spent = time.perf_counter() - (begin or 0.0)
        steps.append(count)
        seconds.append(spent * count / max(count - 1, 1))
        losses.append(float(loss))
        accuracy[i] = [evaluate(state.params, one.test) for one in tasks]
        if method.ewc and i < len(tasks) - 1:
            found = fisher_diagonal(model, state.params, *task.train, kind=method.fisher, mesh=mesh, key=jax.random.fold_in(fisher_key, i))
            state = state._replace(opt_state=ewc.consolidate(state.opt_state, state.params, found))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.buffer) if hasattr(leaf, "nbytes"))
    return Outcome(accuracy=accuracy, before=before, steps=tuple(steps), train_s=tuple(seconds), losses=tuple(losses), buffer_bytes=held,
                   params=state.params)


def _check(tasks: Sequence[Task], method: Method, batch: int, width: int) -> None:
    for name, rows in (("batch", batch), ("r", method.r), ("replay", method.replay)):
        if rows % width:
            raise InputError(f"{name}={rows} rows do not split over {width} devices; nearest: {rows - rows % width or width} or "
                             f"{rows - rows % width + width}")
    for task in tasks:
        if len(task.train[1]) < batch:
            raise InputError(f"task {task.name} has {len(task.train[1])} training rows: fewer than a batch of {batch}")


def _batches(rows: Labelled, earlier: Labelled | None, replay: int, batch: int, epochs: int, mesh: Mesh, *,
             seed: tuple[int, ...]) -> Iterator[dict[str, jax.Array]]:
    """Shuffled epochs. Where rows are replayed, `replay` of the earlier ones come with each batch, drawn with replacement; in the
    first task, which has none, they have weight 0."""
    split = rows_sharding(mesh)
    order, draws = np.random.default_rng([*seed, 0]), np.random.default_rng([*seed, 1])
    for _ in range(epochs):
        shuffled = order.permutation(len(rows[1]))
        for start in range(0, len(shuffled) - batch + 1, batch):
            chosen = shuffled[start:start + batch]
            given = {"inputs": rows[0][chosen], "labels": rows[1][chosen]}
            if replay:
                source = rows if earlier is None else earlier
                again = draws.integers(len(source[1]), size=replay)
                given |= {"old_inputs": source[0][again], "old_labels": source[1][again],
                          "old_weights": np.full(replay, earlier is not None, np.float32)}
            yield jax.device_put(given, split)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(batch_axes(mesh) or None))


def like_parameters(tree: Any, params: Any, shardings: Any, otherwise: NamedSharding) -> Any:
    """A sharding for each leaf of `tree`: that of the parameter whose path ends the leaf's and whose shape it has, or `otherwise`."""
    flat, where = jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(shardings)
    own = {names(path): (leaf.shape, sharding) for (path, leaf), sharding in zip(flat, where, strict=True)}

    def of(path: tuple, leaf: Any) -> Any:
        owner = owner_of(names(path), own)
        return own[owner][1] if owner and own[owner][0] == leaf.shape else otherwise
    return jax.tree_util.tree_map_with_path(of, tree)


def _evaluator(model: Classifier, mesh: Mesh) -> Callable[[Any, Labelled], float]:
    """Accuracy on labelled rows, over all classes the model has. Rows come in calls of one size, the last filled up with zeros."""
    split, size = rows_sharding(mesh), TEST_ROWS // shards_on(mesh) * shards_on(mesh)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))  # whole everywhere, as each of several processes reads it
    def predicted(params: Any, inputs: jax.Array) -> jax.Array:
        return model.logits(params, inputs).argmax(-1)

    def accuracy(params: Any, rows: Labelled) -> float:
        right = 0
        for start in range(0, len(rows[1]), size):
            inputs, labels = rows[0][start:start + size], rows[1][start:start + size]
            filled = np.concatenate([inputs, np.zeros((size - len(inputs), *inputs.shape[1:]), inputs.dtype)])
            right += int((np.asarray(predicted(params, jax.device_put(filled, split)))[:len(labels)] == labels).sum())
        return right / len(rows[1])
    return accuracy

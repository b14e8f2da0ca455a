"""Training and choosing, against a plain loop and against data in which validation and test disagree."""

import math

import jax
import numpy as np
import optax
import pytest

from jaxmem.optim.learned.meta import tasks
from jaxmem.optim.learned.meta.evaluate import Configuration, evaluate, train

ALL = [Configuration(lr=lr, weight_decay=decay) for decay in (0.0, 0.3) for lr in (0.03, 0.1)]


def made(seed: int = 0, valid_flip: bool = False) -> tasks.Task:
    """Two classes by the sign of a sum; with `valid_flip`, validation says the opposite of train and test."""
    random = np.random.default_rng(seed)

    def rows(n: int, flip: bool = False) -> tasks.Rows:
        x = random.normal(size=(n, 5)).astype(np.float32)
        return x, ((x.sum(1) > 0) ^ flip).astype(np.int32)
    return tasks.Task(name="made", train=rows(40), valid=rows(30, valid_flip), test=rows(30), widths=(5, 4, 2))


def adamw(schedule, weight_decay):
    return optax.adamw(schedule, weight_decay=weight_decay)


def test_all_in_one_program_is_each_by_itself():
    """A plain loop of gradient descent with decay: one configuration, one seed, one step at a time."""
    own, steps = made(), 7

    def make(schedule, decay):
        return optax.chain(optax.add_decayed_weights(decay), optax.sgd(schedule))
    found = train(own, make, ALL, steps=steps, batch=8, seeds=2)
    found = {name: np.asarray(x) for name, x in found.items()}
    assert found["w0"].shape == (2, 4, 5, 4)
    init, gradient = jax.jit(own.init), jax.jit(jax.grad(own.loss))
    draw = jax.jit(lambda order, i: jax.random.randint(jax.random.fold_in(order, i), (8,), 0, 40))
    for seed, k in ((0, 0), (1, 3)):
        start, order = jax.random.split(jax.random.key(seed))
        params = {name: np.asarray(x) for name, x in init(start).items()}
        for i in range(steps):
            chosen = np.asarray(draw(order, i))
            lr = np.float32(ALL[k].lr * (1 + math.cos(math.pi * i / steps)) / 2)
            gradients = gradient(params, own.train[0][chosen], own.train[1][chosen])
            params = {name: p - lr * (np.asarray(gradients[name]) + np.float32(ALL[k].weight_decay) * p) for name, p in params.items()}
        for name, p in params.items():
            np.testing.assert_allclose(found[name][seed, k], p, rtol=1e-5, atol=1e-7)
    assert np.abs(found["w0"][0, 0] - found["w0"][0, 3]).max() > 1e-3


def test_validation_chooses_and_test_reports():
    """Where validation says the opposite, the configuration that learned least is best on it, and its test loss is what is reported.
    One that diverges is never chosen."""
    tried = [Configuration(lr=lr) for lr in (1e30, 1e-4, 0.01, 0.1)]
    found = evaluate(made(valid_flip=True), adamw, tried, steps=60, batch=16, seeds=2)
    assert found.chosen == tried[1] and found.valid_losses[1] == found.valid_loss < found.valid_losses[3]
    honest = evaluate(made(), adamw, tried, steps=60, batch=16, seeds=2)
    assert honest.chosen == tried[3] and np.mean(honest.test_losses) < 0.5 < np.mean(found.test_losses)
    assert min(honest.test_accuracies) > 0.8 and len(honest.test_losses) == 2
    assert honest.valid_losses[0] == math.inf

    own = made()
    params = {name: np.asarray(x) for name, x in train(own, adamw, tried, steps=60, batch=16, seeds=2).items()}

    def loss(seed: int, k: int, rows: tasks.Rows) -> float:
        x, y = rows[0].astype(np.float64), rows[1]
        p = {name: array[seed, k].astype(np.float64) for name, array in params.items()}
        h = np.maximum(x @ p["w0"] + p["b0"], 0) @ p["w1"] + p["b1"]
        return float(np.mean(np.log(np.exp(h).sum(1)) - h[np.arange(len(y)), y]))
    np.testing.assert_allclose(honest.test_losses, [loss(seed, 3, own.test) for seed in range(2)], rtol=1e-5)
    means = [np.mean([loss(seed, k, own.valid) for seed in range(2)]) for k in (1, 2, 3)]
    np.testing.assert_allclose(honest.valid_losses[1:], means, rtol=1e-5)


def test_where_all_diverge_there_is_no_result():
    with pytest.raises(RuntimeError, match="made: all 1 configurations diverged within 5 steps"):
        evaluate(made(), lambda schedule, decay: optax.sgd(schedule), [Configuration(lr=1e30)], steps=5, batch=8, seeds=1)

"""Learned rules against float64 NumPy: every feature, the whole step, layers of a stack, blocks, nominal steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.celo import scale_by_celo
from jaxmem.optim.learned.nominal import scale_by_small_fc_nominal
from jaxmem.optim.learned.small_fc import scale_by_small_fc
from tests.optim import published

# name -> shape, stacked layers: a tie of the two largest dims, three dims, layers of matrices and of vectors, a scalar
SHAPES = {"square": ((8, 8), 0), "three": ((4, 9, 5), 0), "stack": ((2, 12, 7), 1), "scalar": ((), 0), "vectors": ((3, 5), 1)}
STACKED = {name: stacked for name, (_, stacked) in SHAPES.items()}
STEPS = 3
QUICK = {"xla_backend_optimization_level": 0}  # compiled in less time, to run a few times


def trees(seed):
    """Parameters and gradients of a few steps, with rows and columns of different sizes: between 0.1 and 30, not tiny."""
    rng = np.random.default_rng(seed)

    def array(shape):
        x = rng.normal(size=shape) + 0.2
        for axis in range(len(shape)):
            x = x * np.exp(rng.normal(size=[n if i == axis else 1 for i, n in enumerate(shape)]))
        return jnp.asarray(x, jnp.float32)
    return [{name: array(shape) for name, (shape, _) in SHAPES.items()} for _ in range(STEPS + 1)]


def tensors_of(make, name):
    shape, stacked = SHAPES[name]
    return [make(shape[stacked:]) for _ in range(shape[0] if stacked else 1)]


def layers_of(name, x):
    return list(np.asarray(x)) if SHAPES[name][1] else [np.asarray(x)]


def random_weights(rule, seed=0):
    """Every array away from zero, decays too."""
    rng = np.random.default_rng(seed)
    size = {"momentum_decays": 0.03, "rms_decays": 0.03, "adafactor_decays": 0.03}
    start = learned_weights.initial(rule, jax.random.key(0))
    return {name: jnp.asarray(rng.normal(size=x.shape) * size.get(name, 0.6), jnp.float32) for name, x in start.items()}


def close(got, want, rtol):
    got, want = np.asarray(got, np.float64), np.asarray(want).reshape(np.shape(got))
    assert np.abs(want).max() > 1e-4, "the reference is tiny and would prove nothing"
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def probe(shapes, channel):
    """Weights that let one input through: the first layer splits it into its positive and its negative part."""
    w = {name: np.zeros(x.shape, np.float32) for name, x in shapes.items()}
    w["w0"][channel, 0], w["w0"][channel, 1] = 1, -1
    w["w1"][0, 0] = w["w1"][1, 1] = 1
    w["w2"][0, 0], w["w2"][1, 0] = 1, -1
    return {name: jnp.asarray(x) for name, x in w.items()}


@functools.cache
def steps_of(rule, chunk, fenced=False):
    """One compiled function: (weights, params, gradients) -> the steps, stacked; the parameters stay. 40 cuts the larger tensors."""
    make = {"small_fc": scale_by_small_fc, "celo": scale_by_celo}[rule]

    def steps(weights, params, gradients):
        tx = make(weights, stacked=STACKED, chunk=chunk, fenced=fenced)

        def one(state, g):
            u, state = tx.update(g, state, params)
            return state, u
        return jax.lax.scan(one, tx.init(params), jax.tree.map(lambda *x: jnp.stack(x), *gradients))[1]
    return jax.jit(steps, compiler_options=QUICK)


def last_step(rule):
    return lambda *args: jax.tree.map(lambda x: x[-1], steps_of(rule, 40)(*args))


def test_every_feature_of_small_fc():
    """Each of the 39 inputs comes through a probe network as NumPy has it."""
    params, *gradients = trees(1)
    shapes = learned_weights.initial("small_fc", jax.random.key(0))
    none = {name: np.zeros(x.shape) for name, x in shapes.items()}
    want = {}
    for name in SHAPES:
        own = tensors_of(lambda shape: published.small_fc_tensor(shape, none), name)
        for g in gradients:
            for tensor, x in zip(own, layers_of(name, g[name]), strict=True):
                tensor.take(x)
        want[name] = np.stack([published.small_fc_inputs(t, p, STEPS - 1) for t, p in zip(own, layers_of(name, params[name]), strict=True)])
    for channel in range(39):
        got = last_step("small_fc")(probe(shapes, channel), params, gradients)
        for name in SHAPES:
            # `exp(0.001 * magnitude)` is one: the probe's second output is zero
            close(np.asarray(got[name]) / 0.001, want[name][..., channel], 2e-5)


def test_every_feature_of_celo():
    params, *gradients = trees(2)
    shapes = learned_weights.initial("celo", jax.random.key(0))
    tensors = {name: tensors_of(published.celo_tensor, name) for name in SHAPES}
    for name, own in tensors.items():
        for g in gradients:
            for tensor, x in zip(own, layers_of(name, g[name]), strict=True):
                tensor.take(x)
    for channel in range(30):
        weights = probe(shapes, channel)
        got = last_step("celo")(weights, params, gradients)
        for name, own in tensors.items():
            want = [published.celo_step(t, p, STEPS - 1, weights) for t, p in zip(own, layers_of(name, params[name]), strict=True)]
            close(got[name], np.stack(want), 2e-5)


@pytest.mark.parametrize(("chunk", "fenced"), [(40, False), (None, False), (None, True)], ids=["in blocks", "whole", "fenced"])
def test_small_fc_step_by_step(chunk, fenced):
    """Random weights and decay offsets: every step of every tensor, layers of a stack each a tensor of its own."""
    params, *gradients = trees(3)
    weights = random_weights("small_fc")
    steps = steps_of("small_fc", chunk, fenced)(weights, params, gradients)
    for name in SHAPES:
        own = tensors_of(lambda shape: published.small_fc_tensor(shape, weights), name)
        for t, (g, step) in enumerate(zip(gradients, steps[name], strict=True)):
            for tensor, x, p, got in zip(own, layers_of(name, g[name]), layers_of(name, params[name]), layers_of(name, step),
                                         strict=True):
                tensor.take(x)
                close(got, published.small_fc_step(tensor, p, t, weights)[0], 5e-5)


@pytest.mark.parametrize(("nominal", "controller"), [("sgd", "none"), ("momentum", "learned"), ("aggregated", "none"), ("adam", "learned"),
                                                     ("adam_aggregated", "none")])
def test_nominal_steps(nominal, controller):
    rng = np.random.default_rng(4)
    p, g = rng.normal(size=(2, 6, 4)).astype(np.float32)
    weights = random_weights("small_fc_nominal")
    # the third output is made large, so that a controller that did nothing would be seen
    weights["b2"] = weights["b2"].at[2].set(500.0)
    tx = scale_by_small_fc_nominal(weights, nominal=nominal, step_size=0.01, controller=controller)
    got, _ = jax.jit(tx.update, compiler_options=QUICK)({"w": g}, tx.init({"w": p}), {"w": p})
    tensor = published.small_fc_tensor((6, 4), weights)
    tensor.take(g)
    step, out = published.small_fc_step(tensor, p, 0, weights)
    adam = tensor.m / np.sqrt(tensor.v + 1e-6)[..., None]
    direction = {"sgd": g, "momentum": tensor.m[..., 2], "aggregated": tensor.m.mean(-1), "adam": adam[..., 2],
                 "adam_aggregated": adam.mean(-1)}[nominal]
    scale = np.exp(0.001 * (out[..., 2] if controller == "learned" else 1.0))
    close(got["w"], step + 0.01 * scale * direction, 5e-5)


def test_celo_has_no_scale():
    """Gradients times 1e-4 or 1e4 and parameters times 100: the same steps, each layer's of root mean square one."""
    params, *gradients = trees(5)
    weights = random_weights("celo")
    want = last_step("celo")(weights, params, gradients)
    for of_g, of_p in ((1e-4, 1.0), (1e4, 1.0), (1.0, 100.0)):
        scaled = [{name: x * factor for name, x in tree.items()} for tree, factor in zip([params, *gradients], [of_p] + [of_g] * STEPS,
                                                                                          strict=True)]
        got = last_step("celo")(weights, scaled[0], scaled[1:])
        for name in SHAPES:
            close(got[name], want[name], 1e-4)
            for layer in layers_of(name, got[name]):
                assert abs(np.sqrt(np.square(layer).mean()) - 1) < 1e-5


def test_untrained_celo_is_adam_of_unit_size():
    rng = np.random.default_rng(6)
    p, *gradients = rng.normal(size=(4, 5, 7)).astype(np.float32)
    tx = scale_by_celo(learned_weights.initial("celo", jax.random.key(3)))
    state, update, m, v = tx.init(p), jax.jit(tx.update, compiler_options=QUICK), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        step, state = update(g, state, p)
        m, v = 0.9 * m + 0.1 * g.astype(np.float64), 0.95 * v + 0.05 * g.astype(np.float64)**2
        adam = m / (1 - 0.9**t) / np.sqrt(v / (1 - 0.95**t))
        close(step, adam / np.sqrt((adam**2).mean()), 1e-5)


def test_numbers_of_meta_parameters():
    """39 x 4 + 4 + 4 x 4 + 4 + 4 x 2 + 2 + 7; two more outputs; 30 x 8 + 8 + 8 x 8 + 8 + 8 + 1."""
    assert {rule: learned_weights.count(learned_weights.initial(rule, jax.random.key(0))) for rule in
            ("small_fc", "small_fc_nominal", "celo")} == {"small_fc": 197, "small_fc_nominal": 207, "celo": 329}

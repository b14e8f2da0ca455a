"""The Fisher information against its closed form and brute force in float64; EWC's penalty as an optax transformation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.continual import ewc
from jaxmem.continual.fisher import fisher_diagonal
from jaxmem.spec import InputError
from tests.continual import plain
from tests.continual.dense import mesh, mlp

KEY = jax.random.key(0)


def regression(seed=1, devices=8):
    rng = np.random.default_rng(seed)
    w, b = rng.normal(size=(plain.INPUTS, plain.CLASSES)) * 0.7, rng.normal(size=plain.CLASSES) * 0.5
    params = jax.device_put({"layer0": {"weight": jnp.float32(w), "bias": jnp.float32(b)}}, NamedSharding(mesh(devices), P()))
    return mlp((plain.INPUTS, plain.CLASSES)), params, w.astype(np.float32).astype(float), b.astype(np.float32).astype(float)


@pytest.mark.parametrize("rows, chunk, devices", [(48, 3, 8), (45, 2, 8), (5, 16, 1)])  # that fill the chunks, and that do not
def test_exact_is_the_closed_form(rows, chunk, devices):
    model, params, w, b = regression(devices=devices)
    x, labels = plain.problem(rows)
    found = fisher_diagonal(model, params, x, labels, mesh=mesh(devices), key=KEY, chunk=chunk)["layer0"]
    weight, bias = plain.fisher(w, b, x)
    assert weight.min() > 0.02  # nothing here is small enough to hide an error
    np.testing.assert_allclose(found["weight"], weight, rtol=2e-5)
    np.testing.assert_allclose(found["bias"], bias, rtol=2e-5)


def test_empirical_is_of_the_given_labels():
    model, params, w, b = regression()
    x, labels = plain.problem(45)
    found = fisher_diagonal(model, params, x, labels, kind="empirical", mesh=mesh(), key=KEY, chunk=2)["layer0"]
    weight, bias = plain.empirical_fisher(w, b, x, labels)
    np.testing.assert_allclose(found["weight"], weight, rtol=2e-5)
    np.testing.assert_allclose(found["bias"], bias, rtol=2e-5)
    assert np.abs(weight / plain.fisher(w, b, x)[0] - 1).max() > 0.3  # another quantity than the Fisher information


def test_sampled_is_unbiased():
    """Over many draws the mean lies within 5 standard errors of the exact one, for each parameter; and single draws differ."""
    model, params, w, b = regression()
    x, labels = plain.problem(48)
    draws = [fisher_diagonal(model, params, np.tile(x, (64, 1)), np.tile(labels, 64), kind="sampled", mesh=mesh(),
                             key=jax.random.key(i), chunk=64)["layer0"]["weight"] for i in range(2)]
    p = plain.probabilities(plain.logits(w, b, x))
    squares = np.asarray(x, float)[:, :, None, None] ** 2 * (np.eye(plain.CLASSES)[None] - p[:, None, :])[:, None] ** 2  # n, i, y, k
    mean = np.einsum("ny,niyk->nik", p, squares)
    variance = (np.einsum("ny,niyk->nik", p, squares ** 2) - mean ** 2).sum(0) / 64 / 48 ** 2
    np.testing.assert_allclose(mean.mean(0), plain.fisher(w, b, x)[0])  # the two derivations agree
    for found in draws:
        assert (np.abs(found - mean.mean(0)) < 5 * np.sqrt(variance)).all()
    assert not np.array_equal(*draws)


def test_hidden_layers_against_brute_force():
    """A gradient for each row and class by finite differences of float64 log-probabilities."""
    sizes = (3, 4, 3)
    rng = np.random.default_rng(2)
    layers = [(rng.normal(size=pair), rng.normal(size=pair[1])) for pair in itertools.pairwise(sizes)]
    flat = np.concatenate([np.concatenate([w.ravel(), b]) for w, b in layers]).astype(np.float32).astype(float)
    x = rng.normal(size=(5, 3)).astype(np.float32)

    def log_p(theta):
        h, at = np.asarray(x, float), 0
        for i, (n, m) in enumerate(itertools.pairwise(sizes)):
            w, b = theta[at:at + n * m].reshape(n, m), theta[at + n * m:at + n * m + m]
            h, at = h @ w + b, at + n * m + m
            h = np.maximum(h, 0) if i < 1 else h
        return np.log(plain.probabilities(h))
    step = 1e-6
    slopes = np.stack([(log_p(flat + step * e) - log_p(flat - step * e)) / (2 * step) for e in np.eye(len(flat))], -1)
    wanted = (np.exp(log_p(flat))[..., None] * slopes ** 2).sum(1).mean(0)
    params, at = {}, 0
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        weight, bias = flat[at:at + n * m].reshape(n, m), flat[at + n * m:at + n * m + m]
        params[f"layer{i}"], at = {"weight": jnp.float32(weight), "bias": jnp.float32(bias)}, at + n * m + m
    params = jax.device_put(params, NamedSharding(mesh(), P()))
    found = fisher_diagonal(mlp(sizes), params, x, np.zeros(5, int), mesh=mesh(), key=KEY, chunk=1)
    got = np.concatenate([np.concatenate([np.ravel(found[f"layer{i}"]["weight"]), found[f"layer{i}"]["bias"]]) for i in range(2)])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    assert np.median(wanted) > 1e-3


def test_no_inputs():
    model, params, *_ = regression()
    with pytest.raises(ValueError, match="no inputs"):
        fisher_diagonal(model, params, np.zeros((0, 6), np.float32), np.zeros(0, int), mesh=mesh(), key=KEY)


def test_the_update_is_the_gradient_of_the_penalty():
    rng = np.random.default_rng(0)
    tree = [{"a": rng.normal(size=(3, 2)), "b": [rng.normal(size=4)]} for _ in range(4)]
    start, now, fisher, gradient = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), one) for one in tree)
    fisher = jax.tree.map(jnp.square, fisher)
    tx = ewc.add_penalty(30.0)
    state = ewc.consolidate(tx.init(now), start, fisher)
    updates, after = tx.update(gradient, state, now)
    exact = (jax.tree.map(np.float64, one) for one in (gradient, fisher, now, start))
    wanted = jax.tree.map(lambda g, f, p, a: g + 30 * f * (p - a), *exact)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5), updates, wanted)
    assert after is state
    slope = jax.grad(lambda p: ewc.penalty(state, p, 30.0))(now)
    jax.tree.map(lambda got, u, g: np.testing.assert_allclose(got, u - g, rtol=1e-4, atol=1e-5), slope, updates, gradient)


def test_before_the_first_task_nothing_is_held():
    params = {"w": jnp.ones(3)}
    tx = ewc.add_penalty(1e6)
    updates, _ = tx.update({"w": jnp.full(3, 0.5)}, tx.init(params), {"w": jnp.full(3, 9.0)})
    assert np.array_equal(updates["w"], np.full(3, 0.5))


def test_tasks_add_up_and_the_anchor_is_the_latest():
    params = {"w": jnp.zeros(2)}
    tx = optax.chain(ewc.add_penalty(1.0), optax.adam(0.1))
    state = tx.init(params)
    state = ewc.consolidate(state, {"w": jnp.float32([1, 2])}, {"w": jnp.float32([3, 4])})
    state = ewc.consolidate(state, {"w": jnp.float32([5, 6])}, {"w": jnp.float32([0, 1])}, keep=0.5)
    assert np.array_equal(state[0].fisher["w"], [1.5, 3.0]) and np.array_equal(state[0].anchor["w"], [5, 6])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


def test_a_quadratic_settles_where_the_two_balance():
    """Loss |p - target|^2 / 2 and penalty s F |p - anchor|^2 / 2 meet at (target + s F anchor) / (1 + s F)."""
    target, anchor, f = (np.array(x) for x in ([1.0, 2.0, 3.0], [0.0, 1.0, -1.0], [0.0, 0.5, 4.0]))
    tx = optax.chain(ewc.add_penalty(2.0), optax.sgd(0.1))
    params = {"w": jnp.float32(anchor)}
    state = ewc.consolidate(tx.init(params), params, {"w": jnp.float32(f)})
    for _ in range(200):
        updates, state = tx.update({"w": params["w"] - jnp.float32(target)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], (target + 2 * f * anchor) / (1 + 2 * f), atol=1e-5)


def test_the_state_is_split_like_the_parameters():
    where = {"w": NamedSharding(mesh(), P("data")), "b": NamedSharding(mesh(), P())}
    params = jax.device_put({"w": jnp.arange(32.0).reshape(16, 2), "b": jnp.ones(2)}, where)
    tx = ewc.add_penalty(1.0)
    state = ewc.consolidate(tx.init(params), params, jax.tree.map(jnp.ones_like, params))

    def same(tree):
        return all(tree[name].sharding.is_equivalent_to(where[name], tree[name].ndim) for name in where)
    assert same(state.fisher) and same(state.anchor)
    step = jax.jit(lambda g, s, p: tx.update(g, s, p))
    updates, after = step(params, state, params)
    assert same(updates) and same(after.fisher) and same(after.anchor)
    text = step.lower(params, state, params).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    model, given, *_ = regression()
    given = jax.device_put(given, {"layer0": {"weight": NamedSharding(mesh(), P(None)), "bias": NamedSharding(mesh(), P())}})
    found = fisher_diagonal(model, given, *plain.problem(16), mesh=mesh(), key=KEY)
    jax.tree.map(lambda f, p: f.sharding.is_equivalent_to(p.sharding, p.ndim) or pytest.fail(str(f.sharding)), found, given)


def test_what_is_refused():
    with pytest.raises(InputError, match="ewc=-1"):
        ewc.add_penalty(-1.0)
    with pytest.raises(ValueError, match="no EwcState"):
        ewc.consolidate(optax.adam(0.1).init({"w": jnp.ones(2)}), {"w": jnp.ones(2)}, {"w": jnp.ones(2)})
    tx = ewc.add_penalty(1.0)
    with pytest.raises(ValueError, match="on parameters"):
        tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))

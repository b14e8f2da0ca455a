"""Meta-gradients on a problem whose meta-loss is quadratic: there every expectation is known exactly, in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.optim.learned.meta import es

# s' = A s + B theta + c, and the loss of a truncation is (s' - t)' H (s' - t) / 2: quadratic in theta and in every perturbation, so that
# the antithetic difference is linear in them and smoothing adds nothing to the gradient.
A = np.array([[0.9, 0.3], [-0.2, 0.8]])
B = np.array([[1.0, 0.2, -0.5], [0.4, -0.7, 0.6]])
C = np.array([0.3, -0.1])
H = np.array([[1.5, 0.4], [0.4, 0.8]])
T = np.array([1.0, -2.0])
START = np.array([0.5, 0.7])
THETA = {"a": np.array([0.6, -0.4]), "b": np.array([0.9])}
TRUNCATIONS, SIGMA, PAIRS = 4, 0.05, 40_000


def flat(theta):
    return np.concatenate([theta["a"], theta["b"]])


def loss(s):
    return (s - T) @ H @ (s - T) / 2


def exact(*, through_time):
    """Gradient of the sum of all truncations' losses; `through_time` False: with each truncation's first state held still."""
    s, jacobian, total = START, np.zeros((2, 3)), np.zeros(3)
    for _ in range(TRUNCATIONS):
        s = A @ s + B @ flat(THETA) + C
        jacobian = (A @ jacobian if through_time else 0) + B
        total += jacobian.T @ H @ (s - T)
    return total


def unroll(theta, s):
    a, b, c, h, t = (jnp.asarray(x, jnp.float32) for x in (A, B, C, H, T))
    s = a @ s + b @ jnp.concatenate([theta["a"], theta["b"]]) + c
    return s, (s - t) @ h @ (s - t) / 2


def unroll_whole(theta, s):
    total = 0.0
    for _ in range(TRUNCATIONS):
        s, x = unroll(theta, s)
        total += x
    return s, total


def theta32():
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), THETA)


@functools.cache
def samples(estimator):
    """[PAIRS, 3]: the sum over a problem's truncations of one pair's gradients."""
    def one(key):
        theta = theta32()
        pair = es.start(jnp.asarray(START, jnp.float32), theta)
        if estimator == "full_es":
            return es.truncation(estimator, theta, pair, key, unroll_whole, sigma=SIGMA, loss_limit=1e6)[1].gradient
        total = jax.tree.map(jnp.zeros_like, theta)
        for i in range(TRUNCATIONS):
            pair, found = es.truncation(estimator, theta, pair, jax.random.fold_in(key, i), unroll, sigma=SIGMA, loss_limit=1e6)
            total = jax.tree.map(jnp.add, total, found.gradient)
        return total
    found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), PAIRS))
    return np.concatenate([np.asarray(found["a"], np.float64), np.asarray(found["b"], np.float64)], axis=1)


def errors(estimator, wanted):
    """How far the mean of the samples is from `wanted`, in its standard errors; and the largest standard error itself."""
    found = samples(estimator)
    deviation = found.std(0, ddof=1) / np.sqrt(PAIRS)
    return (found.mean(0) - wanted) / deviation, deviation.max()


@pytest.mark.parametrize("estimator", ["pes", "full_es"])
def test_unbiased_on_a_quadratic(estimator):
    wanted = exact(through_time=True)
    off, error = errors(estimator, wanted)
    assert np.abs(wanted).min() > 20 * error, "the exact gradient is too small to be told from nothing"
    assert np.abs(off).max() < 4


def test_truncated_es_is_biased_and_by_how_much():
    off, error = errors("es", exact(through_time=False))
    assert np.abs(off).max() < 4
    off, _ = errors("es", exact(through_time=True))
    assert np.abs(off).max() > 50
    assert np.abs(exact(through_time=False)).min() > 20 * error


def test_what_later_truncations_say_is_paid_with_variance():
    assert min(samples(name).var(0).sum() for name in ("pes", "full_es")) > 5 * samples("es").var(0).sum()


def test_pes_by_hand():
    """Two truncations with known perturbations: the second weighs its difference with the sum of both."""
    theta, key = theta32(), jax.random.key(3)
    pair = es.start(jnp.asarray(START, jnp.float32), theta)
    plus = minus = START
    drift = np.zeros(3)
    for i in range(2):
        own = jax.random.fold_in(key, i)
        eps = flat(jax.tree.map(lambda x: np.asarray(x, np.float64), es.perturbation(own, theta, SIGMA)))
        drift += eps
        plus, minus = A @ plus + B @ (flat(THETA) + eps) + C, A @ minus + B @ (flat(THETA) - eps) + C
        wanted = (loss(plus) - loss(minus)) * drift / (2 * SIGMA ** 2)
        pair, found = es.truncation("pes", theta, pair, own, unroll, sigma=SIGMA)
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(flat(found.gradient), wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())
        np.testing.assert_allclose(float(found.loss), (loss(plus) + loss(minus)) / 2, rtol=1e-5)
    np.testing.assert_allclose(pair.states, [plus, minus], rtol=1e-5)
    np.testing.assert_allclose(flat(pair.drift), drift, rtol=1e-5)


def test_truncated_es_goes_on_from_one_state():
    pair, _ = es.truncation("es", theta32(), es.start(jnp.asarray(START, jnp.float32), theta32()), jax.random.key(0), unroll, sigma=SIGMA)
    assert (pair.states[0] == pair.states[1]).all() and np.abs(pair.states[0] - START).max() > 0.1


@pytest.mark.parametrize(("losses", "mean", "difference", "finite"), [
    ((np.nan, 2.0), 11.0, 1.0, False), ((3.0, np.inf), 11.5, -1.0, False), ((30.0, 2.0), 11.0, 1.0, True),
    ((2.25, 2.0), 2.125, 0.25, True)])
def test_limits_of_losses(losses, mean, difference, finite):
    """What is not finite, or too large, counts as the limit of 20, and the difference is clipped at 1."""
    theta = {"x": jnp.zeros(3)}
    # the copy that is moved up in its first number is the first one if that perturbation is positive
    key = jax.random.key(0)
    eps = es.perturbation(key, theta, SIGMA)["x"]
    pair = es.start(jnp.zeros(()), theta)
    first = eps[0] > 0

    def one(theta, s):
        up = (theta["x"][0] > 0) == first
        return s, jnp.where(up, losses[0], losses[1]).astype(jnp.float32)
    _, found = es.truncation("pes", theta, pair, key, one, sigma=SIGMA, difference_limit=1.0)
    assert float(found.loss) == mean
    assert bool(found.finite) == finite
    np.testing.assert_allclose(found.gradient["x"], difference * np.asarray(eps) / (2 * SIGMA ** 2), rtol=1e-6)


def test_perturbations_are_normal_and_differ_between_arrays():
    theta = {"a": jnp.zeros((200, 100)), "b": jnp.zeros((200, 100))}
    found = es.perturbation(jax.random.key(0), theta, 0.3)
    a, b = np.asarray(found["a"]).ravel(), np.asarray(found["b"]).ravel()
    for x in (a, b):
        assert abs(x.mean()) < 4 * 0.3 / np.sqrt(x.size)
        assert abs(x.std() - 0.3) < 4 * 0.3 / np.sqrt(2 * x.size)
        assert abs((x ** 4).mean() / 0.3 ** 4 - 3) < 4 * np.sqrt(96 / x.size)  # a normal's fourth moment
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)

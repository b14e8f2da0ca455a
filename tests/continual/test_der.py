"""DER++'s loss and its gradient against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.continual import der
from tests.continual import plain

ALPHA, BETA = 0.3, 0.8


def case(weights, seed=0):
    rng = np.random.default_rng(seed)
    z = {name: rng.normal(size=(rows, 4)).astype(np.float32) for name, rows in (("own", 6), ("first", 5), ("second", 5), ("before", 5))}
    labels = {"own": rng.integers(4, size=6), "second": rng.integers(4, size=5)}
    return z, labels, np.asarray(weights, np.float32)


def wanted(z, labels, w):
    """The loss, and its slopes by the formulas."""
    def entropy(x, y):
        return -np.log(plain.probabilities(x.astype(float))[np.arange(len(y)), y])
    total = max(w.sum(), 1e-9)
    apart = z["first"].astype(float) - z["before"]
    loss = entropy(z["own"], labels["own"]).mean() + ALPHA * (w * (apart ** 2).mean(-1)).sum() / total
    loss += BETA * (w * entropy(z["second"], labels["second"])).sum() / total
    return loss, {"own": plain.entropy_slope(z["own"].astype(float), labels["own"]) / 6,
                  "first": ALPHA * 2 * apart / 4 * w[:, None] / total,
                  "second": BETA * plain.entropy_slope(z["second"].astype(float), labels["second"]) * w[:, None] / total}


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 0, 1, 0, 0), (0, 0, 0, 0, 0), (0.5, 2, 1, 1, 0.25)])
def test_loss_and_gradient(weights):
    z, labels, w = case(weights)

    def loss(own, first, second):
        return der.loss(own, jnp.asarray(labels["own"]), (first, z["before"], w), (second, jnp.asarray(labels["second"]), w), alpha=ALPHA,
                        beta=BETA)
    value, slopes = jax.value_and_grad(loss, argnums=(0, 1, 2))(*(jnp.asarray(z[name]) for name in ("own", "first", "second")))
    expected, by_formula = wanted(z, labels, w)
    assert value == pytest.approx(expected, rel=1e-6)
    for got, name in zip(slopes, ("own", "first", "second"), strict=True):
        np.testing.assert_allclose(got, by_formula[name], rtol=1e-5, atol=1e-7)


def test_what_is_stored_carries_no_gradient():
    assert der.stored(jnp.ones((2, 3)), jnp.dtype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert not np.asarray(jax.grad(lambda z: der.stored(z, jnp.dtype(jnp.float32)).sum())(jnp.ones((2, 3)))).any()


def test_half_precision_logits_are_enough():
    """Logits in bfloat16 move the distillation loss by less than one percent."""
    z, _, w = case((1, 1, 1, 1, 1))
    full = der.distillation(jnp.asarray(z["first"]), jnp.asarray(z["before"]), w)
    half = der.distillation(jnp.asarray(z["first"]), jnp.asarray(z["before"]).astype(jnp.bfloat16), w)
    assert half != full and half == pytest.approx(float(full), rel=1e-2)

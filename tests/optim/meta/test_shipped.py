"""The trained numbers that come with jaxmem: what an optimizer gets, and that they are what their provenance says."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.optim import transforms
from jaxmem.optim.configs import LEARNED_WEIGHTS, OptimizerConfig
from jaxmem.optim.learned import weights as learned_weights

DIMS, PARAMS = {"w": ("embed", "mlp")}, {"w": jnp.ones((4, 6))}


def weights_of(config):
    tx = transforms.build(config, DIMS)
    state = transforms.with_trained_weights(jax.jit(tx.init)(PARAMS), config)
    return {name: np.asarray(x) for name, x in state[0].weights.items()}


def test_celo_has_trained_numbers_by_default_and_untrained_ones_on_request():
    shipped, untrained = weights_of(OptimizerConfig(name="learned")), weights_of(OptimizerConfig(name="learned", weights=None))
    with np.load(learned_weights.shipped("celo")) as file:
        for name in LEARNED_WEIGHTS["celo"]:
            np.testing.assert_array_equal(shipped[name], file[name])
    assert (untrained["w2"] == 0).all() and np.abs(shipped["w2"]).max() > 0.01


@pytest.mark.parametrize("rule", LEARNED_WEIGHTS)
def test_provenance(rule):
    path = learned_weights.shipped(rule)
    if path is None:
        assert rule != "celo"
        return
    learned_weights.load(path, rule)
    said = json.loads(path.with_suffix(".json").read_text())
    assert said["weights_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert said["recipe"]["rule"] == rule and said["iterations"] == said["recipe"]["iterations"]
    assert said["commit"] and said["versions"]["jax"] and set(said["data"]) == set(said["recipe"]["families"])
    assert path.stat().st_size < 10_000

"""The decoder with imported weights against logits of the reference implementation (tests/fixtures/hf/make.py)."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.checkpoint.formats.reading import read
from jaxmem.models.decoder import Decoder
from jaxmem.models.ops import Ops
from jaxmem.parallel.attend import attention
from jaxmem.parallel.saving import run_layers
from jaxmem.plan import Remat
from jaxmem.step import pure_to_state

GOLDEN = pathlib.Path(__file__).parents[2] / "fixtures" / "hf"
MODELS = ("llama", "llama3", "gpt2", "qwen2", "qwen3")


def logits_of(config, params, tokens):
    """f32 [B, S, V] of the model that training runs, without a plan."""
    graph, variables = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)), nnx.Param)
    ops = Ops(attend=attention("xla", None), attend_local=None,
              run_blocks=run_layers(Remat.parse("none"), layers=config.layers, unroll=False))

    @jax.jit
    def forward(params, tokens):
        model = nnx.merge(graph, pure_to_state(variables, params))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden = model.hidden(tokens, positions, jnp.ones_like(tokens), ops, jnp.float32)
        return hidden @ model.head_weights(jnp.float32)
    return np.asarray(forward(jax.tree.map(jnp.asarray, params), tokens))


def error_of(name, config, params):
    golden = np.load(GOLDEN / name / "golden.npz")
    assert golden["logits"].std() > 1 and golden["logits"].dtype == np.float32
    return np.abs(logits_of(config, params, golden["tokens"]) - golden["logits"]).max() / np.abs(golden["logits"]).max()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_reference(name):
    """Measured on CPU: 6e-7 to 2e-6 of the largest logit."""
    assert error_of(name, *read(GOLDEN / name)) < 1e-5


@pytest.mark.parametrize("name, change", [
    ("llama", {"rope_theta": 9_000.0}), ("llama", {"norm_eps": 1e-3}), ("llama3", {"rope_scaling": "none"}),
    ("llama3", {"rope_low_freq": 1.5}), ("qwen3", {"rope_scaling": "none"}), ("qwen3", {"rope_factor": 3.5}),
    ("gpt2", {"activation": "gelu"}), ("gpt2", {"norm_eps": 1e-3})])
def test_every_setting_shows_in_the_logits(name, change):
    """Were the golden models blind to a setting, agreeing with them would say nothing about it."""
    config, params = read(GOLDEN / name)
    assert error_of(name, dataclasses.replace(config, **change), params) > 1e-4

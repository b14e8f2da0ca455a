"""The smallest model that a method can be tried on: dense layers as a nested dict, and a mesh to put it on."""

import itertools

import jax
import jax.numpy as jnp

from jaxmem.continual.classifier import Classifier
from jaxmem.plan import Plan
from jaxmem.sharding import make_mesh


def mesh(devices=8, text=None):
    return make_mesh(Plan.parse(text or f"data={devices}", devices=devices), jax.devices()[:devices])


def mlp(sizes):
    """`(6, 4)` is a softmax regression; ReLU between layers."""
    pairs = list(itertools.pairwise(sizes))

    def init(key):
        return {f"layer{i}": {"weight": jax.random.normal(one, pair) * (2 / pair[0]) ** 0.5, "bias": jnp.zeros(pair[1])}
                for i, (one, pair) in enumerate(zip(jax.random.split(key, len(pairs)), pairs, strict=True))}

    def logits(params, inputs):
        x = inputs.reshape(len(inputs), -1)
        for i in range(len(pairs)):
            x = x @ params[f"layer{i}"]["weight"] + params[f"layer{i}"]["bias"][None]
            x = jax.nn.relu(x) if i + 1 < len(pairs) else x
        return x
    return Classifier(classes=sizes[-1], init=init, logits=logits)

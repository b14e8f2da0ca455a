"""The package's own classifiers in the learner: the same logits, and the same training however a plan splits them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.continual import learner, methods
from jaxmem.continual.model import classifier_of
from jaxmem.continual.tasks import class_incremental
from jaxmem.hardware import parse_topology
from jaxmem.optim import transforms
from jaxmem.plan import Plan
from jaxmem.sharding import make_mesh
from jaxmem.spec import InputError
from jaxmem.workload import Workload
from tests.continual import plain

MLP = "mlp,height=2,width=3,mlp=16,layers=1,classes=4"
VIT = "vit-tiny,height=4,width=4,layers=1,embed=16,heads=2,mlp=32,classes=4"


def placed(model, text, devices, batch=8):
    workload, plan, topology = Workload.parse(model=model, batch=batch), Plan.parse(text, devices=devices), parse_topology(f"cpu:{devices}")
    where = make_mesh(plan, jax.devices()[:devices])
    return classifier_of(workload, plan, topology, where), where, workload


def tasks(shape):
    def rows(count, seed):
        x, labels = plain.problem(count, seed)
        return np.resize(x, (count, *shape)), labels
    return class_incremental(rows(48, 1), rows(32, 2), [(0, 1), (2, 3)])


def scores(model, text, devices, x):
    found, where, _ = placed(model, text, devices)
    with jax.set_mesh(where):
        params = jax.jit(found.classifier.init)(jax.random.key(3))
        return params, jax.jit(found.classifier.logits)(params, x)


def test_logits_of_the_mlp_by_hand():
    x = np.random.default_rng(0).normal(size=(8, 2, 3, 1)).astype(np.float32)
    params, got = scores(MLP, "data=8,compute=f32", 8, x)
    w, b, v, c = (np.asarray(params[layer][name], float) for layer in ("hidden_0", "head") for name in ("weights", "bias"))
    wanted = np.maximum(x.reshape(8, -1) @ w + b, 0) @ v + c
    assert got.dtype == jnp.float32 and np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_vision_transformer_scores_alike_however_it_is_split():
    x = np.random.default_rng(0).normal(size=(8, 4, 4, 1)).astype(np.float32)
    _, whole = scores(VIT, "data=1,compute=f32", 1, x)
    _, split = scores(VIT, "data=4,tensor=2,compute=f32", 8, x)
    assert split.shape == (8, 4) and np.abs(whole).max() > 0.1
    np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["ewc,ewc=20", pytest.param("shrink-perturb", marks=pytest.mark.long)])
def test_a_split_model_learns_what_a_whole_one_does(method):
    ends = []
    for text, devices in (("data=1,compute=f32", 1), ("fsdp=4,tensor=2,compute=f32", 8)):
        found, where, workload = placed(MLP, text, devices)
        tx = optax.chain(transforms.build(workload.optimizer, found.dims), optax.scale(0.01))
        ends.append(learner.learn(found.classifier, tasks((2, 3, 1)), methods.parse(method), tx, mesh=where, batch=8, epochs=2,
                                  shardings=found.shardings))
    whole, split = ends
    weights = split.params["hidden_0"]["weights"]
    assert not weights.sharding.is_fully_replicated and weights.addressable_shards[0].data.size == weights.size // 8
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(split.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)
    assert np.array_equal(whole.accuracy, split.accuracy)


def test_a_model_of_text_is_refused():
    plan, workload = Plan.parse("data=1", devices=1), Workload.parse(model="decoder-tiny", batch=8, seq=16)
    with pytest.raises(InputError, match="decoder-tiny reads text; tasks of classes take a classifier"):
        classifier_of(workload, plan, parse_topology("cpu:1"), make_mesh(plan, jax.devices()[:1]))

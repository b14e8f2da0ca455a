"""Closed-form state bytes equal the summed shard shapes of the real state, for any mesh, dtype and optimizer.

A formula elsewhere once said that fp16 costs more than fp32, and another divided one dim by ZeRO and by tensor parallelism.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from jaxmem.cost.memory import optimizer_leaves, state_bytes, state_leaves
from jaxmem.models.configs import parameter_shapes
from jaxmem.models.decoder import Decoder
from jaxmem.optim import transforms
from jaxmem.optim.configs import OPTIMIZERS
from jaxmem.optim.dims import flatten, nested, state_dims
from jaxmem.plan import Plan
from jaxmem.rules import rules
from jaxmem.sharding import sharding_for
from jaxmem.workload import Workload

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def real_bytes(workload, plan):
    """Bytes of one device's shards of the real optimizer's state and of parameters, by jax's own shard shapes."""
    mesh = AbstractMesh(tuple(plan.sizes.values()), tuple(plan.sizes))
    shapes = parameter_shapes(workload.model)
    params = nested({path: jax.ShapeDtypeStruct(shape, DTYPES[plan.params]) for path, (shape, _) in shapes.items()})
    dims = nested({path: dims for path, (_, dims) in shapes.items()})
    known = {tuple(path.split("/")): value for path, value in shapes.items()}

    def of(leaf, leaf_dims, what):
        shard = sharding_for(leaf_dims, leaf.shape, rules(plan, what), mesh).shard_shape(leaf.shape)
        return math.prod(shard) * leaf.dtype.itemsize

    state = flatten(jax.eval_shape(transforms.build(workload.optimizer, dims).init, params))
    opt = 0
    for path, leaf in state.items():
        # Muon's three coefficients belong to no parameter and are whole everywhere.
        leaf_dims = (None,) if path[-1] == "ns_coeffs" else state_dims(path, leaf.shape, known)[0]
        opt += of(leaf, leaf_dims, "opt_state")
    return {"opt_state": opt, **{what: sum(of(leaf, known[path][1], what) for path, leaf in flatten(params).items())
                                 for what in ("params", "gradients")}}


@settings(max_examples=25, deadline=None)
@given(model=st.sampled_from(["decoder-tiny", "decoder-small,tied=true", "gpt2,layers=2", "gemma2-2b,layers=3",
                              "llama3-8b,layers=2", "decoder-tiny,bias=all,norm=layer,qk_norm=true,embed=96"]),
       optimizer=st.sampled_from(sorted(OPTIMIZERS)), moments=st.sampled_from(["f32", "bf16"]),
       params=st.sampled_from(sorted(DTYPES)), data=st.sampled_from([1, 2, 3]),
       fsdp=st.sampled_from([1, 2, 6, 16]), tensor=st.sampled_from([1, 2, 5]),
       zero=st.sampled_from([0, 1, 2, 3]))
def test_equals_summed_shards(model, optimizer, moments, params, data, fsdp, tensor, zero):
    workload = Workload.parse(model=model, optimizer=f"{optimizer},moments={moments}", batch=96, seq=128)
    plan = Plan(data=data, fsdp=fsdp, tensor=tensor, zero=zero, params=params)
    closed = state_bytes(workload, plan)
    assert {"params": closed.params, "gradients": closed.gradients, "opt_state": closed.opt_state} == real_bytes(workload, plan)


@pytest.mark.parametrize("model", [
    "decoder-tiny", "gpt2,layers=2,embed=64,mlp=128,heads=2,kv_heads=2,vocab=64", "gemma3-1b,layers=2,vocab=64",
    "qwen3-0.6b,layers=2,vocab=64,bias=qkv", "decoder-tiny,bias=all,norm=layer,post_norms=both,tied=true"])
def test_table_of_shapes_is_the_models_own(model):
    config = Workload.parse(model=model, batch=1, seq=8).model
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)), nnx.Param))
    real = {"/".join(path): leaf.shape for path, leaf in flatten(state).items()}
    assert real == {path: shape for path, (shape, _) in parameter_shapes(config).items()}


def test_llama3_8b_by_hand():
    """8,030,261,248 parameters over 64: only the vectors of the norms are left whole."""
    workload = Workload.parse(model="llama3-8b", batch=64, seq=8192)
    closed = state_bytes(workload, Plan(fsdp=64))
    vectors = (32 * 2 + 1) * 4096 * 4
    device = (8_030_261_248 * 4 - vectors) // 64 + vectors
    assert closed.params == closed.gradients == device
    assert closed.opt_state == 2 * device + 4
    assert closed.batch == 4 * 4 * 8192


def test_zero_and_tensor_do_not_both_divide_the_same_dim():
    w = Workload.parse(model="llama3-8b", batch=64, seq=128)
    one = state_bytes(w, Plan()).params
    vectors = (32 * 2 + 1) * 4096 * 4
    assert state_bytes(w, Plan(fsdp=4, tensor=2)).params == (one - vectors) // 8 + vectors
    assert state_bytes(w, Plan(data=4, tensor=2, zero=1)).params == (one - vectors) // 2 + vectors


def test_less_precise_is_never_more():
    w = Workload.parse(model="llama3-8b", batch=64, seq=128)
    by_dtype = {dtype: state_bytes(w, Plan(fsdp=8, params=dtype)) for dtype in ("f32", "bf16", "f16")}
    assert by_dtype["bf16"].params * 2 == by_dtype["f32"].params == by_dtype["f16"].params * 2
    assert by_dtype["bf16"].total < by_dtype["f32"].total


def test_optimizers_by_hand():
    shape, dims = (2, 256, 512), ("layers", "embed", "mlp")
    n = 2 * 256 * 512

    def whole(name, **changes):
        text = ",".join([name, *(f"{k}={v}" for k, v in changes.items())])
        optimizer = Workload.parse(model="gpt2", optimizer=text, batch=1, seq=8).optimizer
        return sum(leaf.bytes() for leaf in optimizer_leaves(optimizer, "w", shape, dims, 4))

    assert whole("adamw") == 8 * n and whole("adamw", moments="bf16") == 6 * n
    assert whole("lion") == whole("sgd") == whole("muon") == 4 * n
    assert whole("sgd", momentum="none") == 0
    assert whole("adafactor") == 4 * (2 * 256 + 2 * 512 + 1)
    assert whole("adafactor", factored_above=512) == 4 * (n + 2)
    assert whole("adafactor", momentum=0.9) == 4 * (2 * 256 + 2 * 512 + 1) + 4 * n


def test_every_parameter_has_state_once():
    workload = Workload.parse(model="llama3-8b,layers=2", batch=8, seq=128)
    leaves = state_leaves(workload, Plan())
    assert sum(leaf.bytes() for leaf in leaves if leaf.kind == "params") == 4 * workload.model.parameters
    assert len({(leaf.kind, leaf.path) for leaf in leaves}) == len(leaves)

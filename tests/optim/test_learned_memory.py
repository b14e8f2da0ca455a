"""Bytes of optimizer state: the benchmark's table against published counts, and the closed form of the learned rules by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.optimizer_memory import adam_8bit, shampoo, state_bytes
from jaxmem.cost.flops import optimizer_flops
from jaxmem.cost.memory import optimizer_leaves
from jaxmem.models.configs import MODELS
from jaxmem.optim import transforms
from jaxmem.optim.dims import flatten, state_dims
from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.small_fc import scale_by_small_fc
from jaxmem.plan import Plan
from jaxmem.rules import partition, rules
from jaxmem.workload import Workload

# bytes a parameter measured for gpt2, gpt2-medium and gpt2-xl with another version of jax and fused query-key-value matrices; Muon's
# 4.00 there gave it the tables too, which have Adam here
MEASURED = {"sgd": (0, 0, 0), "sgd, momentum": (4.0, 4.0, 4.0), "lion": (4.0, 4.0, 4.0), "lion, bf16": (2.0, 2.0, 2.0),
            "adafactor": (0.010, 0.009, 0.006), "adafactor, momentum": (4.01, 4.01, 4.01), "sm3": (4.01, 4.01, 4.01),
            "8-bit Adam, blocks of 256 (computed)": (2.03, 2.03, 2.03), "adamw, mu in bf16": (6.0, 6.0, 6.0), "adamw": (8.0, 8.0, 8.0),
            "schedule-free adamw": (8.0, 8.0, 8.0), "ademamix": (12.0, 12.0, 12.0), "learned (small_fc)": (16.03, 16.03, 16.02),
            "learned (celo)": (16.03, 16.03, 16.02)}
OF = ("gpt2", "gpt2-medium", "gpt2-xl")


@pytest.mark.parametrize("row", MEASURED)
def test_against_measured_bytes(row):
    for model, want in zip(OF, MEASURED[row], strict=True):
        got = state_bytes(model, row) / MODELS[model].parameters
        assert abs(got - want) <= (0.0015 if want < 1 else 0.011), (model, got)


def test_learned_mib():
    """1,903 MiB, 5,423 MiB and 23,793 MiB were measured for gpt2, gpt2-medium and gpt2-xl, twice AdamW's."""
    for model, mib in zip(OF, (1903, 5423, 23793), strict=True):
        got = state_bytes(model, "learned (small_fc)")
        assert abs(got / 2**20 - mib) < 3
        assert 2.0 < got / state_bytes(model, "adamw") < 2.005


def test_formulas():
    assert adam_8bit((1024, 512)) == 2 * 2**19 + 8 * 2**11
    # 2048 x 1024 is two blocks: statistics and roots of both sides, and two arrays of its own size
    assert shampoo((2048, 1024)) == 8 * 2**21 + 2 * (4 * 4 * 2**20) and shampoo((100,)) == 800


def test_learned_by_hand():
    """A stack of matrices [2, 256, 512]: 16 bytes each, and 3 x 4 for each row and column of each layer; vectors 28 bytes."""
    def whole(text, shape, dims):
        optimizer = Workload.parse(model="gpt2", optimizer=text, batch=1, seq=8).optimizer
        return sum(leaf.bytes() for leaf in optimizer_leaves(optimizer, "w", shape, dims, 2))  # bf16 parameters: no difference
    n, lines = 2 * 256 * 512, 2 * 12 * (256 + 512)
    matrix = ((2, 256, 512), ("layers", "embed", "mlp"))
    assert whole("learned", *matrix) == 16 * n + lines
    assert whole("learned,moments=bf16", *matrix) == 10 * n + lines
    assert whole("learned,moments=int8", *matrix) == 7 * n + lines + 3 * 4 * 2 * 256
    assert whole("learned,rule=small_fc", (2, 512), ("layers", "embed")) == 28 * 2 * 512
    assert whole("learned", (3, 5, 7), ("embed", "heads", "head_dim")) == 16 * 105 + 12 * (15 + 21)


@pytest.mark.parametrize("moments", ["f32", "bf16", "int8"])
def test_closed_form_is_the_real_state(moments):
    """Leaf by leaf: bytes, and where the dims put them."""
    shapes = {"a": ((2, 12, 8, 4), ("layers", "embed", "heads", "head_dim")), "b": ((24, 16), ("vocab", "embed")),
              "c": ((2, 16), ("layers", "embed")), "d": ((16,), ("embed",)), "e": ((3, 16, 16), ("layers", "embed", "mlp"))}
    work = Workload.parse(model="gpt2", optimizer=f"learned,moments={moments}", batch=1, seq=8)
    tx = transforms.build(work.optimizer, {name: dims for name, (_, dims) in shapes.items()})
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in shapes.items()}
    real = {path[-2:]: (leaf, state_dims(path, leaf.shape, {(name,): value for name, value in shapes.items()}))
            for path, leaf in flatten(jax.eval_shape(tx.init, params)).items()}
    for name, (shape, dims) in shapes.items():
        leaves = optimizer_leaves(work.optimizer, name, shape, dims, 4)
        assert len(leaves) == sum(path[-1] == name for path in real)
        for leaf in leaves:
            array, (real_dims, owner) = real[tuple(leaf.path.split("/"))]
            assert owner == (name,) and real_dims == leaf.dims
            assert (array.shape, array.dtype.itemsize) == (leaf.shape, leaf.itemsize)


def test_where_accumulators_lie():
    """fsdp=4, tensor=2: momenta as the parameter, statistics split over what is left, vectors whole, decays never split."""
    work = Workload.parse(model="gpt2", optimizer="learned", batch=8, seq=8)
    plan = Plan.parse("fsdp=4,tensor=2")

    def at(name, shape, dims):
        leaf = next(x for x in optimizer_leaves(work.optimizer, "w", shape, dims, 4) if x.path == f"{name}/w")
        return partition(leaf.dims, leaf.shape, rules(plan, "opt_state"), plan.sizes)
    matrix = ((2, 256, 512), ("layers", "embed", "mlp"))
    assert at("momenta", *matrix) == ((), (), ("fsdp",), ("tensor",)) and at("second", *matrix) == ((), ("fsdp",), ("tensor",))
    assert at("rows", *matrix) == ((), (), ("fsdp",)) and at("cols", *matrix) == ((), (), ("tensor", "fsdp"))
    assert at("momenta", (2, 256), ("layers", "embed")) == ((), (), ())


def test_optimizer_flops_by_hand():
    """The rest of the network once for each parameter: 16 x 4 + 4 x 4 + 4 x 2 and 18 x 8 + 8 x 8 + 8 multiplications."""
    for text, each in (("learned,rule=small_fc", 88), ("learned", 216)):
        work = Workload.parse(model="decoder-tiny", optimizer=text, batch=1, seq=8)
        assert optimizer_flops(work) == 2 * each * work.model.parameters


def test_a_step_leaves_no_larger_state():
    """Shapes and types after an update are those of `init`."""
    params = {"w": jnp.ones((4, 6)), "b": jnp.ones((3,)), "s": jnp.float32(1)}
    tx = scale_by_small_fc(learned_weights.initial("small_fc", jax.random.key(0)), moments="int8")
    state = tx.init(params)
    after = jax.eval_shape(tx.update, params, state, params)[1]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (np.shape(b), b.dtype)

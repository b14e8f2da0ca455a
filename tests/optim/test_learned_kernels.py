"""The kernels of learned rules, interpreted, against the same rules by XLA; and what is read of their compiled calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.optim.learned import kernels
from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.celo import scale_by_celo
from jaxmem.optim.learned.fused import Kernel
from jaxmem.optim.learned.small_fc import scale_by_small_fc

QUICK = {"xla_backend_optimization_level": 0}  # compiled in less time, to run a few times
MAKE = {"small_fc": scale_by_small_fc, "celo": scale_by_celo}
SHAPES = {"tall": (24, 128), "wide": (16, 256), "stack": (2, 16, 128), "vector": (128,), "odd": (7, 130)}
STACKED = {name: int(name == "stack") for name in SHAPES}


def random_weights(rule):
    first = learned_weights.initial(rule, jax.random.key(0))
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(x + rng.normal(size=x.shape).astype(np.float32) * (0.01 if "decays" in name else 0.3))
            for name, x in first.items()}


def trees(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}


def after(make, params, gradients, **how):
    tx = make(stacked=STACKED, **how)

    def run(params, *gradients):
        state, steps = tx.init(params), []
        for g in gradients:
            u, state = tx.update(g, state, params)
            steps.append(u)
        return steps, state
    return jax.jit(run, compiler_options=QUICK)(params, *gradients)


@pytest.mark.parametrize(("rule", "moments"), [("small_fc", "f32"), ("celo", "bf16")])
def test_kernels_do_what_xla_does(rule, moments):
    weights, params, gradients = random_weights(rule), trees(2), [trees(3), trees(4)]
    kernel = Kernel(backend="interpret", shardings={})
    assert {name for name, shape in SHAPES.items() if kernel.does(name, shape, STACKED[name], moments)} == {"tall", "wide", "stack"}
    want, got = (after(lambda **more: MAKE[rule](weights, moments=moments, **more), params, gradients, **how)
                 for how in ({"chunk": 2**18}, {"kernel": kernel}))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a).max() > 1e-4 or not a.any()  # momenta of the slowest decay after two steps: 2e-3
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6 * np.abs(a).max())


def test_sharded_kernels_need_no_whole_matrix():
    """fsdp 4 x tensor 2: every device works on its part; the compiled program gathers nothing."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    weights = random_weights("small_fc")
    params, g = {"w": jnp.asarray(np.random.default_rng(5).normal(size=(2, 64, 256)), jnp.float32)}, None
    g = jax.tree.map(lambda x: jnp.sin(3 * x), params)
    split = NamedSharding(mesh, P(None, "fsdp", "tensor"))
    plain = scale_by_small_fc(weights, stacked={"w": 1})
    tx = scale_by_small_fc(weights, stacked={"w": 1}, kernel=Kernel(backend="interpret", shardings={"['w']": split}))
    want, _ = jax.jit(plain.update, compiler_options=QUICK)(g, plain.init(params), params)
    state = tx.init(jax.device_put(params, split))
    g, params = jax.device_put((g, params), split)
    compiled = jax.jit(tx.update, compiler_options=QUICK).lower(g, state, params).compile()
    got, _ = compiled(g, state, params)
    np.testing.assert_allclose(got["w"], want["w"], rtol=2e-5, atol=2e-6 * float(jnp.abs(want["w"]).max()))
    assert got["w"].sharding.is_equivalent_to(split, 3)
    assert "all-gather" not in compiled.as_text()


def test_blocks_divide_what_a_device_has():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("fsdp", None))
    assert kernels.fits((64, 128), 0, "f32", "tpu", None) and kernels.fits((64, 128), 0, "f32", "tpu", split)
    assert not kernels.fits((32, 128), 0, "f32", "tpu", split)  # four rows a device, of tiles of eight
    assert kernels.fits((32, 128), 0, "f32", "gpu", split) and not kernels.fits((32, 100), 0, "f32", "gpu", None)
    assert not kernels.fits((64, 128), 0, "int8", "tpu", None) and not kernels.fits((64, 4, 128), 0, "f32", "tpu", None)
    for backend in ("tpu", "gpu"):
        for shape in ((50304, 768), (768, 3072), (8, 128)):
            tiles = kernels.blocks_for(*shape, backend)
            assert shape[0] % tiles.rows == 0 and shape[1] % tiles.columns == 0 and tiles.rows % tiles.at_once == 0


def test_operations_by_hand():
    assert kernels.operations(lambda x: jnp.maximum(x * x + x, x)) == (3, 0)
    assert kernels.operations(lambda x: jax.nn.relu(x) * jax.lax.rsqrt(x)) == (2, 1)

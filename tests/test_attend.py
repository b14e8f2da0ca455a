"""Every implementation against attention written out in float64 NumPy, gradients included, on one device and on eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.kernel_limits import attention_problems, choose
from jaxmem.parallel import attend as attention_module
from jaxmem.parallel.attend import attention, block_size_for

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 4, 2, 32
SEGMENT_STARTS = ((0, 100, 250), (0, 1, 128), (0, 64, 192), (0, 200, 255))  # of three documents in each row


@functools.cache
def inputs():
    random = np.random.default_rng(7)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    q, weights = draw(BATCH, SEQ, HEADS, HEAD_DIM), draw(BATCH, SEQ, HEADS, HEAD_DIM)
    k, v = draw(BATCH, SEQ, KV_HEADS, HEAD_DIM), draw(BATCH, SEQ, KV_HEADS, HEAD_DIM)
    segment_ids = np.zeros((BATCH, SEQ), np.int32)
    for row, starts in enumerate(SEGMENT_STARTS):
        for start in starts[1:]:
            segment_ids[row, start:] += 1
    return q, k, v, segment_ids, weights


@functools.cache
def reference(window: int | None, softcap: float | None) -> dict[str, np.ndarray]:
    """o, and dq, dk, dv of sum(o x weights), by hand: one query position at a time, float64."""
    q, k, v, segment_ids, weights = (x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs())
    group, scale = HEADS // KV_HEADS, HEAD_DIM ** -0.5
    o, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(BATCH):
        for s in range(SEQ):
            first = 0 if window is None else max(0, s - window + 1)
            seen = [t for t in range(first, s + 1) if segment_ids[b, t] == segment_ids[b, s]]
            for n in range(HEADS):
                keys, values = k[b, seen, n // group], v[b, seen, n // group]
                raw = keys @ q[b, s, n] * scale
                logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
                p = np.exp(logits - logits.max())
                p /= p.sum()
                o[b, s, n] = p @ values
                dp = values @ weights[b, s, n]
                dlogits = p * (dp - p @ dp)
                draw = dlogits * scale * (1 if softcap is None else 1 - np.tanh(raw / softcap) ** 2)
                dq[b, s, n] = draw @ keys
                dk[b, seen, n // group] += np.outer(draw, q[b, s, n])
                dv[b, seen, n // group] += np.outer(p, weights[b, s, n])
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def values_and_gradients(attend, *, mesh=None) -> dict[str, np.ndarray]:
    q, k, v, segment_ids, weights = inputs()
    if mesh is not None:
        heads, rows = NamedSharding(mesh, P("data", None, "tensor", None)), NamedSharding(mesh, P("data"))
        q, k, v, weights = (jax.device_put(x, heads) for x in (q, k, v, weights))
        segment_ids = jax.device_put(segment_ids, rows)

    @jax.jit
    def run(q, k, v, segment_ids, weights):
        o, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segment_ids), q, k, v)
        return (o, *pull(weights))
    with jax.default_matmul_precision("highest"):
        found = run(q, k, v, segment_ids, weights)
    return dict(zip(("o", "dq", "dk", "dv"), map(np.asarray, found), strict=True))


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    for name, right in wanted.items():
        largest = np.abs(right).max()
        assert largest > 0.5, f"{name}: the reference is tiny"
        error = np.abs(found[name] - right).max() / largest
        assert error < tolerance, f"{name}: off by {error:.1e} of its largest element"


CASES = [("xla", None, None), ("xla", 100, 5.0), ("splash", None, None), ("splash", 100, 5.0), ("triton", None, None),
         ("triton", 100, 5.0)]


@pytest.mark.parametrize(("implementation", "window", "softcap"), CASES)
def test_one_device_equals_float64(implementation, window, softcap) -> None:
    attend = attention(implementation, None, window=window, softcap=softcap, execution="interpreted")
    assert_close(values_and_gradients(attend), reference(window, softcap), 2e-5)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(("implementation", "window"), [("xla", 100), ("splash", None), ("triton", None)])
def test_eight_devices_equal_float64_and_keep_the_split(implementation, window, mesh) -> None:
    attend = attention(implementation, mesh, ("data",), ("tensor",), window=window, execution="interpreted")
    assert_close(values_and_gradients(attend, mesh=mesh), reference(window, None), 2e-5)
    q, k, v, segment_ids, _ = inputs()
    split = NamedSharding(mesh, P("data", None, "tensor", None))
    o = jax.jit(attend)(*(jax.device_put(x, split) for x in (q, k, v)), segment_ids)
    assert o.sharding.is_equivalent_to(split, 4)


def test_more_head_shards_than_kv_heads_repeat_kv_heads_just_enough() -> None:
    wide = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    attend = attention("xla", wide, ("data",), ("tensor",))
    q, k, v, segment_ids, weights = inputs()

    def loss(q, k, v):
        return (attend(q, k, v, segment_ids) * weights).sum()
    with jax.default_matmul_precision("highest"):
        found = (jax.jit(attend)(q, k, v, segment_ids), *jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v))
    assert_close(dict(zip(("o", "dq", "dk", "dv"), map(np.asarray, found), strict=True)), reference(None, None), 2e-5)


def test_no_mask_leaks_from_another_document_or_the_future() -> None:
    q, k, v, segment_ids, _ = inputs()
    attend = jax.jit(attention("xla", None))
    before = np.asarray(attend(q, k, v, segment_ids))
    changed = v.copy()
    changed[0, 100:250] += 1000.0  # the second document of the first row
    after = np.asarray(attend(q, k, changed, segment_ids))
    assert np.array_equal(before[0, :100], after[0, :100]) and np.array_equal(before[0, 250:], after[0, 250:])
    assert np.array_equal(before[1:], after[1:]) and np.abs(after[0, 100:250] - before[0, 100:250]).min() > 900


def test_bfloat16_softmax_is_in_float32() -> None:
    q, k, v, segment_ids, _ = inputs()
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    o = attention("xla", None)(*half, segment_ids)
    assert o.dtype == jnp.bfloat16
    text = str(jax.make_jaxpr(attention("xla", None))(*half, segment_ids))
    assert f"f32[{BATCH},{KV_HEADS},{HEADS // KV_HEADS},{SEQ},{SEQ}] = exp" in text


def test_kernels_read_grouped_keys_without_copying_them() -> None:
    """No array of the traced program, outside the kernels, holds keys repeated for every query head."""
    q, k, v, segment_ids, _ = inputs()
    for implementation in ("splash", "triton", "xla"):
        attend = attention(implementation, None, execution="interpreted")
        shapes = {tuple(variable.aval.shape) for equation in jax.make_jaxpr(attend)(q, k, v, segment_ids).eqns
                  if equation.primitive.name in ("broadcast_in_dim", "concatenate", "gather") for variable in equation.outvars}
        assert not {shape for shape in shapes if HEAD_DIM in shape and np.prod(shape) >= BATCH * SEQ * HEADS * HEAD_DIM}, shapes


@pytest.mark.parametrize(("implementation", "kernel"), [("splash", "name=splash_mha_fwd"), ("triton", "name=mha_forward")])
def test_residuals_can_be_saved_by_name(implementation, kernel) -> None:
    """With `save:context` the backward pass finds output and row sums and runs no forward kernel again."""
    q, k, v, segment_ids, weights = inputs()
    attend = attention(implementation, None)

    def kernels(policy) -> int:
        f = jax.checkpoint(lambda q, k, v: (attend(q, k, v, segment_ids) * weights).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(q, k, v)).count(kernel)
    names = jax.checkpoint_policies.save_only_these_names
    assert kernels(names(attention_module.CONTEXT)) == 1
    assert kernels(names("nothing_of_that_name")) == 2


def test_head_sizes_that_are_no_power_of_two_are_padded_and_cut() -> None:
    q, k, v, segment_ids, _ = (x[:1, :128, :, :24] if x.ndim == 4 else x[:1, :128] for x in inputs())
    wanted = attention("xla", None)(q, k, v, segment_ids)
    found = attention("triton", None, execution="interpreted")(q, k, v, segment_ids)
    assert found.shape == (1, 128, HEADS, 24) and float(jnp.abs(wanted).max()) > 1
    assert float(jnp.abs(found - wanted).max()) < 1e-5


@pytest.mark.parametrize(("seq", "block"), [(128, 128), (256, 256), (384, 128), (1536, 512), (8192, 512)])
def test_blocks_divide_the_sequence(seq, block) -> None:
    assert block_size_for(seq) == block and seq % block == 0
    assert block_size_for(8192, largest=2048) == 2048


def test_choice_by_chip() -> None:
    shape = dict(seq=4096, head_dim=128, heads=32, kv_heads=8)
    assert [choose(kind, **shape) for kind in ("tpu", "gpu", "cpu")] == ["splash", "triton", "xla"]
    assert choose("tpu", **shape | {"seq": 4000}) == "xla"
    assert choose("gpu", **shape, window=512, softcap=50.0) == "triton"
    assert choose("gpu", **shape | {"head_dim": 512}) == "xla"


def test_problems_name_numbers_and_what_would_work() -> None:
    shape = dict(seq=1000, head_dim=320, heads=32, kv_heads=12)
    for implementation, parts in (("splash", ("seq(1000)", "896 and 1024")), ("cudnn", ("head_dim(320)",)),
                                  ("triton", ("head_dim(320)", "16..256", "896 and 1024"))):
        text = "\n".join(attention_problems(implementation, **shape))
        assert all(part in text for part in (*parts, "heads(32)", "kv_heads(12)")), text
    assert attention_problems("xla", seq=1000, head_dim=320, heads=32, kv_heads=8) == []

"""The decoder against a NumPy float64 forward pass written from the papers' formulas, and against the published shapes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.models.configs import parameter_shapes
from jaxmem.models.decoder import Decoder
from jaxmem.models.loss import cross_entropy, head_loss
from jaxmem.models.ops import Ops
from jaxmem.optim.dims import flatten
from jaxmem.parallel.attend import attention
from jaxmem.parallel.saving import run_layers
from jaxmem.plan import Remat
from jaxmem.step import parameter_dims
from jaxmem.workload import Workload

BATCH, SEQ = 2, 24
MODELS = {
    "llama3.1": "decoder-tiny,rope_scaling=llama3,rope_original_positions=16",
    "gpt2": "decoder-tiny,mlp_kind=plain,activation=gelu_tanh,positions=learned,max_positions=64,norm=layer,tied=true,bias=all,kv_heads=4",
    "qwen3": "decoder-tiny,qk_norm=true,tied=true",
    "gemma2": "decoder-tiny,norm_offset=one,post_norms=both,activation=gelu_tanh,attention_softcap=20,final_softcap=10,embed_scale=true,"
              "window=8,window_pattern=2,query_scale=0.2,tied=true",
    "gemma3": "decoder-tiny,layers=3,norm_offset=one,post_norms=both,qk_norm=true,window=8,window_pattern=3,rope_theta=1000000,"
              "rope_local_theta=10000,rope_scaling=linear,embed_scale=true",
}


def config(name):
    return Workload.parse(model=MODELS[name], batch=BATCH, seq=SEQ).model


@functools.cache
def model(name):
    """A decoder whose every parameter is random: zeros and ones would hide biases and norms."""
    c = config(name)
    built = Decoder(c, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graph, state = nnx.split(built, nnx.Param)
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(state)
    leaves = [jnp.asarray(np.asarray(x) + rng.normal(0, 0.1, x.shape), jnp.float32) for x in leaves]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def inputs(vocab):
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, vocab, (BATCH, SEQ), dtype=np.int32)
    place = np.arange(SEQ)[None].repeat(BATCH, 0)
    cut = np.array([[9], [15]])
    segments = np.where(place < cut, 1, 2).astype(np.int32)
    positions = np.where(place < cut, place, place - cut).astype(np.int32)
    return tokens, positions, segments


def ops_for(c):
    attend = lambda window: attention("xla", None, window=window, softcap=c.attention_softcap)  # noqa: E731
    return Ops(attend=attend(None), attend_local=attend(c.window) if c.window else None,
               run_blocks=run_layers(Remat.parse("none"), layers=c.layers, unroll=False))


# ---------------------------------------------------------------- the reference

def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


ACTIVATION = {"silu": lambda x: x / (1 + np.exp(-x)), "gelu_tanh": gelu_tanh}


def norm(c, x, p, kind=None):
    kind = kind or c.norm
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x ** 2).mean(-1, keepdims=True) + c.norm_eps)
    x = x * (1 + p["scale"] if c.norm_offset == "one" else p["scale"])
    return x + p["bias"] if kind == "layer" else x


def rope(c, x, positions, theta, scaled):
    half = c.head_dim // 2
    out = np.empty_like(x)
    for j in range(half):
        f = theta ** (-j / half)
        if scaled and c.rope_scaling == "linear":
            f /= c.rope_factor
        if scaled and c.rope_scaling == "llama3":
            wavelength = 2 * math.pi / f
            long, short = c.rope_original_positions / c.rope_low_freq, c.rope_original_positions / c.rope_high_freq
            if wavelength > long:
                f /= c.rope_factor
            elif wavelength >= short:
                smooth = (c.rope_original_positions / wavelength - c.rope_low_freq) / (c.rope_high_freq - c.rope_low_freq)
                f = (1 - smooth) * f / c.rope_factor + smooth * f
        angle = (positions * f)[:, :, None]
        a, b = x[..., j], x[..., half + j]
        out[..., j], out[..., half + j] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


def reference_logits(c, params, tokens, positions, segments):
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p["embed"][tokens] * (math.sqrt(c.embed) if c.embed_scale else 1)
    if c.positions == "learned":
        x = x + p["positions"][positions]
    for layer in range(c.layers):
        w = jax.tree.map(lambda v, layer=layer: v[layer], p["blocks"])
        attn, is_global = w["attention"], c.is_global(layer)
        h = norm(c, x, w["attention_norm"])
        q, k, v = (np.einsum("bsd,dnh->bsnh", h, attn[n]) + attn.get(f"{n}_bias", 0) for n in ("query", "key", "value"))
        if c.qk_norm:
            q, k = norm(c, q, attn["query_norm"], "rms"), norm(c, k, attn["key_norm"], "rms")
        if c.positions == "rope":
            local = not is_global and c.rope_local_theta is not None
            q, k = (rope(c, y, positions, c.rope_local_theta if local else c.rope_theta, not local) for y in (q, k))
        group = c.heads // c.kv_heads
        k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
        scores = np.einsum("bsnh,btnh->bnst", q, k) * (c.query_scale or c.head_dim ** -0.5)
        if c.attention_softcap:
            scores = c.attention_softcap * np.tanh(scores / c.attention_softcap)
        s, t = np.arange(SEQ)[:, None], np.arange(SEQ)[None]
        seen = (s >= t) & (True if is_global else s - t < c.window)
        mask = seen[None] & (segments[:, :, None] == segments[:, None, :])
        scores = np.where(mask[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("bnst,btnh,nhd->bsd", weights, v, attn["out"]) + attn.get("out_bias", 0)
        x = x + (norm(c, y, w["attention_post_norm"]) if c.post_norms == "both" else y)
        h, m = norm(c, x, w["mlp_norm"]), w["mlp"]
        up = h @ m["up"] + m.get("up_bias", 0)
        inner = ACTIVATION[c.activation](h @ m["gate"]) * up if c.mlp_kind == "gated" else ACTIVATION[c.activation](up)
        y = inner @ m["down"] + m.get("down_bias", 0)
        x = x + (norm(c, y, w["mlp_post_norm"]) if c.post_norms == "both" else y)
    x = norm(c, x, p["final_norm"])
    logits = x @ (p["embed"].T if c.tied else p["head"])
    return c.final_softcap * np.tanh(logits / c.final_softcap) if c.final_softcap else logits


# ---------------------------------------------------------------- tests

@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_float64_numpy(name):
    c, m = config(name), model(name)
    args = inputs(c.vocab)

    @jax.jit
    def logits(state, *args):
        m = nnx.merge(nnx.split(model(name), nnx.Param)[0], state)
        hidden = m.hidden(*args, ops_for(c), jnp.float32)
        out = hidden @ m.head_weights(jnp.float32)
        return c.final_softcap * jnp.tanh(out / c.final_softcap) if c.final_softcap else out
    state = nnx.split(m, nnx.Param)[1]
    got = np.asarray(logits(state, args[0], args[1], args[2]))
    want = reference_logits(c, nnx.to_pure_dict(state), *args)
    assert np.abs(want).max() > 0.5
    assert np.abs(got - want).max() < 2e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_have_the_published_shapes_and_dims(name):
    c = config(name)
    variables = nnx.split(nnx.eval_shape(lambda: Decoder(c, rngs=nnx.Rngs(0), dtype=jnp.float32)), nnx.Param)[1]
    shapes = {"/".join(p): v.shape for p, v in flatten(nnx.to_pure_dict(variables)).items()}
    dims = {"/".join(str(k.key) for k in p): d for p, d in
            jax.tree_util.tree_flatten_with_path(parameter_dims(variables), is_leaf=lambda x: isinstance(x, tuple))[0]}
    assert {path: (shape, dims[path]) for path, shape in shapes.items()} == parameter_shapes(c)
    assert sum(math.prod(s) for s in shapes.values()) == c.parameters


@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_and_gradients_equal_float64(chunks):
    """Value and both gradients of head + cross-entropy, with masked targets, against float64 closed forms."""
    rng = np.random.default_rng(0)
    hidden, weights = rng.normal(size=(2, 6, 8)), rng.normal(size=(8, 11))
    targets = rng.integers(0, 11, (2, 6))
    targets[0, 2] = targets[1, 5] = -1
    logits = hidden @ weights
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    asked = targets >= 0
    want = -np.log(np.take_along_axis(probability, np.maximum(targets, 0)[..., None], -1)[..., 0])[asked].sum()
    error = (probability - np.eye(11)[targets]) * asked[..., None]
    loss = lambda h, w: head_loss(h, w, jnp.asarray(targets, jnp.int32), softcap=None, chunks=chunks)  # noqa: E731
    both = jax.value_and_grad(loss, argnums=(0, 1))
    value, (grad_hidden, grad_weights) = both(jnp.asarray(hidden, jnp.float32), jnp.asarray(weights, jnp.float32))
    assert abs(float(value) - want) < 1e-5 * want
    np.testing.assert_allclose(grad_hidden, error @ weights.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grad_weights, np.einsum("bsd,bsv->dv", hidden, error), rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow():
    logits = jnp.array([[[3e4, 0.0, -3e4]]], jnp.float32)
    assert np.isclose(float(cross_entropy(logits, jnp.array([[1]], jnp.int32))[0, 0]), 3e4)


def test_vocabulary_parallel_logits_are_never_whole():
    """In the compiled forward and backward pass over a split vocabulary no array has both all rows of a device and the whole vocabulary."""
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    put = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))  # noqa: E731
    hidden, weights = put((4, 16, 32), jnp.float32, "data"), put((32, 1000), jnp.float32, None, "tensor")
    targets = put((4, 16), jnp.int32, "data")
    with jax.set_mesh(mesh):
        grad = jax.jit(jax.grad(lambda h, w, t: head_loss(h, w, t, softcap=None, chunks=1), argnums=(0, 1)))
        text = grad.lower(hidden, weights, targets).compile().as_text()
    assert "250" in text
    assert not any(f"[{rows},16,1000]" in text or f"[{rows * 16},1000]" in text for rows in (2, 4))

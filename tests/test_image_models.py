"""MLP and vision transformer against forward passes in NumPy float64 written from their formulas, loss and count of hits included."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.models.configs import blocks, parameter_shapes
from jaxmem.models.loss import correct, counted, label_loss
from jaxmem.models.model import module_of
from jaxmem.models.ops import Ops
from jaxmem.models.vit import patches_of
from jaxmem.optim.dims import flatten
from jaxmem.parallel.attend import attention
from jaxmem.parallel.saving import run_layers
from jaxmem.plan import Remat
from jaxmem.step import parameter_dims
from jaxmem.workload import Workload

BATCH = 4
MODELS = {"mlp": "mlp,layers=3,height=6,width=4,channels=3", "mlp-gelu": "mlp,layers=1,activation=gelu_tanh",
          "vit": "vit-tiny,height=6,width=4,channels=3,patch=2,layers=3"}


@functools.cache
def config(name):
    return Workload.parse(model=MODELS[name], batch=BATCH).model


@functools.cache
def model(name):
    """Every parameter is random: zeros and ones would hide biases and norms."""
    graph, state = nnx.split(module_of(config(name))(config(name), rngs=nnx.Rngs(0), dtype=jnp.float32), nnx.Param)
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(state)
    leaves = [jnp.asarray(np.asarray(x) + rng.normal(0, 0.1, x.shape), jnp.float32) for x in leaves]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def parameters(name):
    """{path: float64 array}."""
    return {"/".join(path): np.asarray(value, np.float64)
            for path, value in flatten(nnx.to_pure_dict(nnx.split(model(name), nnx.Param)[1])).items()}


def batch(name):
    c, rng = config(name), np.random.default_rng(2)
    return {"images": rng.random((BATCH, c.height, c.width, c.channels), np.float32),
            "labels": np.array([0, c.classes - 1, -1, 3], np.int32)}


def ops(layers, implementation="xla"):
    return Ops(attend=attention(implementation, None, mask="full"), attend_local=None,
               run_blocks=run_layers(Remat(policy="none"), layers=layers, unroll=False))


# ---------------------------------------------------------------- references

def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def layer_norm(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias


def reference_mlp(name, images):
    c, p = config(name), parameters(name)
    x = images.reshape(len(images), -1).astype(np.float64)
    for layer in range(c.layers):
        x = x @ p[f"hidden_{layer}/weights"] + p[f"hidden_{layer}/bias"]
        x = np.maximum(x, 0) if c.activation == "relu" else 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    return x @ p["head/weights"] + p["head/bias"]


def reference_vit(name, images):
    c, p = config(name), parameters(name)
    x = np.zeros((len(images), c.seq, c.embed))
    for i, image in enumerate(images.astype(np.float64)):  # one patch after another, in reading order
        for row in range(c.height // c.patch):
            for column in range(c.width // c.patch):
                cut = image[row * c.patch:(row + 1) * c.patch, column * c.patch:(column + 1) * c.patch]
                place = row * (c.width // c.patch) + column
                x[i, place] = cut.reshape(-1) @ p["patches/weights"] + p["patches/bias"] + p["positions"][place]
    for layer in range(c.layers):
        b = {path.removeprefix("blocks/"): value[layer] for path, value in p.items() if path.startswith("blocks/")}
        y = layer_norm(x, b["attention_norm/scale"], b["attention_norm/bias"])
        q, k, v = (np.einsum("bsd,dnh->bnsh", y, b[f"attention/{name}"]) + b[f"attention/{name}_bias"][:, None]
                   for name in ("query", "key", "value"))
        scores = np.exp(np.einsum("bnsh,bnth->bnst", q, k) / math.sqrt(c.head_dim))
        o = np.einsum("bnst,bnth->bsnh", scores / scores.sum(-1, keepdims=True), v)
        x = x + np.einsum("bsnh,nhd->bsd", o, b["attention/out"]) + b["attention/out_bias"]
        y = layer_norm(x, b["mlp_norm/scale"], b["mlp_norm/bias"])
        x = x + gelu(y @ b["mlp/up"] + b["mlp/up_bias"]) @ b["mlp/down"] + b["mlp/down_bias"]
    x = layer_norm(x, p["final_norm/scale"], p["final_norm/bias"]).mean(1)
    return x @ p["head/weights"] + p["head/bias"]


def reference(name, images):
    return (reference_vit if name == "vit" else reference_mlp)(name, images)


# ---------------------------------------------------------------- tests

@pytest.mark.parametrize("name", MODELS)
def test_loss_and_hits_against_numpy(name):
    given, c = batch(name), config(name)
    logits = reference(name, given["images"])
    assert logits.std() > 0.3, "scores that hardly differ would prove nothing"
    keep = given["labels"] >= 0
    each = np.log(np.exp(logits).sum(-1)) - logits[np.arange(BATCH), given["labels"]]
    f32 = jnp.dtype(jnp.float32)
    found, alone = jax.jit(lambda x: (model(name).evaluate(x, ops(c.layers), f32, chunks=1),
                                      model(name).loss_sum(x, ops(c.layers), f32, chunks=1)))(given)
    assert float(found["loss_sum"]) == pytest.approx(each[keep].sum(), rel=1e-5)
    assert float(found["images"]) == 3 == float(model(name).counted(given))
    assert float(found["correct"]) == (logits.argmax(-1) == given["labels"]).sum()
    assert float(alone) == pytest.approx(each[keep].sum(), rel=1e-5)
    assert set(found) == set(type(model(name)).sums)


@pytest.mark.parametrize("name", ["mlp-gelu", "vit"])
def test_bytes_are_the_same_images(name):
    given = batch(name)
    given["images"] = np.rint(given["images"] * 255).astype(np.uint8)
    assert given["images"].max() > 200
    f32, run = jnp.dtype(jnp.float32), ops(config(name).layers)
    scores = jax.jit(lambda images: model(name).logits(images, *([run] if name == "vit" else []), f32))
    np.testing.assert_allclose(scores(given["images"]), reference(name, given["images"] / 255), rtol=1e-4, atol=1e-4)


def test_hits_are_counted():
    logits = jnp.asarray([[0., 3., 1.], [2., 0., 1.], [0., 1., 2.], [5., 0., 0.]])
    labels = jnp.asarray([1, 0, 0, -1], jnp.int32)
    assert float(correct(logits, labels)) == 2  # the first two; the third is wrong, and nothing is asked of the fourth
    assert float(counted(labels)) == 3 and float(counted(jnp.full(2, -1, jnp.int32))) == 1
    assert float(label_loss(logits, jnp.full(4, -1, jnp.int32))) == 0
    assert float(correct(logits, jnp.full(4, -1, jnp.int32))) == 0


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_table_s(name):
    variables = nnx.split(nnx.eval_shape(lambda: module_of(config(name))(config(name), rngs=nnx.Rngs(0), dtype=jnp.float32)), nnx.Param)[1]
    shapes = {"/".join(path): value.shape for path, value in flatten(nnx.to_pure_dict(variables)).items()}
    dims = jax.tree_util.tree_flatten_with_path(parameter_dims(variables), is_leaf=lambda x: isinstance(x, tuple))[0]
    named = {"/".join(str(key.key) for key in path): value for path, value in dims}
    assert {path: (shapes[path], named[path]) for path in shapes} == parameter_shapes(config(name))


def test_patches_lie_in_reading_order():
    image = jnp.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    found = patches_of(image, 2)
    assert found.shape == (2, 6, 12)
    np.testing.assert_array_equal(found[1, 4], np.asarray(image)[1, 2:4, 2:4].reshape(-1))


def test_every_patch_sees_every_patch():
    """What a causal model would not do: the first patch's value moves the last's context and the last's the first's."""
    attend = attention("xla", None, mask="full")
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 5, 4, 8)).astype(np.float32) for _ in range(3))
    got = attend(q, k, v, None)
    scores = np.exp(np.einsum("bsnh,btnh->bnst", q.astype(np.float64), k) / math.sqrt(8))
    want = np.einsum("bnst,btnh->bsnh", scores / scores.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    ids = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 1]], np.int32)
    scores = scores * (ids[:, None, :, None] == ids[:, None, None, :])
    np.testing.assert_allclose(attend(q, k, v, ids), np.einsum("bnst,btnh->bsnh", scores / scores.sum(-1, keepdims=True), v),
                               rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="triton is causal"):
        attention("triton", None, mask="full")


def test_causal_without_documents():
    """Segment ids of None are one document."""
    attend = attention("xla", None)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 5, 2, 8)).astype(np.float32) for _ in range(3))
    np.testing.assert_array_equal(attend(q, k, v, None), attend(q, k, v, np.ones((1, 5), np.int32)))


@pytest.mark.long
def test_splash_attends_to_everything():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 128, 2, 64)).astype(np.float32) for _ in range(3))
    got = attention("splash", None, mask="full", execution="interpreted")(q, k, v, None)
    np.testing.assert_allclose(got, attention("xla", None, mask="full")(q, k, v, None), rtol=1e-4, atol=1e-5)


def test_blocks_are_the_decoder_s():
    """A vision transformer has no code of its own for a block: its config's stack says all that the decoder's block asks."""
    stack = blocks(config("vit"))
    assert stack is not None and (stack.norm, stack.bias, stack.mlp_kind, stack.norm_eps) == ("layer", "all", "plain", 1e-6)
    assert stack.positions == "learned" and stack.window is None and stack.activation == "gelu"

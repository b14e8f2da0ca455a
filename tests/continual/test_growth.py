"""Growth: the larger model's loss is the smaller one's, its moments are what its gradients say, and a broken growth is seen."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import step
from jaxmem.continual import growth
from jaxmem.hardware import parse_topology
from jaxmem.models.configs import MODELS, DecoderConfig, parameter_shapes
from jaxmem.optim.configs import OPTIMIZERS
from jaxmem.optim.dims import nested
from jaxmem.plan import Plan
from jaxmem.workload import Workload

BATCH, SEQ, VOCAB = 4, 16, 64
LLAMA = dataclasses.replace(MODELS["decoder-tiny"], embed=16, heads=4, kv_heads=2, head_dim=8, mlp=12, vocab=VOCAB, qk_norm=True)
GPT = DecoderConfig(layers=2, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=12, vocab=VOCAB, mlp_kind="plain", activation="gelu_tanh",
                    positions="learned", max_positions=SEQ, norm="layer", bias="all", tied=True)
GEMMA = dataclasses.replace(MODELS["gemma2-2b"], layers=2, embed=16, heads=4, kv_heads=2, head_dim=8, mlp=12, vocab=VOCAB, window=8)
LARGER = {  # old, what grows
    "llama": (LLAMA, dict(layers=4, mlp=31, heads=9, kv_heads=3)),  # mlp more than doubles; two groups of two heads become three of three
    "gpt": (GPT, dict(layers=3, mlp=16, heads=4, kv_heads=4, max_positions=24)),
    "gemma": (GEMMA, dict(layers=4, mlp=24, heads=6)),
}


def random_params(config: DecoderConfig, seed: int) -> dict[str, jax.Array]:
    """Nothing is zero or one, as it would be at initialisation, so that every part counts."""
    rng = np.random.default_rng(seed)
    out = {}
    for path, (shape, _) in parameter_shapes(config).items():
        x = rng.normal(size=shape)
        if path.endswith("scale"):
            x = 0.3 * x + (config.norm_offset != "one" or "query_norm" in path or "key_norm" in path)
        elif path.endswith("bias"):
            x = 0.3 * x
        else:
            x = x * (1.0 if path in ("embed", "positions") else 1.5 * math.prod(shape[-2:]) ** -0.25)
        out[path] = jnp.asarray(x, jnp.float32)
    return out


def rows(seed: int = 0) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
    segments = np.repeat([[1] * 10 + [2] * (SEQ - 10)], BATCH, 0).astype(np.int32)
    positions = np.repeat([[*range(10), *range(SEQ - 10)]], BATCH, 0).astype(np.int32)
    return {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:]), "segment_ids": jnp.asarray(segments),
            "positions": jnp.asarray(positions)}


@functools.cache
def programs(config: DecoderConfig):
    workload = Workload(model=config, model_name="decoder-tiny", optimizer=OPTIMIZERS["adamw"], optimizer_name="adamw", batch=BATCH,
                        seq=SEQ)
    return step.build(workload, Plan(compute="f32", step="split"), parse_topology("cpu:1"), jax.devices()[:1])


@functools.cache
def compiled(config: DecoderConfig, name: str):
    return programs(config)[name].lower().compile()


def loss(config: DecoderConfig, params: dict[str, jax.Array]) -> float:
    """Nats a token, in float32."""
    found = compiled(config, "eval")(nested(params), rows())
    return float(found["loss_sum"]) / float(found["tokens"])


def grown(params, old, new, *, degree=0, seed=3):
    return jax.jit(lambda tree, fresh: growth.grow(tree, old, new, fresh=fresh, seed=seed, degree=degree))(params, random_params(new, 99))


@pytest.mark.parametrize("name", LARGER)
def test_loss_before_equals_loss_after(name):
    """float32, parts of a sum in another order: 3e-6 of a loss of about 5 nats."""
    old, changes = LARGER[name]
    new, before = dataclasses.replace(old, **changes), random_params(old, 1)
    assert growth.problems(old, new) == []
    after = grown(before, old, new)
    assert {path: x.shape for path, x in after.items()} == {path: shape for path, (shape, _) in parameter_shapes(new).items()}
    reference = loss(old, before)
    assert reference > math.log(VOCAB) + 0.3  # far from what a model that says nothing would have
    assert loss(new, after) == pytest.approx(reference, rel=3e-6)


@pytest.mark.parametrize("name, part", [("llama", "_sender"), ("llama", "_along"), ("gpt", "silent_value"), ("gemma", "silent_value")])
def test_a_broken_growth_is_seen(name, part, monkeypatch):
    old, changes = LARGER[name]
    new, before = dataclasses.replace(old, **changes), random_params(old, 1)

    def out_of_their_groups(x, dims, dim, axis, heads, split):
        if dims[axis] != "heads":
            return split(x, axis)
        apart = split(x.reshape(*x.shape[:axis], *heads, *x.shape[axis + 1:]), axis + (dim == "group"))
        return apart.swapaxes(axis, axis + 1).reshape(*x.shape[:axis], -1, *x.shape[axis + 1:])
    broken = {"_sender": lambda chosen, seed, degree: growth._receiver(chosen, degree),  # both halves write all of it
              "_along": out_of_their_groups, "silent_value": lambda path, config: None}
    monkeypatch.setattr(growth, part, broken[part])
    assert abs(loss(new, grown(before, old, new)) - loss(old, before)) > 1e-3


@pytest.mark.parametrize("name, changes", [("llama", {"layers": 4}), ("gpt", {"max_positions": 24})])
def test_what_adds_nothing_changes_no_bit(name, changes):
    old = LARGER[name][0]
    new, before = dataclasses.replace(old, **changes), random_params(old, 1)
    assert loss(new, grown(before, old, new)) == loss(old, before)


def test_halves_add_up_to_the_bit_and_differ():
    old, before = LLAMA, random_params(LLAMA, 1)
    after = grown(before, old, dataclasses.replace(old, mlp=20))
    up, down = np.asarray(after["blocks/mlp/up"]), np.asarray(after["blocks/mlp/down"])
    np.testing.assert_array_equal(up[..., :12], before["blocks/mlp/up"])
    source = sources(up)
    assert sorted(source[:12]) == list(range(12)) and len(set(source[12:])) == 8  # eight different units are split
    whole = np.zeros((2, 12, 16), np.float32)
    np.add.at(whole, (slice(None), source), down)
    np.testing.assert_array_equal(whole, before["blocks/mlp/down"])
    for copy, unit in zip(range(12, 20), source[12:], strict=True):
        share = down[:, copy] / np.asarray(before["blocks/mlp/down"])[:, unit]
        assert 0.25 <= share.min() < 0.4 and 0.6 < share.max() <= 0.75  # each number its own: else their gradients would stay parallel
    other = grown(before, old, dataclasses.replace(old, mlp=20), seed=4)
    assert (np.asarray(other["blocks/mlp/down"]) != down).any()


def sources(up: np.ndarray) -> list[int]:
    """Which unit each unit [.., F] is a copy of: the first with the same input weights."""
    return [next(i for i in range(f + 1) if (up[..., i] == up[..., f]).all()) for f in range(up.shape[-1])]


def test_moments_are_what_the_larger_model_gradients_say():
    """The larger model's true gradients: those of a unit's halves add up to the unit's, where it reads; each equals it, where it writes.
    Moments grown by the rule do the same."""
    old, new, before = LLAMA, dataclasses.replace(LLAMA, mlp=20), random_params(LLAMA, 1)
    after = grown(before, old, new)
    source = sources(np.asarray(after["blocks/mlp/up"]))

    def gradients(config, params):
        return compiled(config, "gradients")(nested(params), rows())[1]["blocks"]["mlp"]
    was, true = gradients(old, before), gradients(new, after)
    first, second = (grown({f"blocks/mlp/{name}": x for name, x in was.items()} | {"embed": before["embed"]}, old, new, degree=degree)
                     for degree in (1, 2))
    split = np.array([source.count(unit) == 2 for unit in source])
    assert split.sum() == 16
    for name in ("up", "gate"):
        for found in (true[name], first[f"blocks/mlp/{name}"]):
            folded = np.zeros_like(was[name])
            np.add.at(folded, (slice(None), slice(None), source), np.asarray(found))
            np.testing.assert_allclose(folded, was[name], rtol=1e-4, atol=1e-5 * np.abs(was[name]).max())
        of_source = np.asarray(was[name])[..., source]
        np.testing.assert_array_equal(second[f"blocks/mlp/{name}"], np.where(split, of_source / 4, of_source))
        # halves learn different things from the first step on
        one, other = np.asarray(true[name])[..., source.index(source[12])], np.asarray(true[name])[..., 12]
        cosine = (one * other).sum() / np.sqrt((one ** 2).sum() * (other ** 2).sum())
        assert 0.3 < cosine < 0.999
    scale = np.abs(was["down"]).max()
    for found, tolerance in ((true["down"], 1e-5 * scale), (first["blocks/mlp/down"], 0), (second["blocks/mlp/down"], 0)):
        np.testing.assert_allclose(found, np.asarray(was["down"])[:, source], rtol=0, atol=tolerance)


def test_moments_of_what_is_new():
    old, new = LLAMA, dataclasses.replace(LLAMA, layers=5, vocab=80)
    before = random_params(old, 1)
    first, second = (grown(before, old, new, degree=degree) for degree in (1, 2))
    for path, (_, dims) in parameter_shapes(old).items():
        axis = dims.index("layers") if "layers" in dims else dims.index("vocab") if "vocab" in dims else None
        if axis is None:
            np.testing.assert_array_equal(first[path], before[path])
            continue
        size = before[path].shape[axis]
        added = [np.take(np.asarray(tree[path]), range(size, tree[path].shape[axis]), axis) for tree in (first, second)]
        assert added[0].shape[axis] in (3, 16) and not added[0].any()
        mean = np.asarray(before[path], np.float64).mean(axis, keepdims=True)
        np.testing.assert_allclose(added[1], np.broadcast_to(mean, added[1].shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_larger_vocabulary(name):
    """Old logits keep their bits, and the loss rises by log(new / old) at most."""
    old = LARGER[name][0]
    new, before = dataclasses.replace(old, vocab=VOCAB + 16), random_params(old, 1)
    after = grown(before, old, new)
    rise = loss(new, after) - loss(old, before)
    assert 1e-3 < rise <= math.log(1 + 16 / VOCAB)
    for path in ("embed", "head"):
        if path in before:
            kept = np.asarray(after[path]) if path == "embed" else np.asarray(after[path]).T
            np.testing.assert_array_equal(kept[:VOCAB], np.asarray(before[path]) if path == "embed" else np.asarray(before[path]).T)


@pytest.mark.parametrize("changes, part", [
    ({"layers": 1}, "layers=1 is less than the 2"), ({"embed": 32}, "embed=32: what grows is layers"), ({"tied": True}, "tied=true"),
    ({"heads": 8, "kv_heads": 8}, "2 query heads share a key/value head, and fewer cannot; nearest: kv_heads=2, or heads=16")])
def test_what_cannot_grow(changes, part):
    assert any(part in problem for problem in growth.problems(LLAMA, dataclasses.replace(LLAMA, **changes)))

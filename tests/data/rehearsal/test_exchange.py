"""Sampling over shards: uniform over what is stored, whole rows, and exactly the traffic that was promised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

from jaxmem.data.rehearsal import programs
from jaxmem.data.rehearsal.buffer import draw_from
from jaxmem.data.rehearsal.exchange import exchange, pack, unpack
from jaxmem.hlo.collectives import OPCODES, collectives_of
from jaxmem.hlo.parse import parse
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal
from jaxmem.sharding import make_mesh

FIELDS = {"id": ((), np.int32), "bits": ((3, 2), np.uint8), "half": ((2,), np.float16), "odd": ((), np.bool_)}
ROW_BYTES = 4 + 6 + 4 + 1
W, K, S = 4, 3, 6


def content(ids):
    """A row that says who it is in each of its arrays."""
    ids = np.asarray(ids, np.int64)
    digits = np.stack([ids // 7 ** i % 7 for i in range(6)], -1)
    return {"id": ids.astype(np.int32), "bits": (digits + 40).reshape(*ids.shape, 3, 2).astype(np.uint8),
            "half": np.stack([ids % 64, ids // 64], -1).astype(np.float16) / 8, "odd": ids % 2 == 1}


def ids_of(shard, kind, slot):
    return 1 + (shard * K + kind) * S + slot


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(Plan(data=2, fsdp=2, tensor=2), jax.devices())


def stored(mesh, filled):
    """A buffer whose rows carry their own place; slots beyond `filled` [W, K] hold nonsense that must never be seen."""
    shard, kind, slot = np.meshgrid(np.arange(W), np.arange(K), np.arange(S), indexing="ij")
    real = slot < np.asarray(filled)[:, :, None]
    rows = content(np.where(real, ids_of(shard, kind, slot), 10_000))
    split = NamedSharding(mesh, P(("data", "fsdp")))
    return jax.device_put({"rows": rows, "filled": np.asarray(filled, np.int32), "seen": np.asarray(filled, np.int32)}, split)


@functools.cache
def drawing(mesh, rows_per_pair, unequal, broken=""):
    """`draw(buffer, key) -> ({name: [W, W * q, ...]}, weights [W, W * q])`, one row of results a shard."""
    axes, empty = ("data", "fsdp"), content(0) | {"id": np.int32(-1)}

    def one(buffer, key):
        if broken == "first slots":  # a draw that never reaches the last slot of a class
            buffer = buffer | {"filled": jnp.maximum(buffer["filled"] - 1, 1)}
        found = exchange(buffer, key, rows_per_pair=rows_per_pair, shards=W, axes=axes, unequal=unequal, empty=empty)
        return jax.tree.map(lambda x: x[None], found)
    split = P(axes)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(split, P()), out_specs=split, check_vma=False))


def many(draw, buffer, count):
    found = [jax.device_get(draw(buffer, jax.random.key(i))) for i in range(count)]
    return {name: np.concatenate([rows[name] for rows, _ in found], 1) for name in FIELDS}, np.concatenate([w for _, w in found], 1)


FULL = np.full((W, K), S)


def uniform_in_shards(ids):
    """The p-value of: within each shard every slot of every class equally often. Shards send fixed numbers, so each is a stratum."""
    counts = np.bincount(ids.reshape(-1), minlength=W * K * S + 1)[1:].reshape(W, K * S)
    expected = counts.sum(1, keepdims=True) / (K * S)
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), W * (K * S - 1)), counts


def test_every_slot_of_every_shard_is_equally_likely_and_no_row_is_torn(mesh):
    """16,000 rows: each one whole, each shard's share exact, slots and classes uniform, for every receiver."""
    buffer = stored(mesh, FULL)
    rows, weights = many(drawing(mesh, 125, "reject"), buffer, 8)
    assert rows["id"].size == 16_000 and (weights == 1).all()
    for name, expected in content(rows["id"]).items():
        np.testing.assert_array_equal(rows[name], expected)
    p, counts = uniform_in_shards(rows["id"])
    assert p > 1e-3
    assert (counts.sum(1) == 4000).all()
    assert stats.chisquare(counts.reshape(W, K, S).sum((0, 2))).pvalue > 1e-3
    for receiver in rows["id"]:  # of every draw's rows a quarter comes from each shard, spread over the steps that it serves
        sender = (receiver.reshape(8, -1) - 1) // (K * S)
        assert all((np.bincount(one, minlength=W) == 125).all() for one in sender)
        assert stats.chisquare(np.bincount(sender[:, :100].reshape(-1), minlength=W)).pvalue > 1e-3
    assert len({tuple(one) for one in rows["id"]}) == W  # no two receivers got the same
    first = rows["id"][0, :500] - 1
    picked = {tuple(sorted(first[first // (K * S) == w] % (K * S))) for w in range(W)}
    assert len(picked) == W  # and no two shards picked the same places


def test_the_statistic_sees_a_sampler_that_misses_a_slot(mesh):
    rows, _ = many(drawing(mesh, 125, "reject", "first slots"), stored(mesh, FULL), 2)
    assert uniform_in_shards(rows["id"])[0] < 1e-12


UNEQUAL = np.array([[6, 6, 6], [2, 0, 1], [0, 5, 0], [4, 4, 1]])


def places(filled):
    return np.array([ids_of(w, k, s) for w in range(W) for k in range(K) for s in range(filled[w, k])])


def test_rejection_is_uniform_over_all_that_is_stored(mesh):
    """Shards with 18, 3, 5 and 9 rows: kept rows are uniform over the 35, and as many as the closed form says; the rest is empty."""
    rows, weights = many(drawing(mesh, 125, "reject"), stored(mesh, UNEQUAL), 8)
    kept = weights == 1
    assert ((weights == 0) | kept).all() and (rows["id"][~kept] == -1).all()
    names, counts = np.unique(rows["id"][kept], return_counts=True)
    np.testing.assert_array_equal(names, places(UNEQUAL))
    assert stats.chisquare(counts).pvalue > 1e-3
    share = UNEQUAL.sum(1).mean() / UNEQUAL.sum(1).max()
    assert abs(kept.mean() - share) < 4 * np.sqrt(share * (1 - share) / kept.size)
    all_of_them = np.unique(many(drawing(mesh, 125, "weight"), stored(mesh, UNEQUAL), 8)[0]["id"], return_counts=True)[1]
    assert stats.chisquare(all_of_them).pvalue < 1e-12  # without rejection the emptier shards' rows come too often


def test_weights_are_unbiased(mesh):
    """Weights in closed form, and the weighted mean of something that differs between shards against its mean over what is stored."""
    rows, weights = many(drawing(mesh, 125, "weight"), stored(mesh, UNEQUAL), 8)
    fill = UNEQUAL.sum(1)
    np.testing.assert_allclose(weights, (fill * W / fill.sum())[(rows["id"] - 1) // (K * S)], rtol=1e-6)
    mean = places(UNEQUAL).mean()
    spread = (weights * rows["id"]).std() / np.sqrt(weights.size)
    assert abs((weights * rows["id"]).mean() - mean) < 4 * spread
    assert abs(rows["id"].mean() - mean) > 20 * spread  # without weights


def test_while_nothing_is_stored_rows_are_empty(mesh):
    for unequal in ("weight", "reject"):
        rows, weights = many(drawing(mesh, 125, unequal), stored(mesh, 0 * FULL), 1)
        assert (weights == 0).all() and (rows["id"] == -1).all() and (rows["bits"] == 40).all()
    rows, weights = many(drawing(mesh, 125, "reject"), stored(mesh, np.eye(W, K, 0, dtype=int) * 3), 1)  # the last shard has none
    assert set(np.unique((rows["id"][weights > 0] - 1) // (K * S))) == {0, 1, 2}


def test_rows_as_words_and_back():
    """Every dtype with every bit pattern that it has, NaN payloads too."""
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 256, (50, *shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
            for name, (shape, dtype) in {"a": ((3,), np.uint8), "b": ((2, 2), np.int32), "c": ((), np.float32), "d": ((5,), np.float16),
                                         "e": ((1,), np.int8), "f": ((2,), np.uint16)}.items()}
    rows["g"] = rng.integers(0, 2, 50).astype(bool)
    rows["h"] = rng.integers(0, 2**16, (50, 3)).astype(np.uint16).view(jnp.bfloat16)
    for chosen, unit in ((rows, np.uint8), ({name: rows[name] for name in "bc"}, np.uint32)):
        words, layout = pack({name: jnp.asarray(x) for name, x in chosen.items()})
        assert words.dtype == unit and words.nbytes == sum(x.nbytes for x in chosen.values())
        for name, x in unpack(words, layout).items():
            assert x.dtype == chosen[name].dtype and np.asarray(x).tobytes() == chosen[name].tobytes(), name


def test_one_shard_exchanges_nothing():
    mesh = make_mesh(Plan(tensor=2), jax.devices()[:2])
    fields = FIELDS | {"label": ((), np.int32)}
    built = programs.build(Rehearsal(r=5, capacity=12, every=3, classes=2), fields, mesh, batch=7, labels="label")
    assert traffic(built["draw"]) == []


def traffic(program):
    module = parse(program.lower().compile().as_text())
    return [(one.opcode, one.size, one.sent_bytes) for computation in module.computations.values()
            for instruction in computation.instructions if instruction.opcode.removesuffix("-start") in OPCODES
            for one in collectives_of(module, instruction)]


@pytest.mark.parametrize("plan, every", [(Plan(data=4, fsdp=2), 8), (Plan(data=2, fsdp=2, tensor=2), 4)])
def test_the_compiled_traffic(plan, every):
    """A draw is one all-to-all of R / W rows a device, of which (W - 1) / W leave it; nothing else of a step moves anything."""
    shards = plan.data * plan.fsdp
    rehearsal = Rehearsal(r=2 * shards, capacity=shards * 8, every=every)
    built = programs.build(rehearsal, FIELDS, make_mesh(plan, jax.devices()), batch=shards * 2)
    rows = rehearsal.r * rehearsal.every / shards
    assert traffic(built["draw"]) == [("all-to-all", shards, rows * (ROW_BYTES + 4) * (shards - 1) / shards)]
    for name in ("init", "join", "insert"):
        assert traffic(built[name]) == []


def test_a_shard_alone_draws_what_the_exchange_sends(mesh):
    """What arrives from shard w is what `draw_from` picks in shard w with its own key: rows go to the right place, once each."""
    buffer, key = stored(mesh, UNEQUAL), jax.random.key(5)
    rows, _ = jax.device_get(drawing(mesh, 125, "weight")(buffer, key))
    for w in range(W):
        own = jax.tree.map(lambda x, w=w: jnp.asarray(np.asarray(x)[w:w + 1]), buffer)
        picked = np.asarray(draw_from(own, jax.random.split(jax.random.fold_in(key, w), 3)[0], 500)["id"]).reshape(W, 125)
        for receiver in range(W):
            got = rows["id"][receiver]
            assert sorted(got[(got - 1) // (K * S) == w]) == sorted(picked[receiver])

"""A buffer dealt out to another number of shards: nothing is lost while there is room, and what must go goes at random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

from jaxmem.data.rehearsal import programs
from jaxmem.data.rehearsal.redeal import redeal, redeal_staged, sources
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal
from jaxmem.sharding import make_mesh


def a_buffer(filled, slots, extra=0):
    """Row = its own number in two arrays; empty slots hold -1. `seen` is filled + extra."""
    w, k = filled.shape
    real = np.arange(slots)[None, None, :] < filled[:, :, None]
    ids = np.where(real, np.arange(w * k * slots).reshape(w, k, slots), -1).astype(np.int32)
    return {"rows": {"id": jnp.asarray(ids), "x": jnp.asarray(np.stack([ids * 2, ids * 3], -1).astype(np.float32))},
            "filled": jnp.asarray(filled, jnp.int32), "seen": jnp.asarray(filled + extra, jnp.int32)}


def rows_of(buffer, kind):
    ids, filled = np.asarray(buffer["rows"]["id"]), np.asarray(buffer["filled"])
    return np.concatenate([ids[w, kind, :filled[w, kind]] for w in range(len(ids))])


UNEQUAL = np.array([[5, 0, 2], [3, 1, 5], [0, 0, 5], [4, 0, 1]])


@pytest.mark.parametrize("shards, slots", [(2, 10), (8, 3), (3, 7), (1, 20), (4, 5)])
def test_nothing_is_lost_while_there_is_room(shards, slots):
    old = a_buffer(UNEQUAL, 5, extra=7)
    new = redeal(old, jax.random.key(0), shards=shards, slots=slots)
    assert new["rows"]["x"].shape == (shards, 3, slots, 2) and new["rows"]["x"].dtype == np.float32
    for kind in range(3):
        assert sorted(rows_of(new, kind)) == sorted(rows_of(old, kind))
        assert new["filled"][:, kind].max() - new["filled"][:, kind].min() <= 1
    np.testing.assert_array_equal(np.asarray(new["seen"]).sum(0), UNEQUAL.sum(0) + 4 * 7)
    assert (np.asarray(new["seen"]) >= np.asarray(new["filled"])).all()
    stored = np.arange(slots)[None, None, :] < np.asarray(new["filled"])[:, :, None]
    np.testing.assert_array_equal(np.asarray(new["rows"]["x"])[stored], np.asarray(new["rows"]["id"])[stored][:, None] * [2.0, 3.0])


def test_where_there_is_no_room_a_random_part_stays():
    """Thirty rows to twelve places: each stays with the same chance, from whichever shard it came."""
    old = a_buffer(np.full((5, 1), 6), 6)
    new = redeal(old, jax.random.key(0), shards=2, slots=6)
    assert (np.asarray(new["filled"]) == 6).all() and len(set(rows_of(new, 0))) == 12
    keys = jax.random.split(jax.random.key(0), 400)
    kept = jax.jit(jax.vmap(lambda key: sources(old["filled"], key, slots=6, places=12)))(keys)
    assert all(len(set(one)) == 12 for one in np.asarray(kept[:, 0]))
    counts, p = np.bincount(np.asarray(kept).reshape(-1), minlength=30), 12 / 30
    assert stats.chi2.sf(((counts - 400 * p) ** 2).sum() / (400 * p * (1 - p)) * 29 / 30, 29) > 1e-3


def test_staged_rows_stay_in_their_step():
    staged = {"rows": {"id": jnp.arange(4 * 3 * 2, dtype=jnp.int32).reshape(4, 3, 2)}, "weights": jnp.ones((4, 3, 2))}
    for shards in (1, 2, 4, 8):
        new = redeal_staged(staged, shards=shards)["rows"]["id"]
        assert new.shape == (shards, 3, 8 // shards)
        for step in range(3):
            assert sorted(np.asarray(new)[:, step].reshape(-1)) == sorted(np.asarray(staged["rows"]["id"])[:, step].reshape(-1))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_onto_another_mesh_with_its_shardings(memory):
    """From four shards, as a checkpoint lays them over eight devices, to eight."""
    mesh = make_mesh(Plan(data=8), jax.devices())
    fields = {"id": ((), np.int32), "x": ((2,), np.float32)}
    layout = programs.shardings(fields, mesh, Rehearsal(r=8, capacity=8 * 3 * 3, every=8, classes=3, memory=memory))["buffer"]
    old = jax.device_put(a_buffer(np.full((4, 3), 6), 6), NamedSharding(mesh, P()))
    new = redeal(old, jax.random.key(0), shards=8, slots=3, shardings=layout)
    assert jax.tree.map(lambda x: x.sharding.memory_kind, new["rows"]) == {"id": memory, "x": memory}
    assert new["rows"]["x"].addressable_shards[0].data.shape == (1, 3, 3, 2)
    for kind in range(3):
        assert sorted(rows_of(new, kind)) == sorted(rows_of(old, kind))

"""One shard of the buffer: what is stored, against the algorithms run row by row and against their closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxmem.data.rehearsal.buffer import draw, init, insert, places, row_bytes

ID = {"id": ((), np.int32)}
insert_in_place = jax.jit(insert, donate_argnums=0, static_argnames=("policy", "probability"))


def row_by_row(stored, filled, seen, rows, classes, key, *, policy, probability, slots):
    """The policies as they are described, a row at a time, with the same random numbers. NumPy."""
    before, counts = [], seen.copy()
    for kind in classes:
        before.append(counts[kind] if 0 <= kind < len(seen) else 0)
        if 0 <= kind < len(seen):
            counts[kind] += 1
    if policy == "reservoir":
        other = np.asarray(jax.random.randint(key, (len(rows),), 0, jnp.asarray(before, jnp.int32) + 1))
    else:
        where, whether = jax.random.split(key)
        kept = np.asarray(jax.random.uniform(whether, (len(rows),))) < probability
        other = np.where(kept, np.asarray(jax.random.randint(where, (len(rows),), 0, slots)), slots)
    for row, kind, slot in zip(rows, classes, other, strict=True):
        if not 0 <= kind < len(seen):
            continue
        if filled[kind] < slots:
            stored[kind, filled[kind]] = row
            filled[kind] += 1
        elif slot < slots:
            stored[kind, slot] = row
        seen[kind] += 1


@pytest.mark.parametrize("policy, probability", [("reservoir", 1.0), ("replace", 0.6)])
def test_a_batch_at_once_is_the_rows_one_by_one(policy, probability):
    """Batches with several rows of a class, several in one slot, and rows of no class."""
    slots, rng, key = 3, np.random.default_rng(0), jax.random.key(1)
    buffer = init(ID, classes=4, slots=slots)
    stored, filled, seen = np.zeros((4, slots), np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)
    replaced_twice = 0
    for step in range(12):
        key, own = jax.random.split(key)
        ids, classes = np.arange(step * 10, step * 10 + 10, dtype=np.int32) + 1, rng.integers(-1, 5, 10).astype(np.int32)
        old = stored.copy()
        row_by_row(stored, filled, seen, ids, classes, own, policy=policy, probability=probability, slots=slots)
        buffer = insert_in_place(buffer, {"id": ids}, classes, own, policy=policy, probability=probability)
        np.testing.assert_array_equal(buffer["rows"]["id"], stored)
        np.testing.assert_array_equal(buffer["filled"], filled)
        np.testing.assert_array_equal(buffer["seen"], seen)
        replaced_twice += int((old != stored).sum() < sum(0 <= c < 4 for c in classes))
    assert (filled == slots).all() and (seen > 2 * slots).all() and replaced_twice


@pytest.mark.parametrize("policy", ["reservoir", "replace"])
def test_no_two_rows_go_to_one_place(policy):
    """A scatter in host memory is told so. Forty rows of one class to two slots, many times over."""
    classes, full = np.zeros(40, np.int32), np.full(1, 2, np.int32)
    slot, offered = jax.vmap(lambda key: places(full, full, classes, key, slots=2, policy=policy, probability=0.5))(
        jax.random.split(jax.random.key(0), 50))
    assert (offered == 40).all() and all(len(set(one)) == 40 for one in np.asarray(slot))
    assert (np.asarray(slot) < 2).any(1).all()


@functools.partial(jax.jit, static_argnames=("trials", "length", "batch", "slots", "policy", "probability"))
def after_streams(key, *, trials, length, batch, slots, policy, probability=1.0):
    """The numbers that are stored after streams of rows 0 ... length - 1: [trials, slots]."""
    def one(key):
        def step(buffer, i):
            ids = i * batch + jnp.arange(batch, dtype=jnp.int32)
            own = jax.random.fold_in(key, i)
            return insert(buffer, {"id": ids}, jnp.zeros_like(ids), own, policy=policy, probability=probability), None
        buffer, _ = jax.lax.scan(step, init(ID, classes=1, slots=slots), jnp.arange(length // batch, dtype=jnp.int32))
        return buffer["rows"]["id"][0]
    return jax.vmap(one)(jax.random.split(key, trials))


def uniform_over_stream(stored, length):
    """The p-value that every row of the stream is stored with the same chance, for samples without replacement.

    Counts then have covariance p (1 - p) (I - 1/N) N / (N - 1) a trial, so the scaled sum of squares is chi-square with N - 1.
    """
    trials, slots = stored.shape
    counts, p = np.bincount(stored.reshape(-1), minlength=length), slots / length
    found = ((counts - trials * p) ** 2).sum() / (trials * p * (1 - p)) * (length - 1) / length
    return stats.chi2.sf(found, length - 1)


def test_a_reservoir_is_uniform_over_the_stream_and_replacement_is_not():
    shape = dict(trials=1500, length=48, batch=8, slots=6)
    reservoir = np.asarray(after_streams(jax.random.key(0), policy="reservoir", **shape))
    assert all(len(set(row)) == 6 for row in reservoir[:100])  # a row is stored once
    assert uniform_over_stream(reservoir, 48) > 1e-3
    replaced = np.asarray(after_streams(jax.random.key(0), policy="replace", probability=0.5, **shape))
    assert uniform_over_stream(replaced, 48) < 1e-12  # the same statistic on a policy that favours what came last


def test_the_age_of_what_replacement_stores():
    """A row takes a given slot with probability p / S, so ages are geometric: mean S / p - 1 rows of the class (about N b / c)."""
    slots, p, length, trials = 8, 0.25, 640, 400
    shape = dict(trials=trials, length=length, batch=8, slots=slots)
    stored = np.asarray(after_streams(jax.random.key(2), policy="replace", probability=p, **shape))
    ages, stay = length - 1 - stored.reshape(-1), 1 - p / slots
    mean, spread = slots / p - 1, np.sqrt(stay) / (p / slots)
    assert abs(ages.mean() - mean) < 4 * spread / np.sqrt(ages.size), ages.mean()
    for age in (8, 32, 96):
        share = stay ** age
        assert abs((ages >= age).mean() - share) < 4 * np.sqrt(share * (1 - share) / ages.size), age


def test_draws_are_uniform_over_what_is_stored():
    """Classes that are filled differently: every stored row has the same chance, and no empty slot is drawn."""
    buffer = init(ID, classes=4, slots=8)
    classes = np.repeat([0, 2, 3], [20, 3, 5]).astype(np.int32)
    buffer = insert_in_place(buffer, {"id": np.arange(28, dtype=np.int32) + 100}, classes, jax.random.key(0))
    rows, stored = jax.jit(draw, static_argnums=2)(buffer, jax.random.key(3), 16000)
    assert bool(stored)
    names, counts = np.unique(np.asarray(rows["id"]), return_counts=True)
    assert len(names) == 8 + 3 + 5 and names.min() >= 100
    assert stats.chisquare(counts).pvalue > 1e-3
    even_over_classes = np.where(names < 120, 1 / 8, np.where(names < 123, 1 / 3, 1 / 5)) / 3 * 16000
    assert stats.chisquare(counts, even_over_classes).pvalue < 1e-12  # the statistic tells uniform rows from uniform classes


def test_nothing_stored():
    buffer = init(ID | {"x": ((2, 3), np.float16)}, classes=2, slots=4)
    rows, stored = draw(buffer, jax.random.key(0), 5)
    assert not bool(stored) and rows["x"].shape == (5, 2, 3) and rows["x"].dtype == np.float16


def test_the_update_is_in_place():
    """The donated buffer is the result's memory, and what the program needs beside it is far from another copy of it."""
    buffer = init({"x": ((1000,), np.float32)}, classes=2, slots=500)
    rows = {"x": jax.ShapeDtypeStruct((8, 1000), jnp.float32)}
    lowered = insert_in_place.lower(buffer, rows, jax.ShapeDtypeStruct((8,), jnp.int32), jax.random.key(0))
    sizes = lowered.compile().memory_analysis()
    assert sizes.alias_size_in_bytes >= 4_000_000 and sizes.temp_size_in_bytes < 100_000


def test_row_bytes():
    assert row_bytes({"x": ((28, 28, 1), np.uint8), "y": ((), np.int32), "z": ((3,), np.float16)}) == 784 + 4 + 6

"""The endless order of rows, what each process reads of it, what reaches the devices, and the thread that reads ahead."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.data import Batches, Data, eval_batches
from jaxmem.data.batches import kept_position
from jaxmem.data.rows import text_fields
from jaxmem.spec import InputError

SEQ = 4


def numbered(rows, read=None):
    """Row i is i, i, i, ... in tokens, and i + 100 in targets; the numbers of the rows that are read go to `read`."""
    def row(i):
        assert 0 <= i < rows
        if read is not None:
            read.append(i)
        return {name: np.full(SEQ, i + 100 if name == "targets" else i, np.int32) for name in text_fields(SEQ)}
    return Data(name="numbers", kind="text", rows=rows, fields=text_fields(SEQ), fingerprint="", row=row, described="")


def mesh(*shape):
    return jax.make_mesh(shape, ("data", "tensor", "seq")[:len(shape)], devices=jax.devices()[:int(np.prod(shape))])


def over(spec, shape=(8,)):
    return {name: NamedSharding(mesh(*shape), spec) for name in ("tokens", "targets")}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def first_rows(batches, count):
    """Row numbers of the next batches, from the devices."""
    return [(position, np.asarray(arrays["tokens"])[:, 0].tolist()) for position, arrays in itertools.islice(batches, count)]


# ---------------------------------------------------------------- the order

@pytest.mark.parametrize("rows,batch", [(10, 4), (7, 16), (1, 2), (12, 4)])
def test_every_row_comes_once_an_epoch_and_epochs_differ(rows, batch):
    with Batches(numbered(rows), batch=batch, seed=0, shardings=over(P())) as batches:
        count = -(-5 * rows // batch)
        order = sum((numbers for _, numbers in first_rows(batches, count)), [])
    epochs = [order[e * rows:(e + 1) * rows] for e in range(5)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (5 if rows > 5 else 1)




def test_starting_at_k_is_dropping_k():
    with Batches(numbered(10), batch=8, seed=3, shardings=over(P("data"))) as whole:
        expected = first_rows(whole, 12)
    assert [position for position, _ in expected] == list(range(12))
    for start in (1, 5, 11):
        with Batches(numbered(10), batch=8, seed=3, shardings=over(P("data")), start=start) as later:
            assert first_rows(later, 12 - start) == expected[start:]


def test_skipped_positions_are_left_out_and_the_others_are_what_they_were():
    with Batches(numbered(10), batch=8, seed=3, shardings=over(P("data"))) as whole:
        expected = dict(first_rows(whole, 20))
    with Batches(numbered(10), batch=8, seed=3, shardings=over(P("data")), start=4, skip=[(9, 9), (2, 5), (12, 14), (13, 15)]) as some:
        assert first_rows(some, 6) == [(p, expected[p]) for p in (6, 7, 8, 10, 11, 16)]


def test_kept_positions_against_counting():
    random = np.random.default_rng(0)
    for _ in range(300):
        start = int(random.integers(0, 20))
        skip = sorted((int(a), int(a + random.integers(0, 6))) for a in random.integers(0, 40, random.integers(0, 5)))
        kept = [p for p in range(start, 100) if not any(first <= p <= last for first, last in skip)]
        assert [kept_position(i, start, skip) for i in range(30)] == kept[:30], (start, skip)


def test_epoch_of_is_the_epoch_of_the_first_row():
    batches = Batches(numbered(10), batch=4, seed=0, shardings=over(P()))
    assert [batches.epoch_of(p) for p in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]  # rows 0 4 8 | 12 16 | 20 24 28


# ---------------------------------------------------------------- devices and processes

SHARDINGS = [(P(), (8,)), (P("data"), (8,)), (P("data"), (2, 4)), (P(("data", "tensor")), (4, 2)), (P("data", "seq"), (2, 2, 2)),
             (P(None, "tensor"), (2, 4)), (P("data"), (1,))]


@pytest.mark.parametrize("spec,shape", SHARDINGS)
def test_the_batch_is_the_same_on_every_mesh(spec, shape):
    shardings = over(spec, shape)
    with Batches(numbered(10), batch=8, seed=5, shardings=shardings, start=2) as batches:
        position, arrays = next(batches)
        expected = batches.global_rows(2)
        assert position == 2 and set(arrays) == set(expected) == {"tokens", "targets"}
        for name, array in arrays.items():
            assert array.shape == (8, SEQ) and array.dtype == np.int32 and array.sharding == shardings[name]
            np.testing.assert_array_equal(array, expected[name])
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[name][shard.index])
    # row_numbers come from grain alone, and the content from the data's definition
    assert expected["tokens"][:, 0].tolist() == batches.row_numbers(2)
    assert (expected["targets"] == expected["tokens"] + 100).all()


@pytest.mark.parametrize("spec,shape", SHARDINGS)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_processes_together_read_the_whole_batch_and_none_reads_more_than_its_devices_hold(spec, shape, processes):
    """Each process is emulated by its devices' part of the sharding's map."""
    shardings = over(spec, shape)
    read: list[int] = []
    batches = Batches(numbered(20, read), batch=8, seed=5, shardings=shardings)
    expected = batches.global_rows(3)
    assembled = {name: np.full((8, SEQ), -99, np.int32) for name in shardings}
    rows_of_process = []
    for own in np.array_split(np.arange(np.prod(shape)), processes):
        read.clear()
        maps = {name: list(sharding.devices_indices_map((8, SEQ)).items()) for name, sharding in shardings.items()}
        parts = {name: {index for device, index in places if device.id in own} for name, places in maps.items()}
        held = batches.parts_of(3, parts)
        for name, places in held.items():
            assert set(places) == parts[name]
            for index, values in places.items():
                np.testing.assert_array_equal(values, expected[name][index])
                assembled[name][index] = values
        wanted = {row for index in parts["tokens"] for row in range(*index[0].indices(8))}
        assert sorted(read) == sorted(batches.row_numbers(3)[row] for row in wanted)  # each once, though two fields want it
        rows_of_process.append(wanted)
    for name in shardings:
        np.testing.assert_array_equal(assembled[name], expected[name])
    if spec == P("data") and shape == (8,):  # nothing is on two devices, so no two processes read the same
        assert sorted(itertools.chain(*rows_of_process)) == list(range(8))


def test_what_a_process_without_devices_reads():
    read: list[int] = []
    batches = Batches(numbered(20, read), batch=8, seed=5, shardings=over(P("data")))
    assert batches.parts_of(0, {"tokens": set(), "targets": set()}) == {"tokens": {}, "targets": {}} and read == []


# ---------------------------------------------------------------- reading ahead

def settled(read):
    """The count of rows read, once it has stopped growing."""
    count = -1
    while count != len(read):
        count = len(read)
        time.sleep(0.1)
    return count


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_at_most_so_many_batches_are_read_ahead(prefetch):
    read: list[int] = []
    with Batches(numbered(100, read), batch=8, seed=0, shardings=over(P("data")), prefetch=prefetch) as batches:
        for taken in (1, 2, 3):
            next(batches)
            assert settled(read) == 8 * (taken + prefetch)


def test_close_ends_the_thread_and_the_iteration():
    batches = Batches(numbered(100), batch=8, seed=0, shardings=over(P("data")))
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []


def test_a_row_that_cannot_be_read_is_an_error_where_the_batch_is_taken():
    data = numbered(16)

    def row(i):
        if i == 3:
            raise OSError("gone")
        return data.row(i)
    broken = Data(name="broken", kind="text", rows=16, fields=data.fields, fingerprint="", row=row, described="")
    with Batches(broken, batch=8, seed=0, shardings=over(P("data"))) as batches:
        with pytest.raises(OSError, match="gone"):
            list(itertools.islice(batches, 2))


# ---------------------------------------------------------------- evaluation

@pytest.mark.parametrize("spec,shape", SHARDINGS)
def test_evaluation_is_every_row_once_in_order_and_its_padding_has_no_targets(spec, shape):
    found = list(eval_batches(numbered(21), 8, over(spec, shape)))
    tokens, targets = (np.concatenate([np.asarray(batch[name]) for batch in found]) for name in ("tokens", "targets"))
    assert tokens[:, 0].tolist() == [*range(21), 0, 0, 0]
    assert (targets[:21] == tokens[:21] + 100).all() and (targets[21:] == -1).all()


def test_evaluation_reads_no_more_than_its_limit():
    read: list[int] = []
    assert len(list(eval_batches(numbered(21, read), 8, over(P("data")), limit=2))) == 2 and read == list(range(16))
    assert len(list(eval_batches(numbered(16), 8, over(P("data")), limit=5))) == 2


# ---------------------------------------------------------------- errors

@pytest.mark.parametrize("change,message", [
    ({"batch": 0}, "batch=0: a batch has one row or more"),
    ({"seed": -1}, "seed=-1: the data's shuffle takes 0 to 4294967295"),
    ({"data": numbered(2 ** 32)}, "the data has 4294967296 rows, and its shuffle takes fewer"),
    ({"shardings": {"token": None}}, "the program takes 'token', and numbers has tokens, targets, .*; did you mean tokens"),
])
def test_errors(change, message):
    with pytest.raises(InputError, match=message):
        Batches(**{"data": numbered(4), "batch": 8, "seed": 0, "shardings": over(P("data")), **change})

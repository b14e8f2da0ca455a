"""The programs of a step on eight devices: what stands beside a batch, how old it is, and where the buffer lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.data.rehearsal import programs
from jaxmem.data.rehearsal.buffer import init, insert
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal
from jaxmem.sharding import make_mesh
from jaxmem.spec import InputError

FIELDS = {"tokens": ((5,), np.int32), "labels": ((), np.int32)}
REHEARSAL = Rehearsal(r=8, capacity=72, every=4, classes=3)
PLAN, BATCH = Plan(data=2, fsdp=2, tensor=2), 16


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(PLAN, jax.devices())


class Steps:
    """Rows 1, 2, 3 ... in batches of 16 of three classes, and one of a class that is not stored; the programs of rehearsal on them."""

    def __init__(self, mesh, rehearsal=REHEARSAL):
        self.every = rehearsal.every
        built = programs.build(rehearsal, FIELDS, mesh, batch=BATCH, labels="labels", empty={"labels": np.int32(-1)})
        self.run = {name: program.lower().compile() for name, program in built.items()}
        self.split = built["join"].args[2]["labels"].sharding
        self.memory = self.run["init"](jax.device_put(np.uint32(3), built["init"].args[0].sharding))
        self.taken = 0

    def batch(self):
        ids = np.arange(BATCH * self.taken, BATCH * (self.taken + 1), dtype=np.int32) + 1
        return {"tokens": ids[:, None] * 10 + np.arange(5, dtype=np.int32), "labels": ids % 4}

    def step(self):
        """The rows that a training program would see."""
        rows = jax.device_put(self.batch(), self.split)
        joined = jax.device_get(self.run["join"](self.memory["staged"]["rows"], self.memory["inserts"], rows))
        self.memory = self.run["insert"](self.memory, rows)
        self.taken += 1
        if self.taken % self.every == 0:
            self.memory = self.run["draw"](self.memory)
        return joined


@pytest.fixture(scope="module")
def history(mesh):
    """Twelve steps, and the buffer after each."""
    steps, out = Steps(mesh), []
    for _ in range(12):
        out.append((steps.batch(), steps.step(), jax.device_get(steps.memory)))
    return out


def test_a_batch_has_b_and_r_rows_each_shard_its_own(history):
    for incoming, joined, _ in history:
        for name in FIELDS:
            by_shard = joined[name].reshape(4, 4 + 2, *joined[name].shape[1:])
            np.testing.assert_array_equal(by_shard[:, :4].reshape(BATCH, *joined[name].shape[1:]), incoming[name])


def test_what_is_rehearsed_was_seen_and_is_at_most_one_draw_old(history):
    """Every staged row is whole, is in the buffer as it was at the latest draw, and the last batch before the draw can be among them."""
    seen = set()
    newest = []
    for step, (_, joined, _) in enumerate(history):
        staged = {name: x.reshape(4, 6, *x.shape[1:])[:, 4:].reshape(8, *x.shape[1:]) for name, x in joined.items()}
        if step < 4:  # the first draw comes after the first four steps: until then nothing counts
            assert (staged["labels"] == -1).all() and (staged["tokens"] == 0).all()
            continue
        drawn_after = step // 4 * 4 - 1
        buffer, drawn = history[drawn_after][2]["buffer"], history[drawn_after][2]["staged"]["rows"]
        for name, rows in staged.items():  # each step of a draw has its own rows of it
            np.testing.assert_array_equal(rows, drawn[name][:, step % 4].reshape(rows.shape))
        there = {tuple(row) for w in range(4) for k in range(3) for row in buffer["rows"]["tokens"][w, k, :buffer["filled"][w, k]]}
        ids = staged["tokens"][:, 0] // 10
        assert {tuple(row) for row in staged["tokens"]} <= there
        np.testing.assert_array_equal(staged["labels"], ids % 4)
        assert (ids % 4 != 3).all() and ids.max() <= (drawn_after + 1) * BATCH
        newest.append(drawn_after - (ids.max() - 1) // BATCH)
        seen |= set(ids)
    assert min(newest) == 0 and len(seen) > 20


def test_each_shard_is_the_buffer_of_its_own_rows(history, mesh):
    """Against one-device buffers that are offered each shard's rows with that shard's keys."""
    key = jax.random.wrap_key_data(jnp.asarray(history[0][2]["key"]))
    alone = [init(FIELDS, classes=3, slots=6) for _ in range(4)]
    for step, (incoming, _, _) in enumerate(history):
        own = jax.random.fold_in(jax.random.fold_in(key, 0), step)
        for w in range(4):
            rows = {name: x[4 * w:4 * w + 4] for name, x in incoming.items()}
            alone[w] = insert(alone[w], rows, rows["labels"], jax.random.fold_in(own, w))
    found = history[-1][2]["buffer"]
    assert found["seen"].sum() == 12 * 12 and (found["filled"] == 6).all()  # of 16 rows 12 are of a class that is stored
    for w in range(4):
        jax.tree.map(lambda a, b, w=w: np.testing.assert_array_equal(a[w], b), found, alone[w])


def test_pinned_host_memory_holds_the_same(history, mesh):
    """The buffer lies in pinned host memory, is updated there, and every row that comes out is the same."""
    steps = Steps(mesh, Rehearsal(r=8, capacity=72, every=4, classes=3, memory="pinned_host"))
    pointer = None
    for _, joined, memory in history:
        jax.tree.map(np.testing.assert_array_equal, steps.step(), joined)
        tokens = steps.memory["buffer"]["rows"]["tokens"]
        assert tokens.sharding.memory_kind == "pinned_host" and steps.memory["buffer"]["filled"].sharding.memory_kind == "device"
        where = tokens.addressable_shards[0].data.unsafe_buffer_pointer()
        assert pointer in (None, where)  # the same memory after twelve updates
        pointer = where
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(steps.memory), memory)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_an_update_and_a_draw_are_in_place(mesh, memory):
    """The donated shard is the result's memory, and neither program needs a tenth of it beside."""
    rehearsal = Rehearsal(r=8, capacity=4000, every=4, memory=memory)
    built = programs.build(rehearsal, {"x": ((250,), np.float32)}, mesh, batch=BATCH)
    shard_bytes = 1000 * 1000
    for name in ("insert", "draw"):
        sizes = built[name].lower().compile().memory_analysis()
        assert sizes.alias_size_in_bytes >= shard_bytes and sizes.temp_size_in_bytes < shard_bytes / 10, (name, sizes)


def test_bad_choices(mesh):
    with pytest.raises(InputError, match=r"r\(6\) is not a multiple of the 4 shards; nearest: r=8"):
        programs.build(Rehearsal(r=6, capacity=64), FIELDS, mesh, batch=BATCH)
    with pytest.raises(InputError, match="classes=3, and the rows .tokens. have no labels"):
        programs.build(REHEARSAL, {"tokens": ((5,), np.int32)}, mesh, batch=BATCH)

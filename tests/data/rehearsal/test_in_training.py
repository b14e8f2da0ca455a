"""`train --rehearsal`: what a step trains on, and that the buffer survives whatever the run survives."""

import concurrent.futures
import dataclasses
import hashlib
import socket

import jax
import numpy as np
import pytest
import training

from jaxmem import step
from jaxmem.checkpoint.store import committed_steps, read_meta, read_tree
from jaxmem.data import open_data
from jaxmem.data.order import shuffled
from jaxmem.data.rehearsal import programs
from jaxmem.hardware import parse_topology
from jaxmem.hlo.parse import parse
from jaxmem.hlo.work import hlo_flops
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal
from jaxmem.spec import InputError
from jaxmem.workload import Workload

PLAN = training.TINY["plan"] + ",compute=f32"
FLAGS = {"plan": PLAN, "rehearsal": "r=8,capacity=64,every=2", "print_hash": True}


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert training.train_here(out, **FLAGS) == 0
    return out


def digests(out, at=16):
    """Of parameters, optimizer state, buffer, staged rows, key and counters."""
    return read_meta(out / "checkpoints" / str(at))["digests"]


def buffer_of(out, at, shards, data=None):
    """A checkpoint's buffer and staged rows, in NumPy."""
    data = data or open_data("synthetic", seq=32, vocab=512)
    path = out / "checkpoints" / str(at)
    meta = read_meta(path)["rehearsal"]
    assert meta["shards"] == shards
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = programs.shapes(Rehearsal.parse(meta["rehearsal"]), shards, data.fields)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), shapes)
    return jax.device_get(read_tree(path / "state", {"rehearsal": abstract})["rehearsal"])


def stored_rows(memory):
    buffer = memory["buffer"]
    return sorted(tuple(buffer["rows"]["tokens"][w, 0, s]) for w in range(len(buffer["filled"])) for s in range(buffer["filled"][w, 0]))


def test_the_first_steps_are_plain_and_later_ones_rehearse(undisturbed, tmp_path):
    """Until the first draw the staged rows count for nothing: losses of a run without rehearsal, in the float32's last digits."""
    plain = tmp_path / "plain"
    assert training.train_here(plain, plan=PLAN) == 0
    with_it, without = ([line["loss"] for line in training.metrics(run)] for run in (undisturbed, plain))
    np.testing.assert_allclose(with_it[:2], without[:2], rtol=2e-6)
    assert all(abs(a - b) > 1e-3 for a, b in zip(with_it[3:], without[3:], strict=True))
    assert [line["batch"] for line in training.metrics(undisturbed)] == list(range(16))  # b rows of the data a step, not b + r


def test_the_buffer_holds_rows_of_the_data(undisturbed):
    """128 rows went by; each of the 64 stored ones and the staged ones is one of them, and no row of the data is stored twice."""
    memory, data = buffer_of(undisturbed, 16, 4), open_data("synthetic", seq=32, vocab=512)
    row_at = shuffled(data.rows, 0)
    came = [data.row(row_at(k)) for k in range(128)]
    assert len(stored_rows(memory)) == 64 and memory["buffer"]["seen"].sum() == 128
    assert set(stored_rows(memory)) <= {tuple(row["tokens"]) for row in came}
    targets = {tuple(row["tokens"]): tuple(row["targets"]) for row in came}
    staged = memory["staged"]["rows"]
    for tokens, target in zip(staged["tokens"].reshape(-1, 32), staged["targets"].reshape(-1, 32), strict=True):
        assert targets[tuple(tokens)] == tuple(target)
    assert (memory["inserts"], memory["draws"]) == (16, 8)


def test_the_program_has_b_and_r_rows(undisturbed):
    """What ran is the train program of batch b + r, and its matmuls are (b + r) / b of those of batch b."""
    where, plan = parse_topology("cpu:8"), Plan.parse(PLAN)
    small = Workload.parse(model="decoder-tiny,layers=1", batch=8, seq=32)
    lowered = [step.build(dataclasses.replace(small, batch=b), plan, where, jax.devices())["train"].lower() for b in (8, 16)]
    ran = training.events(undisturbed, "start")[0]["programs"]
    assert ran["train"] == hashlib.sha256(lowered[1].as_text().encode()).hexdigest()
    assert {"rehearsal_join", "rehearsal_insert", "rehearsal_draw"} <= set(ran)
    flops = [hlo_flops(parse(one.compile().as_text())) for one in lowered]
    assert flops[1] / flops[0] == pytest.approx((8 + 8) / 8, rel=1e-3)


@pytest.mark.parametrize("more", [{}, pytest.param({"plan": PLAN + ",step=split", "snapshot": "lazy"}, marks=pytest.mark.long)],
                         ids=["async", "lazy"])
def test_stopped_in_the_middle_of_a_draw_and_gone_on(undisturbed, tmp_path, more):
    """Stopped after an odd step, when half of the staged rows were used: everything ends bitwise equal, the buffer too."""
    whole = undisturbed
    if more:
        whole = tmp_path / "whole"
        assert training.train_here(whole, **FLAGS | more) == 0
    out = tmp_path / "run"
    assert training.train_here(out, **FLAGS | more, fault="term:step=9") == 75
    assert training.train_here(out, **FLAGS | more) == 0
    assert [e["restored_from"] for e in training.events(out, "start")] == [None, 9]
    assert digests(out) == digests(whole) and sum(name.startswith("rehearsal/") for name in digests(out)) == 14
    assert training.final_hash(out) == training.final_hash(whole)


def test_in_pinned_host_memory_it_is_the_same_run(undisturbed, tmp_path):
    out = tmp_path / "run"
    flags = FLAGS | {"rehearsal": "r=8,capacity=64,every=2,memory=pinned_host"}
    assert training.train_here(out, **flags, fault="term:step=5") == 75
    assert training.train_here(out, **flags) == 0
    assert digests(out) == digests(undisturbed)


@pytest.mark.long
def test_a_rollback_takes_the_buffer_back(tmp_path):
    """After a NaN the buffer is that of the step that was returned to: as in a run that was told to leave those batches out."""
    out, told = tmp_path / "nan", tmp_path / "told"
    assert training.train_here(out, **FLAGS, fault="nan:step=7") == 0
    [event] = training.events(out, "rollback")
    assert (event["to"], event["skip"]) == (4, [4, 6])
    assert training.train_here(told, **FLAGS, skip="4:6") == 0
    assert digests(told) == digests(out)


@pytest.mark.long
def test_a_lazy_snapshot_of_host_memory_is_of_its_step(tmp_path):
    """The buffer in pinned host memory is updated in place while its snapshot is written: the snapshot is a copy all the same."""
    flags = FLAGS | {"plan": PLAN + ",step=split", "rehearsal": "r=8,capacity=64,every=2,memory=pinned_host", "keep": "last=9"}
    runs = {snapshot: tmp_path / snapshot for snapshot in ("lazy", "sync")}
    for snapshot, out in runs.items():
        assert training.train_here(out, **flags, snapshot=snapshot) == 0
    assert all(digests(runs["lazy"], at) == digests(runs["sync"], at) for at in (4, 8, 12, 16))
    assert stored_rows(buffer_of(runs["lazy"], 8, 4)) == stored_rows(buffer_of(runs["sync"], 8, 4))


def test_goes_on_on_fewer_devices(undisturbed, tmp_path):
    """Eight devices to two: no stored row is lost, and the rows that were staged stay those of their step."""
    out = tmp_path / "run"
    assert training.train_here(out, **FLAGS, fault="term:step=9") == 75
    before = buffer_of(out, 9, 4)
    flags = FLAGS | {"plan": "fsdp=2,compute=f32", "topology": "cpu:2", "elastic": True}
    assert training.train_here(out, **flags, fault="term:step=10") == 75
    after = buffer_of(out, 10, 2)
    assert after["buffer"]["seen"].sum() == 80 and (after["buffer"]["filled"] == 32).all()
    assert len(set(stored_rows(before)) - set(stored_rows(after))) <= 8  # of the step between
    notes = [e["text"] for e in training.events(out, "note")]
    assert notes == ["the rehearsal buffer of 4 shards (r=8,capacity=64,every=2) was dealt to 2"]
    mine, reference = ([line["loss"] for line in training.metrics(run)] for run in (out, undisturbed))
    assert mine[:9] == reference[:9]
    np.testing.assert_allclose(mine[9], reference[9], rtol=2e-6)  # step 10 has the rows that were staged after step 8


def test_another_run_takes_the_buffer_along(undisturbed, tmp_path):
    """--start_from: the next phase begins with what the one before remembered."""
    out = tmp_path / "next"
    flags = FLAGS | {"start_from": f"{undisturbed}@12", "steps": 1, "warmup": 0, "seed": 5}
    assert training.train_here(out, **flags) == 0
    first, then = buffer_of(undisturbed, 12, 4), buffer_of(out, 1, 4)
    assert (then["inserts"], then["draws"]) == (13, 6)
    jax.tree.map(np.testing.assert_array_equal, first["staged"], then["staged"])
    assert len(set(stored_rows(first)) - set(stored_rows(then))) <= 8


@pytest.mark.long
def test_another_run_takes_the_buffer_into_another_size(undisturbed, tmp_path):
    """Another capacity, and another r: the stored rows are dealt out again, and rehearsal begins with the next draw."""
    flags = FLAGS | {"start_from": f"{undisturbed}@12", "steps": 1, "warmup": 0, "seed": 5}
    first = buffer_of(undisturbed, 12, 4)
    smaller = tmp_path / "smaller"
    assert training.train_here(smaller, **flags | {"rehearsal": "r=8,capacity=40,every=2"}) == 0
    assert any("24 of 64 rows had no place" in e["text"] for e in training.events(smaller, "note"))
    larger = tmp_path / "larger"
    assert training.train_here(larger, **flags | {"rehearsal": "r=16,capacity=128,every=1"}) == 0
    then = buffer_of(larger, 1, 4)
    assert set(stored_rows(first)) <= set(stored_rows(then)) and then["buffer"]["filled"].sum() == 64 + 8
    assert then["inserts"] == 13 and then["staged"]["weights"].shape == (4, 1, 4)


@pytest.mark.long
def test_classes_of_a_classifier(tmp_path):
    """Each class has its own slots: after 24 batches of 16 digits, ten classes with two slots in each of four shards."""
    out = tmp_path / "run"
    flags = {"model": "mlp", "plan": "data=4", "topology": "cpu:4", "batch": 16, "steps": 24, "seq": 1, "data": "images:digits"}
    assert training.train_here(out, **flags, checkpoint_every=0, rehearsal="r=8,capacity=80,every=2,classes=10") == 0
    data = open_data("images:digits", seq=1, vocab=0)
    memory = buffer_of(out, 24, 4, data)
    assert (memory["buffer"]["filled"] == 2).all() and memory["buffer"]["seen"].sum() == 24 * 16
    np.testing.assert_array_equal(memory["buffer"]["rows"]["labels"], np.broadcast_to(np.arange(10)[:, None], (4, 10, 2)))
    assert (memory["staged"]["weights"] == 1).all() and len(set(memory["staged"]["rows"]["labels"].reshape(-1))) > 3


def test_what_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"r\(6\) is not a multiple of the 4 shards; nearest: r=8"):
        training.train_here(tmp_path / "run", **FLAGS | {"rehearsal": "r=6,capacity=64"})
    with pytest.raises(InputError, match="nearest: every=2"):
        training.train_here(tmp_path / "run", **FLAGS | {"rehearsal": "r=8,capacity=64"})
    with pytest.raises(InputError, match="classes=4, and the rows .* have no labels"):
        training.train_here(tmp_path / "run", **FLAGS | {"rehearsal": "r=8,capacity=64,every=2,classes=4"})
    with pytest.raises(InputError, match=r"batch\(12\) is not .* nearest: .*the programs' batch is --batch=8 and r=4 rows"):
        training.train_here(tmp_path / "run", **FLAGS | {"rehearsal": "r=4,capacity=64,every=4", "plan": PLAN + ",accumulate=2"})
    out = tmp_path / "other"
    assert training.train_here(out, **FLAGS, steps=2, warmup=0, fault="term:step=1") == 75
    with pytest.raises(InputError, match="rehearsal: was 'r=8,capacity=64,every=2', now None"):
        training.train_here(out, plan=PLAN, steps=2, warmup=0)


@pytest.mark.long
def test_killed_it_ends_bitwise_equal(tmp_path):
    """SIGKILL before a step and in the middle of a save, in processes of their own: the buffer is that of the undisturbed run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert training.train_apart(whole, **FLAGS).returncode == 0
    for _ in range(2):
        killed = training.train_apart(broken, **FLAGS, fault="kill:step=7;kill:step=12,phase=commit")
        assert killed.returncode == -9, killed.stderr
    assert committed_steps(broken / "checkpoints")[-1] == 8
    assert training.train_apart(broken, **FLAGS).returncode == 0
    assert digests(broken) == digests(whole)


@pytest.mark.long
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_two_processes_remember_what_one_does(tmp_path, memory):
    """2 processes x 4 devices: buffer, staged rows and counters are bitwise those of one process of 8."""
    flags = {"plan": "data=4,fsdp=2,compute=f32", "batch": 16, "steps": 12, "checkpoint_every": 4,
             "rehearsal": f"r=16,capacity=128,every=4,memory={memory}"}
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert training.train_apart(alone, **flags).returncode == 0
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda k: training.train_apart(together, **flags, coordinator=f"localhost:{port}", processes=2, process=k),
                             range(2)))
    assert [one.returncode for one in both] == [0, 0], both[0].stderr + both[1].stderr
    one, other = (digests(run, 12) for run in (alone, together))
    kept = {name for name in one if name.startswith("rehearsal/")}
    assert len(kept) == 14 and {name: one[name] for name in kept} == {name: other[name] for name in kept}

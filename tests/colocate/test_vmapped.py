"""Runs in one program against runs of their own: the same numbers up to the order of sums, split as they should be."""

import functools

import jax
import numpy as np
import pytest

from jaxmem import step
from jaxmem.colocate import vmapped
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

WORKLOAD = Workload.parse(model="mlp,mlp=32", batch=8)
SEEDS, RATES, CLIPS = np.array([3, 4, 3, 9], np.uint32), np.float32([0.02, 0.05, 0.1, 0.02]), np.float32([1.0, 1.0, 1.0, 0.05])
STEPS = 3


def batches() -> list[dict[str, np.ndarray]]:
    """Rows of each run's own, [R, B, ...]."""
    rng = np.random.default_rng(0)
    return [{"images": rng.uniform(size=(4, 8, 8, 8, 1)).astype(np.float32), "labels": rng.integers(0, 10, (4, 8), dtype=np.int32)}
            for _ in range(STEPS)]


def placed(values, structs):
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), values, structs)


@functools.cache
def programs_of_many():
    """Four runs of two devices each on four devices: two groups that hold two runs each."""
    built = vmapped.build(WORKLOAD, Plan.parse("fsdp=2,compute=f32"), parse_topology("cpu:4"), jax.devices()[:4], runs=4)
    return built, *(built[name].lower().compile() for name in ("init", "train"))


@functools.cache
def many():
    built, *compiled = programs_of_many()
    return built, *trained(built, SEEDS, batches(), RATES, CLIPS, compiled=compiled)


@functools.cache
def alone(run: int):
    built, init, train = programs_of_one()
    own = [{name: value[run] for name, value in batch.items()} for batch in batches()]
    return trained(built, SEEDS[run], own, RATES[run], CLIPS[run], compiled=(init, train))


@functools.cache
def programs_of_one():
    """On one device, so that neither groups nor splits are shared with what is tested."""
    built = step.build(WORKLOAD, Plan.parse("compute=f32"), parse_topology("cpu:1"), jax.devices()[:1])
    return built, *(built[name].lower().compile() for name in ("init", "train"))


def trained(built, seeds, rows, rates, clips, compiled=None):
    """(states after each step, metrics of each step, the last state)."""
    init, train = compiled or (built[name].lower().compile() for name in ("init", "train"))
    state = init(placed(seeds, built["init"].args[0]))
    states, metrics = [jax.device_get(state)], []
    for batch in rows:
        before = state
        state, found = train(state, placed(batch, dict(built.batch)), placed({"lr": rates, "clip": clips}, built["train"].args[2]))
        if "runs" in built.mesh.shape:  # a copy of one device's state is a view, which would keep it alive
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        states.append(jax.device_get(state))
        metrics.append(jax.device_get(found))
    return states, metrics, state


@pytest.mark.parametrize("run", range(4))
def test_each_run_is_the_run_alone(run):
    """In f32: within 2e-6 of the largest value of each array, 1e-5 for the loss, after three steps that move every parameter."""
    _, states, metrics, _ = many()
    own_states, own_metrics, _ = alone(run)
    for at in range(STEPS + 1):
        for ours, theirs in zip(jax.tree.leaves(vmapped.run_of(states[at], run)), jax.tree.leaves(own_states[at]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6 * max(1.0, np.abs(theirs).max()))
    for ours, theirs in zip(metrics, own_metrics, strict=True):
        assert ours["loss"][run] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"][run] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(own_states[0]["params"]), jax.tree.leaves(own_states[-1]["params"]),
                                                 strict=True)]
    assert min(moved) > 1e-3


def test_runs_differ_where_their_inputs_do():
    """Runs 0 and 2 begin as one, for they have one seed, and part with their learning rates; run 1 begins elsewhere."""
    _, states, _, _ = many()
    first, second, third = (vmapped.run_of(states[0]["params"], run) for run in (0, 1, 2))
    for a, b, c in zip(*map(jax.tree.leaves, (first, second, third)), strict=True):
        np.testing.assert_array_equal(a, c)
        assert a.ndim < 2 or np.abs(a - b).max() > 1e-2  # biases begin at zero


def test_groups_hold_whole_runs():
    """The leading dim is over `runs`, the rest as the plan of one run has it; no device holds more than its group's runs."""
    built, _, _, state = many()
    one = step.build(WORKLOAD, Plan.parse("fsdp=2,compute=f32"), parse_topology("cpu:2"), jax.devices()[:2])
    assert dict(built.mesh.shape) == {"runs": 2, "data": 1, "fsdp": 2, "tensor": 1}
    split = 0
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(one.state), strict=True):
        assert ours.sharding.spec == jax.P("runs", *theirs.sharding.spec)
        shard = theirs.sharding.shard_shape(theirs.shape)
        assert {part.data.shape for part in ours.addressable_shards} == {(2, *shard)}
        split += shard != theirs.shape
    assert split >= 4


def test_nothing_moves_between_runs():
    """Every collective of the compiled step stays inside a group: devices 0 and 1, or 2 and 3."""
    from jaxmem.hlo.collectives import collectives
    from jaxmem.hlo.parse import parse
    from jaxmem.targets.child import describe_mesh

    built, _, train = programs_of_many()
    found = collectives(parse(train.as_text()), describe_mesh(built.mesh))
    assert found and {one["axis"] for one in found} == {"fsdp"}


def test_a_run_that_breaks_leaves_the_others_as_they_were():
    """Run 1 with a rate at which it has no numbers any more; the others bit for bit as with it whole."""
    built, *compiled = programs_of_many()
    states, metrics, _ = trained(built, SEEDS, batches(), np.float32([RATES[0], np.inf, RATES[2], RATES[3]]), CLIPS, compiled=compiled)
    _, whole, whole_metrics, _ = many()
    assert not np.isfinite(metrics[-1]["loss"][1]) and np.isfinite(whole_metrics[-1]["loss"]).all()
    for run in (0, 2, 3):
        jax.tree.map(np.testing.assert_array_equal, vmapped.run_of(states[-1], run), vmapped.run_of(whole[-1], run))


def test_programs_of_runs_are_labelled_as_of_one():
    built, *_ = many()
    one, _, _ = programs_of_one()
    assert built["train"].labels == one["train"].labels and built["train"].output_labels == one["train"].output_labels
    assert set(built.programs) == {"init", "train", "eval"}


@pytest.mark.parametrize("topology, plan, runs, words", [
    ("cpu:4", "", 6, "6 runs of 1 devices each do not fill the 4 groups of cpu:4 evenly; nearest: 4 or 8"),
    ("cpu:4", "fsdp=3", 3, "3 devices a run, which do not divide the 4"), ("cpu:4", "fsdp=8", 1, "do not divide the 4"),
    ("cpu:4", "", 0, "0 runs: at least 1"), ("cpu:4", "", 2, "nearest: 4$"), ("cpu:2", "fsdp=2,tensor=1,zero=9", 2, "zero")])
def test_what_cannot_be_built_is_told(topology, plan, runs, words):
    where = parse_topology(topology)
    with pytest.raises(InputError, match=words):
        vmapped.build(WORKLOAD, Plan.parse(plan), where, jax.devices()[:where.devices], runs=runs)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["data=2,tensor=2", "fsdp=2,tensor=2,sequence=tensor", "fsdp=4,remat=block,accumulate=2"])
def test_a_decoder_under_every_kind_of_plan(plan):
    workload = Workload.parse(model="decoder-tiny,layers=2", batch=8, seq=32)
    plan = Plan.parse(plan + ",compute=f32")
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, workload.model.vocab, (2, 8, 33), dtype=np.int32)
    shape = (2, 8, 32)
    rows = [{"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "segment_ids": np.ones(shape, np.int32),
             "positions": np.broadcast_to(np.arange(32, dtype=np.int32), shape)}] * 3
    built = vmapped.build(workload, plan, parse_topology("cpu:8"), jax.devices(), runs=2)
    states, metrics, _ = trained(built, SEEDS[:2], rows, RATES[:2], CLIPS[:2])
    one = step.build(workload, Plan.parse("compute=f32"), parse_topology("cpu:1"), jax.devices()[:1])
    compiled = tuple(one[name].lower().compile() for name in ("init", "train"))
    for run in range(2):
        own = [{name: value[run] for name, value in batch.items()} for batch in rows]
        own_states, own_metrics, _ = trained(one, SEEDS[run], own, RATES[run], CLIPS[run], compiled=compiled)
        assert [float(m["loss"][run]) for m in metrics] == pytest.approx([float(m["loss"]) for m in own_metrics], rel=1e-4)
        assert own_metrics[-1]["loss"] < own_metrics[0]["loss"] - 0.5

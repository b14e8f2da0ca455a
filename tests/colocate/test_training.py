"""Training many runs, in all three ways, against each other and against `jaxmem train`."""

import contextlib
import functools
import time

import numpy as np
import pytest

from jaxmem.colocate import training
from jaxmem.colocate.training import Run, Trained, Wave, train_many
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload
from tests.training import metrics, train_here

WORKLOAD = Workload.parse(model="mlp,mlp=32", optimizer="sgd", batch=8)  # Adam would not show a clip
RUNS = [Run(seed=5, lr=0.02), Run(seed=6, lr=0.05), Run(seed=5, lr=0.1), Run(seed=7, lr=0.1, clip=0.05)]


@functools.cache
def trained(how: str, plan: str = "compute=f32", topology: str = "cpu:2", runs: int = 4, eval_rows: int = 20) -> Trained:
    return train_many(WORKLOAD, Plan.parse(plan), parse_topology(topology), RUNS[:runs], how=how, steps=6,  # type: ignore[arg-type]
                      data="images:digits", schedule="cosine", warmup=2, eval_rows=eval_rows)


def test_one_program_learns_what_runs_alone_learn():
    ours, theirs = trained("vmapped"), trained("one_after_another")
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    np.testing.assert_allclose(ours.eval_losses, theirs.eval_losses, rtol=1e-5)
    assert np.shape(theirs.losses) == (4, 6) and theirs.losses[0][0] == theirs.losses[2][0]  # one seed, and before any step
    assert abs(theirs.eval_losses[0] - theirs.eval_losses[2]) > 0.01  # what the rate alone did
    assert len({round(one, 4) for one in theirs.eval_losses}) == 4  # each run's own seed, rate or clip shows


def test_parts_learn_it_bit_for_bit():
    ours, theirs = trained("parts", runs=2), trained("one_after_another")
    assert ours.losses == theirs.losses[:2] and ours.eval_losses == theirs.eval_losses[:2]


def test_what_is_measured_is_positive_and_memory_is_of_a_program():
    many, one = trained("vmapped"), trained("one_after_another")
    assert many.step_s > 0 and many.setup_s > 0
    state = 8 * WORKLOAD.model.parameters + 4  # f32 parameters and momentum, and the count of steps
    assert one.memory["alias_bytes"] == pytest.approx(state, rel=0.01)
    assert many.memory["alias_bytes"] == pytest.approx(2 * state, rel=0.01)  # four runs on two devices


def test_no_device_works_while_the_clock_stands_still(monkeypatch):
    """A device that takes 10 ms a round, and data that takes longer to read: the time of a step is the device's."""
    free = 0.0

    class Loss:
        def __init__(self, ready: float):
            self.ready = ready

        def __array__(self, dtype=None, copy=None):
            time.sleep(max(0.0, self.ready - time.perf_counter()))
            return np.zeros(1, np.float32)

    def one_step(*given):
        nonlocal free
        free = max(free, time.perf_counter()) + 0.01
        return Loss(free)

    @contextlib.contextmanager
    def reading(*given):
        yield lambda members, position: time.sleep(0.02)
    monkeypatch.setattr(training, "one_step", one_step)
    monkeypatch.setattr(training, "reading", reading)
    losses = {0: []}
    step_s = training.train_wave(Wave(lanes=[None], members=[[0]], setup_s=0.0), [Run()], None, None, 20, "constant", 0, losses)
    assert 0.0099 <= step_s and len(losses[0]) == 20


@pytest.mark.parametrize("words, change", [
    ("how=vmaped: expected one of vmapped, parts, one_after_another; did you mean vmapped", {"how": "vmaped"}),
    ("0 runs of 6 steps", {"runs": []}), ("4 runs of 0 steps", {"steps": 0}), ("step=split", {"plan": Plan(step="split")}),
    ("4 equal parts", {"how": "parts"}), ("nearest: 2 or 4", {"runs": RUNS[:3]})])
def test_mistakes_are_told(words, change):
    given = {"plan": Plan(), "runs": RUNS, "how": "vmapped", "steps": 6} | change
    plan, runs = given.pop("plan"), given.pop("runs")
    with pytest.raises(InputError, match=words):
        train_many(WORKLOAD, plan, parse_topology("cpu:2"), runs, data="images:digits", **given)


@pytest.mark.long
def test_a_run_is_the_one_that_jaxmem_train_makes(tmp_path):
    """Same seed, rate, schedule, clip and data: the losses of the run's folder, bit for bit."""
    flags = {"model": "decoder-tiny,layers=1", "plan": "fsdp=8", "topology": "cpu:8", "batch": 8, "seq": 32, "steps": 6,
             "schedule": "cosine", "warmup": 2, "lr": 0.01, "seed": 5, "data": "text:python", "checkpoint_every": 0}
    assert train_here(tmp_path / "run", **flags) == 0
    workload = Workload.parse(model=flags["model"], batch=8, seq=32)
    found = train_many(workload, Plan.parse("fsdp=8"), parse_topology("cpu:8"), [Run(seed=5, lr=0.01)], how="one_after_another", steps=6,
                       data="text:python", schedule="cosine", warmup=2)
    assert found.losses[0] == [line["loss"] for line in metrics(tmp_path / "run")]

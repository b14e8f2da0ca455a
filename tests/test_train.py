"""The loop: what it computes, what it writes, what it survives. The reference for every disturbed run is the undisturbed one."""

import gc
import hashlib
import math

import jax
import numpy as np
import optax
import pytest
import training

from jaxmem import step
from jaxmem.checkpoint.store import Store, committed_steps, read_meta
from jaxmem.damage import corrupt
from jaxmem.data import Batches, open_data
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

SPLIT = training.TINY["plan"] + ",step=split"
EXACT = training.TINY["plan"] + ",compute=f32"


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert training.train_here(out, eval_every=8, print_hash=True) == 0
    return out


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory):
    """Where another mesh must give the same losses: sums in another order differ by float32's last digits and not by bfloat16's."""
    out = tmp_path_factory.mktemp("float32") / "run"
    assert training.train_here(out, plan=EXACT) == 0
    return out


def test_it_learns_and_writes_a_line_a_step(undisturbed):
    lines = training.metrics(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert [line["batch"] for line in lines] == list(range(16))
    assert lines[0]["loss"] == pytest.approx(math.log(512), rel=0.1)  # uniform over the vocabulary, before anything is learned
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert all(line["step_s"] >= 0 and line["mfu"] is None for line in lines)
    assert [line["step"] for line in training.metrics(undisturbed, "eval")] == [8, 16]
    assert training.metrics(undisturbed, "eval")[-1]["loss"] < lines[0]["loss"]
    assert [line["lr"] for line in lines[:2]] == [0.005, 0.01] and lines[-1]["lr"] < 1e-9


def test_the_program_that_is_trained_is_the_one_that_is_checked(undisturbed):
    built = step.build(Workload.parse(model="decoder-tiny,layers=1", batch=8, seq=32), Plan.parse(training.TINY["plan"]),
                       parse_topology("cpu:8"), jax.devices())
    texts = training.events(undisturbed, "start")[0]["programs"]
    assert set(texts) == {"init", "train", "eval"}
    for name, digest in texts.items():
        assert digest == hashlib.sha256(built[name].lower().as_text().encode()).hexdigest(), name


def test_against_a_bare_loop(in_float32):
    """Loss and parameters of the run against a loop written here: one device, another plan, optax's own schedule."""
    where = parse_topology("cpu:1")
    workload = Workload.parse(model="decoder-tiny,layers=1", batch=8, seq=32)
    built = step.build(workload, Plan(compute="f32"), where, jax.devices()[:1])
    run = {name: built[name].lower().compile() for name in ("init", "train")}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, 2, 16)
    state = run["init"](jax.device_put(np.uint32(0), built.state["step"].sharding))
    data = open_data("synthetic", seq=32, vocab=512)
    losses = []
    with Batches(data, batch=8, seed=0, shardings={k: v.sharding for k, v in built.batch.items()}) as batches:
        for i, (_, batch) in zip(range(1, 17), batches, strict=False):
            hyper = {"lr": np.float32(schedule(i)), "clip": np.float32(1.0)}
            state, found = run["train"](state, batch, jax.device_put(hyper, built.state["step"].sharding))
            losses.append(float(found["loss"]))
    np.testing.assert_allclose([line["loss"] for line in training.metrics(in_float32)], losses, rtol=2e-5)


@pytest.fixture(scope="module")
def in_two_programs(tmp_path_factory):
    out = tmp_path_factory.mktemp("split") / "run"
    assert training.train_here(out, plan=SPLIT, snapshot="sync", print_hash=True) == 0
    return out


def test_how_it_is_saved_changes_nothing(undisturbed, in_two_programs, tmp_path):
    assert training.train_here(tmp_path / "a", eval_every=8, print_hash=True, snapshot="sync") == 0
    assert training.final_hash(tmp_path / "a") == training.final_hash(undisturbed)
    assert training.train_here(tmp_path / "b", print_hash=True, snapshot="lazy", plan=SPLIT) == 0
    assert training.final_hash(tmp_path / "b") == training.final_hash(in_two_programs)
    assert committed_steps(tmp_path / "a" / "checkpoints") == committed_steps(tmp_path / "b" / "checkpoints") == [12, 16]
    kinds = [(e["step"], e["snapshot"]) for e in training.events(tmp_path / "b", "checkpoint")]
    assert kinds == [(4, "lazy"), (8, "lazy"), (12, "lazy"), (16, "sync")]


@pytest.mark.parametrize("snapshot", ["async", "lazy"])
def test_stopped_on_sigterm_and_gone_on(undisturbed, in_two_programs, tmp_path, snapshot):
    out = tmp_path / "run"
    flags = {"eval_every": 8, "print_hash": True} if snapshot == "async" else {"plan": SPLIT, "snapshot": "lazy", "print_hash": True}
    assert training.train_here(out, fault="term:step=10", **flags) == 75
    assert committed_steps(out / "checkpoints")[-1] == 10 == training.events(out, "end")[-1]["step"]
    assert training.train_here(out, **flags) == 0
    assert [line["step"] for line in training.metrics(out)] == list(range(1, 17))
    assert training.final_hash(out) == training.final_hash(undisturbed if snapshot == "async" else in_two_programs)
    assert [e["restored_from"] for e in training.events(out, "start")] == [None, 10]


def test_nan_rolls_back_and_leaves_the_batches_out(tmp_path, undisturbed):
    out = tmp_path / "nan"
    assert training.train_here(out, eval_every=8, print_hash=True, fault="nan:step=11") == 0
    [event] = training.events(out, "rollback")
    assert (event["step"], event["to"], event["skip"]) == (11, 8, [8, 10])
    positions = [line["batch"] for line in training.metrics(out)]
    assert positions == [*range(8), *range(11, 19)]
    assert all(math.isfinite(line["loss"]) for line in training.metrics(out))
    told = tmp_path / "told"
    assert training.train_here(told, eval_every=8, print_hash=True, skip="8:10") == 0
    assert training.final_hash(told) == training.final_hash(out) != training.final_hash(undisturbed)


def test_a_rollback_survives_a_stop(tmp_path):
    """The batches that were left out stay left out when the run is stopped before the next checkpoint and resumed."""
    out = tmp_path / "run"
    assert training.train_here(out, fault="nan:step=7;term:step=9", checkpoint_every=4) == 75
    assert training.train_here(out) == 0
    assert [line["batch"] for line in training.metrics(out)] == [*range(4), *range(7, 19)]


def test_rollbacks_are_exhausted(tmp_path):
    out = tmp_path / "run"
    assert training.train_here(out, fault="nan:step=3;nan:step=5", max_rollbacks=1) == 77
    assert training.events(out, "end")[-1]["status"] == "rollbacks"
    assert training.train_here(out, max_rollbacks=2) == 0


@pytest.mark.parametrize("at, back", [(30, 28), (28, 24)])  # the spike itself falls on a checkpoint's step: none is written of it
def test_a_spike_that_lasts_rolls_back(tmp_path, at, back):
    out = tmp_path / "run"
    assert training.train_here(out, steps=40, lr=0.002, warmup=0, schedule="constant", fault=f"spike:step={at}", spike=6) == 0
    [event] = training.events(out, "rollback")
    assert event["step"] == at + 1 and event["to"] == back and "deviations above the median" in event["reason"]


def test_a_damaged_checkpoint_is_passed_over_with_a_clear_line(undisturbed, tmp_path, capsys):
    out = tmp_path / "run"
    flags = {"eval_every": 8, "print_hash": True}
    assert training.train_here(out, fault="term:step=14", **flags) == 75
    corrupt(out / "checkpoints" / "14", "flip")
    capsys.readouterr()
    assert training.train_here(out, **flags) == 0
    assert "checkpoint of step 14 is damaged" in capsys.readouterr().err
    assert [e["step"] for e in training.events(out, "corrupt")] == [14]
    assert training.events(out, "start")[-1]["restored_from"] == 12
    [dropped] = training.events(out, "dropped")
    assert (dropped["from"], dropped["to"], dropped["steps"]) == (13, 14, 2)
    assert training.final_hash(out) == training.final_hash(undisturbed)


def test_a_step_that_was_damaged_is_saved_again(tmp_path):
    """Stopped at the very step whose checkpoint is damaged: what is said to be saved can be restored."""
    out = tmp_path / "run"
    assert training.train_here(out, fault="term:step=14") == 75
    corrupt(out / "checkpoints" / "14", "flip")
    assert training.train_here(out, fault="term:step=14;term:step=14") == 75
    assert training.train_here(out) == 0
    assert [e["restored_from"] for e in training.events(out, "start")] == [None, 12, 14]
    assert len(training.events(out, "corrupt")) == 1


def test_the_best_is_best_at_its_own_step(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match="--eval_every that divides --checkpoint_every=4"):
        training.train_here(out, keep="last=1,best=1", eval_every=8)
    assert training.train_here(out, keep="last=1,best=1", eval_every=4, steps=24, lr=0.05, schedule="constant") == 0
    losses = {line["step"]: line["loss"] for line in training.metrics(out, "eval")}
    best = min(losses, key=lambda step: losses[step])
    kept = committed_steps(out / "checkpoints")
    assert kept == sorted({best, 24})
    assert all(read_meta(out / "checkpoints" / str(step))["eval_loss"] == losses[step] for step in kept)


def test_restored_from_the_local_copies(undisturbed, tmp_path):
    """With local checkpoints a restart reads nothing from the run's own folder, and says so."""
    out = tmp_path / "run"
    flags = {"eval_every": 8, "print_hash": True, "local_checkpoints": tmp_path / "local"}
    assert training.train_here(out, fault="term:step=10", **flags) == 75
    assert training.train_here(out, **flags) == 0
    [ledger] = training.events(out, "ledger")
    assert ledger["local_bytes"] == ledger["state_bytes"] > 100_000 and ledger["remote_bytes"] == ledger["peer_bytes"] == 0
    assert training.final_hash(out) == training.final_hash(undisturbed)


def test_a_rollback_holds_one_state(tmp_path, monkeypatch):
    """While the good state is restored the bad one is gone: a plan that fits still fits."""
    held = []
    real = Store.restore

    def restore(self, *args, **kwargs):
        gc.collect()
        held.append(sum(x.nbytes for x in jax.live_arrays() if x.nbytes > 1000))
        return real(self, *args, **kwargs)
    monkeypatch.setattr(Store, "restore", restore)
    for plan in (training.TINY["plan"], SPLIT):
        held.clear()
        assert training.train_here(tmp_path / plan.replace("=", ""), fault="nan:step=7", plan=plan, steps=8) == 0
        first, again = held
        assert again - first < 100_000, (first, again)  # the state has a megabyte


def test_goes_on_under_another_plan_on_fewer_devices(in_float32, tmp_path):
    out = tmp_path / "run"
    assert training.train_here(out, fault="term:step=8", plan=EXACT) == 75
    with pytest.raises(InputError, match="topology: was 'cpu:8', now 'cpu:4'"):
        training.train_here(out, plan="fsdp=4", topology="cpu:4")
    assert training.train_here(out, plan="fsdp=4,compute=f32", topology="cpu:4", elastic=True) == 0
    mine, reference = ([line["loss"] for line in training.metrics(run)] for run in (out, in_float32))
    assert mine[:8] == reference[:8]
    np.testing.assert_allclose(mine, reference, rtol=2e-5)
    assert read_meta(out / "checkpoints" / "16")["topology"] == "cpu:4"


def test_other_data_is_refused(tmp_path):
    out = tmp_path / "run"
    text = tmp_path / "words.txt"
    text.write_text("one two three four five " * 400)
    assert training.train_here(out, data=f"text:{text}", fault="term:step=4") == 75
    text.write_text("one two three four six " * 400)
    with pytest.raises(InputError, match="not what the checkpoint of step 4 was trained on"):
        training.train_here(out, data=f"text:{text}")


def test_images_are_not_for_a_decoder(tmp_path):
    with pytest.raises(InputError, match="gives images, labels|gives .*, and decoder-tiny takes"):
        training.train_here(tmp_path / "run", data="images:digits")


def test_every_problem_is_told_at_once(tmp_path):
    with pytest.raises(InputError) as error:
        training.train_here(tmp_path / "run", steps=0, lr=-1, batch=6, snapshot="lazy")
    for part in ("--steps=0", "--lr=-1", "batch(6)", "step=split"):
        assert part in str(error.value)
    assert not (tmp_path / "run").exists()


def test_killed_in_mid_step_and_in_mid_save_it_ends_bitwise_equal(tmp_path):
    """SIGKILL before a step and between the flush and the commit of a checkpoint; the same command again, each time."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = training.train_apart(whole, print_hash=True)
    assert done.returncode == 0, done.stderr
    for _ in range(2):
        killed = training.train_apart(broken, print_hash=True, fault="kill:step=7;kill:step=12,phase=commit")
        assert killed.returncode == -9, killed.stderr
    assert committed_steps(broken / "checkpoints")[-1] == 8  # 12 was flushed and not committed
    resumed = training.train_apart(broken, print_hash=True)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == done.stdout.splitlines()[-1] and "state sha256:" in done.stdout
    assert [e["restored_from"] for e in training.events(broken, "start")] in ([None, 4, 8], [None, None, 8])  # 4 in flight at step 7
    assert not list((broken / "checkpoints").glob("*tmp*")) and not list((broken / "checkpoints").glob(".*"))
    again = training.train_apart(broken, print_hash=True)
    assert again.returncode == 0 and "is finished" in again.stderr
    assert again.stdout == resumed.stdout.splitlines()[-1] + "\n"


def test_it_starts_itself_again(tmp_path):
    """--max_restarts: one command, killed twice by faults, ends with 0 and the state of the undisturbed run."""
    whole = training.train_apart(tmp_path / "whole", print_hash=True)
    done = training.train_apart(tmp_path / "run", print_hash=True, fault="kill:step=6;kill:step=11", max_restarts=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert len(training.events(tmp_path / "run", "start")) == 3

"""A run that begins with another's checkpoint: its bits on another mesh, its schedule where it stood, a larger model with its loss."""

import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training

from jaxmem import step
from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.store import committed_steps, read_meta
from jaxmem.continual import start
from jaxmem.damage import corrupt
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.runs.start_from import StartFrom, parse
from jaxmem.schedules import parse as parse_schedule
from jaxmem.spec import InputError
from jaxmem.workload import Workload

PLAN = "data=2,fsdp=2,tensor=2,compute=f32"
SMALL = "decoder-tiny,embed=32,layers=1,mlp=32"
RUN = {"plan": PLAN, "steps": "8", "schedule": "infinite,cooldown=4,decay=0", "warmup": "2", "keep": "last=9", "seq": "16", "model": SMALL}


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    out = tmp_path_factory.mktemp("source") / "run"
    assert training.train_here(out, **RUN) == 0
    return out


def saved(out, step: int) -> dict:
    return read_meta(out / "checkpoints" / str(step))


def lrs(out) -> list[float]:
    return [line["lr"] for line in training.metrics(out)]


def test_spelling():
    assert parse("runs/a") == StartFrom(run=parse("runs/a").run, step=None)
    found = parse("runs/a,b@home@200, optimizer=keep,schedule=continue,grow=true")
    assert (str(found.run), found.step, found.optimizer, found.schedule, found.grow) == ("runs/a,b@home", 200, "keep", "continue", True)
    assert parse("a@b").step is None and str(parse("a@b").run) == "a@b"
    for text, part in (("a,optimiser=keep", "did you mean optimizer"), ("a,optimizer=save", "expected reset|keep"),
                       (",grow=true", "comes first"), ("a,shrink=2", "a part of 1"), ("a,shrink=0.4,optimizer=keep", "optimizer=reset")):
        with pytest.raises(InputError, match=part):
            parse(text)


def test_two_runs_are_one_run(source, tmp_path):
    """8 steps, and 8 more by another run on the batches after them, are 16 steps: the same losses, rates, parameters and moments."""
    whole = RUN | {"steps": "16", "schedule": "infinite,cooldown=4,decay=0.25"}
    assert training.train_here(tmp_path / "whole", **whole) == 0
    later = RUN | {"schedule": "infinite,cooldown=4,decay=0.5", "skip": "0:7", "start_from": f"{source},optimizer=keep,schedule=continue"}
    assert training.train_here(tmp_path / "later", **later) == 0
    assert lrs(source) + lrs(tmp_path / "later") == pytest.approx(lrs(tmp_path / "whole"), rel=1e-12)
    assert lrs(source)[-1] == lrs(tmp_path / "later")[0] == 0.005 and lrs(tmp_path / "later")[-1] == pytest.approx(0.001)
    losses = [line["loss"] for out in (source, tmp_path / "later") for line in training.metrics(out)]
    assert losses == [line["loss"] for line in training.metrics(tmp_path / "whole")]
    ends = [{name: value for name, value in saved(tmp_path / name, at)["digests"].items() if name != "step"}
            for name, at in (("whole", 16), ("later", 8))]
    assert ends[0] == ends[1] and len(ends[0]) > 20
    assert saved(tmp_path / "later", 8)["schedule"] == {"text": later["schedule"], "origin": 8, "rate": pytest.approx(0.001)}
    note = next(line["text"] for line in training.events(tmp_path / "later", "note"))
    assert "the schedule goes on after its step 8; the learning rate begins at 0.005, and was 0.005 there" in note


def test_a_resume_neither_warms_up_again_nor_needs_the_other_run(source, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(source, other)
    later = RUN | {"schedule": "infinite,cooldown=4,decay=0.5", "print_hash": True,
                   "start_from": f"{other},optimizer=keep,schedule=continue"}
    assert training.train_here(tmp_path / "whole", **later) == 0
    assert training.train_here(tmp_path / "stopped", **later, fault="term:step=5") == 75
    shutil.rmtree(other)
    assert training.train_here(tmp_path / "stopped", **later) == 0
    assert lrs(tmp_path / "stopped") == lrs(tmp_path / "whole") and lrs(tmp_path / "whole")[0] == 0.005
    assert training.final_hash(tmp_path / "stopped") == training.final_hash(tmp_path / "whole")
    with pytest.raises(InputError, match="start_from: was"):
        training.train_here(tmp_path / "stopped", **later | {"start_from": str(other)})


def test_a_new_schedule_with_the_moments_warmed_at_rate_zero(source, tmp_path):
    out = tmp_path / "warm"
    assert training.train_here(out, **RUN | {"schedule": "cosine,zero=4", "checkpoint_every": 4, "start_from": str(source)}) == 0
    assert lrs(out)[:6] == [0, 0, 0, 0, 0.005, 0.01] and lrs(out)[-1] == pytest.approx(0, abs=1e-9)
    before, after = saved(source, 8)["digests"], saved(out, 4)["digests"]
    moments = [name for name in before if "/nu/" in name]
    assert len(moments) > 8 and all(before[name] != after[name] for name in moments)
    assert all(before[name] == after[name] for name in before if name.startswith("params/"))
    assert saved(out, 8)["schedule"]["origin"] == 0


# ---------------------------------------------------------------- without a loop

def built(model: str = SMALL, plan: str = PLAN, devices: int = 8, optimizer: str = "adamw"):
    workload = Workload.parse(model=model, optimizer=optimizer, batch=8, seq=16)
    topology = parse_topology(f"cpu:{devices}")
    programs = step.build(workload, Plan.parse(plan, devices=devices), topology, jax.devices()[:devices])
    fresh = jax.tree.map(lambda leaf: jax.device_put(jnp.ones(leaf.shape, leaf.dtype), leaf.sharding), programs.state)
    return workload, programs, fresh


def begun(text: str, workload, programs, fresh, schedule: str = "constant"):
    asked = parse(text)
    origin = start.find(asked, workload, parse_schedule(schedule))
    return origin, start.begin(asked, origin, fresh, programs.state, workload, seed=0)


@pytest.mark.parametrize("plan, devices", [("data=4,tensor=2,compute=f32", 8), ("compute=f32", 1)])
def test_onto_another_mesh(source, plan, devices):
    workload, programs, fresh = built(plan=plan, devices=devices)
    origin, state = begun(f"{source}@4,optimizer=keep", workload, programs, fresh)
    assert jax.tree.map(lambda x: (x.shape, x.sharding), state) == jax.tree.map(lambda x: (x.shape, x.sharding), programs.state)
    found, _ = digests({"params": state["params"], "opt_state": state["opt_state"]})
    assert found == {name: value for name, value in saved(source, 4)["digests"].items() if name != "step"}
    assert origin.step == 4 and int(state["step"]) == 1  # the count of steps is the new run's own, `fresh`


def test_fresh_moments_and_shrunk_weights(source):
    workload, programs, fresh = built(plan="compute=f32", devices=1)
    ones = jax.tree.map(np.asarray, fresh)
    _, plain = begun(str(source), *built(plan="compute=f32", devices=1))
    _, state = begun(f"{source},shrink=0.4,perturb=0.1", workload, programs, fresh)
    jax.tree.map(lambda new, old: np.testing.assert_allclose(new, 0.4 * np.asarray(old) + 0.1, rtol=1e-6, atol=1e-8),  # of sums near 0
                 state["params"], plain["params"])
    jax.tree.map(np.testing.assert_array_equal, state["opt_state"], ones["opt_state"])


def test_a_damaged_checkpoint_is_refused_and_left_alone(source, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(source, other)
    meta = other / "checkpoints" / "8" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    name = next(name for name in content["digests"] if name.endswith("query") and name.startswith("params"))
    content["digests"][name] = "0" * 16
    meta.write_text(json.dumps(content))
    corrupt(other / "checkpoints" / "4", "truncate")
    for asked, part in ((str(other), f"damaged: 1 of .* arrays differ from what was written, {name}"),
                        (f"{other}@4,optimizer=keep", "cannot be read|damaged")):
        with pytest.raises(InputError, match=part):
            begun(asked, *built())
    assert committed_steps(other / "checkpoints") == committed_steps(source / "checkpoints")


@pytest.mark.parametrize("text, model, optimizer, schedule, part", [
    ("{}@5", SMALL, "adamw", "constant", "no such checkpoint; there are .*4.*8"),
    ("{}x", SMALL, "adamw", "constant", "no checkpoint.*did you mean run"),
    ("{}", SMALL.replace("mlp=32", "mlp=48"), "adamw", "constant", "mlp=48; ,grow=true"),
    ("{},grow=true", "decoder-tiny,layers=1,embed=64,mlp=32", "adamw", "constant", "embed=64: what grows is"),
    ("{},optimizer=keep", SMALL, "lion", "constant", "has the state of --optimizer=adamw, not of lion"),
    ("{},schedule=continue", SMALL, "adamw", "cosine", "cosine is made for its number of steps"),
    ("{}", "vit-tiny", "adamw", "constant", "is no variant of"),
])
def test_what_is_refused(source, text, model, optimizer, schedule, part):
    workload = Workload.parse(model=model, optimizer=optimizer, batch=8, seq=16 if "decoder" in model else None)
    with pytest.raises(InputError, match=part):
        start.find(parse(text.format(source)), workload, parse_schedule(schedule))


@pytest.mark.parametrize("optimizer", ["adafactor", "learned"])
def test_moments_that_do_not_grow_are_refused(source, optimizer, monkeypatch):
    workload, programs, _ = built(model=SMALL.replace("mlp=32", "mlp=48"), optimizer=optimizer)
    with pytest.raises(InputError, match="does not grow with the model; optimizer=reset"):
        start.smaller(programs.state, Workload.parse(model=SMALL, batch=8, seq=16).model, workload.model)


# ---------------------------------------------------------------- growth on a mesh

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_grown_state_on_a_mesh_is_that_of_one_device(source, tmp_path, optimizer):
    out = source
    if optimizer != "adamw":
        out = tmp_path / "run"
        assert training.train_here(out, **RUN | {"optimizer": optimizer, "steps": "3", "warmup": 0}) == 0
    model = SMALL.replace("layers=1", "layers=2").replace("mlp=32", "mlp=80") + ",heads=8,kv_heads=4,vocab=528"
    states = []
    for plan, devices in ((PLAN, 8), ("compute=f32", 1)):
        workload, programs, fresh = built(model=model, plan=plan, devices=devices, optimizer=optimizer)
        _, state = begun(f"{out},grow=true,optimizer=keep", workload, programs, fresh)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == jax.tree.map(
            lambda x: (x.shape, x.dtype, x.sharding), programs.state)
        states.append(state)
    split = [x for x in jax.tree.leaves(states[0]) if x.size > 4096 and x.addressable_shards[0].data.size < x.size]
    assert len(split) > 10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), *states)


def test_training_goes_on_from_a_grown_model(source, tmp_path):
    """On the mesh, by the command: the first loss is that of the run that was not grown, on the same batch, and it falls."""
    small = RUN | {"start_from": f"{source},optimizer=keep", "schedule": "constant", "warmup": 0, "steps": "12", "lr": 0.003,
                   "eval_every": 6}
    assert training.train_here(tmp_path / "same", **small) == 0
    larger = SMALL.replace("layers=1", "layers=3").replace("mlp=32", "mlp=80") + ",heads=8,kv_heads=4"
    assert training.train_here(tmp_path / "grown", **small | {"model": larger, "start_from": f"{source},optimizer=keep,grow=true"}) == 0
    same, grown = ([line["loss"] for line in training.metrics(tmp_path / name)] for name in ("same", "grown"))
    assert grown[0] == pytest.approx(same[0], rel=2e-6)
    assert abs(grown[1] - same[1]) > 1e-5  # it is not the small model that goes on
    first, last = (line["loss"] for line in training.metrics(tmp_path / "grown", "eval"))
    assert last < first - 0.01


@pytest.mark.long
def test_two_processes_begin_and_grow_as_one_does(source, tmp_path):
    """2 processes x 4 devices, gloo: the checkpoint of one process of 8, grown, trained on a mixture; then a start that both refuse."""
    letters = tmp_path / "letters.txt"
    letters.write_text("".join(chr(97 + i * i % 26) for i in range(3000)))
    flags = RUN | {"model": SMALL.replace("mlp=32", "mlp=80"), "start_from": f"{source},optimizer=keep,grow=true,schedule=continue",
                   "data": f"synthetic=0.75+text:{letters}=0.25", "steps": 4, "eval_every": 4, "eval_batches": 2}
    assert training.train_here(tmp_path / "alone", **flags) == 0

    def together(out, **changes) -> list[int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        parts = [subprocess.Popen([sys.executable, "-m", "jaxmem", "train", *training.arguments(out, **flags | changes),
                                   f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={k}"],
                                  env=os.environ | {"JAX_PLATFORMS": "cpu"}) for k in range(2)]
        try:
            return [part.wait(timeout=280) for part in parts]
        finally:
            for part in parts:
                part.kill()
    assert together(tmp_path / "together") == [0, 0]
    for kind in ("train", "eval"):
        losses = [[line["loss"] for line in training.metrics(tmp_path / name, kind)] for name in ("alone", "together")]
        np.testing.assert_allclose(*losses, rtol=2e-5)
    assert together(tmp_path / "refused", start_from=f"{source}@7") == [2, 2]

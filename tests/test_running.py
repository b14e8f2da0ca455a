"""What surrounds the steps: trackers, trace, honest MFU, the command's messages. User reports 14 and 21 for training."""

import json
import sys
import types

import jax
import numpy as np
import pytest
import training

from jaxmem.cli import main as cli
from jaxmem.hardware import parse_topology
from jaxmem.running import agreement, measured, starting
from jaxmem.running.profiling import Profiler
from jaxmem.running.trackers import Trackers
from jaxmem.runs.folder import Folder
from jaxmem.spec import InputError

LINES = [{"kind": "train", "step": 1, "loss": 2.5, "grad_norm": 1.0, "lr": 0.1, "step_s": 0.2, "tokens_per_s": 100.0, "mfu": None},
         {"kind": "eval", "step": 1, "loss": 2.25, "tokens": 10, "seconds": 0.1}]


@pytest.fixture
def folder(tmp_path):
    return Folder(path=tmp_path, run_id="abc", attempt=0)


def test_tensorboard_gets_every_number(folder):
    tracker = Trackers(["tensorboard"], folder, writes=True)
    for line in LINES:
        tracker.write(line)
    tracker.close()
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - the format's own package is here

    [file] = (folder.path / "tensorboard").iterdir()
    data, found = file.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12:12 + size])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + size:]
    assert found["loss"] == (1, 2.5) and found["eval/loss"] == (1, 2.25) and found["tokens_per_s"] == (1, 100.0)
    assert "mfu" not in found  # unknown is not 0


def test_weights_and_biases_and_mlflow_through_their_own_packages(folder, monkeypatch):
    """Neither is a dependency; what we call of them is written down here."""
    calls = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append(("wandb", step, values)), finish=lambda: calls.append("wandb closed"))
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **how: calls.append(how) or run
    mlflow = types.ModuleType("mlflow")
    mlflow.set_tracking_uri = lambda uri: calls.append(uri)
    mlflow.search_runs = lambda **how: []
    mlflow.start_run = lambda **how: calls.append(how)
    mlflow.log_metrics = lambda values, step: calls.append(("mlflow", step, values))
    mlflow.end_run = lambda: calls.append("mlflow closed")
    for module in (wandb, mlflow):
        module.__spec__ = types.SimpleNamespace(name=module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    tracker = Trackers(["wandb", "mlflow"], folder, writes=True)
    tracker.write(LINES[0])
    tracker.close()
    values = {key: LINES[0][key] for key in ("loss", "grad_norm", "lr", "step_s", "tokens_per_s")}
    assert ("wandb", 1, values) in calls and ("mlflow", 1, values) in calls
    assert calls[-2:] == ["wandb closed", "mlflow closed"]
    assert any(isinstance(c, dict) and c.get("id") == "abc" and c.get("resume") == "allow" for c in calls)


def test_a_tracker_that_is_not_installed_is_said(folder):
    with pytest.raises(InputError, match="pip install mlflow"):
        Trackers(["mlflow"], folder, writes=True)


def test_a_trace_of_two_steps(tmp_path):
    profiler = Profiler((2, 2), tmp_path)
    ended = []
    for step in range(1, 6):
        profiler.before(step)
        jax.block_until_ready(jax.numpy.ones(8) * step)
        if profiler.last(step):
            profiler.close()
            ended.append(step)
    profiler.close()
    assert ended == [3]
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_row_14_a_time_that_no_device_can_have_taken_is_not_a_rate():
    """maxtext 390: the first steps show impossible speed."""
    said = []
    log = types.SimpleNamespace(event=lambda kind, **more: said.append((kind, more)))
    from jaxmem.plan import Plan
    from jaxmem.workload import Workload

    s = types.SimpleNamespace(program_workload=Workload.parse(model="llama3-8b", batch=8, seq=8192), topology=parse_topology("h100:8"),
                              plan=Plan(fsdp=8))
    flops = 6 * (8.03e9 - 128256 * 4096) * 65536 + 12 * 32 * 32 * 128 * 8192 * 65536
    fair = flops / (0.4 * 8 * 989.4e12)
    assert measured.honest_mfu(s, fair, log) == pytest.approx(0.4, rel=0.01) and said == []
    assert measured.honest_mfu(s, fair / 3, log) is None
    assert said[0][0] == "impossible" and said[0][1]["mfu"] == pytest.approx(1.2, rel=0.01)
    assert measured.honest_mfu(s, 0.0, log) is None


def test_processes_that_differ_are_named():
    rows = np.zeros((4, 3, 2), np.uint32)
    rows[2, 1] = 7
    rows[1:, 2, 1] = [1, 2, 3]
    assert agreement.differing(["flags", "data", "programs"], rows) == [
        "data of process 2 is not that of process 0", "programs of process 1, 2, 3 are not that of process 0"]


@pytest.mark.parametrize("name, kind, says, other", [
    ("h100", "gpu", "NVIDIA H100 80GB HBM3", None), ("h100", "gpu", "NVIDIA A100-SXM4-80GB", "a100"), ("h200", "gpu", "NVIDIA H200", None),
    ("b200", "gpu", "NVIDIA GB200", "gb200"), ("gb200", "gpu", "NVIDIA GB200", None), ("h100", "gpu", "Some new card", None),
    ("a100-80gb", "gpu", "NVIDIA A100-SXM4-80GB", None), ("v5p", "tpu", "TPU v5", None), ("v5p", "tpu", "TPU v5 lite", "v5e"),
    ("cpu", "cpu", "cpu", None)])
def test_another_chip_than_was_asked_for(name, kind, says, other):
    assert starting.other_chip(name, kind, says) == other


@pytest.mark.parametrize("flags, words", [
    (["--modle=x"], ["--modle", "--model"]),
    (["—steps=10", "--topologie=cpu:8"], ["--topologie", "--topology"]),
    (["--model=decoder-tny"], ["decoder-tny", "decoder-tiny"]),
    (["--data=text:no/such/file.txt"], ["no/such/file.txt"]),
    (["--data=txt:pydoc"], ["txt", "text"]),
    (["--schedule=cosin"], ["cosine"]),
    (["--keep=lst=2"], ["last"]),
    (["--fault=kil:step=3"], ["kill"]),
    (["--fault=kill:step=3,process=9"], ["process"]),
    (["--profile=5"], ["STEP:N"]),
    (["--skip=9:3"], ["FIRST:LAST"]),
    (["--log=tensorbord"], ["tensorboard"]),
    (["--snapshot=lasy"], ["lazy"]),
    (["--steps=0", "--lr=nan"], ["--steps=0", "--lr=nan"]),
    (["--topology=cpu:8", "--plan=fsdp=3"], ["fsdp", "8"]),
    (["--watchdog=0"], ["--watchdog=0"]),
])
def test_row_21_what_is_mistyped_is_named_with_what_was_meant(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmem.running.starting.start", lambda topology, place: 0)
    status = cli.main(["train", f"--out={tmp_path / 'run'}", *flags])
    said = capsys.readouterr().err
    assert status == 2, said
    for word in words:
        assert word in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists() or not any((tmp_path / "run" / "checkpoints").iterdir())


def test_a_trace_and_tensorboard_of_a_run(tmp_path):
    out = tmp_path / "run"
    assert training.train_here(out, steps=6, profile="3:2", log="tensorboard", checkpoint_every=0) == 0
    assert list((out / "profile").rglob("*.xplane.pb")) and list((out / "tensorboard").iterdir())
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5, 6]

"""The local launcher: what it starts for which flags, and how a run shrinks and grows again."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from launch import gke, local, slurm, tpu_vm
from launch.command import train_settings


def prints(capsys, *words: str) -> tuple[int, str, str]:
    status = local.main(words)
    out, err = capsys.readouterr()
    return status, out, err


def layouts(processes: int, *train: str) -> local.Layouts:
    words, settings = local.with_topology([*train, "--out=a"], processes, None)
    return local.Layouts(settings, processes)


def test_a_shrinking_run_keeps_its_batch_and_gets_another_plan():
    plan_for = layouts(4, "--topology=cpu:8", "--plan=data=4,fsdp=2", "--batch=16")
    whole = plan_for((0, 1, 2, 3))
    assert (whole.devices, whole.changes) == (8, {})
    assert whole.coordinator is not None and whole.coordinator.startswith("127.0.0.1:")
    three = plan_for((0, 2, 3))  # six devices do not share 16 rows; four do
    assert (three.present, three.devices) == ((0, 2), 4)
    assert three.changes == {"topology": "cpu:4", "plan": "data=2,fsdp=2,accumulate=2"}
    one = plan_for((3,))
    assert (one.present, one.coordinator) == ((3,), None)
    command = local.argv_of(["--topology=cpu:8", "--plan=data=4,fsdp=2", "--batch=16", "--out=a"], 0, one)
    settings, _ = train_settings(command[4:])
    assert (str(settings.plan), str(settings.topology), settings.workload.batch) == ("fsdp=2,accumulate=4", "cpu:2", 16)
    assert plan_for((0, 1, 2, 3)).changes == {}


def test_a_batch_that_follows_from_the_topology_is_held():
    words, settings = local.with_topology(["--out=a", "--plan=fsdp=*"], 4, 2)
    assert settings.workload.batch == 16
    assert {"--topology=cpu:8", "--batch=16"} < set(words)


@pytest.mark.parametrize(("words", "parts"), [
    (["--processes=2", "--", "--topology=cpu:2"], ["--out=RUN"]),
    (["--processes=3", "--", "--topology=cpu:8", "--out=a"], ["cpu:8", "--processes=3", "cpu:6"]),
    (["--processes=2", "--devices=2", "--", "--topology=cpu:8", "--out=a"], ["8 devices", "are 4"]),
    (["--processes=2", "--", "--topology=h100:8", "--out=a"], ["GPU", "--processes=1"]),
    (["--", "--topology=cpu:2", "--out=a", "--process=0"], ["--process", "launch.local itself"]),
    (["--rejoin_after=3", "--", "--topology=cpu:2", "--out=a"], ["--elastic"]),
    (["--elastic", "--rejoin_after=soon", "--", "--topology=cpu:2", "--out=a"], ["--rejoin_after=soon"]),
    (["--elastic", "--lose=1@1", "--", "--topology=cpu:2", "--out=a"], ["--lose=1@1", "0 to 0"]),
    (["--", "--topology=cpu:2", "--out=a", "--plan=fsdp=3"], ["fsdp(3)"]),
    (["--model=decoder-tiny", "--", "--out=a"], ["unknown flag --model"]),
    (["stray", "--", "--out=a"], ["'stray'", "after --"]),
    (["--processes=0", "--", "--out=a"], ["--processes"]),
])
def test_refusals(capsys, words, parts):
    status, out, err = prints(capsys, *words)
    assert (status, out) == (2, "")
    for part in parts:
        assert part in err


@pytest.mark.parametrize("launcher", [local, slurm, gke, tpu_vm])
def test_help(capsys, launcher):
    assert launcher.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith(f"python -m {launcher.__name__}: ")


@pytest.mark.parametrize(("launcher", "program", "words"), [
    (slurm, "sbatch", ["--", "--topology=h100:8", "--out=/a"]),
    (gke, "kubectl", ["--image=i", "--", "--topology=h100:8", "--out=/a"]),
    (tpu_vm, "gcloud", ["--tpu=t", "--zone=z", "--", "--topology=v5e-4", "--out=/a"]),
])
def test_run_hands_over_or_says_what_is_missing(capfd, monkeypatch, tmp_path, launcher, program, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launcher.main(["--run", *words]) == 2
    assert f"--run needs {program}, which is not on the PATH" in capfd.readouterr().err
    assert launcher.main(words) == 0
    text = capfd.readouterr().out
    bash = shutil.which("bash", path="/bin:/usr/bin")
    (tmp_path / program).write_text(f'#!{bash}\necho "$0 $*"\nwhile IFS= read -r line; do echo "$line"; done\nexit 5\n')
    (tmp_path / program).chmod(0o755)
    assert launcher.main(["--run", *words]) == 5
    got = capfd.readouterr().out
    assert got.startswith(str(tmp_path / program))
    if launcher is not tpu_vm:
        assert got.partition("\n")[2] == text


def test_launchers_need_no_jax(repository):
    code = "import sys, launch.local, launch.slurm, launch.gke, launch.tpu_vm; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repository, timeout=60).returncode == 0


@pytest.mark.long
def test_a_run_that_shrinks_and_grows_takes_every_step_once(tmp_path, repository):
    """Real training: killed at step 5 of two processes, at step 9 of one that is left, and done by two again."""
    own = ["--processes=2", "--devices=2", "--elastic", "--lost_after=3", "--lose=1@1", "--rejoin_after=1attempt", "--backoff=0.1", "--run"]
    train = ["--plan=data=2,fsdp=2", "--steps=12", "--seq=32", "--checkpoint_every=3", f"--out={tmp_path / 'run'}", "--data=synthetic",
             "--fault=kill:step=5,process=0;kill:step=9,process=0", "--print_hash"]
    done = subprocess.run([sys.executable, "-m", "launch.local", *own, "--", *train], cwd=repository, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"state sha256:[0-9a-f]{64}\n", done.stdout)  # and nothing of Gloo's
    events = [json.loads(line) for line in (tmp_path / "run" / "logs" / "events.jsonl").read_text().splitlines()]
    starts = [(event["processes"], event["topology"], event["plan"]) for event in events if event["kind"] == "start"]
    assert starts == [(2, "cpu:4", "data=2,fsdp=2"), (1, "cpu:2", "fsdp=2,accumulate=2"), (2, "cpu:4", "data=2,fsdp=2")]
    said = [event["text"] for event in events if event["kind"] == "supervisor"]
    assert said[-2:] == ["start 3: 2 processes of 2 devices, cpu:4, plan data=2,fsdp=2; back: 1", "done"]
    assert [event["attempt"] for event in events if event["kind"] == "supervisor" and event["text"].startswith("start")] == [0, 1, 2]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["kind"] == "train"] == list(range(1, 13))

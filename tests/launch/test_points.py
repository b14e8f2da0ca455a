"""Points handed to clusters: the texts, and a whole sweep through a scheduler that runs tasks at once."""

import json
import os
import pathlib
import subprocess
import sys

import jsonschema
import pytest
import yaml
from launchers import FOLDER, shellcheck

from jaxmem import experiment, handing
from jaxmem.records import Point, find, read
from jaxmem.spec import InputError
from launch import points

NAME = "experiments_fake_question"
TOP = pathlib.Path(__file__).parent.parent.parent
# The array's tasks one after another, as SLURM numbers them.
SBATCH = """#!/usr/bin/env bash
script=$(cat); echo "$script" > "$D/script"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$D/script")
for i in $(seq 0 "$last"); do SLURM_ARRAY_TASK_ID=$i bash "$D/script" 2>> "$D/said" || exit 1; done
"""


def point(topology: str = "cpu:8", *, alone: bool = False, batch: int = 8) -> Point:
    return experiment.point(model="decoder-tiny", batch=batch, seq=64, topology=topology, alone=alone)


def text(where: str, own: list[Point], *words: str, folder: str = "/runs/a b", jobs: int | None = None) -> list[str]:
    return points.texts(where, handing.batches(own, pathlib.Path(folder)), name="a-question", jobs=jobs, timeout_s=600, words=words)


# ---------------------------------------------------------------- SLURM

def test_points_are_grouped_by_the_node_they_want():
    mixed = [point("h100:8"), point("h100:8", alone=True), point("v5e-8"), point("h100:8", alone=True, batch=16), point(alone=True)]
    found = handing.batches(mixed, pathlib.Path("/runs"))
    assert [(one.needs, len(one.points)) for one in found] == [(None, 2), ("h100:8", 2), ("cpu:8", 1)]
    assert len({one.file for one in found}) == 3 and found[0].file.parent == pathlib.Path("/runs/handed")
    assert handing.batches(mixed, pathlib.Path("/runs"))[1].file == found[1].file
    with pytest.raises(InputError, match="2 hosts; give a topology of one host"):
        handing.batches([point("h100:2x8", alone=True)], pathlib.Path("/runs"))


def test_an_array_has_a_task_a_point_and_the_node_it_wants():
    compiles, measures = text("slurm", [point(batch=8 * i) for i in (1, 2, 3)] + [point("h100:8", alone=True)], "--partition=gpu",
                              "--python=/a b/python -X dev", "--folder=/it's", "--sbatch=--qos=high", jobs=2)
    assert "#SBATCH --array=0-2%2\n" in compiles and "--cpus-per-task=4" in compiles and "gpus-per-node" not in compiles
    assert "#SBATCH --array=0-0%2\n" in measures and "#SBATCH --gpus-per-node=8\n" in measures and "#SBATCH --exclusive\n" in measures
    for one in (compiles, measures):
        assert "#SBATCH --time=21\n" in one and "#SBATCH --partition=gpu\n" in one and "#SBATCH --qos=high\n" in one


def test_shellcheck_finds_nothing(tmp_path):
    for i, one in enumerate(text("slurm", [point(), point("h100:8", alone=True)], "--folder=/it's")):
        (tmp_path / f"{i}.sh").write_text(one)
        assert shellcheck(tmp_path / f"{i}.sh") == []


@pytest.mark.parametrize("where, own, words, said", [
    ("slurm", [point("v5e-4", alone=True)], (), "launch.gke"), ("slurm", [point()], ("--partition=a b",), "no spaces"),
    ("slurm", [point()], ("--time=12h",), "sbatch reads"), ("slurm", [point()], ("--partitoin=a",), "--partition"),
    ("gke", [point()], (), "--image=IMAGE"), ("gke", [point()], ("--image=a",), "--claim=CLAIM"),
    ("gke", [point()], ("--image=a", "--claim=c", "--mount=/data"), "--mount=/data")])
def test_mistakes_are_told(where, own, words, said):
    with pytest.raises(InputError) as error:
        text(where, own, *words)
    assert said in str(error.value)


# ---------------------------------------------------------------- GKE

def test_a_jobset_has_an_indexed_job_for_each_kind_of_node():
    own = [point(), point(batch=16), point("v5e-4", alone=True), point("h100-mig-1g.10gb", alone=True)]
    found, = (yaml.safe_load(one) for one in text("gke", own, "--image=registry/a:1", "--claim=runs", "--queue=q", jobs=1))
    jsonschema.validate(found, json.loads((FOLDER / "jobset.schema.json").read_text()))
    jobs = {one["name"]: one["template"]["spec"] for one in found["spec"]["replicatedJobs"]}
    assert {name: (one["completions"], one["parallelism"], one["completionMode"]) for name, one in jobs.items()} == {
        "compiles": (2, 1, "Indexed"), "v5e-4": (1, 1, "Indexed"), "h100-mig-1g-10gb": (1, 1, "Indexed")}
    pods = {name: one["template"]["spec"] for name, one in jobs.items()}
    assert pods["v5e-4"]["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}} and "nodeSelector" not in pods["compiles"]
    assert pods["v5e-4"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2"
    command = pods["compiles"]["containers"][0]["command"]
    assert command[:3] == ["python", "-m", "jaxmem.handing"] and command[-1] == "$(JOB_COMPLETION_INDEX)"
    assert command[3].startswith("/runs/a b/handed/") and found["metadata"]["name"].startswith("a-question-")


# ---------------------------------------------------------------- a sweep through a scheduler

@pytest.fixture
def command(tmp_path, monkeypatch):
    """The fake experiment as a command, with an sbatch that runs the tasks at once."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / f"{NAME}.py").write_text((TOP / "tests" / "experiments" / "fake_question.py").read_text())
    (modules / "sbatch").write_text(SBATCH)
    (modules / "sbatch").chmod(0o755)
    env = os.environ | {"D": str(modules), "PATH": f"{modules}:{os.environ['PATH']}", "PYTHONPATH": f"{modules}:{TOP}"}

    def run(*flags: str) -> subprocess.CompletedProcess:
        code = f"import sys, {NAME} as m; from jaxmem import experiment; sys.exit(experiment.main(m.EXPERIMENT, sys.argv[1:]))"
        return subprocess.run([sys.executable, "-c", code, f"--out={tmp_path / 'out'}", *flags], capture_output=True, text=True,
                              timeout=120, env=env, cwd=TOP)
    return run


def test_a_sweep_is_handed_over_and_what_is_on_record_is_not_handed_again(command, tmp_path):
    out = tmp_path / "out"
    dry = command("--launch=slurm", "--batch=8|16", "--dry_run")
    assert dry.returncode == 0 and "#SBATCH --array=0-1\n" in dry.stdout and not (out / "handed").exists()
    done = command("--launch=slurm", "--batch=8|16", "--does=works|fails")
    assert done.returncode == 0, done.stderr + (tmp_path / "modules" / "said").read_text()
    assert "4 points handed over" in done.stderr and not (out / "records.jsonl").exists()
    records = read(*find(out))
    assert sorted((one["settings"]["does"], one["status"]) for one in records) == [("fails", "failed")] * 2 + [("works", "done")] * 2
    again = command("--launch=slurm", "--batch=8|16|32", "--does=works")
    assert "3 points, 2 of them on record" in again.stderr and "1 points handed over" in again.stderr
    tries = (out / "tries").read_text().splitlines()
    assert len(tries) == 3  # two the first time, one now; those that fail leave none
    assert command("--render").returncode == 0
    assert (out / "page.txt").read_text() == "fails=failed fails=failed works=done works=done works=done"
    here = command("--batch=8|16|32", "--does=works")  # and here nothing is left to do
    assert "3 points, 3 of them on record" in here.stderr and len((out / "tries").read_text().splitlines()) == 3


def test_a_task_whose_point_is_on_record_does_nothing(command, tmp_path):
    command("--launch=slurm", "--batch=8")
    file, = (tmp_path / "out" / "handed").glob("*.jsonl")
    assert handing.take(file, 0) == "on record"
    with pytest.raises(InputError, match="has points 0 to 0, and no 1"):
        handing.take(file, 1)
    assert handing.main([str(file)]) == 2 and handing.main([str(tmp_path / "nothing"), "0"]) == 2

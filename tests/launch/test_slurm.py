"""The batch script as bash runs it, with programs of SLURM's names that note what they are asked."""

import os
import pathlib
import signal
import subprocess
import time

import pytest
from absl import flags as absl_flags

from jaxmem.hardware import parse_topology
from jaxmem.spec import InputError
from launch import slurm

# srun ends with the next of the statuses; "wait" runs until scancel, and "deaf" does not listen. The last is repeated.
SRUN = """#!/bin/bash
n=$(cat "$D/count" 2>/dev/null || echo 0); echo $((n + 1)) > "$D/count"
echo "srun $*" >> "$D/calls"
word=$(sed -n "$((n + 1))p" "$D/statuses"); [ -n "$word" ] || word=$(tail -1 "$D/statuses")
case "$word" in
  wait) trap 'exit 75' TERM; echo $$ > "$D/step"; while :; do sleep 0.02; done ;;
  crash) trap 'exit 143' TERM; echo $$ > "$D/step"; while :; do sleep 0.02; done ;;
  *) exit "$word" ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$D/calls"
[ ! -e "$D/step" ] || kill -TERM "$(cat "$D/step")"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$D/calls"
"""
SLEEP = """#!/bin/bash
case "$1" in 0.*) exec /bin/sleep "$1" ;; esac
echo "sleep $1" >> "$D/calls"
[ ! -e "$D/pause" ] || { touch "$D/paused"; exec /bin/sleep "$(cat "$D/pause")"; }
"""


def script(*own: str, train: tuple[str, ...] = ("--topology=h100:2x8", "--out=/shared/a")) -> str:
    flags = absl_flags.FlagValues()
    slurm.define(flags)
    flags(["slurm", *own])
    return slurm.script(flags, train)


class Job:
    def __init__(self, folder: pathlib.Path, *statuses: str, own: tuple[str, ...] = ("--max_restarts=2",)) -> None:
        self.folder = folder
        for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "sleep": SLEEP}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "statuses").write_text("\n".join(statuses) + "\n")
        self.job = subprocess.Popen(["bash", "-c", script(*own)], stderr=subprocess.PIPE, text=True,
                                    env=os.environ | {"D": str(folder), "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"})

    def when(self, name: str, number: int) -> "Job":
        """Signal the script as SLURM does, once a file is there."""
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.job.send_signal(number)
        return self

    def end(self) -> tuple[int, list[str]]:
        """The status, and which programs were called."""
        try:
            self.job.communicate(timeout=30)
        finally:
            self.job.kill()
        calls = (self.folder / "calls").read_text().splitlines()
        return self.job.returncode, ["srun" if call.startswith("srun") else call for call in calls]


@pytest.mark.parametrize(("statuses", "status", "calls"), [
    (["0"], 0, ["srun"]),
    (["2"], 2, ["srun"]),
    (["77"], 77, ["srun"]),
    (["75"], 75, ["srun"]),  # somebody else's SIGTERM: it is saved, and that is all
    (["137", "76", "0"], 0, ["srun", "sleep 5", "srun", "sleep 10", "srun"]),
    (["70"], 70, ["srun", "sleep 5", "srun", "sleep 10", "srun"]),
])
def test_statuses(tmp_path, statuses, status, calls):
    assert Job(tmp_path, *statuses).end() == (status, calls)


@pytest.mark.parametrize(("word", "status"), [("wait", 75), ("crash", 143)])
def test_the_end_of_the_time_saves_and_queues_again(tmp_path, word, status):
    calls = ["srun", "scancel --signal=TERM 7", "scontrol requeue 7"]
    assert Job(tmp_path, word).when("step", signal.SIGUSR1).end() == (status, calls)


def test_scancel_saves_and_does_not_come_back(tmp_path):
    assert Job(tmp_path, "wait").when("step", signal.SIGTERM).end() == (75, ["srun", "scancel --signal=TERM 7"])


def test_the_end_of_the_time_between_two_starts(tmp_path):
    (tmp_path / "pause").write_text("0.5")
    job = Job(tmp_path, "70").when("paused", signal.SIGUSR1)
    assert job.end() == (70, ["srun", "sleep 5", "scancel --signal=TERM 7", "scontrol requeue 7"])


@pytest.mark.parametrize(("topology", "wanted"), [
    ("h100:16x8", {"nodes": "16", "ntasks-per-node": "1", "gpus-per-node": "8", "exclusive": ""}),
    ("gb200:4x4", {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "4", "exclusive": ""}),
    ("cpu:8", {"nodes": "1", "ntasks-per-node": "1", "exclusive": ""}),
])
def test_resources(topology, wanted):
    assert slurm.resources(parse_topology(topology), None) == wanted


@pytest.mark.parametrize(("own", "train", "parts"), [
    ((), ("--topology=v5p-128", "--batch=128", "--out=/a"), ["v5p-128", "launch.gke", "launch.tpu_vm"]),
    ((), ("--topology=h100-mig-1g.10gb", "--out=/a"), ["MIG", "h100:1"]),
    ((), ("--topology=h100:8",), ["--out=RUN"]),
    ((), ("--topology=h100:8", "--out=/a", "--plan=fsdp=4"), ["fsdp(4)", "8"]),
    ((), ("--topology=h100:8", "--out=/a", "--bath=4"), ["--bath", "--batch"]),
    (("--name=two words",), ("--topology=h100:8", "--out=/a"), ["two words"]),
    (("--sbatch=--a\n--b",), ("--topology=h100:8", "--out=/a"), ["one line"]),
])
def test_refusals(own, train, parts):
    with pytest.raises(InputError) as error:
        script(*own, train=train)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("text, want", [("30", 1800), ("30:15", 1815), ("24:00:00", 86400), ("1-12", 129600), ("1-0:30", 88200),
                                        ("2-1:2:3", 176523)])
def test_time_limits_as_sbatch_reads_them(text, want):
    from launch.slurm import seconds

    assert seconds(text) == want


@pytest.mark.parametrize("text", ["12h", "1d", "", "1:2:3:4", "-5", "1-"])
def test_time_limits_that_sbatch_does_not_read(text):
    from launch.slurm import seconds

    with pytest.raises(InputError, match="sbatch reads"):
        seconds(text)

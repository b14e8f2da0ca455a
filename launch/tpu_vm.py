"""TPU VMs of Google Cloud: the same command on every host of a slice, or of several, over gcloud's ssh.

  python -m launch.tpu_vm --tpu=my-tpu --zone=us-east5-a -- --model=llama3-8b --topology=v5p-128 --plan=fsdp=64 --out=/shared/runs/a
  python -m launch.tpu_vm --tpu=my-slices --zone=us-west4-a --run -- --model=llama3-8b --topology=2xv5e-256 --out=/shared/runs/a

Prints the command, and on stderr the one that makes such a TPU; --run runs the first. Several slices are the nodes of one queued
resource. The hosts find each other by themselves. --out must be on storage that every host sees.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem.hardware import Topology
from jaxmem.hosts import AUTO
from jaxmem.spec import InputError
from launch import command

# https://cloud.google.com/tpu/docs/runtimes (2026-12). tpu7x is not in this API: GKE has it.
RUNTIMES = {"v4": "tpu-ubuntu2204-base", "v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
NAMES = {"v5e": "v5litepod"}  # what the API calls it


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text = absl_flags.DEFINE_string
    absl_flags.DEFINE_boolean("run", False, "run the command; else it is printed", **f)
    text("tpu", None, "name of the TPU VM, or of the queued resource for several slices", **f)
    text("zone", None, "its zone", **f)
    text("project", None, "its project (default: gcloud's)", **f)
    text("jaxmem", "jaxmem", "the program on the hosts, as in ~/venv/bin/jaxmem", **f)


def launch(flags: absl_flags.FlagValues, train: list[str]) -> int:
    argv, topology = ssh(flags, train)
    if flags.run:
        return command.hand_over(argv, missing="https://cloud.google.com/sdk/docs/install has it")
    print(f"# {topology}, if it is not there yet: {shlex.join(creation(flags, topology))}", file=sys.stderr)
    print(command.shown(argv))
    return 0


def ssh(flags: absl_flags.FlagValues, train: Sequence[str]) -> tuple[list[str], Topology]:
    """The command that runs `jaxmem train` on every host; raises `InputError`."""
    for name in ("tpu", "zone"):
        if getattr(flags, name) is None:
            raise InputError(f"which {name}? --{name}=NAME, as `gcloud compute tpus tpu-vm list` shows it")
    settings, given = command.train_settings(train)
    topology = settings.topology
    if topology.chip.name not in RUNTIMES:
        where = "launch.gke starts it" if topology.chip.kind != "cpu" else "launch.local runs it"
        raise InputError(f"--topology={topology}: TPU VMs are of {', '.join(RUNTIMES)}; {where}")
    if "out" not in given:
        raise InputError("the run needs a folder that every host sees: --out=RUN after --")
    if topology.hosts > 1 and not settings.out.is_absolute():
        raise InputError(f"--out={settings.out} would be another folder on each of the {topology.hosts} hosts; give an absolute path "
                         "that all of them see, as in --out=/shared/runs/a")
    # The hosts' shells read it once more; a ~ at the program's front is theirs.
    words = [flags.jaxmem, shlex.join(["train", *train])]
    if topology.hosts > 1:
        words.append(f"--coordinator={AUTO}")
    every = ["--worker=all", *(["--node=all"] if topology.slices > 1 else [])]
    argv = ["gcloud", "compute", "tpus", _kind(topology), "ssh", flags.tpu, *_place(flags), *every, f"--command={' '.join(words)}"]
    return argv, topology


def creation(flags: absl_flags.FlagValues, topology: Topology) -> list[str]:
    """The command that makes such a TPU."""
    chip = topology.chip.name
    one = str(Topology(chip=topology.chip, shape=topology.shape))  # of one slice: a cloud's name, or a shape
    size = ([f"--type={NAMES.get(chip, chip)}", f"--topology={topology.shape_text}"] if ":" in one
            else [f"--accelerator-type={re.sub(f'^{chip}', NAMES.get(chip, chip), one)}"])
    runtime, many = ("--version", []) if topology.slices == 1 else ("--runtime-version", [f"--node-count={topology.slices}"])
    return ["gcloud", "compute", "tpus", _kind(topology), "create", flags.tpu, *_place(flags), *size, f"{runtime}={RUNTIMES[chip]}", *many]


def _kind(topology: Topology) -> str:
    return "tpu-vm" if topology.slices == 1 else "queued-resources"


def _place(flags: absl_flags.FlagValues) -> list[str]:
    return [f"--zone={flags.zone}", *([f"--project={flags.project}"] if flags.project else [])]


def main(words: Sequence[str]) -> int:
    return command.run(__doc__ or "", define, launch, words, "launch.tpu_vm")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

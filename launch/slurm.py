"""A batch script for SLURM: nodes, GPUs and tasks follow from the run's --topology.

  python -m launch.slurm --time=24:00:00 -- --model=llama3-8b --topology=h100:16x8 --plan=fsdp=128 --out=/shared/runs/a > train.sbatch
  python -m launch.slurm --partition=gpu --run -- --model=llama3-8b --topology=h100:16x8 --plan=fsdp=128 --out=/shared/runs/a

Prints the script; --run hands it to sbatch. One task a node has all of the node's GPUs. Before the time limit the run saves and the
job is queued again; a failure starts it again within the allocation; bad input, exhausted rollbacks and scancel end it. --out must be
a folder that every node sees.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem.hardware import Topology
from jaxmem.spec import InputError
from launch import command


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text, whole = absl_flags.DEFINE_string, absl_flags.DEFINE_integer
    absl_flags.DEFINE_boolean("run", False, "hand it to sbatch; else it is printed", **f)
    text("name", "jaxmem", "the job's name", **f)
    text("partition", None, "partition (default: the cluster's)", **f)
    text("account", None, "account (default: yours)", **f)
    text("time", "24:00:00", "limit of one stay, as sbatch reads it", **f)
    whole("save_before", 300, "seconds before the limit at which the run is asked to save", lower_bound=1, upper_bound=65535, **f)
    whole("max_restarts", 10, "start again after a failure, so often within one stay", lower_bound=0, **f)
    text("jaxmem", "jaxmem", "the program on the nodes, as in /shared/venv/bin/jaxmem", **f)
    whole("cpus", None, "CPU cores of a task, for jobs that share nodes (default: whole nodes)", lower_bound=1, **f)
    absl_flags.DEFINE_multi_string("sbatch", [], "another line for sbatch, as in --sbatch=--qos=high; may be given several times", **f)


def launch(flags: absl_flags.FlagValues, train: list[str]) -> int:
    text = script(flags, train)
    if flags.run:
        return command.hand_over(["sbatch"], text=text, missing="it comes with SLURM, on a login node")
    print(text, end="")
    return 0


def seconds(time: str) -> float:
    """A time limit as sbatch reads it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES[:SECONDS]."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise InputError(f"--time={time}: sbatch reads minutes (30), hours:minutes:seconds (24:00:00) or days-hours (1-12)")
    numbers = list(map(int, parts))
    if dash:
        hours, minutes, more = (numbers + [0, 0])[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + more
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def script(flags: absl_flags.FlagValues, train: Sequence[str]) -> str:
    """The batch script; raises `InputError`."""
    settings, given = command.train_settings(train)
    if "out" not in given:
        raise InputError("the run needs a folder that every node sees: --out=RUN after --")
    topology = settings.topology
    if (limit_s := seconds(flags.time)) <= 2 * flags.save_before:
        raise InputError(f"--time={flags.time} is {limit_s:.0f} s, and the run is asked to save --save_before={flags.save_before} s "
                         "before that: it would hardly train; give a longer --time or a smaller --save_before")
    lines = {"job-name": flags.name, "partition": flags.partition, "account": flags.account, **resources(topology, flags.cpus),
             "time": flags.time, "signal": f"B:USR1@{flags.save_before}", "requeue": "", "open-mode": "append", "output": "slurm-%j.log"}
    for name, value in lines.items():
        if value is not None and re.search(r"[\s\"'\\#]", str(value)):
            raise InputError(f"--{name}={value}: no spaces, quotes or backslashes, which #SBATCH lines do not read")
    head = [f"#SBATCH --{name}{f'={value}' if value != '' else ''}" for name, value in lines.items() if value is not None]
    if any("\n" in line for line in flags.sbatch):
        raise InputError("--sbatch: one line at a time")
    head += [f"#SBATCH {line}" for line in flags.sbatch]
    # A task is bound to one core unless it is told otherwise.
    cpus = "--cpu-bind=none" if flags.cpus is None else f"--cpus-per-task={flags.cpus}"
    argv = [*shlex.split(flags.jaxmem), "train", *train]
    return TEMPLATE.format(head="\n".join(head), cpus=cpus, command=command.shown(argv, indent="    "), max_restarts=flags.max_restarts,
                           topology=topology)


def resources(topology: Topology, cpus: int | None) -> dict[str, str]:
    """What sbatch is asked for: a node a host, a task a node with all GPUs that the topology has there; nodes are not shared unless
    `cpus` says how much of one is needed."""
    if topology.chip.kind == "tpu":
        raise InputError(f"--topology={topology}: SLURM launches GPUs and CPUs here; launch.gke and launch.tpu_vm start TPUs")
    if topology.chip.parent:
        raise InputError(f"--topology={topology}: how a cluster names its MIG slices is its own; give --topology={topology.chip.parent}:1, "
                         "or write the script by hand")
    found = {"nodes": str(topology.hosts), "ntasks-per-node": "1"}
    if topology.chip.kind == "gpu":
        found["gpus-per-node"] = str(topology.devices_per_host)
    return found | ({"exclusive": ""} if cpus is None else {"cpus-per-task": str(cpus)})


TEMPLATE = """\
#!/usr/bin/env bash
{head}
# {topology}, made by launch.slurm. A task a node; jaxmem finds the others through SLURM's variables.
set -uo pipefail

run() {{
  # A step of its own for each attempt; one task that fails ends the others.
  srun --kill-on-bad-exit=1 {cpus} \\
    {command}
}}

# SLURM signals this script alone. srun would turn a SIGTERM of its own into SIGKILL for the tasks, so they are signalled by scancel.
# USR1 is the end of the time: save, and wait in the queue for more. TERM is scancel or preemption: save; SLURM decides what follows.
requeue=no stopping=no
save() {{ stopping=yes; scancel --signal=TERM "$SLURM_JOB_ID"; }}
trap 'requeue=yes; save' USR1
trap 'save' TERM

# The end of this stay, with the status of the run.
finish() {{
  if [ "$requeue" = yes ] && [ "$1" -ne 0 ]; then
    echo "status $1: back to the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$1"
}}

restarts=0
while :; do
  run &
  step=$!
  wait "$step"; status=$?
  while kill -0 "$step" 2>/dev/null; do  # a trap interrupted the wait, and the step goes on
    wait "$step"; status=$?
  done
  case "$status" in
    0 | 2 | 77) exit "$status" ;;  # done; bad input or exhausted rollbacks, which would only come again
    75) finish 75 ;;
  esac
  [ "$stopping" = no ] || finish "$status"
  restarts=$((restarts + 1))
  if [ "$restarts" -gt {max_restarts} ]; then
    echo "gave up after {max_restarts} restarts" >&2
    exit "$status"
  fi
  sleep $((restarts < 6 ? 5 * restarts : 30))
  [ "$stopping" = no ] || finish "$status"
  echo "status $status: start $((restarts + 1))" >&2
done
"""


def main(words: Sequence[str]) -> int:
    return command.run(__doc__ or "", define, launch, words, "launch.slurm")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

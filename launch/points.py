"""Points of an experiment as tasks of a cluster: a SLURM array, or a JobSet of indexed jobs. `--launch` of an experiment hands them over.

  python -m experiments.remat_policies --topology=h100:8 --out=/shared/remat --launch=slurm --launch_with="--partition=gpu" --dry_run
  python -m experiments.remat_policies --topology=v5e-8 --out=/runs/remat --launch=gke --launch_with="--image=IMAGE --claim=runs"

A task is one point. Points that measure have a node with their topology to themselves; points that only compile share CPU nodes. --out is a
folder that every node sees, and the nodes have the same jaxmem as this machine, or a point will not be known as done here.
"""

import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem.cli import arguments
from jaxmem.handing import COMPILES, Batch
from jaxmem.hardware import parse_topology
from jaxmem.spec import InputError
from launch import command, gke, slurm
from launch.yaml_text import Value, dump


def texts(where: str, batches: Sequence[Batch], *, name: str, jobs: int | None, timeout_s: float, words: Sequence[str]) -> list[str]:
    """What is submitted, one text a submission: a script for each kind of node, or one manifest. Raises InputError."""
    flags = absl_flags.FlagValues()
    (define_slurm if where == "slurm" else define_gke)(flags)
    if stray := arguments.parse(flags, words):
        raise InputError(f"--launch_with: {stray[0]!r} is no flag")
    if not batches:
        return []
    if where == "slurm":
        return [script(flags, batch, name=name, jobs=jobs, timeout_s=timeout_s) for batch in batches]
    return [dump(manifest(flags, batches, name=name, jobs=jobs))]


def submit(where: str, text: str) -> int:
    if where == "slurm":
        return command.hand_over(["sbatch"], text=text, missing="it comes with SLURM, on a login node")
    return command.hand_over(["kubectl", "apply", "--filename=-"], text=text, missing="https://kubernetes.io/docs/tasks/tools has it")


# ---------------------------------------------------------------- SLURM

def define_slurm(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text = absl_flags.DEFINE_string
    text("partition", None, "partition (default: the cluster's)", **f)
    text("account", None, "account (default: yours)", **f)
    text("time", None, "limit of a task, as sbatch reads it (default: the experiment's --timeout and ten minutes)", **f)
    text("python", sys.executable, "the interpreter on the nodes", **f)
    text("folder", str(pathlib.Path.cwd()), "folder on the nodes in which the experiment's module is found", **f)
    absl_flags.DEFINE_integer("cpus", 4, "CPU cores of a task that only compiles", lower_bound=1, **f)
    absl_flags.DEFINE_multi_string("sbatch", [], "another line for sbatch, as in --sbatch=--qos=high; may be given several times", **f)


def script(flags: absl_flags.FlagValues, batch: Batch, *, name: str, jobs: int | None, timeout_s: float) -> str:
    """The script of an array with a task a point."""
    need = (slurm.resources(parse_topology(batch.needs), None) if batch.needs else
            slurm.resources(parse_topology("cpu:1"), flags.cpus))
    time = flags.time or str(int(timeout_s // 60) + 11)  # minutes
    slurm.seconds(time)
    last = len(batch.points) - 1
    lines = {"job-name": name, "partition": flags.partition, "account": flags.account, "array": f"0-{last}{f'%{jobs}' if jobs else ''}",
             **need, "time": time, "output": "slurm-%A_%a.log"}
    for key, value in lines.items():
        if value is not None and re.search(r"[\s\"'\\#]", str(value)):
            raise InputError(f"--{key}={value}: no spaces, quotes or backslashes, which #SBATCH lines do not read")
    if any("\n" in line for line in flags.sbatch):
        raise InputError("--sbatch: one line at a time")
    head = [f"#SBATCH --{key}{f'={value}' if value != '' else ''}" for key, value in lines.items() if value is not None]
    head += [f"#SBATCH {line}" for line in flags.sbatch]
    argv = shlex.join([*shlex.split(flags.python), "-m", "jaxmem.handing", str(batch.file)])
    return SCRIPT.format(head="\n".join(head), count=len(batch.points), name=name, needs=batch.needs or "CPU nodes, which only compile",
                         folder=shlex.quote(flags.folder), command=argv)


SCRIPT = """\
#!/usr/bin/env bash
{head}
# {count} points of {name} on {needs}: a task each. A task whose point is on record does nothing.
set -euo pipefail
cd {folder}
exec {command} "$SLURM_ARRAY_TASK_ID"
"""


# ---------------------------------------------------------------- GKE

def define_gke(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text = absl_flags.DEFINE_string
    text("image", None, "container image with jaxmem and the experiment in it", **f)
    text("python", "python", "the interpreter in the image", **f)
    text("folder", "/app", "folder of the image in which the experiment's module is found", **f)
    text("namespace", "default", "namespace", **f)
    text("claim", None, "persistent volume claim that holds --out", **f)
    text("mount", "/runs", "where pods see it", **f)
    text("queue", None, "Kueue's local queue", **f)
    text("accelerator", None, "the nodes' accelerator label, where it is not the usual one", **f)
    absl_flags.DEFINE_integer("cpus", 4, "CPU cores of a task that only compiles", lower_bound=1, **f)


def manifest(flags: absl_flags.FlagValues, batches: Sequence[Batch], *, name: str, jobs: int | None) -> dict[str, Value]:
    """A JobSet with an indexed job for each kind of node."""
    if flags.image is None:
        raise InputError("which container image? --launch_with=--image=IMAGE, with jaxmem and the experiment in it")
    if flags.claim is None or pathlib.PurePosixPath(flags.mount) not in pathlib.PurePosixPath(batches[0].file).parents:
        raise InputError(f"records must outlive the pods: --launch_with=--claim=CLAIM, and --out under its --mount={flags.mount}")
    name = f"{name[:30].rstrip('-')}-{batches[0].file.stem[:6]}"  # another set of points is another JobSet, which cannot be changed
    if not gke.NAME.fullmatch(name):
        raise InputError(f"the experiment's name gives {name!r}, which is no JobSet's: lower-case letters, digits and dashes")
    metadata: dict[str, Value] = {"name": name, "namespace": flags.namespace}
    if flags.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": flags.queue}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
            "spec": {"replicatedJobs": [job(flags, batch, jobs) for batch in batches]}}


def job(flags: absl_flags.FlagValues, batch: Batch, jobs: int | None) -> dict[str, Value]:
    count = len(batch.points)
    label = re.sub(r"[^a-z0-9]+", "-", batch.needs or COMPILES)
    return {"name": label, "replicas": 1, "template": {"spec": {
        "parallelism": min(count, jobs or count), "completions": count, "completionMode": "Indexed", "backoffLimit": count,
        "template": {"spec": pod(flags, batch)}}}}


def pod(flags: absl_flags.FlagValues, batch: Batch) -> dict[str, Value]:
    """Kubernetes puts JOB_COMPLETION_INDEX into the environment of an indexed job's pods, and $(NAME) into a command."""
    topology = parse_topology(batch.needs or "cpu:1")
    argv = [word.replace("$", "$$") for word in [*shlex.split(flags.python), "-m", "jaxmem.handing", str(batch.file)]]
    container: dict[str, Value] = {"name": "point", "image": flags.image, "command": [*argv, "$(JOB_COMPLETION_INDEX)"],
                                   "env": [{"name": "PYTHONPATH", "value": flags.folder}],
                                   "volumeMounts": [{"name": "runs", "mountPath": flags.mount}]}
    out: dict[str, Value] = {"restartPolicy": "Never"}
    if topology.chip.kind == "cpu":
        container["resources"] = {"limits": {"cpu": str(flags.cpus)}}
    else:
        selector, resource = gke.nodes(topology, flags.accelerator)
        out["nodeSelector"], container["resources"] = selector, {"limits": resource}
    if topology.chip.kind == "gpu":
        out["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return out | {"containers": [container], "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": flags.claim}}]}

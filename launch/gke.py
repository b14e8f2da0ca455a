"""A JobSet for Google Kubernetes Engine: pods, chips and node selectors follow from the run's --topology.

  python -m launch.gke --image=IMAGE --claim=runs -- --model=llama3-8b --topology=2xv5e-256 --plan=data=2,fsdp=256 --out=/runs/a
  python -m launch.gke --image=IMAGE --run -- --model=llama3-8b --topology=h100:16x8 --plan=fsdp=128 --out=/runs/a

Prints the manifest; --run hands it to kubectl apply. A slice of TPUs is one job of the set with a pod a host; hosts of GPUs are the
pods of a single job. When a pod fails the whole set starts again, and each run resumes from its last checkpoint; bad input (2) and
exhausted rollbacks (77) end it. --out must be on storage that every pod sees: a claim, mounted at --mount.
"""

import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem.cluster import COORDINATOR_PORT
from jaxmem.hardware import Topology
from jaxmem.spec import InputError
from launch import command
from launch.yaml_text import Value, dump

# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and /how-to/gpus (2026-12): values of the node labels
# cloud.google.com/gke-tpu-accelerator and cloud.google.com/gke-accelerator.
TPUS = {"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice", "tpu7x": "tpu7x"}
GPUS = {"a100-40gb": "nvidia-tesla-a100", "a100-80gb": "nvidia-a100-80gb", "h100": "nvidia-h100-80gb", "h200": "nvidia-h200-141gb",
        "b200": "nvidia-b200", "gb200": "nvidia-gb200", "rtx-pro-6000": "nvidia-rtx-pro-6000", "v100": "nvidia-tesla-v100"}
JOB = "host"  # pods are NAME-host-JOB-INDEX
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # pod names add to it, and a DNS label holds 63 characters


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text, whole = absl_flags.DEFINE_string, absl_flags.DEFINE_integer
    absl_flags.DEFINE_boolean("run", False, "hand it to kubectl; else it is printed", **f)
    text("name", "jaxmem", "the JobSet's name", **f)
    text("namespace", "default", "namespace", **f)
    text("image", None, "container image with jaxmem in it", **f)
    text("jaxmem", "jaxmem", "the program in the image, as in /venv/bin/jaxmem", **f)
    text("accelerator", None, "the nodes' accelerator label, where it is not the usual one, as in nvidia-h100-mega-80gb", **f)
    text("claim", None, "persistent volume claim that holds the runs", **f)
    text("mount", "/runs", "where pods see it", **f)
    text("queue", None, "Kueue's local queue", **f)
    whole("max_restarts", 10, "start the set again after a failure, so often", lower_bound=0, **f)
    whole("save_within", 300, "seconds that a pod has to save after SIGTERM", lower_bound=1, **f)


def launch(flags: absl_flags.FlagValues, train: list[str]) -> int:
    text = dump(manifest(flags, train))
    if flags.run:
        return command.hand_over(["kubectl", "apply", "--filename=-"], text=text,
                                 missing="https://kubernetes.io/docs/tasks/tools has it")
    print(text, end="")
    return 0


def manifest(flags: absl_flags.FlagValues, train: Sequence[str]) -> dict[str, Value]:
    """The JobSet; raises `InputError`."""
    settings, given = command.train_settings(train)
    topology = settings.topology
    if flags.image is None:
        raise InputError("which container image? --image=IMAGE, with jaxmem in it")
    if not NAME.fullmatch(flags.name):
        raise InputError(f"--name={flags.name}: lower-case letters, digits and dashes, beginning with a letter, at most 40")
    if "out" not in given:
        raise InputError("the run needs a folder on storage that every pod sees: --out=RUN after --")
    if flags.claim is not None and pathlib.PurePosixPath(flags.mount) not in settings.out.parents:
        raise InputError(f"--out={settings.out} is not under --mount={flags.mount}, so it would be lost with the pod; "
                         f"did you mean --out={pathlib.PurePosixPath(flags.mount) / settings.out.name}?")
    if flags.claim is None:
        print(f"# no --claim: {settings.out} is in the pods' own image, and the checkpoints end with the pods without storage there",
              file=sys.stderr)
    jobs = topology.slices
    pods = topology.hosts // jobs
    metadata: dict[str, Value] = {"name": flags.name, "namespace": flags.namespace}
    if flags.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": flags.queue}
    if topology.chip.kind == "tpu":  # a slice is a node pool: one job takes it whole
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": flags.max_restarts,
                # A job that its pods' failure policy ended would only fail again.
                "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{
                "name": JOB,
                "replicas": jobs,
                "template": {"spec": {
                    "parallelism": pods,
                    "completions": pods,
                    "completionMode": "Indexed",
                    "backoffLimit": 0,
                    "podFailurePolicy": {"rules": [{
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "train", "operator": "In", "values": [2, 77]},
                    }]},
                    "template": {"spec": _pod(flags, train, topology, pods)},
                }},
            }],
        },
    }


def _pod(flags: absl_flags.FlagValues, train: Sequence[str], topology: Topology, pods: int) -> dict[str, Value]:
    selector, resource = nodes(topology, flags.accelerator)
    gpu = topology.chip.kind == "gpu"
    # $(NAME) would be replaced by Kubernetes; two dollars are one.
    argv = [word.replace("$", "$$") for word in [*shlex.split(flags.jaxmem), "train", *train]]
    mounts: dict[str, tuple[str, dict[str, Value]]] = {}
    if flags.claim is not None:
        mounts["runs"] = (flags.mount, {"persistentVolumeClaim": {"claimName": flags.claim}})
    if gpu and topology.devices_per_host > 1:  # a container's own is 64 MB, and NCCL takes more
        mounts["memory"] = ("/dev/shm", {"emptyDir": {"medium": "Memory"}})
    container: dict[str, Value] = {"name": "train", "image": flags.image, "command": list[Value](argv)}
    if gpu and pods > 1:  # TPU pods get what they need from GKE
        annotation = "metadata.annotations['jobset.sigs.k8s.io/{}']"
        container["env"] = [
            {"name": "JOBSET_NAME", "valueFrom": {"fieldRef": {"fieldPath": annotation.format("jobset-name")}}},
            {"name": "REPLICATED_JOB_NAME", "valueFrom": {"fieldRef": {"fieldPath": annotation.format("replicatedjob-name")}}},
            {"name": "NNODES", "value": str(pods)},
        ]
        container["ports"] = [{"containerPort": COORDINATOR_PORT, "name": "coordinator"}]
    container["resources"] = {"limits": resource}
    if mounts:
        container["volumeMounts"] = [{"name": name, "mountPath": path} for name, (path, _) in mounts.items()]
    pod: dict[str, Value] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": flags.save_within, "nodeSelector": selector}
    if gpu:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    pod["containers"] = [container]
    if mounts:
        pod["volumes"] = [{"name": name, **source} for name, (_, source) in mounts.items()]
    return pod


def nodes(topology: Topology, accelerator: str | None = None) -> tuple[dict[str, Value], dict[str, Value]]:
    """Which nodes a pod of this topology asks for, and how many of their chips. Raises `InputError`."""
    chip = topology.chip
    if chip.kind == "cpu":
        raise InputError(f"--topology={topology} is emulated: launch.local runs it; GKE has TPUs and GPUs")
    if chip.kind == "tpu":
        if topology.slices > 1 and topology.hosts == topology.slices:
            raise InputError(f"--topology={topology}: several slices on GKE are of several hosts each; one of {topology.chips_per_slice} "
                             f"chips is one host")
        chips = topology.chips // topology.hosts
        return ({"cloud.google.com/gke-tpu-accelerator": accelerator or TPUS[chip.name],
                 "cloud.google.com/gke-tpu-topology": topology.shape_text}, {"google.com/tpu": chips})
    label = accelerator or GPUS.get(chip.parent or chip.name)
    if label is None:
        raise InputError(f"--topology={topology}: GKE has no nodes of {chip.name}{_known()}; --accelerator=LABEL names them if it has")
    selector: dict[str, Value] = {"cloud.google.com/gke-accelerator": label}
    if chip.parent:  # h100-mig-1g.10gb
        selector["cloud.google.com/gke-gpu-partition-size"] = chip.name.rpartition("-")[2]
    return selector, {"nvidia.com/gpu": topology.devices_per_host}


def _known() -> str:
    return f"; known: {', '.join(GPUS)}"


def main(words: Sequence[str]) -> int:
    return command.run(__doc__ or "", define, launch, words, "launch.gke")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

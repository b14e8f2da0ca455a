"""JobSets: by the schema, and what pods and chips follow from a topology."""

import json
from typing import Any

import jsonschema
import pytest
import yaml
from absl import flags as absl_flags
from hypothesis import given
from hypothesis import strategies as st
from launchers import AWKWARD, CASES, FOLDER, golden, text_of

from jaxmem.chips import CHIPS
from jaxmem.cluster import found_in
from jaxmem.hardware import Topology, parse_topology, topologies
from jaxmem.spec import InputError
from launch import gke
from launch.yaml_text import dump

GKE = [name for name in CASES if CASES[name][0] == "gke"]


def manifest(topology: str, *own: str, out: str = "/runs/a", train: tuple[str, ...] = ()) -> dict[str, Any]:
    flags = absl_flags.FlagValues()
    gke.define(flags)
    flags(["gke", "--image=i", *own])
    batch = parse_topology(topology).devices
    return gke.manifest(flags, [f"--topology={topology}", "--model=llama3-8b", f"--batch={batch}", "--plan=data=*", f"--out={out}", *train])


def job(found: dict[str, Any]) -> dict[str, Any]:
    [replicated] = found["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(found: dict[str, Any]) -> dict[str, Any]:
    return job(found)["template"]["spec"]


@pytest.mark.parametrize("name", GKE)
def test_stored_manifests_are_jobsets(name):
    schema = json.loads((FOLDER / "jobset.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    found = yaml.safe_load(golden(name).read_text())
    jsonschema.validate(found, schema)
    for wrong in ({**found, "kind": "Job"}, {**found, "speck": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(("topology", "jobs", "pods", "selector", "limits"), [
    ("2xv5e-256", 2, 64, {"gke-tpu-accelerator": "tpu-v5-lite-podslice", "gke-tpu-topology": "16x16"}, {"google.com/tpu": 4}),
    ("v5p-128", 1, 16, {"gke-tpu-accelerator": "tpu-v5p-slice", "gke-tpu-topology": "4x4x4"}, {"google.com/tpu": 4}),
    ("v6e-16", 1, 4, {"gke-tpu-accelerator": "tpu-v6e-slice", "gke-tpu-topology": "4x4"}, {"google.com/tpu": 4}),
    ("v5e-1", 1, 1, {"gke-tpu-accelerator": "tpu-v5-lite-podslice", "gke-tpu-topology": "1x1"}, {"google.com/tpu": 1}),
    ("tpu7x-128", 1, 16, {"gke-tpu-accelerator": "tpu7x", "gke-tpu-topology": "4x4x4"}, {"google.com/tpu": 4}),
    ("h100:16x8", 1, 16, {"gke-accelerator": "nvidia-h100-80gb"}, {"nvidia.com/gpu": 8}),
    ("gb200:18x4", 1, 18, {"gke-accelerator": "nvidia-gb200"}, {"nvidia.com/gpu": 4}),
    ("a100-40gb-mig-1g.5gb", 1, 1, {"gke-accelerator": "nvidia-tesla-a100", "gke-gpu-partition-size": "1g.5gb"}, {"nvidia.com/gpu": 1}),
])
def test_pods_and_nodes(topology, jobs, pods, selector, limits):
    found = manifest(topology)
    assert found["spec"]["replicatedJobs"][0]["replicas"] == jobs
    assert (job(found)["parallelism"], job(found)["completions"]) == (pods, pods)
    assert pod(found)["nodeSelector"] == {f"cloud.google.com/{name}": value for name, value in selector.items()}
    assert pod(found)["containers"][0]["resources"]["limits"] == limits


@pytest.mark.parametrize("topology", [t for kind in ("tpu", "gpu") for t in topologies(kind)])
def test_every_chip_of_a_topology_is_in_some_pod(topology):
    where = parse_topology(topology)
    try:
        _, limits = gke.nodes(where)
    except InputError as error:
        assert "--accelerator=LABEL" in str(error)
        return
    [chips] = limits.values()
    assert isinstance(chips, int)
    assert where.hosts * chips == where.chips


def test_pods_of_gpu_hosts_find_each_other():
    found = manifest("h100:16x8", "--name=big")
    environ = {entry["name"]: entry.get("value") for entry in pod(found)["containers"][0]["env"]}
    assert {name for name, value in environ.items() if value is None} == {"JOBSET_NAME", "REPLICATED_JOB_NAME"}
    # as Kubernetes fills them in for the sixth pod
    pod_environ = environ | {"JOBSET_NAME": "big", "REPLICATED_JOB_NAME": "host", "JOB_COMPLETION_INDEX": "5"}
    joined = found_in(pod_environ)
    assert joined is not None
    assert (joined.processes, joined.process, joined.coordinator) == (16, 5, "big-host-0-0.big:8482")
    assert found["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert "env" not in pod(manifest("h100:8"))["containers"][0]  # one pod
    assert "env" not in pod(manifest("v5p-128"))["containers"][0]


def test_what_a_failed_pod_does():
    found = manifest("h100:2x8", "--max_restarts=4", "--save_within=120")
    policy = found["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], [rule["action"] for rule in policy["rules"]]) == (4, ["FailJobSet"])
    assert (job(found)["backoffLimit"], pod(found)["restartPolicy"]) == (0, "Never")  # one pod alone cannot go on
    assert job(found)["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 77]
    assert pod(found)["terminationGracePeriodSeconds"] == 120


def test_words_reach_the_run_as_they_are():
    command = pod(yaml.safe_load(text_of("gke-mig")))["containers"][0]["command"]
    assert [word.replace("$$", "$") for word in command[-3:]] == list(AWKWARD)
    assert not any("$(" in word.replace("$$", "") for word in command)  # Kubernetes would fill it in


@pytest.mark.parametrize(("topology", "own", "out", "parts"), [
    ("cpu:8", (), "/runs/a", ["launch.local"]),
    ("a6000:4", (), "/runs/a", ["a6000", "--accelerator=LABEL"]),
    ("2xv5e-4", (), "/runs/a", ["one host"]),
    ("h100:8", ("--name=Big",), "/runs/a", ["--name=Big", "lower-case"]),
    ("h100:8", ("--name=" + "a" * 41,), "/runs/a", ["at most 40"]),
    ("h100:8", ("--claim=runs",), "/other/a", ["--mount=/runs", "--out=/runs/a"]),
])
def test_refusals(topology, own, out, parts):
    with pytest.raises(InputError) as error:
        manifest(topology, *own, out=out)
    for part in parts:
        assert part in str(error.value)


def test_unusual_nodes_are_named_by_a_flag():
    assert pod(manifest("a6000:4", "--accelerator=my-a6000"))["nodeSelector"] == {"cloud.google.com/gke-accelerator": "my-a6000"}
    assert {chip.name for chip in CHIPS.values() if chip.kind == "tpu"} == set(gke.TPUS)
    assert all(CHIPS[name].kind == "gpu" for name in gke.GPUS)
    assert isinstance(parse_topology("h100:8"), Topology)


SCALARS = st.text(max_size=8) | st.integers() | st.booleans() | st.sampled_from(
    ["yes", "No", "null", "~", "", "1e3", "0x1", "1:30", "2026-12-01", "-", "- a", "a: b", "a #b", "#", "{}", "[", "*a", "&a", "!x", "%",
     "@", "é", "\u2028", "\x85", "a\nb", "'", '"', "\\", "=", "<<", ".inf", "key:", "?", "|", ">", "0o7", "1_000", "on", "a:b"])


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=8))
def test_yaml_comes_back_as_it_was(value):
    assert yaml.safe_load(dump(value)) == value

"""Checks of classifiers of images through the real compilers: the text is the one that is trained, and the peak has names."""

import hashlib
import json
import pathlib

import jax
import jsonschema
import pytest

from jaxmem import step, verdict
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.targets.compile import Request, compile_programs
from jaxmem.workload import Workload

SCHEMA = json.loads((pathlib.Path(verdict.__file__).parent / "check.schema.json").read_text())
LINES: list[str] = []


def test_what_is_checked_is_what_is_trained():
    """The compile child and this process build the programs on their own; the line has no seq, which the child derives too."""
    work, plan, where = Workload.parse_line("model=mlp,batch=16"), Plan.parse("data=2,tensor=2"), parse_topology("cpu:4")
    request = Request(spec={"kind": "workload", "workload": "model=mlp,batch=16", "plan": str(plan)}, programs=("train", "eval"),
                      topology=where, flags=())
    checked = compile_programs(request, progress=LINES.append)
    here = step.build(work, plan, where, jax.devices()[:4])
    for name, artifact in checked.items():
        assert artifact.result["status"] == "ok"
        assert artifact.result["text_sha256"] == hashlib.sha256(here[name].lower().as_text().encode()).hexdigest()


@pytest.mark.long
@pytest.mark.parametrize(("topology", "plan"), [("v5e-4", "fsdp=4,remat=block"), ("h100:4", "data=4,zero=1")])
def test_where_the_memory_of_a_vision_transformer_goes(topology, plan):
    """Every program fits; nearly all of the peak has a kind and a module, and the modules are the model's own."""
    work = Workload.parse(model="vit-s16,layers=2", batch=64)
    found = verdict.check_workload(work, Plan.parse(plan), parse_topology(topology), progress=LINES.append)
    jsonschema.validate(found, SCHEMA)
    assert found["verdict"] == "fits" and set(found["programs"]) == {"init", "train", "eval", "save"}
    assert found["workload"] == "model=vit-s16,layers=2,optimizer=adamw,batch=64,seq=196"
    assert found["unattributed_bytes"] < 0.05 * found["peak_bytes"]
    modules = {row["module"] for row in found["composition"]}
    assert {"patches", "blocks/attention", "blocks/mlp", "head"} <= modules
    assert {"params", "opt_state", "saved"} <= {row["kind"] for row in found["composition"]}
    pixels = [row for row in found["buffers"] if row["kind"] == "batch" and row["module"] == "input"]
    assert any(row["bytes"] >= 16 * 224 * 224 * 3 * 4 for row in pixels), "a device's images"
    assert found["step_s"] is not None and 0 < found["mfu"] < 1 and found["model_flops"] == pytest.approx(64 * 6 * 0.812e9, rel=0.01)

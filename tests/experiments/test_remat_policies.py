"""A pulse of the experiment: two policies of a tiny model, run here; and what it makes of records."""

import functools
import json
import pathlib

import pytest

from experiments import remat_policies
from jaxmem import experiment
from jaxmem.cli import main as cli
from jaxmem.cost.flops import step_flops
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.records import record
from jaxmem.workload import Workload
from tests.experiments.given import flags_of

WORKLOAD = {"model": "decoder-tiny,layers=1", "batch": 8, "seq": 32}


flags = functools.partial(flags_of, remat_policies.EXPERIMENT)


def test_the_grid_is_models_by_batches_by_targets_by_policies():
    points = remat_policies.grid(flags())
    by_topology = {name: [one for one in points if one.topology == name] for name in ("v5e-8", "h100:8", "cpu:8")}
    assert {name: len(own) for name, own in by_topology.items()} == {"v5e-8": 24, "h100:8": 24, "cpu:8": 10}
    assert all(one.alone and one.seeded and "decoder-small" in one.workload and "offload" not in one.plan for one in by_topology["cpu:8"])
    assert not any(one.alone or one.seeded for name in ("v5e-8", "h100:8") for one in by_topology[name])
    assert len(remat_policies.grid(flags(compiled_model="", targets=""))) == 10


def test_a_pulse(tmp_path: pathlib.Path, capsys):
    argv = [f"--model={WORKLOAD['model']}", "--batch=8", "--seq=32", "--steps=2", "--targets=", "--compiled_model=", f"--out={tmp_path}",
            "--sweep=remat=none|block"]
    assert experiment.main(remat_policies.EXPERIMENT, argv) == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [(one["status"], one["plan"]) for one in records] == [("done", "fsdp=8"), ("done", "fsdp=8,remat=block")]
    none, block = (one["values"] for one in records)
    for one in records:
        values, plan = one["values"], Plan.parse(one["plan"])
        assert one["sources"]["step_s"] == "measure" and 0 < values["fastest_s"] <= values["step_s"] <= values["slowest_s"]
        # the CPU's compiler writes every matmul out, so what it computes is what the shapes say
        counted = step_flops(Workload.parse(**WORKLOAD), plan)
        assert values["compiled_flops"] == pytest.approx(counted.hardware) and values["estimated_flops"] == counted.hardware
    assert block["compiled_flops"] > none["compiled_flops"] and block["last_loss"] == pytest.approx(none["last_loss"], rel=1e-2)
    for name in ("index.html", "remat.svg", "table.md", "results.csv"):
        assert (tmp_path / name).stat().st_size
    capsys.readouterr()
    assert experiment.main(remat_policies.EXPERIMENT, argv) == 0
    assert "2 points, 2 of them on record" in capsys.readouterr().err
    assert cli.main(["results", str(tmp_path), "--filter=remat=block", "--csv=-"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def compiled(policy: str, peak_bytes: int, step_s: float | None, total: float | None, verdict: str = "fits") -> dict:
    point = experiment.point(model="gpt2", batch=64, seq=1024, topology="v5e-8", plan=f"fsdp=8,remat={policy}", settings={"how": "compile"})
    return record("remat_policies", point, {"jax": "1"}, status="done", time=0.0, backend="tpu v5e", values={
        "peak_bytes": (peak_bytes, "compile"), "step_s": (step_s, "estimate"), "compiled_flops": (total, "compile"),
        "verdict": (verdict, "compile"), "estimated_recomputed_flops": (5.0, "estimate")})


def test_the_table_holds_each_policy_against_none():
    table = remat_policies.pages([compiled("block", 2**30, 0.25, 133.0), compiled("dots", 2**31, None, None, "does_not_fit"),
                                  compiled("none", 2**31, 0.2, 100.0)])["table.md"]
    assert [line.split("|")[1].strip() for line in table.splitlines() if "GiB" in line] == ["none", "dots", "block"]  # as in the grid
    assert "## gpt2, batch 64 x 1024, v5e-8" in table
    assert "| none | 2.00 GiB | 100.0% | 0.200 s | 100.0% | 5 FLOP | 0 | — | fits |" in table
    assert "| block | 1.00 GiB | 50.0% | 0.250 s | 125.0% | 5 FLOP | 33 FLOP | — | fits |" in table
    assert "| dots | 2.00 GiB | 100.0% | — | — | 5 FLOP | — | — | does_not_fit |" in table


@pytest.mark.parametrize("topology, policy, matmuls, kernel", [
    ("cpu:8", "attention", 1, "xla"), ("v5e-8", "attention", 2, "splash"), ("v5e-8", "save:context", 0, "splash"),
    ("h100:8", "attention", 2 * 0.75, "triton")])
def test_recomputed_flops_are_of_the_attention_that_runs(topology, policy, matmuls, kernel):
    """One matmul of S x S scores is 2 B N S S H a layer; `save:context` repeats the six others. Triton's blocks of 128 leave out one
    of the four at this length, splash has one block."""
    workload = Workload.parse(model="decoder-small", batch=8, seq=256)
    found = remat_policies.estimated(workload, Plan.parse(f"fsdp=8,remat={policy}"), parse_topology(topology))
    tokens, m = 8 * 256, workload.model
    one = 2 * 8 * m.heads * m.head_dim * 256**2 * m.layers
    q, kv = m.embed * m.heads * m.head_dim, m.embed * m.kv_heads * m.head_dim
    others = 2 * tokens * m.layers * (q + 2 * kv + q + 2 * m.embed * m.mlp) if policy == "save:context" else 0
    assert found["estimated_recomputed_flops"] == (pytest.approx(matmuls * one + others), "estimate")
    assert found["attention_kernel"][0] == kernel


@pytest.mark.long
@pytest.mark.parametrize("topology", ["v5e-8", "h100:8"])
def test_a_pulse_of_a_target(tmp_path: pathlib.Path, topology):
    argv = ["--model=decoder-tiny", "--batch=8", "--seq=128", f"--targets={topology}", "--compiled_model=", f"--out={tmp_path}",
            "--sweep=remat=none|block", "--topology=", "--jobs=2"]
    assert experiment.main(remat_policies.EXPERIMENT, argv) == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    none, block = sorted(records, key=lambda one: one["plan"])
    repeated = block["values"]["compiled_flops"] - none["values"]["compiled_flops"]
    assert repeated == pytest.approx(block["values"]["estimated_recomputed_flops"], rel=0.01) and none["values"]["compiled_flops"] > 0
    assert all(one["values"]["verdict"] == "fits" and one["values"]["step_s"] > 0 and one["sources"]["step_s"] == "estimate"
               for one in records)

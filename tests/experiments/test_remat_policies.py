"""A pulse of the experiment: two policies of a tiny model, run here; and what it makes of records."""

import json
import pathlib

import pytest
from absl import flags as absl_flags

from experiments import remat_policies
from jaxmem import experiment
from jaxmem.cli import main as cli
from jaxmem.cost.flops import step_flops
from jaxmem.plan import Plan
from jaxmem.records import record
from jaxmem.workload import Workload

WORKLOAD = {"model": "decoder-tiny,layers=1", "batch": 8, "seq": 32}


def flags(**values):
    out = absl_flags.FlagValues()
    experiment.define(out, remat_policies.EXPERIMENT)
    out(["x", *(f"--{name}={value}" for name, value in values.items())])
    return out


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
    table = remat_policies.pages([compiled("none", 2**31, 0.2, 100.0), compiled("block", 2**30, 0.25, 133.0),
                                  compiled("dots", 2**31, None, None, "does_not_fit")])["table.md"]
    assert "## gpt2, batch 64 x 1024, v5e-8" in table
    assert "| none | 2.00 GiB | 100.0% | 0.200 s | 100.0% | 5 FLOP | 0 | — | fits |" in table
    assert "| block | 1.00 GiB | 50.0% | 0.250 s | 125.0% | 5 FLOP | 33 FLOP | — | fits |" in table
    assert "| dots | 2.00 GiB | 100.0% | — | — | 5 FLOP | — | — | does_not_fit |" in table


@pytest.mark.long
@pytest.mark.parametrize("topology", ["v5e-8", "h100:8"])
def test_a_pulse_of_a_target(tmp_path: pathlib.Path, topology):
    argv = ["--model=decoder-tiny", "--batch=8", "--seq=128", f"--targets={topology}", "--compiled_model=", f"--out={tmp_path}",
            "--sweep=remat=none|block", "--topology=", "--jobs=2"]
    assert experiment.main(remat_policies.EXPERIMENT, argv) == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    none, block = sorted(records, key=lambda one: one["plan"])
    assert block["values"]["compiled_flops"] > none["values"]["compiled_flops"] > 0
    assert all(one["values"]["verdict"] == "fits" and one["values"]["step_s"] > 0 and one["sources"]["step_s"] == "estimate"
               for one in records)

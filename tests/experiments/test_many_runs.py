"""A pulse of many runs on two devices, the grid, and what the tables make of records."""

import functools
import json
import pathlib

import pytest

from experiments import many_runs
from jaxmem import experiment
from jaxmem.hardware import parse_topology
from jaxmem.records import record
from jaxmem.spec import InputError
from tests.experiments.given import flags_of

flags = functools.partial(flags_of, many_runs.EXPERIMENT)


@pytest.mark.parametrize("how, devices", [
    ("one_after_another", [8, 8, 8, 8, 8, 8]), ("vmapped", [8, None, 2, 1, 1, None]), ("parts", [8, None, 2, 1, None, None])])
def test_each_way_has_the_whole_topology(how, devices):
    assert [many_runs.devices_of_a_run(parse_topology("cpu:8"), runs, how) for runs in (1, 3, 4, 8, 16, 20)] == devices


def test_the_grid_is_ways_by_numbers_of_runs_and_the_targets():
    points = many_runs.grid(flags(runs="1|4", topology="cpu:1|cpu:8"))
    found = [(one.topology, one.settings["how"], one.settings["runs"], one.plan, one.alone) for one in points]
    assert found == [
        ("cpu:1", "one_after_another", 1, "", True), ("cpu:1", "one_after_another", 4, "", True), ("cpu:1", "vmapped", 1, "", True),
        ("cpu:1", "vmapped", 4, "", True), ("cpu:1", "parts", 1, "", True),
        ("cpu:8", "one_after_another", 1, "fsdp=8", True), ("cpu:8", "one_after_another", 4, "fsdp=8", True),
        ("cpu:8", "vmapped", 1, "fsdp=8", True), ("cpu:8", "vmapped", 4, "fsdp=2", True), ("cpu:8", "parts", 1, "fsdp=8", True),
        ("cpu:8", "parts", 4, "fsdp=2", True),
        *((target, how, runs, "", False) for target in ("v5e-1", "h100:1")
          for how, runs in (("compiled", 1), ("compiled", 4), ("largest", 0)))]
    with pytest.raises(InputError, match="--runs=x"):
        many_runs.grid(flags(runs="1|x"))


def test_a_pulse(tmp_path: pathlib.Path, capsys):
    argv = ["--model=mlp,mlp=32", "--batch=8", "--seq=1", "--trained_on=images:digits", "--runs=2", "--topology=cpu:1", "--targets=",
            "--steps=5", f"--out={tmp_path}"]
    assert experiment.main(many_runs.EXPERIMENT, argv) == 0, capsys.readouterr().err
    records = {one["settings"]["how"]: one for one in map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())}
    assert set(records) == {"one_after_another", "vmapped"}
    for one in records.values():
        values = one["values"]
        assert one["status"] == "done" and one["sources"]["tokens_per_s"] == "measure" and one["sources"]["peak_bytes"] == "compile"
        assert values["tokens_per_s"] == pytest.approx(2 * 8 / values["round_s"]) and values["step_s_a_run"] == values["round_s"] / 2
        # runs 0 and 1 have seeds 0 and 1 in every way; in bf16 they agree to three digits
        assert values["mean_last_loss"] == pytest.approx(records["one_after_another"]["values"]["mean_last_loss"], rel=1e-2)
    for name in ("index.html", "many_runs.svg", "many_runs_memory.svg", "table.md", "results.csv"):
        assert (tmp_path / name).stat().st_size


def made(how: str, runs: int, topology: str, **values) -> dict:
    here = how != "compiled" and how != "largest"
    settings = {"how": how, "runs": runs} | ({"steps": 30, "trained_on": "synthetic"} if here else {})
    point = experiment.point(model="decoder-tiny", batch=8, seq=128, topology=topology, settings=settings)
    return record("many_runs", point, {"jax": "1"}, status="done", time=0.0, backend="x",
                  values={name: (value, "measure") for name, value in values.items()})


def test_gains_are_over_the_control_of_as_many_runs():
    table = many_runs.pages([
        made("vmapped", 4, "cpu:1", tokens_per_s=300.0, step_s_a_run=1.0, peak_bytes=100),
        made("one_after_another", 4, "cpu:1", tokens_per_s=200.0, step_s_a_run=1.5, peak_bytes=50),
        made("one_after_another", 1, "cpu:1", tokens_per_s=100.0, step_s_a_run=3.0, peak_bytes=50),
        made("compiled", 4, "v5e-1", tokens_per_s=500.0, step_s_a_run=1.0, peak_bytes=90, peak_bytes_a_run=22.5),
        made("compiled", 1, "v5e-1", tokens_per_s=400.0, step_s_a_run=1.25, peak_bytes=20, peak_bytes_a_run=20.0),
        made("largest", 0, "v5e-1", most_runs=7, next_does_not_fit="yes", usable_bytes=170, compiles=4)])["table.md"]
    assert "| vmapped | 4 |  | 300 | 1.50x |" in table and "| one_after_another | 4 |  | 200 | 1.00x |" in table
    assert "| 4 | 90 B | 22 B | — | 500 | 1.25x |" in table
    assert "| v5e-1 | 7 | yes |" in table

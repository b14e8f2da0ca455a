"""The arithmetic of a mix, with programs whose bytes are given; and a pulse with a real compiler."""

import dataclasses
import json
import pathlib

import pytest

from experiments import packing_waste
from jaxmem import experiment
from jaxmem.colocate import mix
from jaxmem.colocate.fitting import Tried
from jaxmem.hardware import parse_topology
from jaxmem.records import record
from jaxmem.spec import InputError
from jaxmem.verdict import usable
from tests.experiments.given import flags_of

GB = 10**9


def points(**values):
    return packing_waste.grid(flags_of(packing_waste.EXPERIMENT, **values))


@pytest.fixture
def given(monkeypatch):
    """A run of batch B takes 2 GB and B / 10 more, a further one B / 10 GB and 1."""
    def try_runs(workload, plan, topology, runs, **_):
        limit = usable(topology, 1.0)[0]
        peak = 2 * GB + workload.batch * GB // 10 + (runs - 1) * (workload.batch * GB // 10 + GB)
        return Tried(runs=runs, fits=peak <= limit, peak_bytes=peak, step_s=0.1 * runs, backend="cuda h100"), limit
    monkeypatch.setattr(mix, "try_runs", try_runs)


def test_counts_of_gpus(given):
    """32 runs of 10.5 GB, and 1g.10gb has 9.9: four slices of 1g.20gb a GPU, 8 GPUs. 11.6 GB with a runtime: 7 a GPU, 5 GPUs.
    One program takes 1 + n x 9.5 GB of 83.9: 8 a GPU, 4 GPUs."""
    point, = points(topology="h100:1", runs="32", batches="85")
    values = {name: value for name, (value, _) in packing_waste.run(point).values.items()}
    assert (values["gpus_mig"], values["gpus_processes"], values["gpus_one_program"]) == (8, 5, 4)
    whole = parse_topology("h100:1").chip.hbm_bytes - 2**30
    assert values["unused_mig"] == pytest.approx(1 - 32 * 10.5 * GB / (8 * whole))
    assert values["unused_one_program"] == pytest.approx(1 - (4 * GB + 32 * 9.5 * GB) / (4 * whole))


def test_a_mix_is_the_seeds(given):
    one, = points(topology="h100:1", runs="8")
    found = [packing_waste.run(dataclasses.replace(one, seed=seed)).values["mean_run_bytes"][0] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_gpus_without_slices_are_refused(given):
    point, = points(topology="h200:1", runs="8")
    with pytest.raises(InputError, match="has no MIG slices"):
        packing_waste.run(point)


def test_the_table_has_a_line_for_each_way(given):
    records = [record("packing_waste", point, {"jax": "1"}, status="done", time=0.0, values=packing_waste.run(point).values, backend="x")
               for point in points(topology="h100:1", runs="4|32", batches="85")]
    table = packing_waste.pages(records)["table.md"]
    assert [line.split("|")[2:5] for line in table.splitlines() if line.startswith("| h100:1 | 32")] == [
        [" 32 ", " mig ", " 8 "], [" 32 ", " processes ", " 5 "], [" 32 ", " one_program ", " 4 "]]


@pytest.mark.long
def test_a_pulse(tmp_path: pathlib.Path):
    argv = ["--model=decoder-tiny,layers=1", "--seq=128", "--batches=4|8", "--runs=8", "--topology=h100:1", "--seeds=0,1",
            f"--out={tmp_path}"]
    assert experiment.main(packing_waste.EXPERIMENT, argv) == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [one["values"]["gpus_mig"] for one in records] == [2, 2] and [one["values"]["gpus_one_program"] for one in records] == [1, 1]
    assert (tmp_path / "packing_waste.svg").stat().st_size

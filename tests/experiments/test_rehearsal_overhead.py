"""A pulse of the experiment, and what its pages make of records."""

import functools
import json
import pathlib

import pytest

from experiments import rehearsal_overhead
from jaxmem import experiment
from jaxmem.records import record
from jaxmem.spec import InputError
from tests.experiments.given import flags_of

flags = functools.partial(flags_of, rehearsal_overhead.EXPERIMENT)


def test_the_grid_is_topologies_by_memories_by_rows():
    points = rehearsal_overhead.grid(flags())
    assert len(points) == 2 * 2 * 4 and all(one.alone and one.seeded for one in points)
    assert {(one.topology, one.workload.split("batch=")[1].split(",")[0]) for one in points} == {("cpu:1", "56"), ("cpu:8", "448")}
    eight = next(one for one in points if one.topology == "cpu:8" and one.settings["r"] == 14)
    assert str(rehearsal_overhead.rehearsal_of(eight)) == "r=112,capacity=17920,every=8"


def test_bad_input():
    with pytest.raises(InputError, match="--steps=20 is not a multiple of --every=8: .*nearest: --steps=16"):
        rehearsal_overhead.grid(flags(steps=20))
    with pytest.raises(InputError, match="nearest: every=8"):
        rehearsal_overhead.grid(flags(every=4))
    with pytest.raises(InputError, match="--r=none: expected a whole number"):
        rehearsal_overhead.grid(flags(r="none"))


def test_a_pulse(tmp_path: pathlib.Path):
    argv = ["--model=mlp", "--topology=cpu:2", "--batch=4", "--r=2", "--every=2", "--steps=2", "--rounds=1", "--capacity=16",
            "--memory=pinned_host", f"--out={tmp_path}"]
    assert experiment.main(rehearsal_overhead.EXPERIMENT, argv) == 0
    [one] = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    values = one["values"]
    assert one["status"] == "done" and values["rows_ratio"] == 6 / 4
    assert values["larger_s"] > 0 and values["rehearsal_ratio"] == pytest.approx(values["rehearsal_s"] / values["plain_s"])
    assert values["buffer_bytes"] == 16 * 65 * 4 and values["sent_bytes"] == 2 * 2 * (65 * 4 + 4) / 2
    assert {one["sources"][name] for name in ("plain_s", "larger_s", "rehearsal_s", "buffer_s")} == {"measure"}
    for name in ("index.html", "rehearsal.svg", "table.md", "results.csv"):
        assert (tmp_path / name).stat().st_size


def test_the_table_and_the_figure():
    def found(r: int, memory: str) -> dict:
        settings = {"r": r, "memory": memory, "capacity": 2240, "every": 8, "steps": 16, "rounds": 5}
        point = experiment.point(model="vit-tiny", batch=56, topology="cpu:1", settings=settings, seq=None)
        return record("rehearsal_overhead", point, {"jax": "1"}, status="done", time=0.0, backend="cpu", values={
            "rows_ratio": (1 + r / 56, "estimate"), "plain_s": (0.1, "measure"), "larger_s": (0.1 * (1 + r / 56), "measure"),
            "rehearsal_s": (0.11 * (1 + r / 56), "measure"), "larger_ratio": (1 + r / 56, "measure"),
            "rehearsal_ratio": (1.1 * (1 + r / 56), "measure"), "buffer_s": (0.01 * (1 + r / 56), "measure"),
            "buffer_share": (0.1, "measure"), "buffer_bytes": (2**20, "estimate"), "sent_bytes": (0, "estimate")})
    pages = rehearsal_overhead.pages([found(r, memory) for memory in ("pinned_host", "device") for r in (56, 7)])
    table = pages["table.md"]
    rows = [line for line in table.splitlines() if line.startswith("| 7 |") or line.startswith("| 56 |")]
    assert len(rows) == 4 and rows[0].startswith("| 7 | 1.12x | 1.12x | 1.24x | 0.100 s |") and "10.0%" in rows[0]
    assert "cpu:1, batch 56, buffer in pinned host memory" in table and "cpu:1, batch 56, buffer in device memory" in pages["rehearsal.svg"]

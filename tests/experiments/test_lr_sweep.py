"""A sweep whose points run in one program: each has its own record, and the record that it would have alone."""

import json
import pathlib

import pytest

from experiments import lr_sweep
from jaxmem import experiment
from jaxmem.records import Point
from jaxmem.sweep import grouped


def swept(out: pathlib.Path, *flags: str) -> dict[tuple[str, float, int], dict]:
    argv = ["--model=mlp,mlp=32", "--seq=1", "--batch=8", "--plan=compute=f32", "--trained_on=images:digits", "--steps=8", "--eval_rows=40",
            "--lrs=0.01|0.1", "--seeds=0,1", f"--out={out}", *flags]
    assert experiment.main(lr_sweep.EXPERIMENT, argv) == 0
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    return {(one["settings"]["how"], one["settings"]["lr"], one["seed"]): one for one in records}


def test_each_point_has_its_own_record(tmp_path, capsys):
    found = swept(tmp_path)
    assert set(found) == {("vmapped", lr, seed) for lr in (0.01, 0.1) for seed in (0, 1)}
    assert {one["status"] for one in found.values()} == {"done"} and len({one["key"] for one in found.values()}) == 4
    assert {one["values"]["runs_together"] for one in found.values()} == {4}
    assert len({round(one["values"]["eval_loss"], 4) for one in found.values()}) == 4 and all(
        len(one["values"]["losses"]) == 8 for one in found.values())
    assert len(list((tmp_path / "logs").glob("*.txt"))) == 1  # one child
    capsys.readouterr()
    swept(tmp_path)
    assert "4 points, 4 of them on record" in capsys.readouterr().err
    assert "| 0.01 |" in (tmp_path / "table.md").read_text()


@pytest.mark.long
def test_one_after_another_finds_the_same_losses(tmp_path):
    swept(tmp_path)
    found = swept(tmp_path, "--how=one_after_another")
    for lr, seed in ((0.01, 0), (0.1, 1)):
        ours, theirs = (found[how, lr, seed]["values"] for how in ("vmapped", "one_after_another"))
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)


def test_points_share_a_child_only_where_they_may():
    def point(seed: int = 0, alone: bool = False, **settings) -> Point:
        return Point(workload="w", topology="cpu:1", plan="", seed=seed, settings=settings, alone=alone)
    points = [point(lr=1.0), point(lr=1.0, seed=1), point(lr=2.0), point(lr=2.0, steps=3), point(lr=1.0, alone=True)]
    assert grouped(points, lr_sweep.together) == [tuple(points[:3]), (points[3],), (points[4],)]
    assert grouped(points, None) == [(one,) for one in points]
    assert grouped(points, lambda one: None) == [(one,) for one in points]

"""A pulse of the experiment: three ways of continuing a tiny model on tiny texts; and what it makes of records."""

import dataclasses
import json
import xml.etree.ElementTree
from fractions import Fraction

import pytest

from experiments import language_shift
from jaxmem import experiment
from jaxmem.continual import mixing
from jaxmem.records import Point, read, record
from jaxmem.spec import InputError
from tests.experiments.given import flags_of


def points(**given: str) -> list[Point]:
    return list(language_shift.grid(flags_of(language_shift.EXPERIMENT, **given)))


def test_the_grid_is_the_table_of_two_phases():
    found = [(point.settings["method"], point.settings["replay"]) for point in points()]
    assert found == [("before", 0), ("joint", 0.5), ("low", 0), ("high", 0), ("rewarm", 0), ("rewarm", 0.01), ("rewarm", 0.05),
                     ("rewarm", 0.25), ("rewarm", 0.5), ("infinite", 0.05)]
    assert all(point.seeded and not point.alone for point in points())
    for wrong in ({"steps": "1"}, {"replay": "1"}, {"low": "0"}, {"lr": "high"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            points(**wrong)


@pytest.mark.parametrize("share", ["0", "0.00001", "0.00007", "0.01", "0.3", "0.29", "0.99999"])
def test_shares_of_replay_are_exact(share):
    old, new = Fraction(share), 1 - Fraction(share)
    assert mixing.parse(language_shift.mixture("text:a", "text:b", float(share))) == [("text:a", old), ("text:b", new)]
    assert [point.settings["replay"] for point in points(replay=share)][4] == float(share)


@pytest.mark.parametrize(("share", "nearest"), [("0.000001", "0.00001"), ("0.000004", "0.00001"), ("0.333333", "0.33333"),
                                                ("0.999999", "0.99999"), ("nan", "0 to below 1")])
def test_shares_too_fine_are_refused(share, nearest):
    with pytest.raises(InputError, match=f"replay.*{nearest}"):
        points(replay=f"0|{share}")


def test_a_pulse(tmp_path, monkeypatch, capfd):
    """Two alphabets, of which no letter is in both: what replay does is plain after a few steps."""
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "old.txt").write_text("the cat sat on the mat and that was that. " * 300)
    (tmp_path / "new.txt").write_text("0123456789 ABCDEFGH 9876543210 " * 400)
    command = ["--model=decoder-tiny,layers=1,embed=32,mlp=32,vocab=257", "--batch=4", "--seq=32", "--steps=30", "--lr=0.01",
               f"--old=text:{tmp_path / 'old.txt'}", f"--new=text:{tmp_path / 'new.txt'}", f"--out={tmp_path / 'out'}",
               "--sweep=method=rewarm,replay=0|0.5"]
    assert experiment.main(language_shift.EXPERIMENT, command) == 0, capfd.readouterr().err
    without, half = (one["values"] for one in read(tmp_path / "out" / "records.jsonl"))
    runs = list((tmp_path / "cache" / "language_shift").iterdir())
    assert len(runs) == 1 and json.loads((runs[0] / "config.json").read_text())["schedule"] == "cosine,floor=0.1"  # trained once
    before = language_shift.losses(runs[0])
    old, new = before[f"text:{tmp_path / 'old.txt'}"], before[f"text:{tmp_path / 'new.txt'}"]
    assert old < 3.5 and new > old + 1  # phase one has learned the one and has never seen the other
    assert without["forgotten"] == pytest.approx(without["old_loss"] - old)
    assert without["forgotten"] > 0.2 and half["forgotten"] < 0.1  # it is forgotten without replay, and not with half
    assert without["new_loss"] < new - 1 and half["new_loss"] < new - 0.5


def test_pages_are_of_the_records_alone():
    records = [record("language_shift", dataclasses.replace(one, seed=seed),
                      {"jax": "0.12"}, status="done", time=float(seed), backend="cpu", wall_s=1.0, values={
                          "old_loss": (2.0 + 0.1 * seed + 0.5 * (1 - one.settings["replay"]), "measure"), "new_loss": (1.5, "measure"),
                          "mean_loss": (1.75, "measure"), "forgotten": (0.25 if one.settings["method"] == "rewarm" else None, "measure")})
               for one in reversed(points()) for seed in (0, 1, 2)]
    pages = language_shift.pages(records)
    assert set(pages) == {"index.html", "table.md", "language_shift.svg", "language_shift_trade.svg", "results.csv"}
    table = pages["table.md"]
    lines = [line for line in table.splitlines() if line.startswith("| ") and "±" in line]
    assert len(lines) == 10 and lines[0].startswith("| before: end of phase one | — | 2.6 ± 0.25")
    assert "| re-warm and re-decay | 1% | 2.595 ± 0.25 | 1.500 |" in table and "3 seeds, 95% intervals" in table
    assert lines[-1].startswith("| constant, then decay (infinite) | 5% |")
    for name in ("language_shift.svg", "language_shift_trade.svg"):
        xml.etree.ElementTree.fromstring(pages[name])
    marks = pages["language_shift.svg"].count("<title>")
    assert marks == 2 * 5  # either text at each of five shares; the control is a dashed level without marks
    assert pages["language_shift.svg"].count('class="dash"') == 4  # the levels, and their keys

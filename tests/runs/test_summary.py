"""The figures of a list of runs: what became of each, found where."""

import json

import pytest
from runs.hand_made import CONFIG, event, held, killed_and_resumed, phase, start, train, write

from jaxmem.runs.reading import read_run
from jaxmem.runs.summary import find_runs, is_run, read_summary, require_run, status, summarize
from jaxmem.spec import InputError


def test_a_finished_run(tmp_path):
    found = summarize(read_run(write(tmp_path / "run", *killed_and_resumed())), now=1137.0)
    assert (found.name, found.status, found.step, found.steps) == ("run", "done", 10, 10)
    assert (found.model, found.plan, found.topology, found.backend) == ("decoder-tiny", CONFIG["plan"], "cpu:8", "cpu")
    assert (found.loss, found.eval_loss, found.step_s, found.tokens_per_s, found.mfu) == (4.0, 4.5, 1.0, 512.0, None)
    assert (found.predicted_bytes, found.measured_bytes, found.predicted_step_s) == (2_000_000, 1_500_000, None)
    assert found.goodput.fraction == pytest.approx(10 / 37) and found.age_s == 100.0
    assert found.problems == () and found.damaged is None
    as_json = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert as_json["goodput"] == pytest.approx(10 / 37) and as_json["seconds"]["total"] == 37.0 and as_json["starts"] == 2


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([event("end", 9, status="done")], "done"),
        ([event("end", 9, status="sigterm")], "stopped (sigterm)"),
        ([event("end", 9, status="watchdog")], "failed (watchdog)"),
        ([event("end", 9, status="rollbacks")], "failed (rollbacks)"),
        ([event("end", 9)], "failed (None)"),
        ([], "killed"),
        ([event("end", 9, status="sigterm"), start(10, 1, 3)], "killed"),
        ([event("end", 9, status="sigterm"), phase("compile", 20, 5, 1)], "killed"),  # while it compiled
        ([event("end", 9, status="sigterm"), event("supervisor", 10, 1, text="starting again")], "stopped (sigterm)"),
    ],
)
def test_status_by_the_last_end_and_by_the_lock(tmp_path, last, expected):
    folder = write(tmp_path / "run", [train(1, 5)], [start(1), *last])
    assert status(read_run(folder)) == expected
    with held(folder):  # taken at 1000, after all of that
        assert status(read_run(folder)) == "running"
    with held(folder, time=0.5):  # and before: it lives still, but what it did has ended
        assert status(read_run(folder)) == ("running" if expected == "killed" else expected)
    with held(folder, time=None):
        assert status(read_run(folder)) == "running"
    assert status(read_run(folder)) == expected


def test_not_started(tmp_path):
    found = summarize(read_run(write(tmp_path / "run", [], [])))
    assert (found.status, found.step, found.loss, found.age_s, found.goodput.fraction) == ("not started", None, None, None, None)
    assert summarize(read_run(write(tmp_path / "begun", [], [start(1)]))).step == 0


def test_after_an_elastic_restart_the_plan_is_that_of_the_last_start(tmp_path):
    events = [start(1), start(5, 1, 3, topology="cpu:4", plan="fsdp=4")]
    found = summarize(read_run(write(tmp_path / "run", [train(1, 2)], events)))
    assert (found.plan, found.topology) == ("fsdp=4", "cpu:4")


def test_a_loss_that_is_not_finite_is_said(tmp_path):
    found = summarize(read_run(write(tmp_path / "run", [train(1, 2), train(2, 3, loss=float("nan"))], [start(1)])))
    assert found.loss is None and found.problems == ("the loss of step 2 is not finite",)


def test_finding_runs(tmp_path):
    for name in ("a", "sweep/b", "sweep/deep/c", ".hidden/d", "1/2/3/kept", "1/2/3/4/too-deep"):
        write(tmp_path / name, *killed_and_resumed())
    write(tmp_path / "a" / "checkpoints" / "inner", [], [])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")  # a model's, not a run's
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["1/2/3/kept", "a", "sweep/b", "sweep/deep/c"]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"] and list(find_runs(tmp_path / "nowhere")) == []
    assert not is_run(tmp_path / "model") and is_run(tmp_path / "a")


def test_a_damaged_folder_is_an_entry_with_its_reason(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("garbage\nmore\n")
    (folder / "config.json").write_text("{")
    found = read_summary(folder)
    assert found.status is None and found.name == "broken"
    assert found.damaged and "config.json is not JSON" in found.damaged and "2 unreadable lines" in found.damaged
    # With one good part left it is a run that has problems.
    (folder / "metrics.jsonl").write_text(json.dumps(train(1, 5)) + "\n")
    found = read_summary(folder)
    assert found.damaged is None and found.step == 1 and any("config.json" in problem for problem in found.problems)


def test_naming_a_folder_that_is_no_run(tmp_path):
    write(tmp_path / "some" / "a", [], [])
    (tmp_path / "file").touch()
    assert require_run(str(tmp_path / "some" / "a")) == tmp_path / "some" / "a"
    for name, message in (("some", f"runs under it: {tmp_path}/some/a"), ("nowhere", "no such folder"), ("file", "is a file")):
        with pytest.raises(InputError, match=message):
            require_run(str(tmp_path / name))

"""The verbs `runs` and `report`: what they print, and the status they end with."""

import json

import pytest
from runs.hand_made import event, held, killed_and_resumed, start, train, write

from jaxmem.cli import main
from jaxmem.report.run_terminal import render_goodput, render_list
from jaxmem.runs.goodput import Goodput, goodput
from jaxmem.runs.reading import Metrics
from jaxmem.runs.summary import Summary


@pytest.fixture
def run(capsys):
    """`run("runs", "--json")` -> (status, stdout, stderr)."""

    def run(*argv):
        status = main.main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def some(tmp_path, monkeypatch):
    """Three runs and a damaged folder under runs/ of the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.time", lambda: 5000.0)
    write(tmp_path / "runs" / "finished", *killed_and_resumed())
    write(tmp_path / "runs" / "newer", [train(1, 4000, loss=2.25)], [start(3999), event("end", 4400, status="rollbacks")], lr=0.5)
    write(tmp_path / "runs" / "sweep" / "live", [train(1, 2000), train(2, 2001)], [start(1999)])
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "metrics.jsonl").write_text("not json\n")
    with held(tmp_path / "runs" / "sweep" / "live"):
        yield tmp_path


def test_the_list(run, some):
    status, out, err = run("runs")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [" ".join(line.split()) for line in lines if not line.startswith("  ")] == [
        "run status steps loss eval tokens/s MFU goodput age",
        "live running 2/10 4.8000 — 512 — 100.0% 49 min",  # runs that live come first, then the newest
        "newer failed (rollbacks) 1/10 2.2500 — 512 — 0.2% 10 min",
        "finished done 10/10 4.0000 4.5000 512 — 27.0% 1 h",
        "runs/broken cannot be read",
    ]
    assert lines[-1] == "  ! metrics.jsonl: 1 unreadable line, the first is line 1"
    assert lines[2] == "  model=decoder-tiny,optimizer=adamw,batch=8,seq=64  data=2,fsdp=2,tensor=2,remat=block  cpu:8"
    assert max(map(len, lines)) <= 100


def test_the_list_as_json(run, some):
    status, out, _ = run("runs", "--json")
    found = json.loads(out)["runs"]
    assert status == 0 and [entry["name"] for entry in found] == ["live", "newer", "finished", "broken"]
    assert found[2]["goodput"] == pytest.approx(10 / 37) and found[2]["mfu"] is None and found[2]["seconds"]["down"] == 6.0
    assert found[3]["status"] is None and "unreadable" in found[3]["damaged"]


def test_folders_given(run, some):
    assert [entry["name"] for entry in json.loads(run("runs", "runs/sweep", "runs/sweep/live", "--json")[1])["runs"]] == ["live"]
    assert run("runs", "runs/finished")[1].splitlines()[1].startswith("finished ")


def test_nothing_there(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("runs") == (0, "no runs under runs; jaxmem train --out=runs/NAME makes one\n", "")
    assert json.loads(run("runs", "--json")[1]) == {"runs": []}


def test_comparing(run, some):
    status, out, err = run("runs", "compare", "runs/finished", "runs/newer")
    assert (status, err) == (0, "")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "finished newer",
        "lr 0.001 0.5",
        "status done failed (rollbacks)",
        "last loss 4.000000 2.250000",
        "last eval loss 4.500000 —",
        "step time (measure) 1.000 s 1.000 s",
        "step time (estimate) — —",
        "memory (measure) 1.43 MiB —",
        "memory (compile) 1.91 MiB —",
        "goodput 27.0% 0.2%",
        "1 4.900000 2.250000",
        "work thrown away 2.000 s 0 s",
        "total 37.0 s 6 min 41 s",
    ):
        assert row in rows, row
    assert "seed" not in out  # it is the same
    found = json.loads(run("runs", "compare", "runs/finished", "runs/newer", "--json")[1])
    assert found["config"] == {"lr": ["0.001", "0.5"]} and found["losses"] == [{"step": 1, "loss": [4.9, 2.25]}]


def test_long_values_that_differ_are_not_cut(run, some):
    plan = "data=2,fsdp=2,tensor=2,remat=save:query_proj+key_proj+value_proj+context+out_proj"
    write(some / "runs" / "planned", [train(1, 5)], [start(1)], plan=plan)
    out = run("runs", "compare", "runs/finished", "runs/planned")[1]
    assert f"plan differs\n  finished  data=2,fsdp=2,tensor=2,remat=block\n  planned  {plan}\n" in out


def test_runs_of_one_name_are_told_apart_by_their_folders(run, some):
    write(some / "other" / "finished", *killed_and_resumed())
    out = run("runs", "compare", "runs/finished", "other/finished")[1]
    assert "runs/finished  other/finished" in out and out.startswith("Configuration: the same\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["runs", "nowhere"], "jaxmem runs: nowhere: no such folder"),
        (["runs", "comapre", "a", "b"], "jaxmem runs: comapre: no such folder; jaxmem runs compare RUN RUN compares"),
        (["runs", "compare"], "jaxmem runs: compare takes two runs or more, as in jaxmem runs compare runs/a runs/b; 0 given"),
        (["runs", "compare", "runs/finished"], "jaxmem runs: compare takes two runs or more"),
        (["runs", "compare", "runs/finished", "runs/newest"], "jaxmem runs: runs/newest: no such folder"),
        (["runs", "compare", "runs/finished", "runs"], "jaxmem runs: runs is not a run: it has no metrics.jsonl and no logs/events.jsonl; "
         "runs under it: runs/broken, runs/finished, runs/newer ..."),
        (["report"], "jaxmem report: report takes one run, as in jaxmem report runs/a; 0 given"),
        (["report", "runs/sweep"], "jaxmem report: runs/sweep is not a run"),
        (["report", "runs/finished", "--out=nowhere/x.html"], "jaxmem report: nowhere/x.html: No such file or directory"),
        (["report", "runs/finished", "--uot=x"], "jaxmem report: unknown flag --uot; did you mean --out"),
    ],
)
def test_bad_input_is_one_message_and_status_2(run, some, argv, message):
    status, out, err = run(*argv)
    assert status == 2 and out == "" and err.startswith(message)


def test_the_report_goes_into_the_folder_or_elsewhere(run, some):
    assert run("report", "runs/finished") == (0, "runs/finished/report.html\n", "")
    page = (some / "runs" / "finished" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "Step 10 of 10" in page
    status, out, _ = run("report", "runs/sweep/live", "--out=live.html", "--curve=loss.svg")
    assert (status, out) == (0, "live.html\nloss.svg\n")
    assert "live: running" in (some / "live.html").read_text(encoding="utf-8")
    assert (some / "loss.svg").read_text().startswith("<svg ") and not (some / "runs" / "sweep" / "live" / "report.html").exists()


def test_where_the_time_went():
    metrics, events = killed_and_resumed()
    lines = render_goodput(goodput(events, Metrics.of(metrics)), color=False).splitlines()
    assert lines[0] == "goodput 27.0% of 37.0 s in 2 starts"
    rows = [" ".join(line.split()) for line in lines[1:4]]
    assert rows == ["steps that count 10.0 s 27.0%", "compiling 8.000 s 21.6%", "not running 6.000 s 16.2%"]
    assert render_goodput(Goodput(), color=False) == "goodput — of — in 0 starts\n"


def test_a_list_of_hostile_names_stays_on_its_lines():
    hostile = "n\x1b[31m\n" * 40
    long = Summary(folder="x", name=hostile, status="done", workload="w" * 300, plan=hostile, topology="t", problems=("a\nb",))
    lines = render_list([long, Summary(folder="f\n" * 99, name="f", damaged="why\x1b")], color=False).splitlines()
    assert len(lines) == 6 and max(map(len, lines)) <= 100 and "\x1b" not in "".join(lines)

"""The frame of experiments, with an experiment that needs no jax."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxmem import experiment, sweep
from jaxmem.experiment import replaced, swept, with_seeds
from jaxmem.records import Point, read
from jaxmem.spec import InputError

NAME = "experiments_fake_question"
SOURCE = pathlib.Path(__file__).parent / "experiments" / "fake_question.py"
POINT = experiment.point(model="gpt2,layers=2", batch=8, seq=64, topology="cpu:8", plan="fsdp=*", settings={"steps": 3, "lr": 0.1})


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The experiment, under a name that a child finds on its path."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(SOURCE.read_text())
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(fake, tmp_path, capsys):
    def command(*flags: str) -> tuple[int, str, list]:
        out = tmp_path / "out"
        status = experiment.main(fake.EXPERIMENT, [f"--out={out}", *flags])
        return status, capsys.readouterr().err, read(out / "records.jsonl")
    return command


def tries(tmp_path) -> list[str]:
    path = tmp_path / "out" / "tries"
    return path.read_text().splitlines() if path.exists() else []


def test_what_is_done_is_not_done_again(run, tmp_path):
    status, said, records = run("--batch=8|16")
    assert status == 0 and "2 points, 0 of them on record" in said and "2/2 done" in said
    assert [(one["status"], one["values"], one["sources"], one["backend"]) for one in records] == \
        [("done", {"value": 10.0, "unknown": None}, {"value": "measure"}, "none")] * 2
    assert len(tries(tmp_path)) == 2
    status, said, records = run("--batch=8|16|32")
    assert status == 0 and "3 points, 2 of them on record" in said
    assert len(tries(tmp_path)) == 3 and len(records) == 3
    assert (tmp_path / "out" / "page.txt").read_text() == "works=done works=done works=done"


def test_seeds_repeat_what_depends_on_them(run, tmp_path):
    status, _, records = run("--seeds=0,1,2", "--does=works|unseeded")
    assert sorted((one["settings"]["does"], one["seed"], one["values"]["value"]) for one in records) == \
        [("unseeded", 0, 10.0), ("works", 0, 10.0), ("works", 1, 11.0), ("works", 2, 12.0)]


def test_what_goes_wrong_is_on_record_with_its_reason(run, tmp_path):
    status, said, records = run("--does=fails|refuses|dies|leaves|wrong|works")
    found = {one["settings"]["does"]: (one["status"], one["reason"]) for one in records}
    assert status == 4
    assert found["fails"] == ("failed", "RuntimeError: the reason")
    assert found["refuses"] == ("refused", "cannot be used")
    assert found["dies"][0] == "failed" and found["dies"][1].startswith("killed by SIGKILL")
    assert found["leaves"] == ("failed", "ended with status 3 and no result")
    assert found["wrong"][0] == "failed" and "'batch' is a column of every record" in found["wrong"][1]
    assert found["works"] == ("done", None)
    log = next(path for path in (tmp_path / "out" / "logs").glob("*.txt") if "RuntimeError" in path.read_text())
    assert "Traceback" in log.read_text()
    status, said, records = run("--does=refuses|works|fails")  # what failed is tried again, what was refused is not
    assert status == 4 and "3 points, 2 of them on record" in said and "1 failed" in said


def test_a_point_that_takes_too_long_is_ended(run, tmp_path):
    assert_told(run, tmp_path, "KeyboardInterrupt")


def test_a_child_can_be_asked_to_stop_also_in_the_background_of_a_shell(run, tmp_path):
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert_told(run, tmp_path, "KeyboardInterrupt")
    finally:
        signal.signal(signal.SIGINT, usual)


def assert_told(run, tmp_path, word):
    """A point that sleeps is ended by an interrupt, which leaves it time for its own children, and not by SIGKILL."""
    status, said, records = run("--does=sleeps", "--timeout=4")
    assert status == 4 and records[0]["reason"] == "no result within 4 s"
    assert any(word in path.read_text() for path in (tmp_path / "out" / "logs").glob("*.txt"))
    assert_gone(tmp_path)


def assert_gone(tmp_path):
    for path in (tmp_path / "out").glob("asleep-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("asleep-")), 0)


@pytest.fixture
def heeds_interrupts():
    """Also where this process was started in the background of a shell, which makes it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_keeps_what_is_done_and_goes_on(run, tmp_path, number, heeds_interrupts):
    def interrupt():
        deadline = time.monotonic() + 30
        while not list((tmp_path / "out").glob("asleep-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), number)
    threading.Thread(target=interrupt, daemon=True).start()
    status, said, records = run("--does=works|sleeps")
    assert status == 130 and "stopped: 1 of 2 points are on record" in said
    assert [one["settings"]["does"] for one in records] == ["works"]
    assert (tmp_path / "out" / "page.txt").read_text() == "works=done"
    assert_gone(tmp_path)
    (tmp_path / "out" / "awake").touch()
    status, said, records = run("--does=works|sleeps")
    assert status == 0 and "2 points, 1 of them on record" in said and len(tries(tmp_path)) == 2


def test_a_second_interrupt_waits_for_nobody(run, tmp_path, heeds_interrupts):
    """A point that ignores the first is killed at the second, and none stays behind."""
    def interrupt():
        deadline = time.monotonic() + 30
        while not list((tmp_path / "out").glob("asleep-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    status, said, _ = run("--does=ignores")
    thread.join()
    assert status == 130 and "stopped: 0 of 1 points" in said
    assert_gone(tmp_path)


def test_points_run_side_by_side_but_for_those_that_measure_time(run, tmp_path):
    status, _, records = run("--does=alone|together", "--batch=8|16", "--jobs=2")
    assert status == 0
    spans = [(line.split()[0], *map(float, line.split()[2:])) for line in tries(tmp_path)]
    together, alone = ([one for one in spans if one[0] == kind] for kind in ("together", "alone"))
    assert len(together) == len(alone) == 2
    for kind, begin, end in alone:
        assert not [one for one in spans if one != (kind, begin, end) and one[1] < end and begin < one[2]]
    assert max(end for _, _, end in together) <= min(begin for _, begin, _ in alone)


def test_who_may_start_beside_whom():
    def point(alone):
        return Point(workload="w", topology="t", plan="p", alone=alone)
    assert sweep.may_start(point(False), [point(False)], 2) and not sweep.may_start(point(False), [point(False)] * 2, 2)
    assert sweep.may_start(point(True), [], 2) and not sweep.may_start(point(True), [point(False)], 2)
    assert not sweep.may_start(point(False), [point(True)], 2)


def test_pages_can_be_made_again_from_the_records_alone(run, tmp_path):
    run()
    (tmp_path / "out" / "page.txt").unlink()
    status, _, _ = run("--render")
    assert status == 0 and (tmp_path / "out" / "page.txt").exists() and len(tries(tmp_path)) == 1


def test_mistakes_are_told(run, tmp_path):
    for flags, words in ((["--sweep=remta=none"], "unknown field 'remta'; did you mean remat"), (["--seeds=a"], "--seeds=a: expected"),
                         (["--bacth=8"], "unknown flag --bacth; did you mean --batch"), (["--batch=none"], "batch=none: expected a whole"),
                         (["words"], "takes flags only"), (["--launch=slrum"], "--launch=slrum: expected one of local, slurm, gke"),
                         (["--launch=slurm", "--launch_with='a"], "no closing quotation")):
        status, said, records = run(*flags)
        assert status == 2 and words in said and not records, said


def test_help_says_the_question_and_the_flags(fake, capsys):
    assert experiment.main(fake.EXPERIMENT, ["--help"]) == 0
    out = capsys.readouterr().out
    assert "Does the frame keep what it is given?" in out and "--sweep" in out and "--does=TEXT" in out


def test_a_swept_field_replaces_the_grids():
    points = [POINT, experiment.point(model="gpt2,layers=2", batch=16, seq=64, topology="cpu:8", plan="fsdp=*,remat=dots",
                                      settings={"steps": 3, "lr": 0.1})]
    found = swept(points, "remat=none|save:query_proj+out_proj")
    saved = "fsdp=8,remat=save:query_proj+out_proj"
    assert [(one.workload.split("batch=")[1], one.plan) for one in found] == [
        ("8,seq=64", "fsdp=8"), ("16,seq=64", "fsdp=8"), ("8,seq=64", saved), ("16,seq=64", saved)]
    assert len(swept(points, "remat=none,batch=8|16")) == 2  # what became equal comes once
    changed = replaced(POINT, "model=decoder-tiny,steps=7,topology=v5e-8,lr=0.5")
    assert changed.workload == "model=decoder-tiny,optimizer=adamw,batch=8,seq=64" and changed.topology == "v5e-8"
    assert changed.settings == {"steps": 7, "lr": 0.5} and changed.plan == "fsdp=8"
    with pytest.raises(InputError, match="steps=many: expected a whole number"):
        replaced(POINT, "steps=many")


def test_a_point_is_spelled_in_one_way():
    other = experiment.point(model="gpt2,layers=2", batch="8", seq="64", topology="cpu:8", plan="remat=none,fsdp=8",
                             settings={"lr": 0.1, "steps": 3})
    assert other.key("e", {}) == POINT.key("e", {})
    assert [one.seed for one in with_seeds([POINT, POINT], [3, 4])] == [3, 4]


def test_the_command_itself_exits_with_the_status(fake, tmp_path):
    code = f"import sys, {NAME} as m; from jaxmem import experiment; sys.exit(experiment.main(m.EXPERIMENT, sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, f"--out={tmp_path / 'out'}"], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "modules"), str(SOURCE.parent.parent.parent)])})
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "out" / "records.jsonl")) == 1


def test_models_of_images_have_their_own_sequence_length():
    images = experiment.point(model="vit-tiny", batch=8, seq="", topology="cpu:1")
    text = experiment.point(model="decoder-tiny", batch=8, seq=64, topology="cpu:1")
    assert "batch=8,seq=16" in images.workload
    assert experiment.replaced(images, "model=mlp").workload.endswith("seq=1")
    assert experiment.replaced(text, "model=vit-tiny").workload.endswith("seq=16")
    assert experiment.replaced(images, "model=decoder-tiny").workload.endswith("seq=128")
    assert experiment.replaced(text, "model=gpt2").workload.endswith("seq=64")
    assert experiment.replaced(text, "seq=32,model=gpt2").workload.endswith("seq=32")
    with pytest.raises(InputError, match="seq"):
        experiment.point(model="mlp", batch=8, seq=128, topology="cpu:1")

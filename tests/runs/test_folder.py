"""A run's folder: made once, held by one, resumed by the same command."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxmem.runs.folder import Held, Lines, Lock, drop_after, open_folder, read_lines
from jaxmem.spec import InputError

CONFIG = {"workload": "w", "topology": "cpu:8", "plan": "fsdp=8", "lr": 0.1, "keep": "last=2"}


def test_made_and_resumed(tmp_path):
    made = open_folder(tmp_path / "r", CONFIG, {"jax": "1"}, elastic=False)
    assert made.attempt == 0
    (made.path / "logs" / "events.jsonl").write_text('{"kind": "start"}\n{"kind": "end"}\n{"kind": "start"}\n')
    again = open_folder(tmp_path / "r", CONFIG | {"keep": "last=5"}, {"jax": "2"}, elastic=False)
    assert again.run_id == made.run_id and again.attempt == 2
    assert json.loads((made.path / "versions.json").read_text()) == {"jax": "2"}


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    open_folder(tmp_path, CONFIG, {}, elastic=False)
    started(tmp_path)
    with pytest.raises(InputError, match=r"lr: was 0\.1, now 0\.2"):
        open_folder(tmp_path, CONFIG | {"lr": 0.2}, {}, elastic=False)
    with pytest.raises(InputError, match="--elastic"):
        open_folder(tmp_path, CONFIG | {"topology": "cpu:4"}, {}, elastic=False)
    open_folder(tmp_path, CONFIG | {"topology": "cpu:4", "plan": "fsdp=4"}, {}, elastic=True)


def started(path):
    (path / "logs" / "events.jsonl").write_text('{"kind": "start"}\n')


def test_a_command_that_was_refused_binds_nobody(tmp_path):
    open_folder(tmp_path, CONFIG, {}, elastic=False)
    assert json.loads((open_folder(tmp_path, CONFIG | {"lr": 0.2}, {}, elastic=False).path / "config.json").read_text())["lr"] == 0.2
    started(tmp_path)
    with pytest.raises(InputError):
        open_folder(tmp_path, CONFIG, {}, elastic=False)


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        open_folder(tmp_path, CONFIG, {}, elastic=False)
    assert not (tmp_path / "config.json").exists()


def test_one_holder_and_a_stale_lock(tmp_path):
    code = ("import pathlib, sys, time; from jaxmem.runs.folder import Lock; lock = Lock(pathlib.Path(sys.argv[1])); "
            "print('held', flush=True); time.sleep(60)")
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(Held, match=f"process {other.pid} on "):
        Lock(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdout.close()
    Lock(tmp_path).release()


def test_lines_past_a_step_are_dropped_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "train", "step": i, "step_s": 0.5, "time": 100.0 + i} for i in range(1, 8)] + [{"kind": "eval", "step": 7}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    assert drop_after(path, 4) == {"from": 5, "to": 7, "steps": 3, "seconds": 1.5, "last_time": 107.0}
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]
    assert path.read_bytes().endswith(b"}\n")
    assert drop_after(path, 4) is None


def test_lines_wait_for_room(tmp_path, monkeypatch):
    import os
    lines = Lines(tmp_path / "m")
    assert lines.write({"a": 1})
    real = os.write

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "write", full)
    assert not lines.write({"a": 2})
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
    assert not lines.write({"a": 3})
    monkeypatch.setattr(os, "write", real)
    assert lines.write({"a": 4})
    lines.close()
    assert [line["a"] for line in read_lines(tmp_path / "m")] == [1, 2, 3, 4]


def test_a_torn_line_stays_one_bad_line(tmp_path):
    (tmp_path / "m").write_text('{"a": 1}\n{"a":')
    lines = Lines(tmp_path / "m")
    lines.write({"a": 2})
    lines.close()
    assert [line["a"] for line in read_lines(tmp_path / "m")] == [1, 2]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", pathlib.Path("/proc/nothing")):
        with pytest.raises(InputError, match="--out="):
            Lock(path)


def test_what_a_kill_leaves_of_a_start_is_no_obstacle(tmp_path):
    for name in ("config.json.new", "versions.json.new", "lock"):
        (tmp_path / name).write_text("{")
    (tmp_path / "logs").mkdir()
    assert open_folder(tmp_path, CONFIG, {}, elastic=False).attempt == 0

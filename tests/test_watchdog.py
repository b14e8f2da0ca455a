"""The watchdog against real processes that hang in every way: who is named, whose stacks are there, and that all of them end."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from jaxmem import heartbeat, watchdog
from jaxmem.heartbeat import Heartbeat, Peers, dead, missing
from jaxmem.spec import InputError
from jaxmem.watchdog import Watchdog

# One of three processes that wait for each other every step, as in a collective. Process 1 gets stuck at step 25, after a second or two.
MEMBER = textwrap.dedent("""
    import ctypes, os, pathlib, signal, subprocess, sys, time
    from jaxmem.watchdog import Watchdog

    folder, how = pathlib.Path(sys.argv[1]), sys.argv[4]
    process, processes, timeout_s = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[5])

    def wait_for_all(step):
        (folder / f"{step}.{process}").touch()
        while not all((folder / f"{step}.{k}").exists() for k in range(processes)):
            time.sleep(0.01)
        if step > 1 and process == 0:
            for k in range(processes):
                (folder / f"{step - 1}.{k}").unlink()

    def sleeps_in_the_data_loader():
        time.sleep(600)

    def holds_the_interpreters_lock():
        ctypes.PyDLL(None).sleep(600)

    def stopped():
        os.kill(0, signal.SIGSTOP)  # its whole group
        time.sleep(600)

    def killed():
        os.kill(os.getpid(), signal.SIGKILL)

    def suspended_for_a_while():
        subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.7)  # longer than its watchdog needs to look

    def frozen_for_a_while():
        subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {guard._child.pid}; sleep 0.5; kill -CONT {os.getpid()}"],
                         start_new_session=True)
        os.kill(guard._child.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def fails_when_a_peer_is_gone():
        while '"expired": true' not in (folder / "logs" / "heartbeat.1.json").read_text():
            time.sleep(0.02)
        raise RuntimeError("connection reset by peer")

    if how == "freeze":
        processes = 2  # the other is a part of the story only
    with Watchdog(folder, process=process, processes=processes, timeout_s=timeout_s, attempt=3) as guard:
        if how == "freeze":
            processes = 1
        if how == "lock" and processes == 1:
            holds_the_interpreters_lock()  # before its thread has looked once
        with guard.allow(60, "start"):
            wait_for_all(1)
        for step in range(2, 35):
            guard.beat(step, "data")
            if step == 25 and how == "nobody":
                guard.beat(step, "step")
                wait_for_all(1000 + process)  # each for what no other gives
            elif step == 25 and process == min(1, processes - 1):
                {"sleep": sleeps_in_the_data_loader, "lock": holds_the_interpreters_lock, "stop": stopped, "kill": killed,
                 "reset": sleeps_in_the_data_loader, "suspend": suspended_for_a_while,
                 "freeze": frozen_for_a_while, "none": lambda: None}[how]()
            elif step == 25 and how == "reset":
                guard.beat(step, "step")
                fails_when_a_peer_is_gone()
            guard.beat(step, "step")
            time.sleep(0.04)
            wait_for_all(step)
            guard.beat(step, "metrics")
    print("through")
""")
CASES = {"sleep": 3, "lock": 3, "stop": 3, "kill": 3, "nobody": 3, "reset": 3, "lock alone": 1, "suspend alone": 1, "freeze alone": 1,
         "none": 2}


@dataclasses.dataclass(frozen=True)
class Ended:
    """How each process of a case ended, with what it wrote."""

    folder: pathlib.Path
    status: list[int]
    out: list[str]
    err: list[str]

    def stacks(self, process: int) -> str:
        return (self.folder / "logs" / f"stacks.{process}.txt").read_text()

    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "logs" / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory, repository) -> Iterator[dict[str, tuple[pathlib.Path, list[subprocess.Popen]]]]:
    """All cases at once, before the first test: they do nothing but wait."""
    script = tmp_path_factory.mktemp("member") / "member.py"
    script.write_text(MEMBER)
    started = {}
    for case, processes in CASES.items():
        folder = tmp_path_factory.mktemp("run")
        started[case] = folder, [subprocess.Popen(
            [sys.executable, script, str(folder), str(k), str(processes), case.split()[0],
             "3" if "alone" in case else "60" if case == "reset" and k != 1 else "4"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(repository)}, cwd=folder,
            start_new_session=True) for k in range(processes)]
    yield started
    for _, members in started.values():
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGKILL)
            member.wait()
            for pipe in (member.stdout, member.stderr):
                pipe.close()


@pytest.fixture(scope="module")
def ended(started) -> dict[str, Ended]:
    found = {}
    for case, (folder, members) in started.items():
        told = [member.communicate(timeout=60) for member in members]
        found[case] = Ended(folder, [member.returncode for member in members], [out for out, _ in told], [err for _, err in told])
    return found


# ---------------------------------------------------------------- in this process

def test_on_expire_is_called_instead_of_ending_and_close_leaves_nothing(tmp_path, capfd):
    before = threading.enumerate()
    found: list[watchdog.Expiry] = []
    begun = threading.Event()

    def on_expire(expiry):
        begun.set()
        threading.Event().wait(0.3)
        found.append(expiry)

    with Watchdog(tmp_path, process=0, processes=2, timeout_s=1.0, on_expire=on_expire) as w:
        w.beat(7, "eval")
        child = w._child
        assert begun.wait(60)
    assert [(e.step, e.phase, e.missing) for e in found] == [(7, "eval", (1,))]
    assert found[0].line + "\n" == capfd.readouterr().err
    assert "process 1 gave no sign of life" in found[0].line
    assert "test_on_expire_is_called" in (tmp_path / "logs" / "stacks.0.txt").read_text()
    assert threading.enumerate() == before and child.poll() is not None and child.stdin.closed


def test_time_is_limited_by_what_is_allowed(tmp_path):
    found: list[watchdog.Expiry] = []
    done = threading.Event()
    with Watchdog(tmp_path, process=0, processes=1, timeout_s=1.0, on_expire=lambda e: (found.append(e), done.set())) as w:
        with w.allow(3600, "compile"), w.pause():
            assert not done.wait(3)
        assert not found
        assert done.wait(60)
    assert (found[0].phase, found[0].missing) == ("compile", (0,))


def test_a_beat_is_progress(tmp_path):
    found: list[watchdog.Expiry] = []
    with Watchdog(tmp_path, process=0, processes=1, timeout_s=2.0, on_expire=found.append) as w:
        for _ in range(15):
            w.beat(1, "data")
            threading.Event().wait(0.2)
    assert not found
    told = json.loads((tmp_path / "logs" / "heartbeat.0.json").read_text())
    assert {"process": 0, "pid": os.getpid(), "step": 1, "phase": "data", "attempt": 0}.items() <= told.items()


def test_an_ending_peer_is_followed_before_the_own_limit(tmp_path):
    found: list[watchdog.Expiry] = []
    done = threading.Event()
    with Watchdog(tmp_path, process=0, processes=2, timeout_s=4.0, on_expire=lambda e: (found.append(e), done.set())) as w:
        w.beat(6, "step")
        heartbeat.write(tmp_path, at(1, 5, expired=True))
        assert done.wait(60)
    assert "no progress for 2 s" in found[0].line or "no progress for 3 s" in found[0].line
    assert found[0].missing == (1,)


def test_wrong_use_is_refused(tmp_path):
    with pytest.raises(InputError, match="-1 s is no time limit; give more than 0 s"):
        Watchdog(tmp_path, process=0, processes=1, timeout_s=-1)
    with Watchdog(tmp_path, process=0, processes=1, timeout_s=60) as w:
        with pytest.raises(ValueError, match="unknown phase 'metric'; did you mean metrics"):
            w.beat(1, "metric")
        w.close()  # and once more by the context


# ---------------------------------------------------------------- real processes

@pytest.mark.parametrize("case, status, function", [
    ("sleep", 76, "sleeps_in_the_data_loader"),
    ("lock", -signal.SIGKILL, "holds_the_interpreters_lock"),
    ("stop", -signal.SIGKILL, "stopped"),
    ("kill", -signal.SIGKILL, None),
    ("reset", 76, "sleeps_in_the_data_loader"),
])
def test_the_others_name_the_stuck_process_and_end(ended, case, status, function):
    found = ended[case]
    assert found.status == [76, status, 76], found.err
    for survivor in (0, 2):
        (line,) = [text for text in found.err[survivor].splitlines() if text.startswith("watchdog:")]
        what = "RuntimeError while a peer is being ended" if case == "reset" else "no progress for [45] s"
        assert re.match(rf"watchdog: process {survivor}: {what} at step 25 \(step\); process 1 \(", line)
        assert line.endswith("; ending with status 76")
        assert f"stacks in {found.folder}/logs/stacks.{survivor}.txt" in line
        assert "fails_when_a_peer_is_gone" if case == "reset" else "wait_for_all" in found.stacks(survivor)
        assert f"attempt 3, process {survivor}" in found.stacks(survivor)
    if function:
        assert f" in {function}\n" in found.stacks(1)
    events = [event for event in found.events() if event["kind"] == "watchdog"]
    assert sorted(event["process"] for event in events) == ([0, 2] if case == "kill" else [0, 1, 2])
    assert all(event["missing"] == [1] and event["attempt"] == 3 for event in events)
    assert [event["status"] for event in found.events() if event["kind"] == "end"] == ["watchdog"]


def test_a_living_process_is_behind_and_a_silent_one_went_silent(ended):
    name = f"process 1 ({os.uname().nodename}, pid "
    assert name in ended["sleep"].err[0] and ") has been at step 25 (data) since 2" in ended["sleep"].err[0]
    for case in ("lock", "stop", "kill"):
        assert name in ended[case].err[2] and ") went silent at step " in ended[case].err[2]
    assert ", this one) has been at step 25 (data)" in ended["sleep"].err[1]


def test_the_child_speaks_for_a_process_that_cannot(ended):
    for case, process in (("lock", 1), ("stop", 1), ("lock alone", 0)):
        assert f"watchdog: process {process} (pid " in ended[case].err[process]
        assert "stopped answering at step" in ended[case].err[process]
        assert f"attempt 3, process {process} (pid " in ended[case].stacks(process)
    assert ended["lock alone"].status == [-signal.SIGKILL]
    assert "holds_the_interpreters_lock" in ended["lock alone"].stacks(0)
    (event,) = ended["lock alone"].events()
    assert (event["kind"], event["process"], event["missing"], event["attempt"]) == ("watchdog", 0, [0], 3)


def test_when_all_wait_for_each_other_nobody_is_blamed(ended):
    assert ended["nobody"].status == [76, 76, 76]
    for err in ended["nobody"].err:
        assert "all 3 processes are there, so none of them is behind" in err
    assert all(event["missing"] == [] for event in ended["nobody"].events() if event["kind"] == "watchdog")


@pytest.mark.parametrize("case", ["suspend alone", "freeze alone"])
def test_a_run_that_was_suspended_goes_on(ended, case):
    """For longer than its limit and its child's; frozen is with its child."""
    assert (ended[case].status, ended[case].out) == ([0], ["through\n"]), ended[case].err
    assert "watchdog" not in ended[case].err[0]


def test_a_run_that_gets_on_is_left_alone(ended):
    assert (ended["none"].status, ended["none"].out, ended["none"].err) == ([0, 0], ["through\n"] * 2, ["", ""])
    left = {path.name for path in (ended["none"].folder / "logs").iterdir()}
    assert left == {"heartbeat.0.json", "heartbeat.1.json"}  # empty stacks are taken away


# ---------------------------------------------------------------- who is missing

def at(process: int, step: int, phase: heartbeat.Phase = "step", *, restores: int = 0, time: float = 0.0, expired: bool = False,
       attempt: int = 0) -> Heartbeat:
    return Heartbeat(process=process, pid=100 + process, host="h", attempt=attempt, restores=restores, step=step, phase=phase, since=0.0,
                     time=time, expired=expired)


def of(*beats: Heartbeat | None) -> dict[int, Heartbeat | None]:
    return dict(enumerate(beats))


@pytest.mark.parametrize("seen, silent, expected", [
    (of(at(0, 12), at(1, 11), at(2, 12)), set(), [1]),
    (of(at(0, 12), at(1, 12, "data"), at(2, 12, "metrics")), set(), [1]),  # at one step the earlier phase is behind
    (of(at(0, 12), at(1, 12), at(2, 12)), set(), []),
    (of(at(0, 13), at(1, 14), at(2, 15)), {1}, [1]),  # 0 is only held up by 1
    (of(at(0, 13), at(1, 14), None), set(), [2]),
    (of(at(0, 13), at(1, 14), None), {1, 2}, [1, 2]),
    (of(at(0, 12), at(1, 11, expired=True), at(2, 12)), {1}, [1]),  # it has left by itself, and was behind
    (of(at(0, 12), at(1, 11), at(2, 12, expired=True)), {2}, [1]),  # left by itself too, but was not
    (of(at(0, 20, "end"), at(1, 20, "drain"), at(2, 20, "end")), {0, 2}, [1]),  # being through is no death
    (of(at(0, 5, restores=1), at(1, 40), at(2, 6, restores=1)), set(), [1]),  # the others have rolled back
    (of(at(0, 3)), set(), [0]),
])
def test_who_is_missing(seen, silent, expected):
    assert missing(seen, silent) == expected
    assert set(dead(seen, silent)) <= silent | {k for k, beat in seen.items() if beat is None}


def test_what_lay_there_before_is_nobodys_sign_of_life(tmp_path):
    (tmp_path / "logs").mkdir()
    for process in range(3):
        heartbeat.write(tmp_path, at(process, 30, expired=True))  # of an earlier try that counts as the same attempt
    peers = Peers(tmp_path, processes=4, attempt=0)
    peers.look(10.0)
    assert peers.seen() == of(None, None, None, None)
    heartbeat.write(tmp_path, at(0, 2, time=-1e9))  # clocks of hosts are never compared
    heartbeat.write(tmp_path, at(1, 2, attempt=1))
    heartbeat.path_of(tmp_path, 2).write_text('{"process": 2, "st')
    peers.look(11.0)
    assert peers.seen() == of(at(0, 2, time=-1e9), None, None, None)
    assert peers.silent(12.9, 2.0) == {3} and peers.silent(13.0, 2.0) == {0, 1, 2, 3}
    heartbeat.write(tmp_path, at(0, 2, time=-1e9 + 1))
    peers.look(13.0)
    heartbeat.path_of(tmp_path, 0).unlink()  # cannot be read just now: what was seen stays
    peers.look(14.0)
    assert peers.silent(14.0, 2.0) == {1, 2, 3}
    assert peers.seen()[0] == at(0, 2, time=-1e9 + 1)


def test_a_restore_is_counted_where_it_begins(tmp_path):
    with Watchdog(tmp_path, process=0, processes=1, timeout_s=60) as w:
        for step, phase in ((0, "restore"), (0, "restore"), (1, "data"), (2, "step"), (2, "restore"), (1, "data")):
            w.beat(step, phase)
        assert (w._heartbeat().restores, w._heartbeat().place) == (2, (2, 1, heartbeat.PHASES.index("data")))

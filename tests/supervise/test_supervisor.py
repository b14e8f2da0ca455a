"""Restarts, statuses, signals and logs, with processes that do as they are told in place of training."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from jaxmem.spec import InputError
from jaxmem.supervise.roster import Rejoin, Roster
from jaxmem.supervise.supervisor import Layout, Patience, free_port, supervise

# What a process does, word by word: exit:N, kill:SIGNAL, wait (until SIGTERM, then 75), stubborn (not even then), until:PATH (is there),
# pid:PATH (writes its number there), outlive:PATH (the process of that number), child:PATH (starts one, writes its number there),
# say:TEXT, err:TEXT, touch:PATH, event:PATH=JSON.
MEMBER = """
import os, signal, sys, time
for word in sys.argv[1:]:
    name, _, value = word.partition(":")
    if name == "exit":
        sys.stdout.flush()
        os._exit(int(value))
    elif name == "kill":
        os.kill(os.getpid(), int(value))
    elif name == "wait":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # one that came too early comes now
        print("waiting", flush=True)
        time.sleep(60)
    elif name == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
        print("ready", flush=True)
        for _ in range(600):
            time.sleep(0.1)
    elif name == "pid":
        with open(value + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(value + ".part", value)
    elif name == "outlive":
        while not os.path.exists(value):
            time.sleep(0.01)
        with open(value) as file:
            stat = "/proc/" + file.read() + "/stat"
        try:
            while open(stat).read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
        except OSError:
            pass
    elif name == "until":
        while not os.path.exists(value):
            time.sleep(0.01)
    elif name == "say":
        os.write(1, value.encode())
    elif name == "err":
        os.write(2, value.encode())
    elif name == "touch":
        open(value, "w").close()
    elif name == "child":
        import subprocess
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
        with open(value + ".part", "w") as file:
            file.write(str(child.pid))
        os.rename(value + ".part", value)
    elif name == "event":
        with open(value.partition("=")[0], "a") as file:
            file.write(value.partition("=")[2] + "\\n")
"""
QUICK = Patience(max_restarts=3, backoff_s=0.01, grace_s=0.2)
Script = list[list[list[str]]]  # what to do, by attempt and process


class Trial:
    """One supervised run of members that follow `script`; its last attempt is repeated."""

    def __init__(self, folder: pathlib.Path, script: Script, *, roster: Roster | None = None, patience: Patience = QUICK,
                 least: int = 1) -> None:
        self.folder, self.script, self.layouts, self.least = folder, script, [], least
        self.roster = roster or Roster(processes=len(script[0]), lost_after=None)
        self.said: list[str] = []
        self.status = supervise(self.command_of, self.layout_of, self.roster, folder, patience, say=self.said.append)

    def layout_of(self, present: tuple[int, ...]) -> Layout:
        if len(present) < self.least:
            raise InputError(f"{len(present)} are too few")
        self.layouts.append(present)
        return Layout(present=present, devices=2 * len(present), text="as told", coordinator=f"127.0.0.1:{free_port()}")

    def command_of(self, number: int, layout: Layout) -> list[str]:
        attempt = self.script[min(len(self.layouts), len(self.script)) - 1]
        return [sys.executable, "-S", "-c", MEMBER, *attempt[layout.present[number]]]

    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "logs" / "events.jsonl").read_text().splitlines()]

    def log(self, slot: int) -> str:
        return (self.folder / "logs" / f"process.{slot}.log").read_text()


def test_done(tmp_path, capfdbinary):
    trial = Trial(tmp_path / "run", [[["say:first\nsecond", "err:10%\r20%\r", "exit:0"], ["say:other\n", "exit:0"]]])
    assert (trial.status, trial.layouts) == (0, [(0, 1)])
    out, err = capfdbinary.readouterr()
    assert out == b"first\nsecond\n"  # process 0's alone
    assert err == b"10%\r20%\r"
    assert [line.partition("] ")[2] for line in trial.log(0).splitlines() if "%" not in line] == ["first", "second"]
    assert "[0.0 " in trial.log(0) and "20%" in trial.log(0) and "10%" not in trial.log(0)
    assert trial.log(1).startswith("[0.1 ") and trial.log(1).endswith("] other\n")


def test_gloo_is_not_shown_but_logged(tmp_path, capfdbinary):
    noise = "[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n"
    trial = Trial(tmp_path, [[[f"err:{noise}50%\r", "say:state\n", "exit:0"]]])
    assert capfdbinary.readouterr() == (b"state\n", b"50%\r")
    assert "Gloo" in trial.log(0)


@pytest.mark.parametrize("failure", ["kill:9", "exit:1", "exit:70", "exit:76", "kill:6"])
def test_a_failure_starts_all_again(tmp_path, failure):
    trial = Trial(tmp_path, [[["wait"], [failure], ["stubborn"]], [["exit:0"]] * 3])
    assert (trial.status, trial.layouts) == (0, [(0, 1, 2)] * 2)
    events = trial.events()
    assert {(e["kind"], e["processes"], e["devices"]) for e in events} == {("supervisor", 3, 6)}
    words = {"kill:9": "process 1 was killed by SIGKILL", "kill:6": "process 1 was killed by SIGABRT",
             "exit:1": "process 1 ended with status 1", "exit:70": "process 1 ended with status 70",
             "exit:76": "the watchdog ended the run"}
    assert [e["text"] for e in events][:1] == ["start 1: as told"]
    assert events[1]["text"].startswith(words[failure])
    assert [e["text"] for e in events][2:] == ["start 2: as told", "done"]


@pytest.mark.parametrize(("first", "status"), [("exit:2", 2), ("exit:77", 77), ("exit:75", 75), ("exit:0", 0)])
def test_what_is_passed_on_and_not_tried_again(tmp_path, first, status):
    trial = Trial(tmp_path, [[[first], [first]]])
    assert (trial.status, len(trial.layouts)) == (status, 1)


def test_the_others_end_when_one_refuses_its_input(tmp_path):
    trial = Trial(tmp_path, [[["stubborn"], ["exit:2"], ["wait"]]])
    assert (trial.status, len(trial.layouts)) == (2, 1)


@pytest.mark.parametrize("status", [0, 75])
def test_what_process_zero_says_of_the_run_holds(tmp_path, status):
    trial = Trial(tmp_path, [[[f"pid:{tmp_path / 'zero'}", f"exit:{status}"], [f"outlive:{tmp_path / 'zero'}", "kill:6"], ["stubborn"]]],
                  patience=Patience(max_restarts=1, backoff_s=0.01, grace_s=0.2, poll_s=0.5))  # both within one look
    assert (trial.status, len(trial.layouts)) == (status, 1)


def test_restarts_are_bounded_and_the_last_failure_is_passed_on(tmp_path):
    trial = Trial(tmp_path / "a", [[["exit:70"]]])
    assert (trial.status, len(trial.layouts)) == (70, 4)
    assert "gave up after 3 restarts" in trial.events()[-1]["text"]
    assert Trial(tmp_path / "b", [[["kill:9"]]], patience=Patience(max_restarts=0)).status == 128 + 9


def test_back_off_doubles_until_a_step_is_taken(tmp_path, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("jaxmem.supervise.supervisor.Stop.sleep", lambda self, seconds: not slept.append(seconds))
    tmp_path.joinpath("metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (1, 1))
    step = f"touch:{tmp_path / 'metrics.jsonl'}"
    script = [[["exit:1"]]] * 4 + [[[step, "exit:1"]], [["exit:1"]], [["exit:0"]]]
    Trial(tmp_path, script, patience=Patience(max_restarts=9, backoff_s=1.0, backoff_most_s=5.0))
    assert slept == [1.0, 2.0, 4.0, 5.0, 1.0, 1.0]


def test_attempts_are_counted_as_the_run_counts_them(tmp_path):
    start = f"event:{tmp_path}/logs/events.jsonl=" + json.dumps({"kind": "start", "attempt": 0})
    trial = Trial(tmp_path, [[[start, "exit:1"]], [["exit:1"]], [["say:x\n", "exit:0"]]])
    attempts = [(e["attempt"], e["text"]) for e in trial.events() if e["kind"] == "supervisor" and e["text"].startswith("start")]
    assert attempts == [(0, "start 1: as told"), (1, "start 2: as told"), (1, "start 3: as told")]
    assert "[1.0 " in trial.log(0)


# ---- losing processes ----

def test_a_lost_process_is_left_out(tmp_path):
    roster = Roster(processes=3, lost_after=2)
    script = [[["wait"], ["kill:9"], ["wait"]]] * 2 + [[["exit:0"]] * 3]
    trial = Trial(tmp_path, script, roster=roster)
    assert (trial.status, trial.layouts) == (0, [(0, 1, 2), (0, 1, 2), (0, 2)])
    assert "process 1 is counted as lost; left: 0, 2" in trial.said
    assert [e["processes"] for e in trial.events() if e["text"].startswith("start")] == [3, 3, 2]


def test_the_watchdog_says_who_is_lost(tmp_path):
    missing = f"event:{tmp_path}/logs/events.jsonl=" + json.dumps({"kind": "watchdog", "time": time.time() + 60, "missing": [2]})
    script = [[[missing, f"touch:{tmp_path / 'written'}", "exit:76"], [f"until:{tmp_path / 'written'}", "exit:76"], ["stubborn"]],
              [["exit:0"]] * 3]
    trial = Trial(tmp_path, script, roster=Roster(processes=3, lost_after=1))
    assert trial.layouts == [(0, 1, 2), (0, 1)]
    assert "process 2 did not answer" in trial.said[1]


def test_a_lost_process_comes_back_through_a_save(tmp_path):
    roster = Roster(processes=2, lost_after=1, rejoin=Rejoin(seconds=0.5))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # processes inherit it, and hear the signal when they listen
    try:
        trial = Trial(tmp_path, [[["wait"], ["kill:9"]], [["wait"], ["exit:1"]], [["exit:0"]] * 2], roster=roster)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert (trial.status, trial.layouts) == (0, [(0, 1), (0,), (0, 1)])
    assert "saved and stopped so that lost processes come back (status 75)" in trial.said
    assert trial.said[-2:] == ["start 3: as told; back: 1", "done"]


def test_a_run_that_is_done_before_the_lost_are_back(tmp_path):
    roster = Roster(processes=2, lost_after=1, rejoin=Rejoin(seconds=30))
    trial = Trial(tmp_path, [[["wait"], ["kill:9"]], [["exit:0"], []]], roster=roster)
    assert (trial.status, trial.layouts) == (0, [(0, 1), (0,)])


def test_too_few_wait_for_the_lost_or_end(tmp_path):
    script = [[["wait"], ["kill:9"]], [["exit:0"]] * 2]
    roster = Roster(processes=2, lost_after=1, rejoin=Rejoin(seconds=0.3))
    assert Trial(tmp_path / "a", script, roster=roster, least=2).layouts == [(0, 1), (0, 1)]
    roster = Roster(processes=2, lost_after=1, rejoin=Rejoin(attempts=1))
    assert Trial(tmp_path / "b", script, roster=roster, least=2).layouts == [(0, 1), (0, 1)]
    trial = Trial(tmp_path / "c", script, roster=Roster(processes=2, lost_after=1), least=2)
    assert (trial.status, trial.layouts) == (128 + 9, [(0, 1)])
    assert trial.said[-1] == "too few processes are left (0): 1 are too few"


# ---- signals ----

def when(*then: tuple[Callable[[], bool], Callable[[], None]]) -> threading.Thread:
    """Do one action after the other, each once its condition holds."""

    def watch() -> None:
        for condition, action in then:
            deadline = time.monotonic() + 20
            while not condition() and time.monotonic() < deadline:
                time.sleep(0.02)
            action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def logged(folder: pathlib.Path, slots: int, text: str) -> Callable[[], bool]:
    paths = [folder / "logs" / f"process.{k}.log" for k in range(slots)]
    return lambda: all(p.exists() and text in p.read_text() for p in paths)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_all_to_save_and_is_waited_for(tmp_path, number):
    before = signal.getsignal(number)
    thread = when((logged(tmp_path, 2, "waiting"), lambda: os.kill(os.getpid(), number)))
    trial = Trial(tmp_path, [[["wait"], ["wait"]]], patience=Patience(max_restarts=3))
    thread.join()
    assert (trial.status, len(trial.layouts)) == (75, 1)
    assert trial.said[-1] == "saved and stopped on request (status 75)"
    assert signal.getsignal(number) is before


def test_a_second_signal_kills(tmp_path):
    def ask() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    thread = when((logged(tmp_path, 1, "ready"), ask), (logged(tmp_path, 1, "no"), ask))
    trial = Trial(tmp_path, [[["stubborn"]]])
    thread.join()
    assert (trial.status, len(trial.layouts)) == (128 + 9, 1)


def test_a_signal_between_two_attempts(tmp_path):
    events = tmp_path / "logs" / "events.jsonl"
    thread = when((lambda: events.exists() and "status 1" in events.read_text(), lambda: os.kill(os.getpid(), signal.SIGTERM)))
    trial = Trial(tmp_path, [[["exit:1"]]], patience=Patience(backoff_s=30.0))
    thread.join()
    assert (trial.status, len(trial.layouts)) == (75, 1)


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_what_a_process_started_ends_with_it(tmp_path):
    Trial(tmp_path, [[[f"child:{tmp_path / 'a'}", f"until:{tmp_path / 'b'}", "exit:0"], [f"child:{tmp_path / 'b'}", "stubborn"]]])
    pids = [int((tmp_path / name).read_text()) for name in "ab"]
    try:
        assert gone(pids)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_supervisor(tmp_path, number, repository):
    code = textwrap.dedent(f"""
        import pathlib, sys
        from jaxmem.supervise.roster import Roster
        from jaxmem.supervise.supervisor import Layout, supervise
        member = ("import os, signal, time; signal.signal(15, lambda *_: os._exit(75)); "
                  "print('pid', os.getpid(), flush=True); time.sleep(60)")
        sys.exit(supervise(lambda number, layout: [sys.executable, "-S", "-c", member],
                           lambda present: Layout(present=present, devices=2, text="two"),
                           Roster(processes=2, lost_after=None), pathlib.Path({str(tmp_path)!r})))
    """)
    supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=repository, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        when((logged(tmp_path, 2, "pid"), lambda: None)).join()
        pids = [int((tmp_path / "logs" / f"process.{k}.log").read_text().split()[-1]) for k in (0, 1)]
        assert all(map(alive, pids))
        supervisor.send_signal(number)
        assert supervisor.wait(20) == (75 if number == signal.SIGTERM else -9)
        assert gone(pids)
    finally:
        supervisor.kill()
        supervisor.wait()

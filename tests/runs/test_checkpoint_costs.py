"""What checkpoints and starts cost, of events whose every second is known; and the interval that `jaxmem interval --run` makes of it."""

import json
import pathlib

import pytest
from runs.hand_made import CONFIG, event, phase, start, train

from jaxmem.cli import main
from jaxmem.cost.checkpointing import Costs, expected
from jaxmem.runs.checkpoint_costs import RunCosts, checkpoints, run_costs
from jaxmem.runs.reading import read_run


def saved(step: int, begins: float, *waits: float, committed: float | None = None, attempt: int = 0) -> list[dict]:
    """A checkpoint that begins at `begins`, keeps the main thread for `waits` (0.3 s between them) and is committed at `committed`."""
    events, now = [], begins
    for i, wait in enumerate(waits):
        now += wait
        named = {} if 0 < i < len(waits) - 1 else {"step": step}
        events.append(event("phase", now, attempt, name="checkpoint", seconds=wait) | named)
        now += 0.3
    events.append(event("checkpoint", now - 0.3, attempt, step=step))
    return events + ([event("commit", committed, attempt, step=step, seconds=committed - begins - 0.1)] if committed else [])


def two_attempts() -> list[dict]:
    """Started at 990, first step at 1000; checkpoints of 10 (first), 20 (lazy in form) and 30 (never committed); killed at 1031; started at
    1032, first step at 1040; checkpoints of 30 (first) and of 40, the last step."""
    return [
        phase("startup", 996, 6), phase("compile", 999, 3), start(999),
        *saved(10, 1010, 2.0, committed=1015), *saved(20, 1020, 0.1, 0.2, 0.3, committed=1023), *saved(30, 1030, 0.5),
        event("supervisor", 1031, text="process 0 was killed by SIGALRM"),
        phase("startup", 1036, 4, 1), start(1039, 1, 20),
        *saved(30, 1050, 3.0, committed=1055, attempt=1), *saved(40, 1060, 1.0, committed=1062, attempt=1),
        event("end", 1062, 1, step=40, status="done"),
    ]


def test_stalls_and_commits_are_read_from_the_events():
    found = checkpoints(two_attempts(), steps=40)
    assert found.first_stalls == [2, 3] and found.stalls == pytest.approx([0.6, 0.5])  # step 40, written at once, is none of them
    assert found.first_commits == [5, 5] and found.commits == pytest.approx([3.0])
    assert (found.stall_s, found.first_stall_s, found.commit_s) == pytest.approx((0.55, 1.95, 3.0))
    first = checkpoints(saved(10, 5, 2.0, committed=9), steps=40)
    assert (first.stall_s, first.first_stall_s, first.commit_s) == (2, None, 4)
    assert checkpoints([], steps=40).stall_s is None


def test_waiting_for_the_commit_before_is_no_stall():
    """The second checkpoint begins at 10 and waits for the first until 14, then takes 0.5 s; it is committed at 19."""
    first, second = saved(1, 8, 1.0), saved(2, 10, 4.5, committed=19)
    before = event("commit", 14, step=1, seconds=6)
    found = checkpoints([start(5), *first, before, *second], steps=9)
    assert found.first_stalls == [1.0] and found.stalls == pytest.approx([0.5])
    assert found.first_commits == [6] and found.commits == pytest.approx([5.0])
    # a sync checkpoint's own commit is written before its phase, and is its stall
    sync = [start(5), event("commit", 9.8, step=1, seconds=1.7), *saved(1, 8, 2.0), event("commit", 12.8, step=2, seconds=1.7),
            *saved(2, 11, 2.0)]
    assert checkpoints(sync, steps=9).stalls == [2.0]


def written(folder: pathlib.Path, events: list[dict], lines: list[dict], **config) -> pathlib.Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"steps": 40, "snapshot": "async", "topology": "cpu:8"} | config))
    (folder / "versions.json").write_text("{}")
    for name, rows in (("logs/events.jsonl", events), ("metrics.jsonl", lines)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


LINES = [train(step, 1000.0 + 0.5 * step, step_s=0.5) for step in range(1, 21)]
LINES += [train(step, 1040.0 + 0.5 * (step - 20), step_s=0.5) for step in range(21, 41)]


def test_what_a_run_cost(tmp_path: pathlib.Path):
    found = run_costs(read_run(written(tmp_path / "a", two_attempts(), LINES)))
    # started at 990 and 1032, first steps from 1000 and 1040: 10 and 8 s; 1.95 s more for the first checkpoint
    assert (found.step_s, found.stall_s, found.commit_s, found.start_s) == pytest.approx((0.5, 0.55, 3.0, 9 + 1.95))
    odd = [{"kind": "phase", "time": 1}, {"kind": "commit", "step": "x", "time": 2}, {"kind": "checkpoint"}, {"kind": "phase", "name": 3}]
    assert run_costs(read_run(written(tmp_path / "b", odd, []))) == RunCosts(step_s=None, stall_s=None, commit_s=None, start_s=None)


def test_interval_of_a_run(tmp_path: pathlib.Path, capsys):
    folder = written(tmp_path / "a", two_attempts(), LINES)
    assert main.main(["interval", f"--run={folder}", "--mtbf_hours=0.5", "--restart_s=60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["plan"], found["snapshot"]) == ("decoder-tiny", CONFIG["plan"], "async")
    costs = Costs(stall_s=0.55, commit_s=3.0, restart_s=60 + 10.95)
    best = max(range(1, 1000), key=lambda k: expected(costs, 0.5 * k, 1800.0).goodput)
    one = found["modes"]["async"]
    assert one["steps"] == best and one["account"]["goodput"] == pytest.approx(expected(costs, 0.5 * best, 1800.0).goodput)
    assert found["sources"] == dict.fromkeys(("start_s", "stall_s", "commit_s", "step_s"), "measure")
    assert main.main(["interval", f"--run={folder}", "--mtbf_hours=0.5"]) == 0
    assert "10.9 s from a start to the first step, measured" in capsys.readouterr().out


@pytest.mark.parametrize("more, words", [
    (["--model=gpt2"], "measured its own model: leave --model out"), (["--stall_s=1"], None),
])
def test_flags_beside_a_run(tmp_path: pathlib.Path, capsys, more, words):
    folder = written(tmp_path / "a", two_attempts(), LINES)
    status = main.main(["interval", f"--run={folder}", "--mtbf_hours=1", *more])
    assert status == (2 if words else 0) and (words or "") in capsys.readouterr().err


def test_a_run_without_checkpoints_says_so(tmp_path: pathlib.Path, capsys):
    folder = written(tmp_path / "a", [phase("startup", 996, 6), start(999)], LINES)
    assert main.main(["interval", f"--run={folder}", "--mtbf_hours=1"]) == 2
    assert "it committed no checkpoint before its last" in capsys.readouterr().err
    assert main.main(["interval", f"--run={tmp_path / 'none'}", "--mtbf_hours=1"]) == 2
    assert "no such folder" in capsys.readouterr().err

"""A real run that is killed and started again, what is measured of it, the model replayed by hand, and the pages of records."""

import functools
import json
import math
import pathlib

import pytest

from experiments import checkpoint_intervals as question
from experiments.interrupted_runs import Life, interrupted, life, measured, repeated, replayed
from jaxmem import experiment
from jaxmem.cost.checkpointing import Costs, expected, optimum
from jaxmem.records import record
from jaxmem.spec import InputError
from tests.experiments.given import flags_of

TINY = {"model": "decoder-tiny,layers=1", "batch": 4, "seq": 16, "topology": "cpu:2", "plan": "fsdp=2,step=split"}


flags = functools.partial(flags_of, question.EXPERIMENT)


def test_the_grid_is_modes_by_intervals_by_failure_rates_and_one_run_without():
    points = question.grid(flags())
    assert len(points) == 1 + 3 * 3 * 2 and all(one.alone and "step=split" in one.plan for one in points)
    assert points[0].settings == {"snapshot": "none", "every": 0, "mtbf_s": 0, "steps": 5000} and not points[0].seeded
    assert points[-1].settings == {"snapshot": "lazy", "every": 1000, "mtbf_s": 60, "steps": 5000} and points[-1].seeded
    for wrong, words in (({"every": 0}, "--every=0"), ({"mtbf": "soon"}, "--mtbf=soon"), ({"snapshots": "later"}, "unknown mode 'later'"),
                         ({"every": 5000}, "nearest: 4999")):
        with pytest.raises(InputError, match=words):
            question.grid(flags(**wrong))
    with pytest.raises(InputError, match="need step=split"):
        question.run(experiment.point(**TINY | {"plan": "fsdp=2"}, settings={"snapshot": "lazy", "every": 5, "mtbf_s": 9, "steps": 10}))


# ---------------------------------------------------------------- a run that is killed

def test_a_pulse(tmp_path: pathlib.Path):
    """Killed before step 27, after the checkpoint of step 20: it goes on from 20 or from 10, and ends where the undisturbed run does."""
    whole = question.run(experiment.point(**TINY, settings={"snapshot": "none", "every": 0, "mtbf_s": 0, "steps": 40}))
    arguments = [*(f"--{name}={value}" for name, value in TINY.items()), "--data=synthetic", "--steps=40", "--checkpoint_every=10",
                 "--snapshot=async", "--fault=kill:step=27"]
    run = interrupted(arguments, tmp_path / "run", mtbf_s=math.inf, seed=0)
    assert run.kills == 1 and [len(one.lines) for one in run.lives][0] in (24, 25, 26)  # metrics are looked at two steps late
    restored = run.lives[1].lines[0]["step"] - 1
    assert restored in (10, 20) and run.again == (run.lives[0].lines[-1]["step"] - restored, 0)
    assert [line["step"] for line in run.lines] == list(range(1, 41))
    took = measured(run, 40)
    assert 0 < took.step_s < took.restart_s < run.elapsed_s and 0 < took.stall_s <= took.commit_s < took.restart_s
    found = question.values(run, steps=40, every=10, mtbf_s=30.0)
    assert found["losses_sha256"] == whole.values["losses_sha256"] and found["state_sha256"] == whole.values["state_sha256"]
    assert found["elapsed_s"][0] == run.elapsed_s >= run.account.total_s - 0.1
    parts = [found[name][0] for name in ("goodput", "stalls", "lost", "data_waits", "restarts")]
    assert math.fsum(parts) == pytest.approx(1) and min(parts) > 0
    assert all(0 < found[name][0] < 1 and found[name][1] == "estimate" for name in ("replayed", "expected"))
    records = [record("checkpoint_intervals", experiment.point(**TINY, settings=settings), {"jax": "1"}, status="done", time=0.0,
                      backend="cpu", values=values)
               for settings, values in (({"snapshot": "none", "every": 0, "mtbf_s": 0, "steps": 40}, whole.values),
                                        ({"snapshot": "async", "every": 10, "mtbf_s": 30, "steps": 40}, found))]
    table = question.pages(records)["table.md"]
    line = next(one for one in table.splitlines() if one.startswith("| async | 10 |"))
    assert line.endswith("| nothing |") and f"| {run.again[0]} |" in line


@pytest.mark.long
@pytest.mark.parametrize("snapshot", ["sync", "async", "lazy"])
def test_a_run_that_is_killed_at_random_ends_like_one_that_is_not(tmp_path: pathlib.Path, snapshot):
    argv = [f"--{name}={value}" for name, value in TINY.items()] + [f"--out={tmp_path}", f"--snapshots={snapshot}", "--every=20",
                                                                   "--mtbf=15", "--steps=600"]
    assert experiment.main(question.EXPERIMENT, argv) == 0
    whole, killed = (json.loads(line)["values"] for line in (tmp_path / "records.jsonl").read_text().splitlines())
    assert killed["kills"] >= 1 and whole["kills"] == 0
    assert killed["losses_sha256"] == whole["losses_sha256"] and killed["state_sha256"] == whole["state_sha256"]
    assert killed["again_different"] == 0 and "nothing" in (tmp_path / "table.md").read_text()


# ---------------------------------------------------------------- what is measured

def test_a_life_s_start_and_what_was_done_twice():
    def line(step, time, loss=1.0):
        return {"step": step, "time": time, "loss": loss, "step_s": 0.5}
    one = life(100.0, 101.0, 110.0, [line(1, 99.0), line(4, 106.0), line(5, 106.5), line(6, 107.0), line(7, 107.5)])
    assert (one.lived_s, one.start_s, [of["step"] for of in one.lines]) == (10.0, 5.5, [4, 5, 6, 7])
    assert life(100.0, 101.0, 103.0, []).start_s == math.inf
    again = life(110.0, 110.0, math.inf, [line(6, 120.0), line(7, 121.0, loss=2.0), line(8, 122.0)])
    assert repeated([one, again]) == (2, 1)


def lived(*pairs: tuple[float, float]) -> list[Life]:
    return [Life(lived_s=seconds, start_s=start, lines=()) for seconds, start in pairs]


def test_the_model_replayed_is_what_one_counts_by_hand():
    costs, how = Costs(stall_s=2, commit_s=5, restart_s=0), {"step_s": 1.0, "steps": 30, "every": 10, "first_stall_s": 0.0, "end_s": 3.0}
    # 4 to start, 30 steps, two stalls, 3 at the end
    assert replayed(lived((math.inf, 4)), costs, **how) == 4 + 30 + 2 * 2 + 3
    # killed at 20, in step 15: the checkpoint of step 10 was committed at 19, so 20 steps are left, with one stall
    assert replayed(lived((20, 4), (math.inf, 6)), costs, **how) == 20 + 6 + 20 + 2 + 3
    # killed at 18.5, before that commit: everything again
    assert replayed(lived((18.5, 4), (math.inf, 6)), costs, **how) == 18.5 + 6 + 30 + 4 + 3
    # one that is killed while it starts, one that started and came to nothing
    assert replayed(lived((3, math.inf), (12, 4), (math.inf, 4)), costs, **how) == 3 + 12 + 41
    # a commit of 25 s holds up the next checkpoint from 26 to 39, and that one is not committed when step 30 is done
    slow = Costs(stall_s=2, commit_s=25, restart_s=0)
    assert replayed(lived((math.inf, 4)), slow, **how) == 39 + 2 + 10 + 3
    assert replayed(lived((50, 4), (math.inf, 4)), slow, **how) == 50 + 4 + 20 + 2 + 3


def test_many_replayed_lives_have_the_expected_goodput():
    """The event by event model and the closed form are the same model: a long run through exponential lives."""
    import random

    rng, costs, mtbf_s = random.Random(3), Costs(stall_s=0.5, commit_s=3.0, restart_s=4.0), 25.0
    lives = lived(*((rng.expovariate(1 / mtbf_s), 4.0) for _ in range(60_000)), (math.inf, 4.0))
    steps = 400_000
    seconds = replayed(lives, costs, step_s=1.0, steps=steps, every=8, first_stall_s=0.0, end_s=0.0)
    assert steps / seconds == pytest.approx(expected(costs, 8.0, mtbf_s).goodput, rel=0.01)


# ---------------------------------------------------------------- the pages

def found(snapshot: str, every: int, mtbf_s: int, *, losses: str = "a", seed: int = 0, **values) -> dict:
    point = experiment.point(**TINY, settings={"snapshot": snapshot, "every": every, "mtbf_s": mtbf_s, "steps": 100}, seed=seed)
    measures = {"goodput": 0.5, "step_s": 0.01, "data_s": 0.0, "interval_s": 0.01 * every or None, "stall_s": 0.1,
                "commit_s": 0.4, "restart_s": 5.0,
                "first_stall_s": 1.0, "kills": 3, "again": 7, "again_different": 0, "losses_sha256": losses, "state_sha256": "s",
                "loss_curve": [[0, 1, 6.0, 1.0], [0, 50, 4.0, 2.0], [1, 40, 4.2, 9.0], [1, 100, 2.0, 11.0]]} | values
    return record("checkpoint_intervals", point, {"jax": "1"}, status="done", time=0.0, backend="cpu",
                  values={name: (value, "measure") for name, value in measures.items()})


def test_the_pages_say_which_runs_differ_and_give_the_best_interval():
    records = [found("none", 0, 0, stall_s=None, commit_s=None, kills=0), found("async", 10, 30), found("async", 50, 30, losses="b"),
               found("lazy", 10, 30, again_different=1), found("lazy", 10, 30, seed=1, goodput=0.6)]
    pages = question.pages(records)
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]): line.rsplit("|", 2)[1].strip()
            for line in pages["table.md"].splitlines() if line.startswith(("| async", "| lazy"))}
    assert "| lazy | 10 | 2 | " in pages["table.md"] and " | 55 (50 to 60) % | " in pages["table.md"]  # two seeds make no interval
    assert "| async | 10 | 1 | " in pages["table.md"] and "Of two seeds" in pages["table.md"]
    assert rows["async", "10"] == "nothing" and rows["async", "50"] == rows["lazy", "10"] == "YES"
    costs = question.pooled(question.in_order(question.page.lines(records[1:])))["async"]
    assert costs == Costs(stall_s=0.1, commit_s=0.4, restart_s=6.0)  # with what the first checkpoint of an attempt takes longer
    steps = round(optimum(costs, 3600.0) / 0.01)
    assert f"| {steps:,} |" in pages["table.md"]
    for name in ("checkpoint.svg", "checkpoint-losses.svg", "index.html"):
        assert "nan" not in pages[name].lower().replace("nano", "") and "<svg" in pages[name]
    assert pages["checkpoint.svg"].count("<title>") == 3 and "3 kills" in pages["checkpoint-losses.svg"]


def test_pages_of_an_undisturbed_run_alone():
    pages = question.pages([found("none", 0, 0, stall_s=None, commit_s=None)])
    assert "no disturbed run" in pages["checkpoint-losses.svg"] and "The best interval" in pages["table.md"]

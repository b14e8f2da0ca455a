"""`jaxmem train`, killed at random times and started again by the supervisor, and what each part of that cost.

Every attempt gets a time to live from an exponential distribution: a timer that is set before the command replaces its own process, and
whose signal the kernel turns into the end of the process, as SIGKILL would. It runs while the attempt starts, compiles, restores,
steps and writes alike, so failures come at a constant rate whatever the run is doing.
"""

import dataclasses
import hashlib
import math
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxmem.cost.checkpointing import Costs
from jaxmem.runs.checkpoint_costs import checkpoints
from jaxmem.runs.folder import read_lines
from jaxmem.runs.goodput import Goodput, goodput
from jaxmem.runs.reading import read_run
from jaxmem.supervise.roster import Roster
from jaxmem.supervise.supervisor import Layout, Patience, supervise

MOST_RESTARTS = 300
FIRST_STEPS = 3  # of an attempt, which are slower and count as part of the restart
WITH_A_TIMER = ("import os, signal, sys; signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1])); "
                "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])")
Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """One attempt, from the end of the one before. `lived_s`: to its kill, infinite for the last one; `start_s`: to its first step,
    infinite where it took none; `lines`: its training lines, also those that a later restore dropped."""

    lived_s: float
    start_s: float
    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A run that is done. `elapsed_s`: from the first start to the end, also of attempts that were killed before they left a word, which
    the account cannot see. `again`: steps that were done more than once, and how many of them with another loss."""

    began: float
    elapsed_s: float
    lives: tuple[Life, ...]
    events: Sequence[Line]
    lines: Sequence[Line]
    account: Goodput
    state_sha256: str | None
    again: tuple[int, int]

    @property
    def kills(self) -> int:
        return len(self.lives) - 1

    def losses_sha256(self) -> str:
        """Of the loss of every step that counts, to the bit."""
        return hashlib.sha256(repr([(line["step"], line["loss"]) for line in self.lines]).encode()).hexdigest()

    def curve(self, most: int) -> list[list[float]]:
        """[attempt, step, loss, seconds since the first start] of about `most` of all steps that were done, the ends of attempts among
        them."""
        stride = max(1, sum(len(life.lines) for life in self.lives) // most)
        return [[i, line["step"], line["loss"], line["time"] - self.began] for i, life in enumerate(self.lives)
                for k, line in enumerate(life.lines) if k % stride == 0 or k == len(life.lines) - 1]


def interrupted(arguments: Sequence[str], out: pathlib.Path, *, mtbf_s: float, seed: int) -> Interrupted:
    """Run `jaxmem train` with `arguments` to its end. mtbf_s: mean of the times to live; infinite: nothing is killed.

    Raises RuntimeError where the run does not end well, or after `MOST_RESTARTS`.
    """
    rng = random.Random(seed)
    command = ["-m", "jaxmem", "train", f"--out={out}", "--print_hash", *arguments]
    begins: list[float] = []
    seen: list[list[Line]] = []

    def command_of(number: int, layout: Layout) -> list[str]:
        del number, layout
        seen.append(training_lines(out))  # before the next attempt drops some of them
        begins.append(time.time())
        if math.isinf(mtbf_s):
            return [sys.executable, *command]
        return [sys.executable, "-c", WITH_A_TIMER, repr(rng.expovariate(1 / mtbf_s)), *command]

    layout = Layout(present=(0,), devices=1, text="1 process")
    patience = Patience(max_restarts=MOST_RESTARTS, backoff_s=0.05, backoff_most_s=0.05)
    status = supervise(command_of, lambda present: layout, Roster(processes=1, lost_after=None), out, patience, environ=os.environ)
    if status:
        raise RuntimeError(f"the run ended with status {status} after {len(begins)} starts")
    run = read_run(out)
    seen.append(training_lines(out))
    ends = [event["time"] for event in run.events if event["kind"] == "supervisor" and "was killed" in event["text"]]
    if len(ends) != len(begins) - 1:
        raise RuntimeError(f"{len(begins)} starts and {len(ends)} kills: an attempt ended in another way; see the supervisor's lines")
    lives = tuple(life(since, begin, end, lines)
                  for since, begin, end, lines in zip([begins[0], *ends], begins, [*ends, math.inf], seen[1:], strict=True))
    end = next(event for event in reversed(run.events) if event["kind"] == "end")
    return Interrupted(began=begins[0], elapsed_s=end["time"] - begins[0], lives=lives,
                       events=run.events, lines=seen[-1], account=goodput(run.events, run.metrics),
                       state_sha256=end.get("state_sha256"), again=repeated(lives))


def life(since: float, begin: float, end: float, lines: Iterable[Line]) -> Life:
    """The attempt that began at `begin` after another ended at `since`, from all lines that there were at its end."""
    own = tuple(line for line in lines if line["time"] >= begin)
    usual = statistics.median(line["step_s"] for line in own) if own else math.nan
    start = own[FIRST_STEPS - 1]["time"] - FIRST_STEPS * usual - since if len(own) >= FIRST_STEPS else math.inf
    return Life(lived_s=end - since, start_s=start, lines=own)


def training_lines(out: pathlib.Path) -> list[Line]:
    return [line for line in read_lines(out / "metrics.jsonl") if line.get("kind") == "train"]


def repeated(lives: Iterable[Life]) -> tuple[int, int]:
    """(steps done once more, those of them whose loss was another one than before)."""
    losses: dict[int, float] = {}
    again = different = 0
    for life in lives:
        for line in life.lines:
            if line["step"] in losses:
                again += 1
                different += losses[line["step"]] != line["loss"]
            losses[line["step"]] = line["loss"]
    return again, different


# ---------------------------------------------------------------- what it cost

@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of this run: `step_s` and `data_s` (waiting for data, a step) means, the others medians; None: not seen. `first_stall_s`: by
    how much the first checkpoint of an attempt waits longer than the others (it compiles). `restart_s`: from a kill to the first step.
    `end_s`: from the last step on."""

    step_s: float
    data_s: float
    stall_s: float | None
    first_stall_s: float | None
    commit_s: float | None
    restart_s: float | None
    end_s: float

    def costs(self) -> Costs | None:
        """The model's. What only the first checkpoint after a restart costs counts as part of the restart: by the model it is the same."""
        if self.stall_s is None or self.commit_s is None or self.restart_s is None:
            return None
        restart_s = self.restart_s + (self.first_stall_s or 0.0)
        return Costs(stall_s=self.stall_s, commit_s=max(self.commit_s, self.stall_s), restart_s=restart_s)


def measured(run: Interrupted, steps: int) -> Measured:
    """From the run's events and lines. The checkpoint at the end, which is always written at once, is left out."""
    usual = [line["step_s"] for one in run.lives for line in one.lines[FIRST_STEPS:]] or [line["step_s"] for line in run.lines]
    starts = [one.start_s for one in run.lives if math.isfinite(one.start_s)]
    restarts = [one.start_s for one in run.lives[1:] if math.isfinite(one.start_s)] or starts  # without a kill, the first start
    found = checkpoints(run.events, steps)
    end = next(event["time"] for event in reversed(run.events) if event["kind"] == "end")
    done = sum(len(one.lines) for one in run.lives)
    return Measured(step_s=math.fsum(usual) / len(usual), data_s=(run.account.data_s or 0.0) / done,
                    stall_s=found.stall_s, first_stall_s=found.first_stall_s,
                    commit_s=found.commit_s, restart_s=statistics.median(restarts) if restarts else None,
                    end_s=end - run.lines[-1]["time"])


def replayed(lives: Sequence[Life], costs: Costs, *, step_s: float, steps: int, every: int, first_stall_s: float, end_s: float) -> float:
    """Seconds that the run takes by the model, followed event by event through these very lives; the last of them goes on to the end.

    An attempt that was killed and took no step here takes none there; one that was not killed in time there ends the run. `step_s`: with
    the wait for its data.
    """
    total, committed = 0.0, 0
    for one in lives:
        started = math.isfinite(one.start_s) or math.isfinite(one.lived_s)
        clock, at, ready = (one.start_s if started else costs.restart_s) + first_stall_s, committed, 0.0
        saves: list[tuple[int, float]] = []
        while at < steps and clock < one.lived_s:
            reach = min((at // every + 1) * every, steps)
            clock, at = clock + (reach - at) * step_s, reach
            if at < steps:
                clock = max(clock, ready)  # the save before must be committed
                ready = clock + costs.commit_s
                saves.append((at, ready))
                clock += costs.stall_s
        if at == steps and clock + end_s < one.lived_s:
            return total + clock + end_s
        committed = max([committed, *(step for step, when in saves if when < one.lived_s)])
        total += one.lived_s
    return math.inf

"""What checkpoints and starts cost a run, from its own files: what `jaxmem interval --run` and the experiment on intervals go by."""

import dataclasses
import math
import statistics
from collections.abc import Iterable

from jaxmem.runs.goodput import attempts
from jaxmem.runs.reading import Event, Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Seconds. `stalls`: what each checkpoint kept the main thread waiting, `commits`: from its begin to its commit; what it waited for
    the commit of the one before is in neither. The first checkpoint of an attempt compiles and opens things, and stands apart."""

    first_stalls: list[float]
    stalls: list[float]
    first_commits: list[float]
    commits: list[float]

    @property
    def stall_s(self) -> float | None:
        """The usual one (median); of first ones only where there are no others."""
        return statistics.median(self.stalls or self.first_stalls) if self.stalls or self.first_stalls else None

    @property
    def commit_s(self) -> float | None:
        return statistics.median(self.commits or self.first_commits) if self.commits or self.first_commits else None

    @property
    def first_stall_s(self) -> float | None:
        """By how much the first of an attempt is longer than the usual one."""
        if not self.stalls or not self.first_stalls:
            return None
        return max(0.0, statistics.median(self.first_stalls) - statistics.median(self.stalls))


def checkpoints(events: Iterable[Event], steps: int) -> Checkpoints:
    """From a run's events. The checkpoint of step `steps`, the last, is always written at once and is left out.

    A lazy checkpoint waits twice, when the copy begins and when it is handed over; both are its stall.
    """
    stalls: tuple[list[float], list[float]] = ([], [])
    commits: tuple[list[float], list[float]] = ([], [])
    begun: float | None = None
    waited, count = 0.0, 0
    last: tuple[int, float] | None = None  # the latest commit: step and when
    saves: dict[int, tuple[float, int]] = {}  # step -> (when its checkpoint began, 0 for the first of an attempt and 1 for others)
    for event in events:
        if event["kind"] == "start":
            begun, waited, count, last = None, 0.0, 0, None
            saves.clear()
        elif event["kind"] == "phase" and event["name"] == "checkpoint":
            since = event["time"] - event["seconds"]
            if last is not None and last[0] != event.get("step"):
                since = min(max(since, last[1]), event["time"])
            begun = since if begun is None else begun
            waited += event["time"] - since
            saves.setdefault(event.get("step", -1), (begun, min(count, 1)))
        elif event["kind"] == "checkpoint":
            if event["step"] < steps:
                stalls[min(count, 1)].append(waited)
            begun, waited, count = None, 0.0, count + 1
        elif event["kind"] == "commit":
            last = event["step"], event["time"]
            if event["step"] < steps:
                # a commit that comes before the phase is written down is of a save that waited for it
                since, which = saves.get(event["step"], (event["time"] - event["seconds"], min(count, 1)))
                commits[which].append(event["time"] - since)
    return Checkpoints(first_stalls=stalls[0], stalls=stalls[1], first_commits=commits[0], commits=commits[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCosts:
    """Seconds, medians; None is not seen. `start_s`: from the start of a process to its first step, restoring included, and what the first
    checkpoint after it waits longer than others."""

    step_s: float | None
    stall_s: float | None
    commit_s: float | None
    start_s: float | None


def run_costs(run: Run) -> RunCosts:
    """Never raises for odd files: what cannot be read is not seen."""
    step_s = run.metrics.train.recent("step_s", 1000)
    whole = [event for event in run.events if _complete(event)]
    found = checkpoints(whole, run.steps_asked or 2**62)
    starts = []
    for attempt in attempts(run.events, run.metrics):
        begins = [event["time"] - event["seconds"] for event in attempt.before if event.get("name") == "startup" and _complete(event)]
        if begins and attempt.times and step_s is not None:
            starts.append(max(0.0, min(attempt.times) - step_s - begins[0]))
    start_s = statistics.median(starts) + (found.first_stall_s or 0.0) if starts else None
    return RunCosts(step_s=step_s, stall_s=found.stall_s, commit_s=found.commit_s, start_s=start_s)


def _complete(event: Event) -> bool:
    """Whether it has the numbers that are read of its kind."""
    needed = {"phase": ("time", "seconds"), "checkpoint": ("step",), "commit": ("step", "time", "seconds")}.get(event["kind"], ())
    numbers = all(isinstance(event.get(name), (int, float)) and math.isfinite(event[name]) for name in needed)
    return numbers and (event["kind"] != "phase" or isinstance(event.get("name"), str))

"""How often should a run write a checkpoint, and how, when it fails again and again?

Command:  `python -m experiments.checkpoint_intervals --out=runs/checkpointing` (about 15 minutes on two quiet cores; stop it and start it
          again at will; `--seeds=0,1,2` repeats each point with other failures)
Expected: the goodput has its maximum where stall, commit time and failure rate say, near Young's sqrt(2 C M); a too short interval costs
          more with `sync`, whose stall is the whole write, than with `async` and `lazy`; the loss curve through all failures is that of
          the undisturbed run, step by step and bit by bit.

Every point is a run of `jaxmem train` under its supervisor on emulated devices. Each attempt is killed after a time drawn from the
exponential distribution with mean --mtbf, wherever it is then: starting, compiling, restoring, stepping, writing. One seed has the same
draws for all intervals and modes. All runs have the same programs (step=split), so that only the checkpoints differ, and every run is
held against one that nothing disturbed.

Columns: `goodput` is the time of steps that count over the whole time (measure). `replayed` is what the model says for these very
attempts, from this run's own stall, commit, restart and step times; `expected` is the mean over all that could have happened, in closed
form (both estimate). `stalls`, `lost`, `data waits` and `restarts` are the rest of the time (measure): waiting for checkpoints, steps that
were done again, waiting for data, and all else: from a kill to the next step, the first start, the end. `again` counts the steps that were
done more than once. `differs` says whether any loss or the final state is another than the undisturbed run's.
"""

import functools
import math
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from experiments import checkpoint_figure, interrupted_runs
from experiments.interrupted_runs import Interrupted, Measured
from jaxmem import experiment
from jaxmem.cost.checkpointing import Costs, expected, optimum, young
from jaxmem.plan import Plan
from jaxmem.records import Found, Point, Record
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_page import Cell, Column, Figure, Line, Table
from jaxmem.runs.settings import SNAPSHOTS
from jaxmem.spec import InputError
from jaxmem.tabulate import Interval
from jaxmem.tabulate import row as flat
from jaxmem.workload import Workload

FLAGS = {
    "model": ("decoder-tiny,layers=1", "the model"),
    "batch": ("4", "sequences a step"),
    "seq": ("32", "tokens a sequence"),
    "topology": ("cpu:2", "emulated here"),
    "plan": ("fsdp=*,step=split", "lazy needs step=split, and all modes get the same programs"),
    "snapshots": ("sync|async|lazy", "modes, by |"),
    "every": ("20|200|1000", "steps between checkpoints, by |"),
    "mtbf": ("20|60", "mean seconds between failures, by |"),
    "steps": ("5000", "steps of a run"),
}
CURVE = 300  # points of a loss curve that are kept in a record


# ---------------------------------------------------------------- the grid

def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """The undisturbed run, then modes x intervals x failure rates."""
    steps = experiment.whole("steps", flags.steps)
    snapshots = flags.snapshots.split("|")
    for name in snapshots:
        if name not in SNAPSHOTS:
            raise InputError(f"--snapshots={flags.snapshots}: unknown mode {name!r}; expected {', '.join(SNAPSHOTS)}")

    def point(seeded: bool, **settings: Any) -> Point:
        return experiment.point(model=flags.model, optimizer=flags.optimizer, batch=flags.batch, seq=flags.seq, topology=flags.topology,
                                plan=flags.plan, settings=settings | {"steps": steps}, alone=True, seeded=seeded)
    points = [point(False, snapshot="none", every=0, mtbf_s=0)]
    for mtbf_s in experiment.wholes("mtbf", flags.mtbf):
        for snapshot in snapshots:
            for every in experiment.wholes("every", flags.every):
                if every >= steps:
                    raise InputError(f"--every={every}: a run of --steps={steps} would write no checkpoint; nearest: {steps - 1}")
                points.append(point(True, snapshot=snapshot, every=every, mtbf_s=mtbf_s))
    return points


# ---------------------------------------------------------------- one point

def run(point: Point) -> Found:
    workload, plan, of = Workload.parse_line(point.workload), Plan.parse(point.plan), point.settings
    if of["snapshot"] == "lazy" and plan.step != "split":
        raise InputError(f"plan {point.plan}: lazy snapshots need step=split")
    steps, every, undisturbed = of["steps"], of["every"], not of["mtbf_s"]
    arguments = [f"--model={workload.model_text}", f"--optimizer={workload.optimizer_text}", f"--batch={workload.batch}",
                 f"--seq={workload.seq}", f"--topology={point.topology}", f"--plan={point.plan}", "--data=synthetic", f"--steps={steps}",
                 f"--checkpoint_every={every}", f"--snapshot={'sync' if undisturbed else of['snapshot']}"]
    top = pathlib.Path(tempfile.mkdtemp(prefix="jaxmem-interval-"))
    try:
        found = interrupted_runs.interrupted(arguments, top / "run", mtbf_s=of["mtbf_s"] or math.inf, seed=point.seed)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    backend = next(event["backend"] for event in found.events if event["kind"] == "start")
    return Found(backend=backend, values=values(found, steps=steps, every=every, mtbf_s=of["mtbf_s"]))


def values(found: Interrupted, *, steps: int, every: int, mtbf_s: float) -> dict[str, tuple[Any, Any]]:
    """What is kept of a run; the model's figures where it was killed and saw what they are made from."""
    took, total = interrupted_runs.measured(found, steps), found.elapsed_s
    account = found.account
    seconds = {"goodput": account.productive_s or 0.0, "stalls": account.checkpoint_s or 0.0, "lost": account.lost_work_s or 0.0,
               "data_waits": account.data_s or 0.0}
    out: dict[str, Any] = {
        "elapsed_s": total, "kills": found.kills, **{name: part / total for name, part in seconds.items()},
        "restarts": 1 - math.fsum(seconds.values()) / total, "step_s": took.step_s, "data_s": took.data_s,
        "interval_s": every * (took.step_s + took.data_s) if every else None, "stall_s": took.stall_s, "first_stall_s": took.first_stall_s,
        "commit_s": took.commit_s, "restart_s": took.restart_s, "again": found.again[0], "again_different": found.again[1],
        "state_sha256": found.state_sha256, "losses_sha256": found.losses_sha256(), "loss_curve": found.curve(CURVE),
    }
    guessed = predicted(found, took, steps=steps, every=every, mtbf_s=mtbf_s) if mtbf_s else {}
    return {name: (value, "measure") for name, value in out.items()} | {name: (value, "estimate") for name, value in guessed.items()}


def predicted(found: Interrupted, took: Measured, *, steps: int, every: int, mtbf_s: float) -> dict[str, float | None]:
    if (costs := took.costs()) is None:
        return {}
    pace_s = took.step_s + took.data_s  # the model's work; of it, steps are what counts
    seconds = interrupted_runs.replayed(found.lives, costs, step_s=pace_s, steps=steps, every=every,
                                        first_stall_s=took.first_stall_s or 0.0, end_s=took.end_s)
    return {"replayed": steps * took.step_s / seconds,
            "expected": expected(costs, every * pace_s, mtbf_s).goodput * took.step_s / pace_s,
            "optimum_s": optimum(costs, mtbf_s), "young_s": young(costs.stall_s, mtbf_s)}


# ---------------------------------------------------------------- table and figure, from the records

SHARES = [Column(name=name, head=name.replace("_", " "), unit="percent")
          for name in ("goodput", "replayed", "expected", "stalls", "lost", "data_waits", "restarts")]
RUNS = (Column(name="snapshot", head="mode"), Column(name="every", head="every", unit="count"),
        Column(name="seeds", head="seeds", unit="count"),
        Column(name="interval_s", head="interval", unit="seconds"), Column(name="kills", head="kills", unit="count"), *SHARES,
        Column(name="again", head="again", unit="count"), Column(name="differs", head="differs"))
COSTS = (Column(name="snapshot", head="mode"), *(Column(name=name, head=head, unit="seconds") for name, head in (
    ("stall_s", "stall"), ("commit_s", "committed after"), ("restart_s", "restart"))))
BEST = (Column(name="mtbf_s", head="mean time between failures", unit="seconds"), Column(name="snapshot", head="mode"),
        Column(name="young_s", head="Young's interval", unit="seconds"), Column(name="optimum_s", head="best interval", unit="seconds"),
        Column(name="steps_best", head="in steps", unit="count"), Column(name="expected", head="expected goodput", unit="percent"),
        Column(name="at_young", head="at Young's", unit="percent"))


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, the figure, and the tables as Markdown and CSV."""
    lines = in_order(with_differences(page.lines(records), records))
    runs = [line for line in lines if line["mtbf_s"].value]
    costs = pooled(runs)
    pace_s, share = pace(runs)
    tables = [Table(title=f"A failure every {mtbf_s:g} s", lead=f"{runs[0]['topology'].value}, {runs[0]['steps'].value} steps. "
                    "Of two seeds: the mean (lower to higher); of more: with its 95% interval.", columns=RUNS,
                    lines=[line | {"seeds": Cell(value=seeds_of(line))} for line in runs if line["mtbf_s"].value == mtbf_s])
              for mtbf_s in rates(runs)]
    tables.append(Table(title="What a checkpoint and a failure cost", columns=COSTS,
                        lead="Medians over all runs of a mode. A restart is from the kill to the first step, with what the first "
                        "checkpoint of an attempt waits longer than the others.",
                        lines=[cost_line(mode, cost) for mode, cost in costs.items()]))
    tables.append(Table(title="The best interval by the model", lead="In closed form from those costs, for the measured failure rates and "
                        "rarer ones.", columns=BEST, lines=best_lines(costs, rates(runs), pace_s, share)))
    figures = [Figure(heading="Goodput against interval", file="checkpoint.svg",
                      lead="Marks are measured runs; lines are expected, from the costs of all runs of a mode.",
                      draw=functools.partial(checkpoint_figure.drawing, runs, costs, share)),
               Figure(heading="The loss through failures", file="checkpoint-losses.svg",
                      lead="Each attempt of the run with most kills, over the undisturbed run.",
                      draw=functools.partial(checkpoint_figure.losses, records))]
    return page.files("Checkpoints: interval, mode and failures", __doc__ or "", figures, tables, records)


def seeds_of(line: Line) -> int:
    value = line["kills"].value
    return value.seeds if isinstance(value, Interval) else 1


def in_order(lines: list[Line]) -> list[Line]:
    def place(line: Line) -> tuple[Any, ...]:
        mode = line["snapshot"].value
        return line["mtbf_s"].value, SNAPSHOTS.index(mode) if mode in SNAPSHOTS else -1, line["every"].value
    return sorted(lines, key=place)


def rates(lines: Sequence[Line]) -> list[float]:
    return sorted({line["mtbf_s"].value for line in lines})


def with_differences(lines: list[Line], records: Sequence[Record]) -> list[Line]:
    """With a cell that says whether all seeds of the line had the losses and the final state of the undisturbed run."""
    def same(one: Record) -> tuple[Any, ...]:
        return one["workload"], one["topology"], one["plan"], one["settings"]["steps"]
    done = [one for one in records if one["status"] == "done"]
    whole = {same(one): one["values"] for one in done if not one["settings"]["mtbf_s"]}
    for line in lines:
        own = [one for one in done if flat(one)["settings"] == line["settings"].value and one["workload"] == line["workload"].value]
        bases = [whole.get(same(one)) for one in own]
        if all(bases):
            equal = [one["values"][name] == base[name] for one, base in zip(own, bases, strict=True) for name in
                     ("losses_sha256", "state_sha256")]
            redone = sum(one["values"]["again_different"] for one in own)
            line["differs"] = Cell(value="nothing" if all(equal) and not redone else "YES", source="measure")
    return lines


def pooled(lines: Sequence[Line]) -> dict[str, Costs]:
    """Costs of each mode: medians over its runs."""
    out = {}
    for mode in SNAPSHOTS:
        known = {name: [number for line in lines if line["snapshot"].value == mode and (number := line.get(name, page.NOTHING).number)
                        is not None] for name in ("stall_s", "commit_s", "restart_s", "first_stall_s")}
        if all(known[name] for name in ("stall_s", "commit_s", "restart_s")):
            stall, commit, restart = (statistics.median(known[name]) for name in ("stall_s", "commit_s", "restart_s"))
            first = statistics.median(known["first_stall_s"]) if known["first_stall_s"] else 0.0
            out[mode] = Costs(stall_s=stall, commit_s=max(stall, commit), restart_s=restart + first)
    return out


def pace(lines: Sequence[Line]) -> tuple[float | None, float]:
    """Medians over runs: seconds a step with its wait for data, and the share of the step in it."""
    found = [(step, step + data) for line in lines if (step := line["step_s"].number) and (data := line["data_s"].number) is not None]
    if not found:
        return None, 1.0
    return statistics.median(whole for _, whole in found), statistics.median(step / whole for step, whole in found)


def cost_line(mode: str, costs: Costs) -> Line:
    return {"snapshot": Cell(value=mode)} | {name: Cell(value=getattr(costs, name), source="measure")
                                             for name in ("stall_s", "commit_s", "restart_s")}


def best_lines(costs: dict[str, Costs], measured_rates: Sequence[float], pace_s: float | None, share: float) -> list[Line]:
    lines = []
    for mtbf_s in sorted({*measured_rates, 600.0, 3600.0, 86400.0}):
        for mode, one in costs.items():
            best, first = optimum(one, mtbf_s), young(one.stall_s, mtbf_s)
            found = {"young_s": first, "optimum_s": best, "steps_best": best / pace_s if best and pace_s else None,
                     "expected": share * expected(one, best, mtbf_s).goodput if best else None,
                     "at_young": share * expected(one, first, mtbf_s).goodput if first else None}
            lines.append({"mtbf_s": Cell(value=mtbf_s), "snapshot": Cell(value=mode)} |
                         {name: Cell(value=value, source="estimate") for name, value in found.items()})
    return lines


EXPERIMENT = experiment.Experiment(name="checkpoint_intervals", module="experiments.checkpoint_intervals", doc=__doc__ or "", grid=grid,
                                   pages=pages, flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

"""How many small runs should share this machine?

Command:  `python -m experiments.many_runs --model=decoder-tiny --topology="cpu:1|cpu:8" --out=runs/many_runs` (about 25 minutes on two
          quiet cores; stop it and start it again at will)
Expected: where one run leaves a device idle, K runs in one program take less than K times as long: on the CPU, whose cores a single
          tiny run already fills, the gain is small; on a TPU and a GPU target the prediction says how much. Memory grows by a constant a
          run. On emulated devices the parts share the same cores, so the gain is in what a step costs beside its arithmetic.

Ways: `vmapped` is one program that holds all runs; where the topology has several devices, each group of them holds as many. `parts` gives
each run devices of its own, all driven from one process. `one_after_another` is the control: each run in its turn has the whole topology,
and its program is compiled once for all of them.

All runs have the same model, batch and number of steps, and differ in seed, learning rate and order of the data. Here the time in which
every run makes one step is measured, divided by the number of runs; memory is what the CPU's compiler says of one program. For targets
the train step is compiled: memory is the compiler's, the time is predicted from its schedule. `most runs` is the largest number of runs
that the target holds in one program, found by compiling; the next larger number was compiled too, and does not fit.
"""

import functools
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.hardware import Topology, parse_topology
from jaxmem.plan import Plan
from jaxmem.records import Found, Point, Record
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_figure import Scatter, drawing
from jaxmem.report.experiment_page import Column, Figure, Line, Table
from jaxmem.workload import Workload

HERE = ("one_after_another", "vmapped", "parts")
FLAGS = {
    "model": ("decoder-tiny", "the model of every run"),
    "topology": ("cpu:1|cpu:8", "where they run here, by |"),
    "plan": ("fsdp=*", "how a run is split over its own devices"),
    "runs": ("1|2|4|8|16", "numbers of runs, by |"),
    "targets": ("v5e-1|h100:1", "topologies to compile for"),
    "steps": ("30", "steps that every run makes here, of which the first eight are not timed"),
    "trained_on": ("synthetic", "what the runs here are trained on: --data of jaxmem train"),
}


# ---------------------------------------------------------------- the grid

def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """Topologies here x ways x numbers of runs, and the targets."""
    numbers, steps = experiment.wholes("runs", flags.runs), experiment.whole("steps", flags.steps)
    points = []

    def add(topology: str, plan: str, alone: bool, **settings: object) -> None:
        points.append(experiment.point(model=flags.model, optimizer=flags.optimizer, batch=flags.batch, seq=flags.seq, topology=topology,
                                       plan=plan, settings=settings, alone=alone, seeded=alone))
    for name in filter(None, flags.topology.split("|")):
        topology = parse_topology(name)
        for how in HERE:
            for runs in numbers:
                if (devices := devices_of_a_run(topology, runs, how)) is not None:
                    plan = str(Plan.parse(flags.plan, devices=devices))
                    add(name, plan, True, how=how, runs=runs, steps=steps, trained_on=flags.trained_on)
    for name in filter(None, flags.targets.split("|")):
        plan = str(Plan.parse(flags.plan, devices=1))
        for runs in numbers:
            if runs % parse_topology(name).devices == 0:
                add(name, plan, False, how="compiled", runs=runs)
        add(name, plan, False, how="largest", runs=0)
    return points


def devices_of_a_run(topology: Topology, runs: int, how: str) -> int | None:
    """Devices that each run has to itself; None where this way cannot place so many runs on this topology."""
    if how == "one_after_another":
        return topology.devices
    if runs < topology.devices:
        return topology.devices // runs if topology.devices % runs == 0 else None
    if how == "parts":
        return 1 if runs == topology.devices else None
    return 1 if runs % topology.devices == 0 else None


# ---------------------------------------------------------------- one point

def run(point: Point) -> Found:
    topology = parse_topology(point.topology)
    workload, plan = Workload.parse_line(point.workload), Plan.parse(point.plan)
    how, runs = point.settings["how"], point.settings["runs"]
    if how == "compiled":
        return compiled(workload, plan, topology, runs)
    if how == "largest":
        return most(workload, plan, topology)
    return measured(workload, plan, topology, how, runs, steps=point.settings["steps"], data=point.settings["trained_on"], seed=point.seed)


def compiled(workload: Workload, plan: Plan, topology: Topology, runs: int) -> Found:
    """`runs` runs in one program, for a target that is not here."""
    from jaxmem.colocate.fitting import try_runs
    from jaxmem.verdict import usable_source

    tried, usable = try_runs(workload, plan, topology, runs)
    return Found(backend=tried.backend, values={
        "fits": ("yes" if tried.fits else "no", "compile"),
        "peak_bytes": (tried.peak_bytes, "compile"), "usable_bytes": (usable, usable_source(topology)),
        "peak_bytes_a_run": (tried.peak_bytes / runs if tried.peak_bytes else None, "compile"), "round_s": (tried.step_s, "estimate"),
        "step_s_a_run": (tried.step_s / runs if tried.step_s else None, "estimate"),
        "tokens_per_s": (runs * workload.tokens / tried.step_s if tried.step_s else None, "estimate")})


def most(workload: Workload, plan: Plan, topology: Topology) -> Found:
    """The largest number of runs that the target holds in one program."""
    from jaxmem.colocate.fitting import largest, line, try_runs
    from jaxmem.colocate.parts import parts_for
    from jaxmem.verdict import usable_source

    found = largest(lambda n: try_runs(workload, plan, topology, n), step=parts_for(plan, topology), say=experiment.say)
    straight = line(found.tried)
    at_most = next((one.peak_bytes for one in found.tried if one.runs == found.runs), None)
    return Found(backend=found.tried[0].backend, values={
        "most_runs": (found.runs, "compile"), "next_does_not_fit": ("yes" if found.certain else "unknown", "compile"),
        "usable_bytes": (found.usable_bytes, usable_source(topology)), "most_runs_bytes": (at_most, "compile"),
        "bytes_a_further_run": (straight[1] if straight else None, "compile"), "compiles": (len(found.tried), "compile")})


def measured(workload: Workload, plan: Plan, topology: Topology, how: str, runs: int, *, steps: int, data: str, seed: int) -> Found:
    """All runs trained here; their learning rates are spread over a factor of ten."""
    from jaxmem.colocate.training import Run, train_many
    from jaxmem.running import measured as devices
    from jaxmem.running import starting
    from jaxmem.verdict import summed_peak

    starting.start(topology, None)
    own = [Run(seed=seed * runs + i, lr=1e-3 * 10 ** (i / max(runs - 1, 1))) for i in range(runs)]
    found = train_many(workload, plan, topology, own, how=how, steps=steps, data=data)  # type: ignore[arg-type]
    losses = [losses[-1] for losses in found.losses]
    return Found(backend=devices.backend(), values={
        "round_s": (found.step_s, "measure"), "step_s_a_run": (found.step_s / runs, "measure"),
        "tokens_per_s": (runs * workload.tokens / found.step_s, "measure"), "setup_s": (found.setup_s, "measure"),
        "peak_bytes": (summed_peak(found.memory), "compile"), "mean_last_loss": (sum(losses) / runs, "measure")})


# ---------------------------------------------------------------- tables and figures, from the records

COLUMNS = (
    Column(name="how", head="way"), Column(name="runs", head="runs", unit="count"), Column(name="plan", head="plan of a run"),
    Column(name="tokens_per_s", head="tokens/s, all runs", unit="count"), Column(name="gain", head="vs one after another", unit="times"),
    Column(name="step_s_a_run", head="a run's step", unit="seconds"), Column(name="setup_s", head="setup", unit="seconds"),
    Column(name="peak_bytes", head="memory of a program", unit="bytes"),
)
TARGET = (
    Column(name="runs", head="runs", unit="count"), Column(name="peak_bytes", head="memory", unit="bytes"),
    Column(name="peak_bytes_a_run", head="memory / runs", unit="bytes"), Column(name="round_s", head="a step of all", unit="seconds"),
    Column(name="tokens_per_s", head="tokens/s, all runs", unit="count"), Column(name="gain", head="vs one run", unit="times"),
)
MOST = (
    Column(name="topology", head="target"), Column(name="most_runs", head="most runs", unit="count"),
    Column(name="next_does_not_fit", head="one more does not fit"), Column(name="most_runs_bytes", head="memory", unit="bytes"),
    Column(name="usable_bytes", head="usable", unit="bytes"), Column(name="bytes_a_further_run", head="a further run", unit="bytes"),
    Column(name="compiles", head="compiles", unit="count"),
)


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, two figures, and the tables as Markdown and CSV."""
    lines = with_gain(in_order(page.lines(records)))
    drawn = [line for line in lines if line["how"].value != "largest"]
    tables = []
    for name in dict.fromkeys(title(line) for line in drawn):
        own = [line for line in drawn if title(line) == name]
        here = own[0]["how"].value != "compiled"
        lead = (f"Run here ({own[0]['backend'].value})." if here else
                f"Compiled for {own[0]['backend'].value}; the time is predicted from the schedule.")
        tables.append(Table(title=name, lead=lead, columns=COLUMNS if here else TARGET, lines=own))
    if most_lines := [line for line in lines if line["how"].value == "largest"]:
        tables.append(Table(title="The largest number of runs in one program", lead="Compiled, a device of the target.", columns=MOST,
                            lines=most_lines))
    across = Column(name="runs", head="runs", unit="count")
    time = Scatter(title="Time of a run's step against the number of runs (lower is better)", x=across, mark="how", row=workload_of,
                   panel=panel, y=Column(name="step_s_a_run", head="a run's step", unit="seconds"))
    memory = Scatter(title="Memory of one program against the runs in it", x=across, mark="how", row=workload_of, panel=memory_panel,
                     y=Column(name="peak_bytes", head="memory a device", unit="bytes"))
    held = [line for line in drawn if line["how"].value in ("compiled", "vmapped")]
    figures = [Figure(heading="Time", lead="A run's share of the time in which all of them make one step.", file="many_runs.svg",
                      draw=functools.partial(drawing, time, drawn)),
               Figure(heading="Memory", lead="Of one program, on one device.", file="many_runs_memory.svg",
                      draw=functools.partial(drawing, memory, held))]
    return page.files("Many small runs on one machine", __doc__ or "", figures, tables, records)


def in_order(lines: list[Line]) -> list[Line]:
    ways = (*HERE, "compiled", "largest")
    topologies = list(dict.fromkeys(line["topology"].value for line in lines))
    return sorted(lines, key=lambda line: (line["how"].value in ways[3:], topologies.index(line["topology"].value),
                                           ways.index(line["how"].value), line["runs"].value))


def with_gain(lines: list[Line]) -> list[Line]:
    """The lines with their throughput over that of the same number of runs one after another; on targets over that of one run."""
    same = ("model", "optimizer", "batch", "seq", "topology")
    here = page.baseline(lines, (*same, "runs", "steps", "trained_on"), {"how": "one_after_another"}, "tokens_per_s")
    there = page.baseline(lines, same, {"how": "compiled", "runs": 1}, "tokens_per_s")
    for line, control, one in zip(lines, here, there, strict=True):
        line["gain"] = page.over(line.get("tokens_per_s", page.NOTHING), one if line["how"].value == "compiled" else control)
    return lines


def title(line: Line) -> str:
    return f"{workload_of(line)}, {line['topology'].value}"


def workload_of(line: Line) -> str:
    return f"{line['model'].value}, batch {line['batch'].value} x {line['seq'].value} a run"


def panel(line: Line) -> tuple[str, str]:
    return line["topology"].value, "time: estimate" if line["how"].value == "compiled" else "time: measure"


def memory_panel(line: Line) -> tuple[str, str]:
    return line["topology"].value, "memory: compile"


EXPERIMENT = experiment.Experiment(name="many_runs", module="experiments.many_runs", doc=__doc__ or "", grid=grid, pages=pages, flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

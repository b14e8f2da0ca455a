"""How many GPUs does a mix of runs need in MIG slices, as processes, and in shared programs?

Command:  `python -m experiments.packing_waste --seeds=0,1,2,3,4,5,6,7,8,9 --out=runs/packing_waste` (about 10 minutes on two quiet cores,
          nearly all of it for compiling each program once)
Expected: slices need the most GPUs, for a run seldom fills its slice and slices come in few sizes; one program for the runs of each batch
          needs the fewest, and the gap grows with the number of runs. It closes where the runs happen to fill their slices.

A mix is a number of runs of one model, each with a batch size drawn by the seed: what a sweep over batch sizes leaves to place. Every
run is resident the whole time. `mig`: a run a slice, the smallest that holds it. `processes`: runs share a GPU as processes, each with
its own runtime. `one_program`: on each GPU the runs of equal batch size are one program. All are packed largest first, and the whole
memory less what the runtime keeps is there for all of them. Bytes are compiled for the whole GPU, with one run and with two (compile);
what follows from them is arithmetic (estimate). Unused is the part of the GPUs' memory, less what one runtime keeps of each, that no run
takes.
"""

import functools
import random
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.records import Found, Point, Record
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_figure import Scatter, drawing
from jaxmem.report.experiment_page import Cell, Column, Figure, Line, Table
from jaxmem.spec import InputError
from jaxmem.workload import Workload

WAYS = ("mig", "processes", "one_program")
FLAGS = {
    "model": ("decoder-small", "the model of every run"),
    "seq": ("512", "tokens a sequence"),
    "batches": ("4|16|32|64", "batch sizes that a mix draws from, by |"),
    "runs": ("4|8|16|32", "numbers of runs in a mix, by |"),
    "topology": ("h100:1|a100-40gb:1", "GPUs that have MIG slices, by |"),
}


def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """GPUs x numbers of runs; the seeds are the mixes."""
    batches, numbers = experiment.wholes("batches", flags.batches), experiment.wholes("runs", flags.runs)
    return [experiment.point(model=flags.model, optimizer=flags.optimizer, batch=batches[0], seq=flags.seq, topology=topology,
                             plan=flags.plan, settings={"batches": "|".join(map(str, batches)), "runs": runs})
            for topology in flags.topology.split("|") for runs in numbers]


def run(point: Point) -> Found:
    from jaxmem.colocate import mix, packing, slices

    topology = parse_topology(point.topology)
    first, plan = Workload.parse_line(point.workload), Plan.parse(point.plan)
    rng = random.Random(point.seed)
    drawn = [rng.choice(point.settings["batches"].split("|")) for _ in range(point.settings["runs"])]
    kinds = [mix.Runs(workload=Workload.parse(model=first.model_text, optimizer=first.optimizer_text, batch=batch, seq=first.seq),
                      count=drawn.count(batch)) for batch in dict.fromkeys(drawn)]
    found = mix.compiled(kinds, plan, topology, mem_fraction=1.0, with_slices=False)
    profiles = mix.slices_of(topology, 1.0)
    if not profiles:
        raise InputError(f"{topology} has no MIG slices; a100-40gb:1, a100-80gb:1 and h100:1 have")
    reserve, whole = topology.chip.runtime_reserve_bytes or 0, topology.chip.hbm_bytes or 0
    sizes = [one.bytes(1) for one in found.programs for _ in range(one.count)]
    together, gpus = None, 0
    while together is None or together.problem:
        gpus += 1
        together = packing.shared(found.programs, gpus, found.usable_bytes)
    counts = {"mig": len(slices.rigid(sizes, profiles)), "processes": len(slices.flexible([size + reserve for size in sizes], whole)),
              "one_program": len(together.devices)}
    used = {"mig": sum(sizes), "processes": sum(sizes), "one_program": together.used_bytes}
    values: dict[str, tuple[Any, Any]] = {"mean_run_bytes": (sum(sizes) / len(sizes), "compile")}
    for way in WAYS:
        unused = 1 - used[way] / (counts[way] * (whole - reserve))
        values |= {f"gpus_{way}": (counts[way], "estimate"), f"unused_{way}": (unused, "estimate")}
    return Found(backend=found.backend, values=values)


# ---------------------------------------------------------------- table and figure, from the records

COLUMNS = (Column(name="topology", head="GPU"), Column(name="runs", head="runs", unit="count"), Column(name="way", head="way"),
           Column(name="gpus", head="GPUs", unit="count"), Column(name="unused", head="unused", unit="percent"),
           Column(name="mean_run_bytes", head="a run, mean", unit="bytes"))


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, the figure, and the table as Markdown and CSV."""
    lines = sorted((one for line in page.lines(records) for one in by_way(line)),
                   key=lambda line: (line["topology"].value, line["runs"].value, WAYS.index(line["way"].value)))
    tables = [Table(title=name, lead="Means over the mixes of the seeds, with 95% intervals.", columns=COLUMNS,
                    lines=[line for line in lines if model(line) == name]) for name in dict.fromkeys(map(model, lines))]
    scatter = Scatter(title="GPUs that a mix needs (lower is better)", x=Column(name="runs", head="runs in the mix", unit="count"),
                      y=Column(name="gpus", head="GPUs", unit="count"), mark="way", row=model,
                      panel=lambda line: (line["topology"].value, "from compiled bytes: estimate"))
    figure = Figure(heading="GPUs", lead="Bars are 95% intervals over mixes.", file="packing_waste.svg",
                    draw=functools.partial(drawing, scatter, lines))
    return page.files("Packing small runs: MIG slices against sharing", __doc__ or "", [figure], tables, records)


def by_way(line: Line) -> list[Line]:
    """A line for each way, so that a figure can tell them apart."""
    return [line | {"way": Cell(value=way), "gpus": line[f"gpus_{way}"], "unused": line[f"unused_{way}"]} for way in WAYS]


def model(line: Line) -> str:
    return f"{line['model'].value}, batches {line['batches'].value} x {line['seq'].value}"


EXPERIMENT = experiment.Experiment(name="packing_waste", module="experiments.packing_waste", doc=__doc__ or "", grid=grid, pages=pages,
                                   flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

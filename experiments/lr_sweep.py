"""Which learning rate, over several seeds, with all runs in one program?

Command:  `python -m experiments.lr_sweep --model=mlp-mnist --seq=1 --batch=50 --trained_on=images:mnist5k --seeds=0,1,2
          --out=runs/lr_sweep` (about a minute on two quiet cores)
Expected: the loss held out falls with the rate up to a best one and rises beyond it; `--how=one_after_another` finds the same losses
          run by run.

Every (rate, seed) is a point with a record of its own. Points that differ in nothing else are one child: `train_many` makes their runs
under `vmap`, where the rate and the seed are inputs of the same compiled programs. On a topology of several devices the runs are spread
over them, so their number must be a multiple of the number of devices over those of --plan. The rate is constant after a warm-up of a
tenth of the steps. Losses are means over the held-out rows of --eval_rows.
"""

import functools
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.colocate.packing import WAYS
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.records import Found, Point, Record
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_figure import Scatter, drawing
from jaxmem.report.experiment_page import Column, Figure, Line, Table
from jaxmem.spec import InputError, nearest
from jaxmem.workload import Workload

FLAGS = {
    "topology": ("cpu:1", "where the runs train"),
    "lrs": ("0.0003|0.001|0.003|0.01|0.03", "learning rates, by |"),
    "steps": ("200", "steps of every run"),
    "trained_on": ("text:python", "--data of jaxmem train"),
    "eval_rows": ("200", "held-out rows, rounded up to whole batches"),
    "how": ("vmapped", "vmapped, parts or one_after_another"),
}


def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """A point a rate; the seeds come with the frame."""
    lrs = [experiment.number("lrs", text) for text in flags.lrs.split("|")]
    steps, rows = experiment.whole("steps", flags.steps), experiment.whole("eval_rows", flags.eval_rows)
    if flags.how not in WAYS:
        raise InputError(f"--how={flags.how}: expected one of {', '.join(WAYS)}{nearest(flags.how, WAYS)}")
    return [experiment.point(model=flags.model, optimizer=flags.optimizer, batch=flags.batch, seq=flags.seq, topology=flags.topology,
                             plan=flags.plan, settings={"how": flags.how, "lr": lr, "steps": steps, "trained_on": flags.trained_on,
                                                        "eval_rows": rows}) for lr in lrs]


def together(point: Point) -> str | None:
    """Whatever is no input of the program."""
    settings = {name: value for name, value in point.settings.items() if name != "lr"}
    return repr((point.workload, point.topology, point.plan, sorted(settings.items())))


def run(point: Point) -> Found:
    return run_many([point])[0]


def run_many(points: Sequence[Point]) -> list[Found]:
    from jaxmem.colocate.training import Run, train_many
    from jaxmem.running import measured, starting

    first = points[0]
    topology = parse_topology(first.topology)
    starting.start(topology, None)
    steps = first.settings["steps"]
    found = train_many(Workload.parse_line(first.workload), Plan.parse(first.plan), topology,
                       [Run(seed=point.seed, lr=point.settings["lr"]) for point in points], how=first.settings["how"], steps=steps,
                       data=first.settings["trained_on"], warmup=steps // 10, eval_rows=first.settings["eval_rows"])
    assert found.eval_losses is not None
    last = max(1, steps // 20)
    return [Found(backend=measured.backend(), values={
        "eval_loss": (eval_loss, "measure"), "last_loss": (sum(losses[-last:]) / last, "measure"), "losses": (losses, "measure"),
        "step_s_a_run": (found.step_s / len(points), "measure"), "runs_together": (len(points), "measure")})
        for losses, eval_loss in zip(found.losses, found.eval_losses, strict=True)]


COLUMNS = (Column(name="lr", head="learning rate"), Column(name="eval_loss", head="loss, held out", unit="loss"),
           Column(name="last_loss", head="loss, last twentieth", unit="loss"), Column(name="how", head="way"),
           Column(name="runs_together", head="runs of the sweep", unit="count"))


def pages(records: Sequence[Record]) -> dict[str, str]:
    lines = sorted(page.lines(records), key=lambda line: (line["model"].value, line["how"].value, line["lr"].value))
    tables = [Table(title=name, lead="Means over seeds, with 95% intervals.", columns=COLUMNS,
                    lines=[line for line in lines if title(line) == name]) for name in dict.fromkeys(map(title, lines))]
    scatter = Scatter(title="Loss against learning rate", x=Column(name="lr", head="learning rate", unit="count"), mark="how", row=title,
                      y=Column(name="eval_loss", head="loss, held out", unit="loss"),
                      panel=lambda line: (line["topology"].value, "measure"))
    figure = Figure(heading="Loss", lead="Bars are 95% intervals over seeds.", file="lr_sweep.svg",
                    draw=functools.partial(drawing, scatter, lines))
    return page.files("A sweep of the learning rate in one program", __doc__ or "", [figure], tables, records)


def title(line: Line) -> str:
    return f"{line['model'].value}, batch {line['batch'].value}, {line['steps'].value} steps of {line['trained_on'].value}"


EXPERIMENT = experiment.Experiment(name="lr_sweep", module="experiments.lr_sweep", doc=__doc__ or "", grid=grid, pages=pages, flags=FLAGS,
                                   together=together)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

"""What keeps a classifier from forgetting, and what does it cost, when the classes come a few at a time?

Command:  `python -m experiments.class_incremental --seeds=0,1,2 --out=runs/class_incremental` (about 10 minutes on two quiet cores; stop
          it and start it again at will). Your own sequence: `--data=images:digits --tasks="0+1+2|3+4+5|6+7+8+9"`, or the classes kept
          and the inputs changed, `--tasks=permuted:5` or `--tasks=rotated:0+30+60`; `--methods="incremental|rehearsal,r=28"`
Expected: on MNIST-5k in five tasks of two digits, fine-tuning (incremental) ends below 30% of all test digits right: it knows the last
          two. Trained from scratch on everything each time, above 90%, with three times the steps. Rehearsal of 14 rows a step from a
          buffer with 30% of the rows, 80 to 85%; more rows a step help more than a larger buffer. DER++ comes within some points of
          scratch. EWC alone stays near fine-tuning.

Methods: `incremental` trains on each task's own rows; `scratch` on all rows so far, from new parameters; `warm` and `shrink-perturb` on all
rows so far, from the last parameters, kept or shrunk; `rehearsal` adds r rows from a buffer to each batch; `der++` draws twice r rows and
also holds the model to the logits that it once gave them; `replay` draws from all earlier rows; `ewc` penalises changes of parameters by
their Fisher information, exact, with sampled labels, or with the data's own (empirical).

Columns: `final` is the share of all test rows that are right after the last task; `forgetting` how far earlier tasks fell from their
best, `when new` each task's accuracy right after its turn, in the mean over tasks. `rows a step` go through the model, incoming and
remembered. `time` is that of the training steps alone. Intervals are 95% over the seeds; a seed decides the split into training and
test rows, the initialisation, the order of rows and what the buffer does.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.continual import methods, tasks
from jaxmem.data.images import IMAGES
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.records import Found, Point, Record
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_dots import Dot, dots
from jaxmem.report.experiment_page import Cell, Column, Figure, Line, Table
from jaxmem.report.experiment_panels import Panel, panels
from jaxmem.spec import InputError, differences, nearest, split
from jaxmem.tabulate import Interval, interval
from jaxmem.tabulate import row as flat
from jaxmem.workload import Workload

FITTING = {"images:digits": "mlp", "images:mnist5k": "mlp-mnist"}
METHODS = (
    "incremental", *(f"ewc,ewc={strength}" for strength in ("1e2", "1e4", "1e5", "1e6")), "ewc,ewc=1e6,fisher=sampled",
    "ewc,ewc=1e6,fisher=empirical",
    *(f"rehearsal,r=7,buffer={share}" for share in (0.025, 0.05, 0.1, 0.3)), "rehearsal,r=7,policy=replace", "rehearsal,r=14",
    "rehearsal,r=14,policy=replace", "rehearsal,r=28", "replay", "der++,r=7", "der++,r=14", "scratch", "warm", "shrink-perturb")
FLAGS = {
    "data": ("images:mnist5k", "labelled images"),
    "tasks": ("0+1|2+3|4+5|6+7|8+9", "classes of each task; or permuted:N, or rotated:DEGREES+DEGREES"),
    "methods": ("|".join(METHODS), "presets with fields, by |"),
    "model": ("", "a classifier; empty: the one that fits the images"),
    "optimizer": ("adamw,weight_decay=0", "a preset and fields to change; this one is Adam"),
    "lr": ("1e-3", "its constant learning rate"),
    "batch": ("56", "incoming rows a step, over all devices"),
    "epochs": ("20", "over the rows of each task"),
    "seq": ("", "not used: a classifier has its own"),
    "topology": ("cpu:1", "where it runs"),
    "plan": ("data=*,compute=f32", "how it is split, and in which precision it is computed"),
}


# ---------------------------------------------------------------- the grid

def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """One point a method."""
    known = [f"images:{name}" for name in IMAGES]
    if flags.data not in known:
        raise InputError(f"--data={flags.data}: tasks are made of labelled images{nearest(flags.data, known)}")
    tasks.parse(flags.tasks)
    model = flags.model or FITTING[flags.data]
    settings = {"dataset": flags.data, "tasks": flags.tasks, "epochs": experiment.whole("epochs", flags.epochs),
                "lr": experiment.number("lr", flags.lr)}
    seq = str(Workload.parse(model=model, batch=flags.batch).seq)  # a classifier has its own
    return [experiment.point(model=model, optimizer=flags.optimizer, batch=flags.batch, seq=seq, topology=flags.topology, plan=flags.plan,
                             alone=True, settings=settings | {"method": spelled(text)}) for text in flags.methods.split("|")]


def spelled(text: str) -> str:
    """A method in the one spelling that its records have: preset and what differs from it."""
    name = split(text)[0] if split(text) else ""
    return ",".join([name, *differences(methods.parse(text), methods.METHODS[name])])


# ---------------------------------------------------------------- one point

def run(point: Point) -> Found:
    import jax

    from jaxmem.running import measured, starting

    starting.start(parse_topology(point.topology), None)
    values = trained(point, jax.devices())
    return Found(backend=measured.backend(), values={name: (value, "measure") for name, value in values.items()})


def trained(point: Point, devices: Sequence) -> dict[str, Any]:
    """The values of a point's record, from training on these devices."""
    import optax

    from jaxmem.continual import learner, metrics, model
    from jaxmem.optim import transforms
    from jaxmem.sharding import make_mesh

    topology, s = parse_topology(point.topology), point.settings
    workload, plan = Workload.parse_line(point.workload), Plan.parse(point.plan, devices=topology.devices)
    mesh = make_mesh(plan, devices, slices=topology.slices)
    images, labels = IMAGES[s["dataset"].removeprefix("images:")]()
    expected = workload.rows["images"][0]
    if images.shape[1:] != tuple(expected):
        raise InputError(f"{s['dataset']} are {images.shape[1:]} and {workload.model_name} takes {tuple(expected)}"
                         f"; the model for them is {FITTING.get(s['dataset'], 'not known')}")
    if labels.max() >= workload.model.outputs:
        raise InputError(f"{s['dataset']} has classes up to {labels.max()} and {workload.model_name} tells {workload.model.outputs} apart")
    sequence = tasks.sequence(s["tasks"], *tasks.split(images, labels, seed=point.seed), seed=point.seed)
    method = methods.parse(s["method"])
    placed = model.classifier_of(workload, plan, topology, mesh)
    tx = optax.chain(transforms.build(workload.optimizer, placed.dims), optax.scale(s["lr"]))
    found = learner.learn(placed.classifier, sequence, method, tx, mesh=mesh, batch=workload.batch, epochs=s["epochs"], seed=point.seed,
                          shardings=placed.shardings)
    steps = sum(found.steps)
    rows = workload.batch + method.replay + method.r * (2 if method.distils else 1)
    return {
        "final_accuracy": metrics.final_accuracy(found.accuracy, [len(task.test[1]) for task in sequence]),
        "average_accuracy": metrics.average_accuracy(found.accuracy), "new_accuracy": metrics.learning_accuracy(found.accuracy),
        "forgetting": metrics.forgetting(found.accuracy), "backward_transfer": metrics.backward_transfer(found.accuracy),
        "forward_transfer": metrics.forward_transfer(found.accuracy, found.before), "steps": steps, "rows_a_step": rows,
        "rows_trained": steps * rows, "train_s": sum(found.train_s), "timed_step_s": sum(found.train_s) / steps,
        "buffer_bytes": found.buffer_bytes, "last_loss": found.losses[-1], "accuracy_matrix": found.accuracy.tolist(),
        "untrained": found.before.tolist(), "task_names": [one.name for one in sequence]}


# ---------------------------------------------------------------- tables and figures, from the records

COLUMNS = (
    Column(name="label", head="method"), Column(name="final_accuracy", head="final", unit="percent"),
    Column(name="forgetting", head="forgetting", unit="percent"), Column(name="new_accuracy", head="when new", unit="percent"),
    Column(name="forward_transfer", head="forward transfer", unit="percent"), Column(name="steps", head="steps", unit="count"),
    Column(name="rows_a_step", head="rows a step", unit="count"), Column(name="buffer_bytes", head="buffer", unit="bytes"),
    Column(name="train_s", head="time", unit="seconds"))


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, the two figures, and the tables as Markdown and CSV."""
    done = sorted((one for one in records if one["status"] == "done"), key=_place)
    groups: dict[str, list[Record]] = {}
    for one in done:
        groups.setdefault(title(one), []).append(one)
    tables: list[Table] = []
    figures: list[Figure] = []
    for i, (name, own) in enumerate(groups.items()):
        lines = [line | {"label": Cell(value=label(line["method"].value))} for line in page.lines(own)]
        tables += [Table(title=name, lead=f"Run here; {seeds_text(own)}.", columns=COLUMNS, lines=lines),
                   by_task(name, own)]
        of = f"{own[0]['settings']['dataset']}, tasks {own[0]['settings']['tasks']}"
        end, course = f"All test rows after the last task ({of})", f"Each task's test rows after each task ({of})"
        final = [Dot(name=line["label"].value, value=line["final_accuracy"].value) for line in lines]
        cases = [_panel(group) for group in _by_method(own).values()]
        last = f"_{i + 1}" if i else ""
        figures += [Figure(heading=end, lead="A mark a method; the bar is its 95% interval over the seeds.",
                           file=f"class_incremental{last}.svg", draw=functools.partial(dots, end, "share right", final)),
                    Figure(heading=course, lead="A line a task, from its turn on; means over the seeds.",
                           file=f"class_incremental_tasks{last}.svg", draw=functools.partial(panels, course, cases))]
    return page.files("Incremental classification", __doc__ or "", figures, tables, records)


def title(one: Record) -> str:
    """What all records of a table share."""
    row, s = flat(one), one["settings"]
    return (f"{row['model']} on {s['dataset']}, tasks {s['tasks']}, {s['epochs']} epochs, batch {row['batch']}, {row['optimizer']}, "
            f"lr {s['lr']:g}, {one['topology']}")


def label(text: str) -> str:
    """A method with the numbers that matter to it, as tables and figures name it."""
    m, name = methods.parse(text), split(text)[0]
    if m.r:
        return f"{name} r={m.r}, buffer {100 * m.buffer:g}%" + (f", {m.policy}" if m.policy != "reservoir" else "")
    if m.ewc:
        return f"{name} {m.ewc:g}, {m.fisher}"
    return f"{name} r={m.replay}" if m.replay else text


def _place(one: Record) -> int:
    """As the grid has them, whatever was ready first; methods of other commands after them."""
    known = [spelled(text) for text in METHODS]
    return known.index(one["settings"]["method"]) if one["settings"]["method"] in known else len(known)


def _by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    out: dict[str, list[Record]] = {}
    for one in records:
        out.setdefault(one["settings"]["method"], []).append(one)
    return out


def seeds_text(records: Sequence[Record]) -> str:
    """How many seeds the methods have."""
    counts = sorted({len(group) for group in _by_method(records).values()})
    return f"{counts[0]} seed{'s' * (counts[0] > 1)}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds a method"


def over_seeds(group: Sequence[Record], i: int, j: int) -> Interval:
    """Accuracy on task j after task i."""
    return interval([one["values"]["accuracy_matrix"][i][j] for one in group])


def _panel(group: Sequence[Record]) -> Panel:
    names = group[0]["values"]["task_names"]
    curves: dict[str, list[float | None]] = {
        name: [None if i < j else over_seeds(group, i, j).mean for i in range(len(names))] for j, name in enumerate(names)}
    return Panel(title=label(group[0]["settings"]["method"]), curves=curves)


def by_task(name: str, records: Sequence[Record]) -> Table:
    """After the last task, the accuracy on each."""
    names = records[0]["values"]["task_names"]
    lines: list[Line] = []
    for method, group in _by_method(records).items():
        cells = {f"task {j}": Cell(value=over_seeds(group, -1, j), source="measure") for j in range(len(names))}
        lines.append({"label": Cell(value=label(method)), **cells})
    columns = [Column(name="label", head="method"), *(Column(name=f"task {j}", head=one, unit="percent") for j, one in enumerate(names))]
    return Table(title=f"By task: {name}", lead="Test rows of each task that are right after the last one.", columns=columns, lines=lines)


EXPERIMENT = experiment.Experiment(name="class_incremental", module="experiments.class_incremental", doc=__doc__ or "", grid=grid,
                                   pages=pages, flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

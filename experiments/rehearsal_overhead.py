"""What does rehearsal cost in step time, beside the rows that it adds?

Command:  `python -m experiments.rehearsal_overhead --out=runs/rehearsal_overhead --seeds=0,1,2` (about ten minutes on two quiet cores;
          stop it and start it again at will)
Expected: a step on b + r rows takes about (b + r) / b of one on b rows, less where a step has a fixed part; the buffer itself (putting
          rows beside a batch, offering the incoming ones, an exchange every few steps) adds a few percent on top. On emulated
          devices that share two cores nothing overlaps, so what is measured there is all of its cost.

Three loops of the same child, in turn, several rounds: `plain`, a training step on b rows; `larger`, one on b + r rows, without a
buffer; `rehearsal`, one on b incoming and r drawn rows, with everything that rehearsal does. Each dispatches as `jaxmem train` does,
two steps ahead. A number is the median over rounds of a round's seconds a step. `rows alone` is larger / plain, `rehearsal` is
rehearsal / plain, `buffer` is rehearsal - larger; (b + r) / b is counted. The control is `larger`: it costs what the rows cost.

r and b are for each device, as in the paper (b = 56, r = 7 to 56; Bouvier et al., CCGrid 2024): the global batch is b x devices.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.records import Found, Point, Record
from jaxmem.rehearsal import Rehearsal, shards_of
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_figure import Scatter, drawing
from jaxmem.report.experiment_page import Column, Figure, Line, Table
from jaxmem.spec import InputError
from jaxmem.workload import Workload

FLAGS = {
    "model": ("vit-tiny", "what is trained"),
    "batch": ("56", "incoming rows a device"),
    "seq": ("", "tokens a sequence, for a model of text"),
    "topology": ("cpu:1|cpu:8", "where it runs, by |"),
    "plan": ("data=*", "how it is split"),
    "r": ("7|14|28|56", "drawn rows a device, by |"),
    "capacity": ("2240", "stored rows a device"),
    "memory": ("device|pinned_host", "where the buffer lies, by |"),
    "every": ("8", "steps that one draw serves; a multiple of the devices"),
    "steps": ("16", "steps of a round"),
    "rounds": ("5", "rounds of each loop, after one that is not timed"),
}
AHEAD = 2


# ---------------------------------------------------------------- the grid

def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """Topologies x places of the buffer x rows drawn."""
    numbers = {name: experiment.whole(name, flags[name].value) for name in ("batch", "capacity", "every", "steps", "rounds")}
    if numbers["steps"] % numbers["every"]:
        raise InputError(f"--steps={numbers['steps']} is not a multiple of --every={numbers['every']}: rounds would have different "
                         f"numbers of draws; nearest: --steps={max(1, round(numbers['steps'] / numbers['every'])) * numbers['every']}")
    points = []
    for topology in flags.topology.split("|"):
        devices = parse_topology(topology).devices
        for memory in flags.memory.split("|"):
            for r in experiment.wholes("r", flags.r):
                point = experiment.point(
                    model=flags.model, optimizer=flags.optimizer, batch=numbers["batch"] * devices, seq=flags.seq or None,
                    topology=topology, plan=flags.plan, alone=True, seeded=True,
                    settings={"r": r, "memory": memory, **{k: numbers[k] for k in ("capacity", "every", "steps", "rounds")}})
                shards = shards_of(Plan.parse(point.plan))
                if problems := rehearsal_of(point).problems(batch=numbers["batch"] * devices, shards=shards):
                    raise InputError("\n".join(problems))
                points.append(point)
    return points


def rehearsal_of(point: Point) -> Rehearsal:
    s, devices = point.settings, parse_topology(point.topology).devices
    return Rehearsal.parse(f"r={s['r'] * devices},capacity={s['capacity'] * devices},every={s['every']},memory={s['memory']}")


# ---------------------------------------------------------------- one point

def run(point: Point) -> Found:
    import dataclasses

    import jax
    import numpy as np

    from jaxmem import step
    from jaxmem.data.rehearsal import programs as rehearsal_programs
    from jaxmem.data.rehearsal.buffer import row_bytes
    from jaxmem.running import measured, starting

    topology = parse_topology(point.topology)
    workload, plan, rehearsal = Workload.parse_line(point.workload), Plan.parse(point.plan, devices=topology.devices), rehearsal_of(point)
    if plan.step != "fused":
        raise InputError(f"step={plan.step}: only a fused step is timed here")
    starting.start(topology, None)
    devices = jax.devices()[:topology.devices]
    larger = dataclasses.replace(workload, batch=workload.batch + rehearsal.r)
    built = {"plain": step.build(workload, plan, topology, devices), "larger": step.build(larger, plan, topology, devices)}
    train = {name: programs["train"].lower().compile() for name, programs in built.items()}
    fields = {name: (leaf.shape[1:], leaf.dtype) for name, leaf in built["plain"].batch.items()}
    kept = {name: one.lower().compile() for name, one in
            rehearsal_programs.build(rehearsal, fields, built["plain"].mesh, batch=workload.batch).items()}

    rng = np.random.default_rng(point.seed)

    def rows(programs: step.Programs) -> dict[str, jax.Array]:
        """Numbers at random: what a step computes does not depend on them. Integers count from 0 or 1, which every field may hold."""
        made = {name: rng.random(leaf.shape, np.float32) if leaf.dtype == np.float32 else rng.integers(0, 2, leaf.shape).astype(leaf.dtype)
                for name, leaf in programs.batch.items()}
        return {name: jax.device_put(x, programs.batch[name].sharding) for name, x in made.items()}

    scalars = built["plain"]["train"].args[2]
    hyper = {name: jax.device_put(np.float32(value), scalars[name].sharding) for name, value in (("lr", 1e-3), ("clip", 1.0))}
    seed = jax.device_put(np.uint32(point.seed), built["plain"]["init"].args[0].sharding)
    state = built["plain"]["init"].lower().compile()(seed)
    incoming, more = rows(built["plain"]), rows(built["larger"])
    memory: Any = kept["init"](seed)

    def trained(name: str, batch: dict[str, jax.Array]) -> Any:
        nonlocal state
        state, metrics = train[name](state, batch, hyper)
        return metrics["loss"]

    def rehearsed(i: int) -> Any:
        nonlocal memory
        loss = trained("larger", kept["join"](memory["staged"]["rows"], memory["inserts"], incoming))
        memory = kept["insert"](memory, incoming)
        if (i + 1) % rehearsal.every == 0:
            memory = kept["draw"](memory)
        return loss

    loops: dict[str, Callable[[int], Any]] = {
        "plain": lambda i: trained("plain", incoming), "larger": lambda i: trained("larger", more), "rehearsal": rehearsed}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(point.settings["rounds"] + 1):
        for name, one_step in loops.items():
            jax.block_until_ready((state, memory))
            begin, flying = time.perf_counter(), []
            for i in range(point.settings["steps"]):
                flying.append(one_step(i))
                if len(flying) > AHEAD:
                    float(flying.pop(0))
            jax.block_until_ready((state, memory))
            if number:
                seconds[name].append((time.perf_counter() - begin) / point.settings["steps"])
    found = {name: statistics.median(times) for name, times in seconds.items()}
    shards = shards_of(plan)
    drawn = rehearsal.r * rehearsal.every // shards * (row_bytes(fields) + 4)
    return Found(backend=measured.backend(), values={
        "rows_ratio": (larger.batch / workload.batch, "estimate"), "plain_s": (found["plain"], "measure"),
        "larger_s": (found["larger"], "measure"), "rehearsal_s": (found["rehearsal"], "measure"),
        "larger_ratio": (found["larger"] / found["plain"], "measure"), "rehearsal_ratio": (found["rehearsal"] / found["plain"], "measure"),
        "buffer_s": (found["rehearsal"] - found["larger"], "measure"),
        "buffer_share": ((found["rehearsal"] - found["larger"]) / found["larger"], "measure"),
        "buffer_bytes": (row_bytes(fields) * rehearsal.capacity // shards, "estimate"),
        "sent_bytes": (drawn * (shards - 1) // shards, "estimate"), "last_loss": (float(trained("plain", incoming)), "measure")})


# ---------------------------------------------------------------- table and figure, from the records

COLUMNS = (
    Column(name="r", head="r a device", unit="count"), Column(name="rows_ratio", head="(b + r) / b", unit="times"),
    Column(name="larger_ratio", head="rows alone", unit="times"), Column(name="rehearsal_ratio", head="rehearsal", unit="times"),
    Column(name="plain_s", head="plain step", unit="seconds"), Column(name="rehearsal_s", head="step", unit="seconds"),
    Column(name="buffer_s", head="buffer", unit="seconds"), Column(name="buffer_share", head="of the step", unit="percent"),
    Column(name="buffer_bytes", head="buffer a device", unit="bytes"), Column(name="sent_bytes", head="sent a draw", unit="bytes"),
)


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, the figure, and the tables as Markdown and CSV."""
    lines = sorted(page.lines(records), key=lambda line: (*map(str, where(line)), line["r"].number or 0))
    tables = [Table(title=title(*group), columns=COLUMNS, lines=[line for line in lines if where(line) == group],
                    lead=f"Run on {next(line['backend'].value for line in lines if where(line) == group)}.")
              for group in dict.fromkeys(map(where, lines))]
    scatter = Scatter(title="Step time with rehearsal, against the rows that it adds", mark="r", row=lambda line: str(where(line)[0]),
                      x=Column(name="rows_ratio", head="(b + r) / b", unit="times"),
                      y=Column(name="rehearsal_ratio", head="step with / without", unit="times"),
                      panel=lambda line: (title(*where(line)), "x: estimate; y: measure"))
    figure = Figure(heading="Step time", file="rehearsal.svg", draw=functools.partial(drawing, scatter, lines),
                    lead="Each mark is a number of drawn rows. Where the rows alone make the cost, marks lie on x = y.")
    return page.files("Rehearsal: step time against (b + r) / b", __doc__ or "", [figure], tables, records)


def where(line: Line) -> tuple[str, str, int | None]:
    return str(line["topology"].value), str(line["memory"].value), line["batch"].value  # type: ignore[return-value]


def title(topology: str, memory: str, batch: int | None) -> str:
    return f"{topology}, batch {batch}, buffer in {'device' if memory == 'device' else 'pinned host'} memory"


EXPERIMENT = experiment.Experiment(name="rehearsal_overhead", module="experiments.rehearsal_overhead", doc=__doc__ or "", grid=grid,
                                   pages=pages, flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

"""What does each rematerialization policy cost in time for the memory it saves?

Command:  `python -m experiments.remat_policies --model=decoder-small --topology=cpu:8 --out=runs/remat` (about 30 minutes on two
          quiet cores; stop it and start it again at will; `--jobs=2` compiles two points at a time)
Expected: gpt2 needs about 40% of the memory of `none` with `dots` and 20 to 30% with `block`; `attention` saves next to nothing where
          the target's own kernel runs, which never keeps the scores. Recomputed FLOPs counted from shapes equal the compiled ones.
          The predicted step is at most 4% longer than that of `none`: what is not stored is not written and read. With one short sequence a
          device (decoder-small, batch 8, on a TPU) nothing saves memory.

Policies: `none` keeps everything the backward pass needs, `dots` keeps matmul outputs, `attention` recomputes attention alone, `block`
keeps each layer's input alone, `save:A+B` keeps also the named values, `offload:A` keeps the named value in the host's memory.

Two models, two batches each: the model of --model is compiled for every target and also runs here, on --topology; the model of
--compiled_model is only compiled. Memory of a target is its compiler's (compile); its step time is a prediction from the compiled
schedule (estimate). Here the step time is measured, and memory is what the CPU's compiler says.

Columns: `recomputed` is the matmul FLOPs of a step, over all devices, that come again for the backward pass, counted from shapes
(estimate); `beyond none` is what the compiled step computes more than that of policy `none`, counted in its text (compile).
"""

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.cost import flops
from jaxmem.hardware import Topology, parse_topology
from jaxmem.plan import Plan
from jaxmem.records import PLAN, Found, Point, Record
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_figure import Scatter, drawing
from jaxmem.report.experiment_page import Column, Figure, Line, Table
from jaxmem.spec import InputError
from jaxmem.workload import Workload

POLICIES = ("none", "dots", "attention", "block", "save:query_proj+out_proj", "offload:decoder_layer_input")
FLAGS = {
    "model": ("decoder-small", "compiled for every target, and run here"),
    "batch": ("8|32", "two or more global batches of that model, by |"),
    "seq": ("256", "its tokens a sequence"),
    "plan": ("fsdp=*", "how it is split; remat is what varies"),
    "compiled_model": ("gpt2", "only compiled for the targets; empty for none"),
    "compiled_batch": ("64|128", "its global batches"),
    "compiled_seq": ("1024", "its tokens a sequence"),
    "targets": ("v5e-8|h100:8", "topologies to compile for"),
    "steps": ("5", "steps that are timed here, after two that are not"),
}


# ---------------------------------------------------------------- the grid

def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """Models x batches x topologies x policies."""
    steps = experiment.whole("steps", flags.steps)
    models = [(flags.model, flags.batch, flags.seq, True), (flags.compiled_model, flags.compiled_batch, flags.compiled_seq, False)]
    points = []
    for model, batches, seq, runs in (one for one in models if one[0]):
        for batch in batches.split("|"):
            for topology in [*filter(None, flags.targets.split("|")), *([flags.topology] if runs and flags.topology else [])]:
                here = topology == flags.topology
                for policy in POLICIES:
                    if here and policy.startswith("offload") and parse_topology(topology).chip.kind == "cpu":
                        continue  # a CPU device's memory is the host's: there is nowhere to move it to
                    points.append(experiment.point(
                        model=model, optimizer=flags.optimizer, batch=batch, seq=seq, topology=topology,
                        plan=",".join(filter(None, (flags.plan, f"remat={policy}"))), alone=here, seeded=here,
                        settings={"how": "measure", "steps": steps} if here else {"how": "compile"}))
    return points


# ---------------------------------------------------------------- one point

def run(point: Point) -> Found:
    topology = parse_topology(point.topology)
    workload, plan = Workload.parse_line(point.workload), Plan.parse(point.plan, devices=topology.devices)
    if point.settings["how"] == "measure":
        return measured(workload, plan, topology, steps=point.settings["steps"], seed=point.seed)
    return compiled(workload, plan, topology)


def compiled(workload: Workload, plan: Plan, topology: Topology) -> Found:
    """The train step compiled for a target that is not here."""
    from jaxmem.analysis import parsed
    from jaxmem.hlo import speed
    from jaxmem.targets.compile import Request, compile_programs
    from jaxmem.targets.flags import flags_for
    from jaxmem.verdict import check_workload, step_programs

    check = check_workload(workload, plan, topology, programs=("train",), jobs=1)
    if check["verdict"] == "unknown":
        raise RuntimeError("; ".join(check["problems"]) or "the compiler gave no figures")
    names = step_programs(plan)
    request = Request(spec={"kind": "workload", "workload": str(workload), "plan": str(plan)}, programs=names, topology=topology,
                      flags=flags_for(plan.flags, topology))
    total: float | None = 0.0
    if check["verdict"] == "does_not_fit":  # a refused program has no text, and one that is too large is no step
        total = None
    else:
        for artifact in compile_programs(request, jobs=1).values():  # the check's own, from the cache
            one = speed.predict(parsed(artifact), topology, artifact.result["mesh"]).flops
            total = None if total is None or one is None else total + one * topology.devices
    fits = check["verdict"] in ("fits", "tight")
    return Found(backend=check["backend"], values={
        "verdict": (check["verdict"], "compile"), "peak_bytes": (check["peak_bytes"], "compile"),
        "usable_bytes": (check["usable_bytes"], check["sources"].get("usable_bytes", "estimate")),
        "host_bytes": (check["host_bytes"], "compile"), "step_s": (check["step_s"] if fits else None, "estimate"),
        "compiled_flops": (total, "compile"), **estimated(workload, plan, topology)})


def estimated(workload: Workload, plan: Plan, topology: Topology) -> dict[str, tuple[Any, Any]]:
    """FLOPs of a step over all devices, from shapes, with the attention that the step has on this topology."""
    from jaxmem.parallel.attend import block_size_for
    from jaxmem.parallel.triton_attention import blocks_for
    from jaxmem.step import choose_attention

    attention = choose_attention(workload, plan, topology)
    blocks = blocks_for(workload.seq, workload.model.head_dim) if attention == "triton" else {}
    own = block_size_for(workload.seq) if attention == "splash" else 512
    found = flops.step_flops(workload, plan, attention=attention, block_q=blocks.get("block_q", own), block_kv=blocks.get("block_k", own))
    return {"attention_kernel": (attention, "estimate"), "estimated_flops": (found.hardware, "estimate"),
            "estimated_recomputed_flops": (found.recomputed, "estimate")}


def measured(workload: Workload, plan: Plan, topology: Topology, *, steps: int, seed: int) -> Found:
    """The train step on the devices that are here: the median of `steps` steps, each waited for, after two that are not timed."""
    import jax
    import numpy as np

    from jaxmem import step
    from jaxmem.data import open_for
    from jaxmem.hlo.parse import parse
    from jaxmem.hlo.work import hlo_flops
    from jaxmem.running import measured as devices
    from jaxmem.running import starting
    from jaxmem.targets.child import memory_of
    from jaxmem.verdict import summed_peak

    if plan.step != "fused":
        raise InputError(f"step={plan.step}: only a fused step is timed here")
    starting.start(topology, None)
    programs = step.build(workload, plan, topology, jax.devices())
    train = programs["train"].lower().compile()
    state = programs["init"].lower().compile()(jax.device_put(np.uint32(seed), programs["init"].args[0].sharding))
    data = open_for(workload, "synthetic")
    rows = [data.row(seed * workload.batch + i) for i in range(workload.batch)]
    batch = {name: jax.device_put(np.stack([one[name] for one in rows]), leaf.sharding) for name, leaf in programs.batch.items()}
    scalars = programs["train"].args[2]
    hyper = {name: jax.device_put(np.float32(value), scalars[name].sharding) for name, value in (("lr", 1e-3), ("clip", 1.0))}
    seconds, loss = [], float("nan")
    for _ in range(steps + 2):
        start = time.perf_counter()
        state, metrics = train(state, batch, hyper)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    text = train.as_text()
    total = hlo_flops(parse(text)) if text else None
    backend = devices.backend()
    return Found(backend=backend, values={
        "peak_bytes": (summed_peak(memory_of(train)), "compile"), "step_s": (statistics.median(seconds[2:]), "measure"),
        "fastest_s": (min(seconds[2:]), "measure"), "slowest_s": (max(seconds[2:]), "measure"), "last_loss": (loss, "measure"),
        "compiled_flops": (total * topology.devices if total is not None else None, "compile"), **estimated(workload, plan, topology)})


# ---------------------------------------------------------------- table and figure, from the records

SAME = ("model", "optimizer", "batch", "seq", "topology", "settings", *(name for name in PLAN if name != "remat"))
COLUMNS = (
    Column(name="remat", head="policy"), Column(name="peak_bytes", head="memory a device", unit="bytes"),
    Column(name="memory_ratio", head="vs none", unit="percent"), Column(name="step_s", head="step", unit="seconds"),
    Column(name="time_ratio", head="vs none", unit="percent"),
    Column(name="estimated_recomputed_flops", head="recomputed", unit="flops"),
    Column(name="compiled_recomputed_flops", head="beyond none", unit="flops"),
)
TARGET = (*COLUMNS, Column(name="host_bytes", head="host memory", unit="bytes"), Column(name="verdict", head="verdict"))


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, the figure, and the tables as Markdown and CSV."""
    lines = with_ratios(in_order(page.lines(records)))
    titles = list(dict.fromkeys(title(line) for line in lines))
    tables = []
    for name in titles:
        own = [line for line in lines if title(line) == name]
        here = own[0]["settings"].value != "how=compile"
        backend = own[0]["backend"].value
        lead = (f"Run here: the median of the timed steps; memory is what the compiler for {backend} says." if here else
                f"Compiled for {backend}: memory is the compiler's, the step time predicted from its schedule.")
        if kernel := own[0].get("attention_kernel", page.NOTHING).value:
            lead += f" Attention: {kernel}."
        tables.append(Table(title=name, lead=lead, columns=COLUMNS if here else TARGET, lines=own))
    scatter = Scatter(title="Memory against time, by rematerialization policy (lower and further left is better)",
                      x=Column(name="step_s", head="step time", unit="seconds"), mark="remat", row=row, panel=panel,
                      limit="usable_bytes", y=Column(name="peak_bytes", head="memory a device", unit="bytes"))
    figure = Figure(heading="Memory against time", file="remat.svg", draw=functools.partial(drawing, scatter, lines), lead="Each mark is a "
                    "policy. The dotted line joins those that no other beats in both memory and time. Axes do not begin at zero.")
    return page.files("Rematerialization: memory against time", __doc__ or "", [figure], tables, records)


def in_order(lines: list[Line]) -> list[Line]:
    """As the grid has them, whatever was ready first: by model, batch, target before here, policy."""
    def first(name: str) -> list[Any]:
        return list(dict.fromkeys(line[name].value for line in lines))
    models, topologies = first("model"), first("topology")

    def place(line: Line) -> tuple[Any, ...]:
        policy = line["remat"].value
        return (models.index(line["model"].value), line["batch"].value, line["seq"].value, line["settings"].value != "how=compile",
                topologies.index(line["topology"].value), POLICIES.index(policy) if policy in POLICIES else len(POLICIES), policy)
    return sorted(lines, key=place)


def with_ratios(lines: list[Line]) -> list[Line]:
    """The lines with what policy `none` of the same workload and topology had in proportion, and the FLOPs beyond it."""
    of_none = {name: page.baseline(lines, SAME, {"remat": "none"}, name) for name in ("peak_bytes", "step_s", "compiled_flops")}
    for i, line in enumerate(lines):
        line["memory_ratio"] = page.over(line.get("peak_bytes", page.NOTHING), of_none["peak_bytes"][i])
        line["time_ratio"] = page.over(line.get("step_s", page.NOTHING), of_none["step_s"][i])
        total, base = line.get("compiled_flops", page.NOTHING), of_none["compiled_flops"][i]
        if total.number is not None and base is not None:
            line["compiled_recomputed_flops"] = page.Cell(value=total.number - base, source=total.source)
    return lines


def title(line: Line) -> str:
    return f"{line['model'].value}, batch {line['batch'].value} x {line['seq'].value}, {line['topology'].value}"


def row(line: Line) -> str:
    return f"{line['model'].value}, {line['batch'].value} x {line['seq'].value}"


def panel(line: Line) -> tuple[str, str]:
    here = line["settings"].value != "how=compile"
    return (f"{row(line)}, {line['topology'].value}", "time: measure; memory: compile" if here else "time: estimate; memory: compile")


EXPERIMENT = experiment.Experiment(name="remat_policies", module="experiments.remat_policies", doc=__doc__ or "", grid=grid, pages=pages,
                                   flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

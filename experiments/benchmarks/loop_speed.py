"""What does the training loop cost over a bare hand-written loop of the same compiled program?

Command: `python -m experiments.benchmarks.loop_speed` (about 3 minutes)
Expected: at least 0.98 of the bare loop's steps a second.

Bare: one batch on the devices, the compiled step called again and again, the last result awaited. Ours: `jaxmem.train` with its data
pipeline, guard, metrics fetched two steps late, one JSON line a step; no checkpoint in the measured stretch. Both take turns in one
process, several times; the ratio is of medians, since machines are shared.
"""

import json
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

from jaxmem import environment, schedules, step, train
from jaxmem.data import Batches, open_data
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.running import measured
from jaxmem.runs.folder import open_folder
from jaxmem.runs.settings import Settings
from jaxmem.workload import Workload

_MODEL = flags.DEFINE_string("model", "decoder-small", "the model")
_BATCH = flags.DEFINE_integer("batch", 16, "sequences a step")
_SEQ = flags.DEFINE_integer("seq", 256, "tokens a sequence")
_TOPOLOGY = flags.DEFINE_string("topology", "cpu:2", "cpu:N, or the GPUs that are here")
_PLAN = flags.DEFINE_string("plan", "fsdp=*", "the plan")
_STEPS = flags.DEFINE_integer("steps", 40, "steps of one turn; the first quarter is left out")
_TURNS = flags.DEFINE_integer("turns", 5, "turns of each loop")


def main(argv: list[str]) -> None:
    del argv
    topology = parse_topology(_TOPOLOGY.value)
    if topology.chip.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", topology.devices)
    plan = Plan.parse(_PLAN.value, devices=topology.devices)
    workload = Workload.parse(model=_MODEL.value, batch=_BATCH.value, seq=_SEQ.value)
    skipped = _STEPS.value // 4
    programs = step.build(workload, plan, topology, jax.devices())
    compiled = programs["train"].lower().compile()
    data = open_data("text:pydoc", seq=workload.seq, vocab=workload.model.vocab)
    init = jax.make_array_from_callback((), programs["init"].args[0].sharding, lambda _: np.uint32(0))
    fresh = programs["init"].lower().compile()
    hyper = train.hyper_parameters(programs)(1e-3, 1.0)

    def bare() -> float:
        """Seconds a step."""
        with Batches(data, batch=workload.batch, seed=0, shardings={k: v.sharding for k, v in programs.batch.items()}) as batches:
            _, batch = next(batches)
        state = fresh(init)
        metrics = None
        for i in range(_STEPS.value):
            if i == skipped:
                jax.block_until_ready(state)
                begin = time.monotonic()
            state, metrics = compiled(state, batch, hyper)
        jax.block_until_ready((state, metrics))
        return (time.monotonic() - begin) / (_STEPS.value - skipped)

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            s = Settings(workload=workload, topology=topology, plan=plan, out=pathlib.Path(folder) / "run", data="text:pydoc",
                         steps=_STEPS.value, lr=1e-3, schedule=schedules.parse("constant"), schedule_text="constant", warmup=0, clip=1.0)
            train.train(s, open_folder(s.out, s.config(), environment.versions(), elastic=False))
            lines = [json.loads(line) for line in (s.out / "metrics.jsonl").read_text().splitlines()]
        return (lines[-1]["time"] - lines[skipped - 1]["time"]) / (_STEPS.value - skipped)

    times = [(bare(), ours()) for _ in range(_TURNS.value)]
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{workload}\n{topology}, plan {plan or 'default'}, {measured.backend()}, jax {jax.__version__} (measure)")
    print("turns, ms a step (bare, ours): " + ", ".join(f"{1e3 * x:.1f} {1e3 * y:.1f}" for x, y in times))
    print(f"bare {1 / a:.2f} steps/s, ours {1 / b:.2f} steps/s: ratio {a / b:.3f}")


if __name__ == "__main__":
    app.run(main)

"""What does a learned optimizer's update cost on a TPU and a GPU that is not here, beside AdamW's?

Command:  `python -m experiments.benchmarks.optimizer_targets` (ten minutes on two quiet cores) `--targets=v5e-1,h100:1` `--size=2048`
          `--layers=1,12` `--docs=docs/optimizer_targets.md`
Expected: on a TPU two to five times AdamW's predicted time, by XLA and by the kernels alike; on a GPU the kernels are at 2.6 to 2.9 times
          and XLA at up to 6. Temporaries of some bytes for each element of the tensor, stacks of layers as well; 40 for celo's stack on
          GPU by XLA.

One square f32 matrix, or a stack of such, updated by the optimizer alone: gradients in, parameters and state donated. Temporaries and
compile time are the compiler's (compile); the time of a step is predicted from its schedule (estimate). Gradients are not donated, so a
step that is written over them costs 4 bytes an element here that it does not cost inside a training step.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from absl import app, flags

from jaxmem import environment
from jaxmem.hardware import Topology, parse_topology

_TARGETS = flags.DEFINE_list("targets", ["v5e-1", "h100:1"], "topologies of one device, by comma")
_SIZE = flags.DEFINE_integer("size", 2048, "rows and columns of a matrix")
_LAYERS = flags.DEFINE_list("layers", ["1", "12"], "matrices in a stack, by comma")
_DOCS = flags.DEFINE_string("docs", None, "write the table here")
_CHILD = flags.DEFINE_string("child", None, "compile for this topology and print a line of JSON a row")

ROWS = ("adamw", "small_fc, XLA", "small_fc, kernels", "celo, XLA", "celo, kernels")


def transformation(row: str, kind: str, stacked: int) -> Any:
    import jax
    import optax

    from jaxmem.optim.learned import weights as learned_weights
    from jaxmem.optim.learned.celo import scale_by_celo
    from jaxmem.optim.learned.fused import Kernel
    from jaxmem.optim.learned.small_fc import scale_by_small_fc
    if row == "adamw":
        return optax.adamw(1.0)
    rule, by = row.split(", ")
    make = {"small_fc": scale_by_small_fc, "celo": scale_by_celo}[rule]
    kernel = Kernel(backend=kind, shardings={}) if by == "kernels" else None  # type: ignore[arg-type]
    return make(learned_weights.initial(rule, jax.random.key(0)), stacked=stacked, chunk=None, fenced=kind == "gpu", kernel=kernel)


def compile_here(topology: Topology) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxmem.hlo import speed
    from jaxmem.hlo.parse import parse
    from jaxmem.plan import Plan
    from jaxmem.sharding import make_mesh
    from jaxmem.targets.child import describe_mesh, memory_of
    from jaxmem.targets.devices import described_devices
    mesh = make_mesh(Plan.parse("data=1"), described_devices(topology)[:1])
    at = NamedSharding(mesh, P())
    for layers in map(int, _LAYERS.value):
        shape = ((layers,) if layers > 1 else ()) + (_SIZE.value,) * 2
        for row in ROWS:
            tx = transformation(row, topology.chip.kind, int(layers > 1))

            def step(g: jax.Array, state: Any, p: jax.Array, tx: Any = tx) -> tuple:
                update, state = tx.update(g, state, p)
                return p - 1e-3 * update, state
            p = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)
            state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), jax.eval_shape(tx.init, p))
            with jax.set_mesh(mesh):
                lowered = jax.jit(step, donate_argnums=(1, 2)).lower(p, state, p)
            start = time.perf_counter()
            compiled = lowered.compile()
            wall_s, memory = time.perf_counter() - start, memory_of(compiled)
            found = speed.predict(parse(compiled.as_text() or ""), topology, describe_mesh(mesh))
            print(json.dumps({"row": row, "layers": layers, "elements": math.prod(shape), "compile_s": wall_s,
                              "temp_bytes": memory and memory["temp_bytes"], "step_s": found.step_s}), flush=True)


def rows_of(target: str) -> list[dict[str, Any]]:
    """Compiled in a process of its own, with the environment that the target's compiler needs."""
    from jaxmem.targets.devices import environment as needed
    topology = parse_topology(target)
    command = [sys.executable, "-m", "experiments.benchmarks.optimizer_targets", f"--child={target}", f"--size={_SIZE.value}",
               f"--layers={','.join(_LAYERS.value)}"]
    process = subprocess.Popen(command, env=os.environ | needed(topology, ()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out = []
    for line in process.stdout or ():
        if line.startswith("{"):
            out.append(json.loads(line))
            print(f"{target}: {out[-1]['layers']} x {out[-1]['row']} compiled in {out[-1]['compile_s']:.1f} s", file=sys.stderr, flush=True)
    if process.wait():
        sys.exit(f"{target}: {(process.stderr.read() if process.stderr else '')[-2000:]}")
    return out


def table(target: str, rows: list[dict[str, Any]]) -> str:
    lines = ["| target | matrices | update | predicted step (estimate) | x adamw | temporaries, B / element (compile) | compile time |",
             "|---|---|---|---|---|---|---|"]
    base = {row["layers"]: row["step_s"] for row in rows if row["row"] == "adamw"}
    for row in rows:
        step, own = row["step_s"], base[row["layers"]]
        time_text = "—" if step is None else f"{step * 1e3:.3f} ms"
        ratio = "—" if step is None or own is None else f"{step / own:.1f}"
        temp = "—" if row["temp_bytes"] is None else f"{row['temp_bytes'] / row['elements']:.1f}"
        lines.append(f"| {target} | {row['layers']} x {_SIZE.value}² | {row['row']} | {time_text} | {ratio} | {temp} | "
                     f"{row['compile_s']:.0f} s |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    if _CHILD.value:
        compile_here(parse_topology(_CHILD.value))
        return
    environment.quiet()
    text = "\n\n".join(table(target, rows_of(target)) for target in _TARGETS.value)
    print(text)
    if _DOCS.value:
        command = f"python -m experiments.benchmarks.optimizer_targets --targets={','.join(_TARGETS.value)} --size={_SIZE.value}"
        lead = (__doc__ or "").rpartition("\n\n")[2].strip()
        pathlib.Path(_DOCS.value).write_text("# A learned optimizer's update on accelerators, compiled\n\n"
                                             f"{lead}\nMade by `{command}`; {environment.versions_text()}.\n\n{text}\n")


if __name__ == "__main__":
    app.run(main)

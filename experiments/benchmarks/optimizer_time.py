"""How long does a learned optimizer's update take beside AdamW's?

Command: `python -m experiments.benchmarks.optimizer_time` (two minutes; run it alone) `--sizes=1024,4096` `--repeats=10` `--chunk=262144`
Expected: on CPU within 8 times optax.adamw at 1M and at 16.8M parameters, and several times faster than the naive form.

Wall time is what a quiet machine is for; CPU time (of all threads) says much the same where others are at work. One square f32 matrix,
state and parameters donated, everything in one process, the candidates taking turns. `concat` is the control: small_fc as its
description reads, every feature an array, one concatenation, matrix products. Temporaries are what the compiler says.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax import lax

from jaxmem import environment
from jaxmem.optim.learned import accumulators, features
from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.celo import scale_by_celo
from jaxmem.optim.learned.small_fc import scale_by_small_fc
from jaxmem.running import measured

_SIZES = flags.DEFINE_list("sizes", ["1024", "4096"], "rows (and columns) of the matrix, by comma")
_REPEATS = flags.DEFINE_integer("repeats", 10, "timed steps of each; the least and the median are shown")
_CHUNK = flags.DEFINE_integer("chunk", 2**18, "elements of a block")
_CONCAT = flags.DEFINE_integer("concat_up_to", 4096, "largest size at which the control runs: it takes about 300 bytes a parameter")


def scale_by_concat(weights: dict[str, jax.Array]) -> optax.GradientTransformation:
    """small_fc for one matrix, naively."""
    def init(p: jax.Array) -> tuple:
        zeros = jnp.zeros
        return (zeros((), jnp.int32), zeros((*p.shape, 3)), zeros(p.shape), zeros((p.shape[0], 3)), zeros((p.shape[1], 3)))

    def update(g: jax.Array, state: tuple, p: jax.Array) -> tuple:
        count, m, v, r, c = state
        dm, df = (accumulators.decays((0.9, 0.99, 0.999), weights[name]) for name in ("momentum_decays", "adafactor_decays"))
        dv = accumulators.decays((0.999,), weights["rms_decays"])[0]
        m = dm * m + (1 - dm) * g[..., None]
        v = dv * v + (1 - dv) * g * g
        r = df * r + (1 - df) * (g * g + 1e-30).mean(1)[:, None]  # the later dim is the larger one of a square
        c = df * c + (1 - df) * (g * g + 1e-30).mean(0)[:, None]
        factor = lax.rsqrt(jnp.maximum(r / (r.mean(0) + 1e-9), 1e-9))[:, None] * lax.rsqrt(jnp.maximum(c, 1e-9))[None]
        root, rows, cols = lax.rsqrt(v + 1e-6), *(jnp.broadcast_to(x, m.shape) for x in (r[:, None], c[None]))
        x = jnp.concatenate([g[..., None], p[..., None], m, v[..., None], m * root[..., None], root[..., None], g[..., None] * factor, rows,
                             cols, lax.rsqrt(rows + 1e-8), lax.rsqrt(cols + 1e-8), m * factor], -1)
        x = x * lax.rsqrt(1e-5 + jnp.square(x).mean((0, 1)))
        x = jnp.concatenate([x, jnp.broadcast_to(features.step_embedding(count), (*p.shape, 11))], -1)
        for i in range(3):
            x = x @ weights[f"w{i}"] + weights[f"b{i}"]
            x = jax.nn.relu(x) if i < 2 else x
        return x[..., 0] * jnp.exp(0.001 * x[..., 1]) * 0.001, (count + 1, m, v, r, c)
    return optax.GradientTransformation(init, update)


class Candidate:
    """One compiled step and its state."""

    def __init__(self, name: str, tx: Any, p: jax.Array, g: jax.Array):
        def step(g: jax.Array, state: Any, p: jax.Array) -> tuple:
            update, state = tx.update(g, state, p)
            return p - 1e-3 * update, state
        self.name, self.g, self.p, self.seconds, self.cpu_seconds = name, g, jnp.copy(p), [], []
        self.state = jax.jit(tx.init)(p)
        start = time.perf_counter()
        self.run: Callable = jax.jit(step, donate_argnums=(1, 2)).lower(g, self.state, p).compile()
        self.compile_s = time.perf_counter() - start
        analysis = self.run.memory_analysis()  # type: ignore[attr-defined]
        self.temp_bytes = analysis.temp_size_in_bytes if analysis else None

    def step(self) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        self.p, self.state = jax.block_until_ready(self.run(self.g, self.state, self.p))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


def candidates(size: int) -> list[Candidate]:
    p = jax.random.normal(jax.random.key(0), (size, size))
    g = jnp.cos(3 * p) + 0.1
    weights = {rule: learned_weights.initial(rule, jax.random.key(0)) for rule in ("small_fc", "celo")}
    made = [("optax.adamw", optax.adamw(1.0)), ("small_fc", scale_by_small_fc(weights["small_fc"], chunk=_CHUNK.value)),
            ("celo", scale_by_celo(weights["celo"], chunk=_CHUNK.value))]
    if size <= _CONCAT.value:
        made.append(("small_fc, concat (control)", scale_by_concat(weights["small_fc"])))
    return [Candidate(name, tx, p, g) for name, tx in made]


def main(argv: list[str]) -> None:
    del argv
    print(f"milliseconds: measure, {measured.backend()}; temporaries: compile; {environment.versions_text()}\n")
    print("| parameters | update | least ms | median ms | x adamw | least CPU ms | x adamw | temporaries B / parameter | compile s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in map(int, _SIZES.value):
        runs = candidates(size)
        for turn in range(_REPEATS.value + 1):
            for run in runs:
                run.step()
                if turn == 0:
                    run.seconds.clear(), run.cpu_seconds.clear()  # the first touches its memory
        adamw, adamw_cpu = min(runs[0].seconds), min(runs[0].cpu_seconds)
        for run in runs:
            least, cpu, n = min(run.seconds), min(run.cpu_seconds), size * size
            temp = "—" if run.temp_bytes is None else f"{run.temp_bytes / n:.1f}"
            print(f"| {n / 1e6:.2f}M | {run.name} | {least * 1e3:.2f} | {np.median(run.seconds) * 1e3:.2f} | {least / adamw:.1f} | "
                  f"{cpu * 1e3:.2f} | {cpu / adamw_cpu:.1f} | {temp} | {run.compile_s:.1f} |", flush=True)


if __name__ == "__main__":
    app.run(main)

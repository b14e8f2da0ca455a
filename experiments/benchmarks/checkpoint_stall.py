"""How long does a checkpoint keep training from going on: written at once, by Orbax in the background, or copied lazily?

Command: `python -m experiments.benchmarks.checkpoint_stall` (about 5 minutes; a state of 1.1 GB, twice that on disk under --out)
Expected: blocked time sync > async > lazy; lazy near max(0, bytes / bandwidth - seconds of forward and backward) where the copy has
an engine of its own. On CPU devices it has not: copy and step share the cores, and the last column shows what that costs.

blocked: seconds in which the main thread could not go on to the next step. For async that is Orbax's copy to the host, on CPU a view of
the device's buffer; the step that would donate that buffer then has to copy it, so `donation copy` (how much longer the next update
took; measured for every mode) is counted with it. Lazy copies for real, into pinned_host memory, so the next update donates in place.
extra: seconds that three steps took longer than three steps without a checkpoint, the writing in the background included.
bandwidth: the copy to pinned_host alone, nothing else running. All measured in one process.
"""

import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from jaxmem import step
from jaxmem.checkpoint import lazy
from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.keep import Keep
from jaxmem.checkpoint.store import Store, tree_bytes
from jaxmem.data import Batches, open_data
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.running import measured
from jaxmem.workload import Workload

_MODEL = flags.DEFINE_string("model", "decoder-small,layers=16,embed=640,heads=10,kv_heads=10,head_dim=64,mlp=1760,vocab=8192", "the model")
_BATCH = flags.DEFINE_integer("batch", 2, "sequences a step")
_SEQ = flags.DEFINE_integer("seq", 128, "tokens a sequence")
_TOPOLOGY = flags.DEFINE_string("topology", "cpu:2", "cpu:N, or the GPUs that are here")
_PLAN = flags.DEFINE_string("plan", "fsdp=*,step=split,remat=block", "the plan; step=split is what lazy needs, and all modes get")
_REPEATS = flags.DEFINE_integer("repeats", 5, "checkpoints of each mode")
_OUT = flags.DEFINE_string("out", None, "where checkpoints are written (default: a temporary folder)")


def main(argv: list[str]) -> None:
    del argv
    topology = parse_topology(_TOPOLOGY.value)
    if topology.chip.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", topology.devices)
    plan = Plan.parse(_PLAN.value, devices=topology.devices)
    workload = Workload.parse(model=_MODEL.value, batch=_BATCH.value, seq=_SEQ.value)
    programs = step.build(workload, plan, topology, jax.devices())
    compiled = {name: programs[name].lower().compile() for name in ("init", "gradients", "update")}
    whole = programs.state["step"].sharding

    def scalar(x: Any) -> jax.Array:
        return jax.make_array_from_callback((), whole, lambda _: x)
    hyper = {"lr": scalar(np.float32(1e-4)), "clip": scalar(np.float32(1.0))}
    state = compiled["init"](scalar(np.uint32(0)))
    data = open_data("synthetic", seq=workload.seq, vocab=workload.model.vocab)
    batches = Batches(data, batch=workload.batch, seed=0, shardings={k: v.sharding for k, v in programs.batch.items()}, start=0)
    _, batch = next(batches)
    batches.close()
    total = tree_bytes(state)

    def gradients() -> tuple[jax.Array, Any]:
        return compiled["gradients"](state["params"], batch)

    def one_step() -> None:
        nonlocal state
        loss, grads = gradients()
        state, _ = compiled["update"](state, loss, grads, hyper)
        jax.block_until_ready(state)

    def seconds(what: Any) -> float:
        start = time.monotonic()
        what()
        return time.monotonic() - start

    for _ in range(3):
        one_step()
    plain = [seconds(one_step) for _ in range(2 * _REPEATS.value)]
    step_s = statistics.median(plain)
    digest_s = statistics.median(seconds(lambda: digests(state)) for _ in range(_REPEATS.value))
    gradient_s = statistics.median(seconds(lambda: jax.block_until_ready(gradients())) for _ in range(_REPEATS.value))
    copy_s = statistics.median(seconds(lambda: jax.block_until_ready(jax.tree.map(lazy.to_pinned_host, state)))
                               for _ in range(_REPEATS.value))
    folder = pathlib.Path(_OUT.value or tempfile.mkdtemp(prefix="jaxmem-stall-"))
    store = Store(folder, keep=Keep(last=1), run_id="stall")
    snapshots = lazy.Snapshots(store)
    number = 0

    def checkpoint(mode: str) -> tuple[float, float, float, float]:
        """(blocked, donation copy, extra over three steps, commit) seconds of one checkpoint and the three steps after it."""
        nonlocal number, state
        number += 1
        begin = time.monotonic()
        meta = {"digests": {}, "eval_loss": None}
        if mode == "lazy":
            snapshots.start(number, state, meta)
            loss, grads = gradients()
            jax.block_until_ready(grads)
            waits = time.monotonic()
            taken = snapshots.take()
            store.save(number, taken.state, meta | {"digests": taken.digests[0]}, wait=False, release=True)
            blocked = time.monotonic() - waits
            del taken
        else:
            store.save(number, state, meta | {"digests": digests(state)[0]}, wait=mode == "sync")
            blocked = time.monotonic() - begin
            loss, grads = gradients()
            jax.block_until_ready(grads)
        update = time.monotonic()
        state, _ = compiled["update"](state, loss, grads, hyper)
        jax.block_until_ready(state)
        donation = time.monotonic() - update - max(step_s - gradient_s, 0.0)
        one_step()
        one_step()
        extra = time.monotonic() - begin - 3 * step_s
        store.wait()
        return blocked, max(donation, 0.0), extra, time.monotonic() - begin

    print(f"{workload}\n{topology}, plan {plan}, {measured.backend()}, jax {jax.__version__} (measure)")
    print(f"state {total / 1e9:.2f} GB; step {step_s:.2f} s, of which forward and backward {gradient_s:.2f} s; "
          f"copy to pinned_host alone {copy_s:.2f} s = {total / copy_s / 1e9:.2f} GB/s; digests alone {digest_s:.2f} s")
    found = {}
    for mode in ("sync", "async", "lazy"):
        checkpoint(mode)  # the first one pays for files, pools and threads
        rows = [checkpoint(mode) for _ in range(_REPEATS.value)]
        found[mode] = [statistics.median(column) for column in zip(*rows, strict=True)]
        blocked, donation, extra, commit = found[mode]
        print(f"{mode:6} blocked {blocked:6.2f} s   donation copy {donation:5.2f} s   extra over three steps {extra:6.2f} s   "
              f"committed after {commit:6.2f} s", flush=True)
    stall = {mode: row[0] + row[1] for mode, row in found.items()}
    predicted = max(0.0, copy_s - gradient_s)
    print(f"lazy, by the formula max(0, bytes / bandwidth - forward and backward): {predicted:.2f} s (estimate); "
          f"measured {stall['lazy']:.2f} s")
    print(f"stall ratios: sync / async {stall['sync'] / stall['async']:.1f}, sync / lazy {stall['sync'] / stall['lazy']:.1f}, "
          f"async / lazy {stall['async'] / stall['lazy']:.1f}")
    print(f"extra ratios, writing included: sync / async {found['sync'][2] / found['async'][2]:.2f}, "
          f"sync / lazy {found['sync'][2] / found['lazy'][2]:.2f}")
    store.close()
    if _OUT.value is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    app.run(main)

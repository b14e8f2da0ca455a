"""What does a recovery read from shared storage, and how long does it take, when survivors read their own disks first?

Command: `python -m experiments.benchmarks.recovery_bytes` (a minute) `--plan=fsdp=4,tensor=2 --lost=1 --after=fsdp=2,data=3`
    `--shared_bytes_per_s=2.5e7` (0: as fast as this disk)
Expected: the ratio of bytes is total / missing exactly; the ratio of seconds comes near it the slower shared storage is.

Four processes of two devices are emulated, a thread each with a folder each, and they read from one another over TCP. One run
measures both: the same restore with all local folders empty, which reads every byte of the state from shared storage once, and
with the survivors' folders in place. Shared storage is a folder here, held back to a rate that all processes share.
"""

import concurrent.futures
import os
import pathlib
import tempfile
import threading
import time

from absl import app, flags, logging

_MODEL = flags.DEFINE_string("model", "decoder-small,layers=4,embed=384,mlp=1536,vocab=6144,heads=6,kv_heads=2,head_dim=64", "model")
_PLAN = flags.DEFINE_string("plan", "fsdp=4,tensor=2", "plan of the eight devices that saved")
_LOST = flags.DEFINE_multi_integer("lost", [1], "which of the processes 0 to 3 are lost")
_AFTER = flags.DEFINE_string("after", "fsdp=2,data=3", "plan of the devices that are left")
_RATE = flags.DEFINE_float("shared_bytes_per_s", 2.5e7, "what shared storage gives to all processes together; 0: as fast as it can")
STEP = 40


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from jaxmem import step
    from jaxmem.checkpoint.nearby import Nearby, leaves_of
    from jaxmem.checkpoint.nearby_exchange import among_threads
    from jaxmem.checkpoint.nearby_remote import OrbaxRemote
    from jaxmem.hardware import parse_topology
    from jaxmem.plan import Plan
    from jaxmem.workload import Workload
    jax.config.update("jax_num_cpu_devices", 8)

    def abstract(plan: str, devices: list):
        workload = Workload.parse(model=_MODEL.value, batch="24", seq="64", optimizer="adamw")
        return step.build(workload, Plan.parse(plan, devices=len(devices)), parse_topology(f"cpu:{len(devices)}"), devices).state

    class Held(OrbaxRemote):
        """Shared storage of one rate for all."""

        turn = threading.Lock()

        def read(self, path, box):
            found = super().read(path, box)
            if _RATE.value:
                with self.turn:
                    time.sleep(found.nbytes / _RATE.value)
            return found

    # ---- saved by four
    devices, generator, saved = jax.devices(), np.random.default_rng(0), {"step": f"{STEP}"}
    state = jax.tree.map(lambda leaf: jax.device_put(generator.random(leaf.shape, np.float32).astype(leaf.dtype), leaf.sharding),
                         abstract(_PLAN.value, devices))
    survivors = [i for i in range(4) if i not in _LOST.value]
    left = [d for i in survivors for d in devices[2 * i:2 * i + 2]]
    wanted = abstract(_AFTER.value, left)
    with tempfile.TemporaryDirectory() as name:
        where = pathlib.Path(name)
        for i in range(4):
            one = Nearby(where / f"place{i}", process=i, process_of=lambda device: devices.index(device) // 2)
            one.keep(STEP, one.shards_of(state), saved)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(where / "shared", args=ocp.args.PyTreeSave(state))

        # ---- read by those that are left
        def restore(folders: list[pathlib.Path]) -> tuple[list, float, int]:
            exchanges, remote = among_threads(len(survivors), timeout_s=600), Held(where / "shared")

            def one(process: int):
                nearby = Nearby(folders[process], process=process, process_of=lambda device: left.index(device) // 2,
                                exchange=exchanges[process])
                return nearby.read(wanted, STEP, remote, saved)
            start = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(len(survivors)) as pool:
                found = list(pool.map(one, range(len(survivors))))
            return found, time.monotonic() - start, remote.chunk_bytes

        measured = []
        for text, name in (("empty folders", "empty"), ("own disks first", "place")):
            found, seconds, chunks = restore([where / f"{name}{i}" for i in survivors])
            for path, leaf in leaves_of(state).items():
                whole = np.asarray(leaf)
                for box, array in (pair for arrays, _ in found for pair in arrays[path].items()):
                    assert np.array_equal(array, whole[tuple(slice(*bounds) for bounds in box)]), path
            ledger = found[0][1]
            slowest = {tier: max(getattr(p, f"{tier}_s") for p in ledger.processes) for tier in ("verify", "local", "peer", "remote")}
            print(f"{text}: {ledger}; {chunks:,} of whole chunks")
            print(f"  in all {seconds:.2f} s; slowest process: "
                  + ", ".join(f"{tier} {value:.2f} s" for tier, value in slowest.items()), flush=True)
            measured.append((ledger, seconds))
    (before, before_s), (after, after_s) = measured
    assert before.remote_bytes == before.state_bytes
    each = sum(p.local_bytes + p.peer_bytes + p.remote_bytes for p in after.processes)
    missing = after.remote_bytes
    print("bytes from shared storage: " + ("nothing is missing" if not missing else
          f"{before.state_bytes:,} total / {missing:,} missing = {before.state_bytes / missing:.3f}; if each process read all of its "
          f"shards from there: {each:,} / {missing:,} = {each / missing:.3f}"))
    print(f"seconds: {before_s:.2f} / {after_s:.2f} = {before_s / after_s:.2f} with shared storage at "
          + (f"{_RATE.value:.3g} bytes/s" if _RATE.value else "this disk's rate") + " (measure, this machine)")


if __name__ == "__main__":
    app.run(main)

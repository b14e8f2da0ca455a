"""A meta-training run: meta-steps, a line for each, checkpoints, a live curve, the weights.

The folder is a run's like any other (`runs/folder.py`), a step being a meta-step: config.json, metrics.jsonl, logs/, checkpoints/, and
weights.npz with weights.json (where they come from) beside them, rewritten with every checkpoint. The same command goes on from the
latest checkpoint, with the numbers, bit for bit, that an uninterrupted run would have had.
"""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.keep import Keep
from jaxmem.checkpoint.store import Store
from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.meta import provenance, recipe, tasks, trainer
from jaxmem.optim.learned.meta.recipe import Recipe
from jaxmem.running import measured
from jaxmem.running.stopping import StopRequest
from jaxmem.runs.folder import Folder, read_lines
from jaxmem.runs.log import Log
from jaxmem.spec import InputError

DONE, STOPPED = 0, 75
Show = Callable[[dict[str, Any]], None]  # is given every line of metrics.jsonl, old ones too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """`minutes` of meta-steps in this start, compiling aside (None: no limit); seconds between checkpoints."""

    minutes: float | None = None
    checkpoint_s: float = 60.0


def meta_train(r: Recipe, folder: Folder, budget: Budget, *, devices: int | None = None, begin_from: pathlib.Path | None = None,
               show: Show = lambda line: None) -> int:
    """Exit status: 0 all iterations are done, or the minutes are over; 75 saved and stopped on a signal."""
    with contextlib.ExitStack() as closing:
        stop = StopRequest()
        closing.callback(stop.close)
        log = Log(folder, writes=True)
        closing.callback(log.close)
        mesh = trainer.mesh_of(devices)
        recipe.check(r, mesh.devices.size)
        store = Store(folder.checkpoints, keep=Keep(last=2), run_id=folder.run_id)
        closing.callback(store.close)
        families = {name: tasks.find(name) for name in r.families}
        commit = provenance.commit()  # now: what is imported, and not what the files will be by the end
        data = trainer.data_of(families, mesh)
        given = learned_weights.load(begin_from, r.rule) if begin_from and not store.steps() else None  # a checkpoint has the weights
        state = trainer.start(r, families, mesh, given)
        found = store.restore(abstract(state))
        if found is not None:
            state = found.state
        at = int(state.iteration)
        gone = log.rewind(at)
        for line in read_lines(folder.metrics):
            show(line)
        log.event("start", restored_from=at if found else None, processes=1, devices=mesh.devices.size, backend=measured.backend(),
                  versions=measured.versions())
        if gone:
            log.event("dropped", **gone)
        begin = time.monotonic()
        log.say(f"{'resuming at' if found else 'starting at'} meta-step {at} of {r.iterations}; {r.rule}, {r.estimator}, "
                f"{r.tasks} problems of each of {', '.join(r.families)} on {mesh.devices.size} devices; compiling takes minutes")
        with log.phase("compile"):
            step = trainer.build(r, families, mesh).lower(state, data).compile()
        log.say(f"compiled in {time.monotonic() - begin:.0f} s")

        def save(state: trainer.MetaState, at: int, *, wait: bool) -> None:
            with log.phase("checkpoint", step=at):
                store.save(at, state, {"digests": digests(state)[0], "recipe": dataclasses.asdict(r),
                                       "versions": measured.versions()}, wait=wait)
                learned_weights.save(folder.path / "weights.npz", state.theta)
                provenance.write(folder.path, r, families, at, commit)
            log.event("checkpoint", step=at, stall_s=None, snapshot="sync" if wait else "async")

        start = saved = last = time.monotonic()
        status, ended = DONE, "done"
        pending: tuple[int, trainer.Measured] | None = None

        def settle() -> None:
            """Write the line of the meta-step before, whose numbers are there by now."""
            nonlocal pending, last
            if pending is None:
                return
            done, numbers = pending
            pending, now = None, time.monotonic()
            line = line_of(r, done, jax.device_get(numbers), now - last)
            last = now
            log.metric(**line)
            show(line)

        while at < r.iterations:
            state, numbers = step(state, data)
            settle()
            at += 1
            pending = at, numbers
            now = time.monotonic()
            if stop.reached():
                status, ended = STOPPED, "sigterm"
                break
            if budget.minutes is not None and now - start >= 60 * budget.minutes:
                log.event("note", text=f"{budget.minutes:g} minutes are over")
                break
            if now - saved >= budget.checkpoint_s:
                settle()
                save(state, at, wait=False)
                saved = last = time.monotonic()
        settle()
        if at not in store.steps():
            save(state, at, wait=True)
        log.event("end", status=ended, step=at, state_sha256=None)
        log.say(f"{'all' if at >= r.iterations else f'{at} of'} {r.iterations} meta-steps are done; weights: {folder.path}/weights.npz"
                + ("" if at >= r.iterations else "; the same command goes on"))
        return status


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def line_of(r: Recipe, at: int, numbers: trainer.Measured, seconds: float) -> dict[str, Any]:
    losses = {name: float(x) for name, x in numbers.losses.items()}
    lr = r.outer_lr * 0.5 * (1 + math.cos(math.pi * (at - 1) / r.iterations))
    return {"kind": "train", "step": at, "loss": sum(losses.values()) / len(losses), "grad_norm": float(numbers.gradient_norm), "lr": lr,
            "step_s": seconds, "tokens_per_s": None, "mfu": None, "losses": losses, "broken": int(numbers.broken)}


def check_families(names: tuple[str, ...]) -> None:
    """Raises InputError for unknown families, and for a held-out task among them."""
    for name in names:
        if name in tasks.HELD_OUT:
            raise InputError(f"--families: {name} is held out, to say what trained weights are worth; known: {', '.join(tasks.FAMILIES)}")
        if name not in tasks.FAMILIES:
            tasks.find(name)

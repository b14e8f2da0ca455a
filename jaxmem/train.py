"""The training loop: runs exactly the programs that were checked, and loses nothing past the last commit.

Read it top to bottom: programs, state, data, then steps. Every process of a run executes it alike; decisions are made from values that
all of them have (losses, step counts, agreed restores), so that no process goes its own way.

B batch, S sequence.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmem import step
from jaxmem.checkpoint import lazy
from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.keep import Keep
from jaxmem.checkpoint.nearby import Nearby
from jaxmem.checkpoint.state_hash import state_hash
from jaxmem.checkpoint.store import Commit, SaveFailed, Store
from jaxmem.data import Batches, open_for
from jaxmem.data.rehearsal.rehearsing import Rehearsing
from jaxmem.faults import Faults
from jaxmem.faults import parse as parse_faults
from jaxmem.guard import Guard
from jaxmem.running import agreement, beginning, evaluating, measured
from jaxmem.running.libraries import libraries_to_file
from jaxmem.running.profiling import Profiler
from jaxmem.running.progress import Progress
from jaxmem.running.stopping import StopRequest
from jaxmem.running.trackers import Trackers
from jaxmem.runs.folder import Folder, write_json
from jaxmem.runs.log import Log
from jaxmem.runs.settings import Settings
from jaxmem.spec import InputError
from jaxmem.watchdog import Watchdog

AHEAD = 2  # steps dispatched before the oldest one's metrics are fetched
SLOW_S = 3600.0  # what reading data, compiling or restoring may take, or six times the watchdog's limit if that is more
WARM_UP = 5  # steps of a start after which memory and time are compared with what was predicted
SAVE_AGAIN = 3  # tries at the checkpoint that a run must not end without
DONE, NOT_SAVED, SAVED_ON_SIGNAL, ROLLBACKS_EXHAUSTED = 0, 70, 75, 77
STATUS = {DONE: "done", NOT_SAVED: "error", SAVED_ON_SIGNAL: "sigterm", ROLLBACKS_EXHAUSTED: "rollbacks"}

State = Any


@dataclasses.dataclass(frozen=True)
class Flying:
    """A step that was dispatched and whose metrics were not looked at yet."""

    step: int
    position: int
    lr: float
    metrics: dict[str, jax.Array]


class Bad(Exception):
    """A step that the guard refuses; the state before step `below` is not suspect."""

    def __init__(self, step: int, position: int, reason: str, *, below: int) -> None:
        super().__init__(reason)
        self.step, self.position, self.below = step, position, below


def train(s: Settings, folder: Folder) -> int:
    """Train, or go on training, the run in `folder`; returns the exit status. Devices and processes are already up."""
    process, processes = jax.process_index(), jax.process_count()
    libraries_to_file(folder.path / "logs" / f"libraries.{process}.log")
    log = Log(folder, writes=process == 0)
    wanted = parse_faults(s.fault, processes=None if s.elastic else processes, steps=s.steps)
    faults = Faults(wanted, folder.path, process, attempt=folder.attempt)
    watchdog = Watchdog(folder.path, process=process, processes=processes, timeout_s=s.watchdog_s, attempt=folder.attempt)
    with contextlib.ExitStack() as closing:  # last in, first out: what is being written is finished before the log ends
        for part in (log, watchdog, faults):
            closing.callback(part.close)
        try:
            return _train(s, folder, log, faults, watchdog, closing)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on from the latest checkpoint") from None


def _train(s: Settings, folder: Folder, log: Log, faults: Faults, watchdog: Watchdog, closing: contextlib.ExitStack) -> int:
    writes, slow_s = jax.process_index() == 0, max(SLOW_S, 6 * s.watchdog_s)
    if s.started_at is not None:
        log.event("phase", name="startup", seconds=time.time() - s.started_at)
    # ---------------------------------------------------------------- data and programs
    with watchdog.allow(slow_s, "data"):
        data = open_for(s.workload, s.data, split="train")
        held_out = open_for(s.workload, s.data, split="eval") if s.eval_every else None
    beginning.check(s, folder)
    workload = s.program_workload
    programs = step.build(workload, s.plan, s.topology, jax.devices()[:s.topology.devices])
    kept = Rehearsing(s.rehearsal, data, programs.mesh, batch=s.workload.batch) if s.rehearsal else None
    split = s.plan.step == "split"
    wanted = ["init", *(("gradients", "update") if split else ("train",)), *(("eval",) if s.eval_every else ())]
    with watchdog.allow(slow_s, "compile"), log.phase("compile"):
        lowered = {name: programs[name].lower() for name in wanted}
        lowered |= {f"rehearsal_{name}": program.lower() for name, program in (kept.programs if kept else {}).items()}
        texts = {name: hashlib.sha256(low.as_text().encode()).hexdigest() for name, low in lowered.items()}
        compiled = {name: low.compile() for name, low in lowered.items()}
    if kept:
        kept.run = {name: compiled[f"rehearsal_{name}"] for name in kept.programs}
    shardings = {name: field.sharding for name, field in programs.batch.items()}

    # ---------------------------------------------------------------- state: from a checkpoint, or made on the devices that will hold it
    def on_commit(commit: Commit) -> None:
        log.event("commit", **dataclasses.asdict(commit))
        faults.on_committed(commit.step, folder.checkpoints / str(commit.step))

    def note(text: str) -> None:
        log.event("note", text=text)
        log.say(text)

    nearby = Nearby(local_folder(s, folder)) if s.local_checkpoints else None
    store = Store(folder.checkpoints, keep=Keep.parse(s.keep), run_id=folder.run_id, on_started=faults.on_save_started, on_commit=on_commit,
                  on_note=note, nearby=nearby, timeout_s=s.watchdog_s)
    closing.callback(store.close)
    snapshots = lazy.Snapshots(store, s.snapshot_pool or None)
    skip: list[tuple[int, int]] = [tuple(pair) for pair in json.loads(folder.skips.read_text())] if folder.skips.exists() else list(s.skip)
    given_skips = len(s.skip)
    with watchdog.allow(slow_s, "restore"):
        agreement.check(flags={**s.config(), "watchdog": s.watchdog_s}, programs=texts, data=data.fingerprint, attempt=folder.attempt,
                        skipped_batches=skip, versions=measured.versions())

    origin = 0  # steps of the schedule that were made before this run's first one

    def start_over(below: int | None = None) -> tuple[int, State, int, Guard, bool]:
        """`(step, state, position, guard, restored)` of the latest good checkpoint, or of another run's, or of the seed."""
        nonlocal origin
        with watchdog.allow(slow_s, "restore"), log.phase("restore"):
            whole = (lambda meta: programs.state | {"rehearsal": kept.abstract(meta)}) if kept else programs.state
            found = store.restore(whole, below=below)
            if found is None:
                state, origin = beginning.begin(s, programs, compiled["init"], kept, note)
                return 0, state, 0, Guard(s.spike), False
            if found.meta["run_id"] != folder.run_id:
                log.say(f"the checkpoint of step {found.step} was written by another run ({found.meta['run_id']})")
            for refused, why in found.refused:
                log.event("corrupt", step=refused, reason=why)
                log.say(f"checkpoint of step {refused} is damaged ({why}); taking step {found.step}")
            beginning.check_same_data(found.meta, found.step, data.fingerprint, s.data)
            if found.ledger is not None:
                log.event("ledger", step=found.step, local_bytes=found.ledger.local_bytes, peer_bytes=found.ledger.peer_bytes,
                          remote_bytes=found.ledger.remote_bytes, state_bytes=found.ledger.state_bytes, notes=found.ledger.notes)
            guard, origin = found.meta["guard"], found.meta.get("schedule", {}).get("origin", 0)
            if kept and (dealt := kept.adopt(found.state.pop("rehearsal"), found.meta)):
                note(dealt)
            return found.step, found.state, found.meta["position"], Guard(s.spike, guard["recent"], guard["high"]), True

    at, state, position, guard, restored = start_over()
    dropped = log.rewind(at)
    log.event("start", restored_from=at if restored else None, processes=jax.process_count(), devices=jax.device_count(),
              topology=str(s.topology), plan=str(s.plan), backend=measured.backend(), versions=measured.versions(), programs=texts,
              data=data.described, fingerprint=data.fingerprint)
    if dropped:
        log.event("dropped", **dropped)
    log.say(f"{'resuming at' if restored else 'starting at'} step {at} of {s.steps}; {data.described}; {s.topology}, "
            f"plan {str(s.plan) or 'default'}")

    def batches_from(position: int) -> Batches:
        return Batches(data, batch=s.workload.batch, seed=s.seed, shardings=shardings, start=position, skip=skip)

    hyper_of, rate_of = hyper_parameters(programs), beginning.rate_of(s, origin)

    batches = batches_from(position)
    closing.callback(lambda: batches.close())  # whichever there are by then
    trackers = Trackers(s.log, folder, writes=writes)
    progress = Progress(s.steps, at, shown=writes)
    profiler = Profiler(s.profile, folder.path / "profile")
    stop = StopRequest()
    for part in (trackers, progress, profiler, stop):
        closing.callback(part.close)
    epoch: int | None = None
    eval_loss: tuple[int, float] | None = None  # (step, loss) of the latest evaluation
    flying: collections.deque[Flying] = collections.deque()
    step_times: list[float] = []
    settled_at = time.monotonic()
    log.take_waited()

    # ---------------------------------------------------------------- pieces of a step
    def settle(keep: int) -> None:
        """Look at the metrics of all but the latest `keep` steps; raises Bad."""
        nonlocal settled_at
        while len(flying) > keep:
            one = flying.popleft()
            loss, norm = float(one.metrics["loss"]), float(one.metrics["grad_norm"])  # waits until that step is done
            now = time.monotonic()
            step_s, settled_at = max(now - settled_at - log.take_waited(), 0.0), now
            if problem := guard.problem(loss, norm):
                flying.clear()
                raise Bad(one.step, one.position, problem, below=one.step - max(guard.high - 1, 0))
            line = {"kind": "train", "step": one.step, "loss": loss, "grad_norm": norm, "lr": one.lr, "step_s": step_s,
                    "tokens_per_s": workload.tokens / step_s if step_s else None, "mfu": measured.honest_mfu(s, step_s, log),
                    "epoch": batches.epoch_of(one.position), "batch": one.position}
            log.metric(**line)
            trackers.write(line)
            progress.show(line)
            step_times.append(step_s)
            if len(step_times) == WARM_UP and writes:
                with watchdog.allow(slow_s, "metrics"), log.phase("metrics"):
                    measured.compare_with_prediction(s, compiled, programs.mesh, statistics.median_high(step_times[1:]), log)

    def loss_of(at: int) -> float | None:
        """The evaluation's loss, if it was of this very step."""
        return eval_loss[1] if eval_loss is not None and eval_loss[0] == at else None

    def meta(at: int, after: int, found: dict[str, str]) -> dict[str, Any]:
        return {"position": after, "digests": found, "guard": {"recent": guard.recent, "high": guard.high}, "seed": s.seed,
                "schedule": {"text": s.schedule_text, "origin": origin, "rate": rate_of(at)},
                "eval_loss": loss_of(at), "fingerprint": data.fingerprint, "data": s.data, "workload": str(s.workload), "plan": str(s.plan),
                "topology": str(s.topology), "versions": measured.versions(), "text_sha256": texts} | (
                    {"rehearsal": kept.meta()} if kept else {})

    def everything() -> State:
        """What a checkpoint holds: without the rehearsal buffer a resumed run would begin to forget."""
        return state | {"rehearsal": kept.memory} if kept else state

    def checkpoint(at: int, after: int, *, wait: bool) -> bool:
        """Write the state after step `at`; `after` is the position of the next batch. Raises Bad for a state that is not finite."""
        settle(0)
        with watchdog.allow(3 * s.watchdog_s, "checkpoint"), log.phase("checkpoint", step=at):
            begin = time.monotonic()
            await_save()
            found, not_finite = digests(everything())
            refuse(at, after, not_finite)
            try:
                store.save(at, everything(), meta(at, after, found), wait=wait or s.snapshot == "sync")
            except SaveFailed as failure:
                save_failed(failure)
                return False
            stall = time.monotonic() - begin
        log.event("checkpoint", step=at, stall_s=stall, snapshot="sync" if wait else s.snapshot)
        return True

    def last_checkpoint(at: int, after: int) -> bool:
        """The one that a run must not end without."""
        for _ in range(SAVE_AGAIN):
            if checkpoint(at, after, wait=True):
                return True
        log.say(f"step {at} could not be saved; the latest checkpoint is of step {max(store.steps(), default=0)}, "
                "and the same command goes on from there")
        return False

    def refuse(at: int, after: int, not_finite: int) -> None:
        if not_finite:
            raise Bad(at, after - 1, f"{not_finite} numbers of the state are not finite", below=at)

    def await_save() -> None:
        """Wait for the save that goes on in the background, if there is one, and say it if it failed."""
        try:
            store.wait()
        except SaveFailed as failure:
            save_failed(failure)

    def save_failed(failure: SaveFailed) -> None:
        log.event("commit_failed", reason=str(failure))
        log.say(f"{failure}; training goes on from memory, and the next checkpoint is tried as usual")
        faults.on_save_failed()

    def start_snapshot(at: int, after: int) -> None:
        try:
            snapshots.start(at, everything(), {"position": after})
        except SaveFailed as failure:  # of the one before, which the pool had to wait for
            save_failed(failure)
            snapshots.start(at, everything(), {"position": after})

    def finish_snapshot(grads: Any) -> None:
        """The copy that was started at the step boundary is handed to the writer; called before the state it copied is donated."""
        jax.block_until_ready(grads)  # the copy had this time for nothing; what it takes beyond is the stall
        with watchdog.allow(3 * s.watchdog_s, "checkpoint"), log.phase("checkpoint"):
            begin = time.monotonic()
            taken = snapshots.take()
            stall = time.monotonic() - begin
        settle(0)  # metrics up to the copied step, which the copy itself waited for
        found, not_finite = taken.digests
        refuse(taken.step, taken.meta["position"], not_finite)
        with watchdog.allow(3 * s.watchdog_s, "checkpoint"), log.phase("checkpoint", step=taken.step):
            begin = time.monotonic()
            await_save()
            try:
                store.save(taken.step, taken.state, meta(taken.step, taken.meta["position"], found), wait=False, release=True)
            except SaveFailed as failure:
                save_failed(failure)
                return
            stall += time.monotonic() - begin
        log.event("checkpoint", step=taken.step, stall_s=stall, snapshot="lazy")

    def evaluate(at: int) -> float:
        assert held_out is not None
        settle(0)
        with watchdog.allow(3 * s.watchdog_s, "eval"), log.phase("eval", step=at):
            begin = time.monotonic()
            found = evaluating.evaluate(compiled["eval"], state["params"], held_out, workload=workload, shardings=shardings,
                                        limit=s.eval_batches)
        line = {"kind": "eval", "step": at, **found.line(), "seconds": time.monotonic() - begin}
        log.metric(**line)
        trackers.write(line)
        progress.note(f"step {at}: {found}")
        return found.loss

    # ---------------------------------------------------------------- steps
    status = DONE
    rows: Any = None
    batch: Any = None
    poisoned: Any = None
    loss: Any = None
    grads: Any = None
    metrics: Any = None
    while at < s.steps:
        try:
            watchdog.beat(at + 1, "data")
            faults.before_step(at + 1)
            begin = time.monotonic()
            position, rows = next(batches)
            if not flying or flying[-1].metrics["loss"].is_ready():  # type: ignore[attr-defined]
                log.waited("data", time.monotonic() - begin)
            now, before = batches.epoch_of(position), batches.epoch_of(position - 1) if position else None
            if now != (before if epoch is None else epoch):  # a resumed run says it only where it begins one
                log.event("epoch", step=at + 1, epoch=now)
            epoch = now
            if (poisoned := faults.poison(at + 1, state["params"], programs.mesh)) is not None:
                state = state | {"params": poisoned}
            profiler.before(at + 1)
            lr = rate_of(at + 1)
            hyper = hyper_of(lr, s.clip)
            watchdog.beat(at + 1, "step")
            batch = kept.beside(rows) if kept else rows
            if split:
                loss, grads = compiled["gradients"](state["params"], batch)
                if snapshots.started:
                    finish_snapshot(grads)
                state, metrics = compiled["update"](state, loss, grads, hyper)
                del loss, grads  # else they would live beside the next ones
            else:
                state, metrics = compiled["train"](state, batch, hyper)
            if kept:
                kept.offer(rows)
            at += 1
            flying.append(Flying(at, position, lr, metrics))
            settle(AHEAD)
            if profiler.last(at):
                settle(0)
                profiler.close()
            if s.eval_every and (at % s.eval_every == 0 or at == s.steps):
                eval_loss = at, evaluate(at)
            if stop.reached():
                status = SAVED_ON_SIGNAL if last_checkpoint(at, position + 1) else NOT_SAVED
                break
            if at == s.steps:
                status = DONE if last_checkpoint(at, position + 1) else NOT_SAVED
            elif s.checkpoint_every and at % s.checkpoint_every == 0:
                settle(0)
                if guard.high:
                    log.event("note", step=at, text="no checkpoint: the loss has risen, and the state is suspect")
                elif s.snapshot == "lazy":
                    with watchdog.allow(3 * s.watchdog_s, "checkpoint"), log.phase("checkpoint", step=at):
                        start_snapshot(at, position + 1)
                else:
                    checkpoint(at, position + 1, wait=False)
        except Bad as bad:
            flying.clear()
            snapshots.drop()
            batches.close()
            with watchdog.allow(3 * s.watchdog_s, "drain"), log.phase("drain"):
                await_save()
            reached = at
            state = rows = batch = poisoned = loss = grads = metrics = None  # the devices hold one state, and that will be the restored one
            if kept:
                kept.memory = None
            at, state, position, guard, _ = start_over(below=bad.below)
            first = next_position(position, skip)
            skip = sorted([*skip, (first, bad.position)])
            gone = log.rewind(at)
            log.event("rollback", step=bad.step, to=at, skip=[first, bad.position], reason=str(bad), reached=reached)
            if gone:
                log.event("dropped", **gone)
            log.say(f"step {bad.step}: {bad}; back to step {at}, leaving out batches {first} to {bad.position}")
            if writes:
                remember(folder, skip, log)
            if len(skip) - given_skips > s.max_rollbacks:
                log.say(f"{len(skip) - given_skips} rollbacks, and --max_rollbacks={s.max_rollbacks}: giving up; "
                        f"the run was back at step {at}")
                status = ROLLBACKS_EXHAUSTED
                break
            batches = batches_from(position)
            settled_at = time.monotonic()
            log.take_waited()

    # ---------------------------------------------------------------- the end
    with watchdog.allow(3 * s.watchdog_s, "end"):
        await_save()
        final = state_hash(state) if s.print_hash and status == DONE else None
    watchdog.beat(at, "end")
    if status == DONE and faults.pending:
        log.say(f"faults that did not strike: {'; '.join(map(str, faults.pending))}")
    log.event("end", step=at, status=STATUS[status], state_sha256=final)
    if status == SAVED_ON_SIGNAL:
        log.say(f"saved step {at} and stopped; the same command goes on from there")
    if final and writes:
        print(f"state sha256:{final}", flush=True)
    return status


# ---------------------------------------------------------------- pieces

def local_folder(s: Settings, folder: Folder) -> pathlib.Path:
    """This process's own folder for local checkpoints: of the run, and of its place among the processes of this machine."""
    place = next((os.environ[name] for name in ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ), "0")
    path = pathlib.Path(s.local_checkpoints) / folder.run_id / place
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--local_checkpoints={s.local_checkpoints}: {error.strerror}; give a folder on this machine's own disk") from None
    return path


def remember(folder: Folder, skip: list[tuple[int, int]], log: Log) -> None:
    try:
        write_json(folder.skips, skip)
    except OSError as error:
        log.say(f"{folder.skips}: {error.strerror}; a restart would meet the batches that are left out now")


def hyper_parameters(programs: step.Programs) -> Callable[[float, float], dict[str, jax.Array]]:
    """`(lr, clip)` as the step's inputs, made without a collective; a value that did not change is not sent again."""
    sharding = next(iter(jax.tree.leaves(programs.state["step"]))).sharding
    sent: dict[str, tuple[float, jax.Array]] = {}

    def one(name: str, value: float) -> jax.Array:
        if name not in sent or sent[name][0] != value:
            sent[name] = value, jax.make_array_from_callback((), sharding, lambda _: np.float32(value))
        return sent[name][1]
    return lambda lr, clip: {"lr": one("lr", lr), "clip": one("clip", clip)}


def next_position(position: int, skip: list[tuple[int, int]]) -> int:
    """The first position from `position` on that no range of `skip` leaves out."""
    for first, last in sorted(skip):
        if first <= position <= last:
            position = last + 1
    return position

"""A run's checkpoints on shared storage, through Orbax: written in the background, committed whole, verified when read.

One folder a step. Orbax's AsyncCheckpointer writes and commits; which steps exist, which stay and which is read is decided here,
because Orbax's CheckpointManager deletes by its own count: it would take a folder that a user copied in, and after a failed save it
forgets the steps that it was about to delete. The classic interface, since v1 is still `experimental` in orbax-checkpoint 0.12.

The state, and `meta` (data position, random state, the three strings, versions, digests), are one commit.
"""

import contextlib
import json
import math
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.keep import Keep
from jaxmem.checkpoint.nearby import Nearby
from jaxmem.checkpoint.nearby_ledger import Ledger
from jaxmem.checkpoint.nearby_read import NearbyFailed
from jaxmem.checkpoint.nearby_remote import OrbaxRemote
from jaxmem.optim.dims import names
from jaxmem.spec import InputError

Meta = dict[str, Any]


class SaveFailed(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


class NotFinite(Exception):
    """The state holds NaN or infinity, and was not written."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    step: int
    state: Any
    meta: Meta
    refused: tuple[tuple[int, str], ...]  # newer steps that could not be used, and why
    ledger: Ledger | None  # what came from where, with local checkpoints


@dataclass(frozen=True, kw_only=True)
class Commit:
    step: int
    seconds: float  # from the call of save
    bytes: int


class Store:
    """`run_id` marks what this run wrote: nothing else is ever deleted. `on_started(step)` is called when a save is in flight: its arrays
    are on the host and its commit is to come. `on_commit(Commit)` and `on_note(text)` (what went wrong and
    changed nothing) are called in a thread of their own. `nearby`: this process's local copies, which are read first."""

    def __init__(self, directory: pathlib.Path, *, keep: Keep, run_id: str, on_started: Callable[[int], None] | None = None,
                 on_commit: Callable[[Commit], None] | None = None, on_note: Callable[[str], None] | None = None,
                 nearby: Nearby | None = None, timeout_s: float = 1200) -> None:
        self.directory, self.keep, self.run_id, self._on_commit = directory.absolute(), keep, run_id, on_commit
        self._on_started = on_started or (lambda step: None)
        self._nearby, self._note = nearby, on_note or (lambda text: None)
        self._primary = jax.process_index() == 0
        if self._primary:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clear_own_remains()
        handler = ocp.CompositeCheckpointHandler("state", "meta")
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=ocp.options.AsyncOptions(timeout_secs=math.ceil(timeout_s)))
        self._waiter: threading.Thread | None = None
        self._failure, self._latest = "", 0

    # ---- writing

    def save(self, step: int, state: Any, meta: Meta, *, wait: bool, release: bool = False) -> None:
        """Write `state` (arrays on devices or in pinned host memory) and `meta` as `step`. Returns when the arrays may be donated;
        with `wait`, when the checkpoint is committed. A save that is still going is awaited first. With `release` the arrays are
        deleted when they are written: Orbax's futures would hold them until Python collects its garbage.

        Raises SaveFailed, in every process when it fails in one: this save, or with wait=False the one before it, could not be written.
        """
        self.wait()
        start = time.monotonic()
        path, why = self.directory / str(step), ""
        self._latest = step
        try:
            if self._primary:
                (self.directory / f".writing-{step}").write_text(self.run_id)
            self._orbax.save(path, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(
                meta | {"step": step, "run_id": self.run_id})), force=self._own(step))
        except Exception as error:  # noqa: BLE001 - whatever Orbax raises is this save's failure
            why = _first_line(error)
            with contextlib.suppress(Exception):
                self._orbax.wait_until_finished()
        if problem := first_of(why):
            self._clear_half(step)
            raise SaveFailed(f"checkpoint of step {step} was not written: {problem}")
        self._on_started(step)
        shards = self._nearby.shards_of(state) if self._nearby else None

        def finish() -> None:
            try:
                write_out()
            finally:
                if release:
                    for x in jax.tree.leaves(state):
                        x.delete()

        def write_out() -> None:
            if self._nearby and shards is not None:
                try:
                    self._nearby.keep(step, shards, meta["digests"])
                except OSError as error:
                    self._note(f"no local copy of step {step}: {_first_line(error)}")
            try:
                self._orbax.wait_until_finished()
            except Exception as error:  # noqa: BLE001
                self._failure = f"checkpoint of step {step} was not written: {_first_line(error)}"
                return
            if self._on_commit:
                self._on_commit(Commit(step=step, seconds=time.monotonic() - start, bytes=tree_bytes(state)))
            try:
                if self._nearby:
                    self._nearby.committed(step)
                if self._primary:
                    self._delete_old()
            except OSError as error:
                self._note(f"old checkpoints stay: {_first_line(error)}")
        self._waiter = threading.Thread(target=finish, name=f"commit-{step}")
        self._waiter.start()
        if wait:
            self.wait()

    @property
    def outstanding(self) -> bool:
        """A save was started and not waited for: the same in every process."""
        return self._waiter is not None

    def wait(self) -> None:
        """Until the save in flight is committed. Raises SaveFailed, in every process when it failed in one."""
        if self._waiter is None:
            return
        self._waiter.join()
        self._waiter, failure, self._failure = None, self._failure, ""
        if problem := first_of(failure):
            self._clear_half(self._latest)
            raise SaveFailed(problem)

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.join()
        self._orbax.close()

    # ---- reading

    def steps(self) -> list[int]:
        """Committed steps, ascending. What Orbax has not finished is not among them."""
        return committed_steps(self.directory)

    def restore(self, abstract: Any | Callable[[Meta], Any], *, step: int | None = None, below: int | None = None) -> Restored | None:
        """The latest committed step (or `step`, or the latest one under `below`) as arrays with the shardings of `abstract`, which may be
        a function of the step's meta where that decides shapes.

        A step that does not read back to what was written is refused, in every process, and the one before it taken. None: no step.
        """
        refused = []
        candidates = [s for s in agreed(self.steps) if (step is None or s == step) and (below is None or s < below)]
        for candidate in reversed(candidates):
            found = self._read(candidate, abstract)
            if isinstance(found, str):
                refused.append((candidate, found))
                self._set_aside(candidate)
            else:
                state, meta, ledger = found
                return Restored(step=candidate, state=state, meta=meta, refused=tuple(refused), ledger=ledger)
        if refused:
            raise InputError("no checkpoint can be read:\n" + "\n".join(f"step {s}: {why}" for s, why in refused))
        return None

    def _read(self, step: int, abstract: Any) -> tuple[Any, Meta, Ledger | None] | str:
        """State and meta, or why not: the same in every process, for a process that gave up alone would leave the others waiting."""
        path, state, meta, why = self.directory / str(step), None, {}, ""
        try:
            meta = read_meta(path)
            abstract = abstract(meta) if callable(abstract) else abstract
            check_same(path, abstract)
        except InputError:
            raise  # another model: the same everywhere
        except Exception as error:  # noqa: BLE001 - json, tensorstore and the file system each have their own
            why = _first_line(error)
        if problem := first_of(why):
            return problem
        if self._nearby:
            try:
                state, ledger = self._nearby.restore(abstract, step, OrbaxRemote(path / "state"), meta["digests"])
                return state, meta, ledger
            except NearbyFailed as error:
                self._note(f"local copies of step {step} were of no use ({_first_line(error)}); reading all of it from {path}")
        try:
            state = read_tree(path / "state", abstract)
        except Exception as error:  # noqa: BLE001
            why = _first_line(error)
        if problem := first_of(why):
            return problem
        found, _ = digests(state)
        wrong = [name for name, value in found.items() if meta["digests"].get(name) != value]
        if wrong:
            return f"{len(wrong)} of {len(found)} arrays differ from what was written, {wrong[0]} among them"
        return state, meta, None

    # ---- deleting: only what this run wrote

    def _set_aside(self, step: int) -> None:
        """A damaged step is no step any more, and its place is free. It goes for good with the steps of its age."""
        if self._primary:
            with contextlib.suppress(OSError):
                aside = self.directory / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self.directory / str(step)).rename(aside)

    def _own(self, step: int) -> bool:
        try:
            return read_meta(self.directory / str(step)).get("run_id") == self.run_id
        except Exception:  # noqa: BLE001 - unreadable: nobody's, and left alone
            return False

    def _delete_old(self) -> None:
        losses: dict[int, float | None] = {}
        for step in self.steps():
            if self._own(step):
                losses[step] = read_meta(self.directory / str(step)).get("eval_loss")
        for step in losses.keys() - self.keep.kept(losses):
            # renamed first: a kill in the middle of deleting leaves nothing that looks committed
            doomed = self.directory / f".deleting-{step}"
            (self.directory / str(step)).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        for aside in self.directory.glob("*.damaged"):
            if (number := aside.name.removesuffix(".damaged")).isdigit() and int(number) < min(self.keep.kept(losses), default=0):
                shutil.rmtree(aside, ignore_errors=True)
        for mark in self.directory.glob(".writing-*"):
            if (self.directory / mark.name.removeprefix(".writing-")).exists():
                mark.unlink(missing_ok=True)

    def _clear_own_remains(self) -> None:
        """What a killed process left half written or half deleted: folders of Orbax's temporary names for steps that this run began."""
        for doomed in self.directory.glob(".deleting-*"):
            shutil.rmtree(doomed, ignore_errors=True)
        for mark in self.directory.glob(".writing-*"):
            if mark.read_text() == self.run_id:
                self._clear_half(int(mark.name.removeprefix(".writing-")))


    def _clear_half(self, step: int) -> None:
        """What a save of `step` that did not come to its end has left; it would keep a full disk full."""
        if not self._primary:
            return
        for half in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(half, ignore_errors=True)
        if not committed(self.directory / str(step)):
            shutil.rmtree(self.directory / str(step), ignore_errors=True)
        (self.directory / f".writing-{step}").unlink(missing_ok=True)


# ---------------------------------------------------------------- pieces

def committed(path: pathlib.Path) -> bool:
    """Orbax finished this folder, and it holds a run's state."""
    try:
        return path.is_dir() and ocp.utils.is_checkpoint_finalized(path) and (path / "meta" / "metadata").is_file()
    except (OSError, ValueError):
        return False


def committed_steps(directory: pathlib.Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and committed(p))


def read_meta(path: pathlib.Path) -> Meta:
    """What was saved beside the state in the step folder `path`."""
    return json.loads((path / "meta" / "metadata").read_text())


def check_same(path: pathlib.Path, abstract: Any) -> None:
    """Raises InputError when the step folder `path` holds arrays of other shapes or dtypes than `abstract`, any part of the saved tree."""
    saved = {"/".join(names(p)): m for p, m in jax.tree_util.tree_flatten_with_path(ocp.PyTreeCheckpointHandler().metadata(
        path / "state").tree)[0]}
    wanted = {"/".join(names(p)): x for p, x in jax.tree_util.tree_flatten_with_path(abstract)[0]}
    problems = [f"{name}: {'not saved' if name not in saved else f'saved as {saved[name].dtype}{list(saved[name].shape)}'}, "
                f"wanted {x.dtype}{list(x.shape)}" for name, x in wanted.items()
                if name not in saved or tuple(saved[name].shape) != x.shape or saved[name].dtype != x.dtype]
    if problems:
        more = f"\nand {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(f"{path}: another model or optimizer was saved there{saved_as(path)}:\n" + "\n".join(problems[:5]) + more)


def read_tree(path: pathlib.Path, abstract: Any) -> Any:
    """The arrays of `abstract` (any part of the tree that the folder `path` holds), each with the sharding that it has there. Without
    Orbax's barriers, so that a process that fails does not leave the others waiting."""
    return ocp.PyTreeCheckpointHandler().restore(path, args=ocp.args.PyTreeRestore(
        item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True))


def saved_as(path: pathlib.Path) -> str:
    """The workload, plan and topology of a checkpoint, for messages."""
    try:
        meta = read_meta(path)
        return f" ({meta['workload']}; plan {meta['plan'] or 'default'} on {meta['topology']})"
    except (OSError, KeyError, ValueError):
        return ""


def tree_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def agreed(list_steps: Callable[[], list[int]]) -> list[int]:
    """The steps that every process sees. A file system that shows one process an old list is asked again before a step is given up."""
    steps = list_steps()
    if jax.process_count() == 1:
        return steps
    for attempt in range(4):
        latest = np.full(64, -1, np.int32)
        latest[:min(len(steps), 64)] = steps[-64:]
        rows = np.asarray(multihost_utils.process_allgather(latest))
        seen = [set(row[row >= 0].tolist()) for row in rows]
        if all(one == seen[0] for one in seen):
            break
        time.sleep(attempt + 1)
        steps = list_steps()
    return sorted(set.intersection(*seen))


def first_of(why: str) -> str:
    """One process's reason, the same in every process; empty where all have none."""
    if jax.process_count() == 1:
        return why
    text = np.zeros(200, np.uint8)
    raw = why.encode()[:200]
    text[:len(raw)] = np.frombuffer(raw, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(text))
    reasons = [f"process {i}: {bytes(row[row > 0]).decode(errors='replace')}" for i, row in enumerate(rows) if row.any()]
    return min(reasons, key=waited_for_another, default="")


def waited_for_another(reason: str) -> bool:
    """A process that only waited in vain for one that failed; the other's reason says more."""
    return "barrier" in reason or "Timed out" in reason


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"

"""One restore, as every process goes through it: agree on what is held where, fetch what nobody holds, read the rest from the others.

All agree three times: on what each holds and needs, from which all work out the same plan; that the missing boxes have been fetched,
each by one process; and that everyone has everything, for until then each serves the others.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from jaxmem.checkpoint import nearby_store
from jaxmem.checkpoint.nearby_boxes import Box, Boxes, Read, inside, plan_reads, shape_of, share_missing, slices
from jaxmem.checkpoint.nearby_exchange import Exchange
from jaxmem.checkpoint.nearby_ledger import Ledger, Reads, Tier
from jaxmem.checkpoint.nearby_remote import Remote
from jaxmem.checkpoint.nearby_server import fetch, serving
from jaxmem.spec import InputError

Arrays = dict[str, dict[Box, np.ndarray]]  # leaf's path -> box -> its elements
Source = tuple[Tier, int]  # where from, and of which process
THREADS = 8


class NearbyFailed(Exception):
    """This restore worked in no process: the checkpoint on shared storage is to be restored as a whole."""


class Leaf(Protocol):
    shape: tuple[int, ...]
    dtype: np.dtype


class Reading:
    """`leaves`: the wanted state, path -> shape and dtype; `needs`: process -> leaf -> the boxes that it needs."""

    def __init__(self, leaves: Mapping[str, Leaf], needs: Mapping[int, Boxes], process: int, exchange: Exchange, remote: Remote) -> None:
        self._leaves, self._needs, self._process, self._exchange, self._remote = leaves, needs, process, exchange, remote
        self._own, self._fetched, self._reads = nearby_store.nothing(), Arrays(), Reads()

    def run(self, folder: pathlib.Path, step: int, content: str) -> tuple[Arrays, Ledger]:
        mine = self._needs.get(self._process, {})
        with serving(self._read_here, self._exchange.host) if self._exchange.host else contextlib.nullcontext("") as address:
            answers = self._agree(lambda: {"wants": [step, content], "address": address, "holds": self._open(folder, step, content)})
            if any(answer["wants"] != [step, content] for answer in answers):
                raise NearbyFailed(f"the processes do not restore the same state: they want steps {[a['wants'][0] for a in answers]}")
            held = [{path: [tuple(map(tuple, box)) for box in boxes] for path, boxes in a["holds"].items()} for a in answers]
            missing = share_missing(self._needs, held, {path: leaf.dtype.itemsize for path, leaf in self._leaves.items()})
            self._agree(lambda: self._fetch(missing.get(self._process, {})))
            plan = plan_reads(mine, self._sources(held, missing))
            out = {path: {box: np.empty(shape_of(box), self._leaves[path].dtype) for box in boxes} for path, boxes in mine.items()}
            every = self._agree(lambda: self._gather(plan, out, [a["address"] for a in answers]))
        total = sum(int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize for leaf in self._leaves.values())
        return out, Ledger(step=step, state_bytes=total, processes=tuple(Reads(**one) for one in every))

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returned in every process; NearbyFailed in every process if it raised in one."""
        cause: Exception | None = None
        try:
            answer = {"value": work()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this process
            answer, cause = {"error": f"{type(error).__name__}: {error}"}, error
        answers = [json.loads(text) for text in self._exchange(json.dumps(answer))]
        if failed := [f"process {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]:
            raise NearbyFailed("\n".join(failed)) from cause
        return [a["value"] for a in answers]

    def _open(self, folder: pathlib.Path, step: int, content: str) -> dict[str, list[Box]]:
        with self._reads.timed("verify"):
            self._own = nearby_store.open_step(folder, step, content, THREADS)
        self._reads.notes += self._own.damaged
        holds: dict[str, list[Box]] = {}
        for piece in self._own.pieces:
            leaf = self._leaves.get(piece.path)
            if leaf is not None and (piece.shape, piece.dtype) == (leaf.shape, leaf.dtype.name):
                holds.setdefault(piece.path, []).append(piece.box)
        return holds

    def _sources(self, held: list[dict[str, list[Box]]], missing: Mapping[int, Boxes]) -> list[tuple[Source, Boxes]]:
        """In the order in which they are asked; each process begins with another peer."""
        me, count = self._process, len(held)
        own: list[tuple[Source, Boxes]] = [(("local", me), held[me]), (("remote", me), missing.get(me, {}))]
        return own + [(("peer", p), boxes) for p in ((me + i) % count for i in range(1, count)) for boxes in (held[p], missing.get(p, {}))]

    def _fetch(self, missing: Boxes) -> None:
        wanted = [(path, box) for path, boxes in missing.items() for box in boxes]
        with self._reads.timed("remote"), ThreadPoolExecutor(THREADS) as pool:
            for (path, box), array in zip(wanted, pool.map(lambda one: self._read_remote(*one), wanted), strict=True):
                self._fetched.setdefault(path, {})[box] = array

    def _gather(self, plan: list[Read[Source]], out: Arrays, addresses: list[str]) -> dict[str, Any]:
        """Fill `out`; returns this process's Reads."""
        def place(read: Read[Source]) -> tuple[Tier, int]:
            assert read.source, f"{read.path} {read.box} is planned from nowhere"
            tier, process = read.source
            target = out[read.path][read.into][slices(read.box, read.into)]
            if tier != "peer":
                target[...] = self._read_here(read.path, read.box)
                return tier, target.nbytes
            try:
                target[...] = fetch(addresses[process], read.path, read.box, target.dtype)
            except OSError as error:
                self._reads.notes.append(f"taken from shared storage, not from process {process}: {error}")
                target[...] = self._read_remote(read.path, read.box)
                tier = "remote"
            return tier, target.nbytes

        tiers: tuple[Tier, ...] = ("local", "remote", "peer")
        with ThreadPoolExecutor(THREADS) as pool:
            for part in tiers:
                with self._reads.timed(part):
                    done = list(pool.map(place, [read for read in plan if not read.source or read.source[0] == part]))
                for tier, count_bytes in done:
                    self._reads.count(tier, count_bytes)
        return asdict(self._reads)

    def _read_here(self, path: str, box: Box) -> np.ndarray:
        """From this process's store, or from what it fetched."""
        for whole, array in self._fetched.get(path, {}).items():
            if inside(box, whole):
                return array[slices(box, whole)]
        return self._own.read(path, box)

    def _read_remote(self, path: str, box: Box) -> np.ndarray:
        array = self._remote.read(path, box)
        if (array.shape, array.dtype) != (shape_of(box), self._leaves[path].dtype):
            raise InputError(f"{path}: {array.dtype}{list(array.shape)} was read, "
                             f"{self._leaves[path].dtype}{list(shape_of(box))} is wanted")
        return array

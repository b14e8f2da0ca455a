"""Local-first restore: from a process's own disk, then from the other survivors, and from shared storage only what nobody has.

Split: every process keeps, for each leaf, one copy of each distinct box that its devices hold, replicated leaves included: a copy
    in every process is what makes a lost process cost nothing where the state is replicated.
Moves: after processes were lost and the mesh changed, each process reads its new shards: own boxes from disk, boxes of others over
    TCP, and missing boxes from the checkpoint on shared storage, each once in the whole run and passed on from there.
Costs: a second write of a process's shards at each checkpoint, to the local disk; at a restore one read of it, for the checksums.
Use: shared storage is slow beside local disks and the network between hosts. Avoid: hosts come back with empty disks.

AutoHet (arXiv 2512.20953) recovers so, layer by layer. Expected gain over reading everything from afar: total / missing bytes.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxmem.checkpoint import nearby_store
from jaxmem.checkpoint.digest import Digests, digests
from jaxmem.checkpoint.nearby_boxes import Box, box_of
from jaxmem.checkpoint.nearby_exchange import Exchange, exchange_of_this_run
from jaxmem.checkpoint.nearby_ledger import Ledger
from jaxmem.checkpoint.nearby_read import Arrays, NearbyFailed, Reading
from jaxmem.checkpoint.nearby_remote import Remote
from jaxmem.checkpoint.nearby_store import Shards
from jaxmem.optim.dims import names
from jaxmem.spec import InputError

ProcessOf = Callable[[jax.Device], int]


class Nearby:
    """The local checkpoints of one process in `folder`, which no other process writes. After a restart the folder belongs to whichever
    process runs in that place, whatever its index: it is named after the place (the host, the rank within the host).

    `process` and `process_of` say whose devices are meant; by default those of this process.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int = 2, process: int | None = None,
                 process_of: ProcessOf = lambda device: device.process_index, exchange: Exchange | None = None) -> None:
        if keep < 1:
            raise InputError(f"local checkpoints: keep={keep}: expected at least 1")
        self.folder, self._keep, self._process_of = folder, keep, process_of
        self.process = jax.process_index() if process is None else process
        self._exchange = exchange or exchange_of_this_run()

    # ---- writing

    def shards_of(self, state: Any) -> dict[str, Shards]:
        """One host copy of each distinct box that this process's devices hold of each array of `state`."""
        leaves = leaves_of(state)
        mine = {path: {box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards
                       if self._process_of(shard.device) == self.process} for path, leaf in leaves.items()}
        for boxes in mine.values():
            for data in boxes.values():
                data.copy_to_host_async()
        return {path: Shards(leaves[path].shape, [(box, np.asarray(data)) for box, data in boxes.items()]) for path, boxes in mine.items()}

    def keep(self, step: int, shards: Mapping[str, Shards], saved: Digests) -> int:
        """Write this process's shards and return their bytes. `saved`: the state's digests, as in the checkpoint's meta; they tell this
        state from another one of the same step. Blocks on the disk (fsync). Raises OSError; the earlier steps stay as they were."""
        return nearby_store.write_step(self.folder, step, content_of(saved), shards)

    def committed(self, step: int) -> None:
        """The checkpoint of `step` is committed on shared storage: older local steps go, but for the last `keep` committed ones."""
        nearby_store.mark_committed(self.folder, step, self._keep)

    # ---- reading

    def restore(self, abstract: Any, step: int, remote: Remote, saved: Digests) -> tuple[Any, Ledger]:
        """The state of the committed `step` with the shardings of `abstract` (ShapeDtypeStructs), and what was read from where.

        `saved` are the digests in that checkpoint's meta: local pieces of another state are not used, and the restored one is verified
        against them. Every process calls this with the same arguments. Raises NearbyFailed in all when it fails in one.
        """
        arrays, ledger = self.read(abstract, step, remote, saved)
        state = assemble(abstract, arrays)
        found, _ = digests(state)
        if wrong := [name for name, value in found.items() if saved.get(name) != value]:
            raise NearbyFailed(f"step {step}: {len(wrong)} of {len(found)} arrays differ from what was saved, {wrong[0]} among them")
        return state, ledger

    def read(self, abstract: Any, step: int, remote: Remote, saved: Digests) -> tuple[Arrays, Ledger]:
        """This process's distinct shards on the host, each once, and the ledger of all processes. Raises NearbyFailed."""
        leaves = leaves_of(abstract)
        reading = Reading(leaves, needs_of(leaves, self._process_of), self.process, self._exchange, remote)
        return reading.run(self.folder, step, content_of(saved))


# ---------------------------------------------------------------- pieces

def leaves_of(tree: Any) -> dict[str, Any]:
    return {"/".join(names(path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def needs_of(leaves: Mapping[str, Any], process_of: ProcessOf) -> dict[int, dict[str, list[Box]]]:
    """Process -> leaf -> the distinct boxes that its devices will hold."""
    needs: dict[int, dict[str, list[Box]]] = {}
    for path, leaf in leaves.items():
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            boxes = needs.setdefault(process_of(device), {}).setdefault(path, [])
            if (box := box_of(index, leaf.shape)) not in boxes:
                boxes.append(box)
    return needs


def assemble(abstract: Any, arrays: Arrays) -> Any:
    """The state with the shardings of `abstract` from host arrays of this process's boxes."""
    def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        boxes, sharding = arrays["/".join(names(path))], leaf.sharding
        kind = sharding.memory_kind
        parts = [jax.device_put(boxes[box_of(index, leaf.shape)], SingleDeviceSharding(device, memory_kind=kind))
                 for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)
    return jax.tree_util.tree_map_with_path(one, abstract)


def content_of(saved: Digests) -> str:
    """One word for a state, from the digests of its leaves."""
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()[:32]

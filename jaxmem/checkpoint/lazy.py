"""Lazy snapshots: the state is copied to pinned host memory while the next gradients are computed (DataStates-LLM, arXiv 2406.10707).

Moves: the state once, device to host. Costs: pinned host memory for one copy of the state's local shards, and a stall of
max(0, bytes / bandwidth - seconds of the gradient program) before the update.
Use: frequent checkpoints with `step=split`. Avoid: with a fused step, which donates the state that is being copied.

Parameters and optimizer state do not change between two updates, and jax arrays are immutable, so the copy needs no lock. Donation is the
hazard: `take` must return before the program that donates the copied state is dispatched.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from jaxmem.checkpoint.digest import Digests, Pending
from jaxmem.spec import InputError


class Writer(Protocol):
    @property
    def outstanding(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A finished copy: `state` lies in pinned host memory and nothing else refers to its buffers."""

    step: int
    state: Any
    meta: dict[str, Any]
    digests: tuple[Digests, int]


class Snapshots:
    """At most one copy is in the making. `pool_bytes` bounds what this process pins in all, for copies that are made and for those that
    `writer` still writes (`outstanding`, `wait()`: a Store); None: one copy of the state that is snapshotted, and no more.
    """

    def __init__(self, writer: Writer, pool_bytes: int | None = None) -> None:
        self.pool_bytes, self._writer = pool_bytes, writer
        self._going: tuple[int, Any, dict[str, Any], Pending] | None = None
        self._written_bytes = 0  # of the copy that was handed to the writer last

    @property
    def started(self) -> bool:
        return self._going is not None

    def start(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Dispatch the copy of the state after step `step`; returns at once, or when the writer has freed enough of the pool.

        Raises InputError for a pool that cannot hold one copy, and what `writer.wait` raises.
        """
        size = local_bytes(state)
        pool = size if self.pool_bytes is None else self.pool_bytes
        if size > pool:
            raise InputError(f"a snapshot of this process's shards takes {size} bytes of pinned host memory and the pool has {pool}; give "
                             f"--snapshot_pool={size} or more, or use --snapshot=async")
        if self._writer.outstanding and size + self._written_bytes > pool:
            self._writer.wait()
        pending = Pending(state)
        self._going = step, jax.tree.map(to_pinned_host, state), meta, pending
        self._written_bytes = size

    def take(self) -> Taken:
        """Wait for the copy. After this the copied state may be donated."""
        assert self._going is not None
        step, copy, meta, pending = self._going
        jax.block_until_ready(copy)
        self._going = None
        return Taken(step=step, state=copy, meta=meta, digests=pending.result())

    def drop(self) -> None:
        if self._going is not None:
            jax.block_until_ready(self._going[1])
            self._going = None


def to_pinned_host(x: jax.Array) -> jax.Array:
    """A copy of this process's shards, each by its device's own transfer: for an array of several processes, `device_put` of the whole
    would be a program in the queue of the step, and overlap with nothing."""
    parts = [jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind="pinned_host"), may_alias=False)
             for shard in x.addressable_shards]  # without may_alias what lies in pinned host memory already would be no copy
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind("pinned_host"), parts)


def local_bytes(tree: Any) -> int:
    """Bytes of the shards that this process's devices hold, replicas included."""
    return sum(math.prod(shard.data.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree) for shard in x.addressable_shards)

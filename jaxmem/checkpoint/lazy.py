"""Lazy snapshots: the state is copied to pinned host memory while the next gradients are computed (DataStates-LLM, arXiv 2406.10707).

Moves: the state once, device to host. Costs: pinned host memory for one copy of the state's local shards, and a stall of
max(0, bytes / bandwidth - seconds of the gradient program) before the update.
Use: frequent checkpoints with `step=split`. Avoid: with a fused step, which donates the state that is being copied.

Parameters and optimizer state do not change between two updates, and jax arrays are immutable, so the copy needs no lock. Donation is the
hazard: `take` must return before the program that donates the copied state is dispatched.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.checkpoint.digest import Digests, Pending
from jaxmem.spec import InputError


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A finished copy: `state` lies in pinned host memory and nothing else refers to its buffers."""

    step: int
    state: Any
    meta: dict[str, Any]
    digests: tuple[Digests, int]


class Snapshots:
    """At most one copy is in the making, and `pool_bytes` bounds what a process pins for copies that are being made or written.

    `held` says how many bytes a writer still holds; a snapshot that would pass the bound waits in `start` until they are free.
    """

    def __init__(self, pool_bytes: int | None = None) -> None:
        self.pool_bytes = pool_bytes
        self._going: tuple[int, Any, dict[str, Any], Pending] | None = None

    @property
    def started(self) -> bool:
        return self._going is not None

    def start(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Dispatch the copy of the state after step `step`; returns at once."""
        size = local_bytes(state)
        if self.pool_bytes is not None and size > self.pool_bytes:
            raise InputError(f"a snapshot of this process's shards takes {size} bytes of pinned host memory and the pool has "
                             f"{self.pool_bytes}; give the pool at least that, or use --snapshot=async")
        pending = Pending(state)
        self._going = step, jax.tree.map(to_pinned_host, state), meta, pending

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
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def local_bytes(tree: Any) -> int:
    """Bytes of the shards that this process's devices hold, replicas included."""
    return sum(math.prod(shard.data.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree) for shard in x.addressable_shards)

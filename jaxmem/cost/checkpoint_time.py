"""Bytes and seconds of one checkpoint, in closed form from shapes.

Split: each array is written by the devices that hold it; replicas share the writing where a dim of the shard divides by their number
    (Orbax's rule), otherwise the first of them writes it.
Moves: device to host over the host link, then host to storage.
Costs: sync waits for both, async for the first, lazy for what of the first is left when forward and backward are done; each also for
    the digests, which read the state once, and for what a checkpoint of next to nothing costs.
Use: `checkpointing.Costs` of a job that nobody has run yet.
Avoid: for the time that compression, many hosts' barriers and a busy file system take on top; a measured stall and commit say more.
"""

import dataclasses
import math

from jaxmem.cost.checkpointing import Costs
from jaxmem.cost.memory import Leaf, state_bytes, state_leaves
from jaxmem.hardware import Topology
from jaxmem.plan import Plan
from jaxmem.rules import partition, rules
from jaxmem.workload import Workload

# Folders, metadata, threads: of async checkpoints of 1.7 MB on two shared x86 cores (measure, cpu; experiments.checkpoint_intervals).
FIXED_STALL_S, FIXED_COMMIT_S = 0.04, 0.2
STEP_COUNTER = Leaf(kind="opt_state", path="step", shape=(), dims=(), itemsize=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointBytes:
    """`total`: of all arrays, once. `host`: what the busiest host writes. `device`: what the busiest device hands over for writing.
    `resident`: a device's shards, replicas too, which a lazy snapshot copies and a restart loads. `gradients`: a device's."""

    total: int
    host: int
    device: int
    resident: int
    gradients: int


def checkpoint_bytes(workload: Workload, plan: Plan, topology: Topology) -> CheckpointBytes:
    """Parameters, optimizer state and step counter; `plan` must be for the topology's devices."""
    total = host = device = 0
    for leaf in [*state_leaves(workload, plan), STEP_COUNTER]:
        if leaf.kind == "gradients":
            continue
        total += leaf.bytes()
        axes = partition(leaf.dims, leaf.shape, rules(plan, leaf.kind), plan.sizes)
        parts = [math.prod(plan.sizes[axis] for axis in of) for of in axes]
        shard = [n // into for n, into in zip(leaf.shape, parts, strict=True)]
        size, shards = math.prod(shard) * leaf.itemsize, math.prod(parts)
        replicas = topology.devices // shards
        if any(n % replicas == 0 for n in shard):
            device += size // replicas
            host += size // replicas * topology.devices_per_host
        else:
            device += size
            host += size * min(shards, topology.devices_per_host)
    state = state_bytes(workload, plan)
    resident = state.persistent + STEP_COUNTER.itemsize
    return CheckpointBytes(total=total, host=host, device=device, resident=resident, gradients=state.gradients)


def write_s(size: CheckpointBytes, *, bytes_per_s: float | None, host_bytes_per_s: float | None) -> float | None:
    """Host to storage: all hosts together at `bytes_per_s`, none faster than `host_bytes_per_s`; None where neither is known."""
    limits = [amount / rate for amount, rate in ((size.total, bytes_per_s), (size.host, host_bytes_per_s)) if rate is not None]
    return max(limits) if limits else None


def read_s(size: CheckpointBytes, topology: Topology, *, bytes_per_s: float | None, host_bytes_per_s: float | None) -> float | None:
    """A restart's reading: each host what its devices hold, the same bytes of several devices once."""
    host = min(size.resident * topology.devices_per_host, size.total)
    limits = [amount / rate for amount, rate in ((host * topology.hosts, bytes_per_s), (host, host_bytes_per_s)) if rate is not None]
    link = topology.chip.host_link_bytes_per_s
    return max(limits) + size.resident / link if limits and link else None


def forward_backward_s(size: CheckpointBytes, topology: Topology, step_s: float) -> float:
    """Of a step of `step_s`, what is not the update, which reads and writes the state and reads the gradients."""
    rate = topology.chip.hbm_bytes_per_s
    return max(0.0, step_s - (2 * size.resident + size.gradients) / rate) if rate else step_s


def mode_costs(mode: str, size: CheckpointBytes, topology: Topology, *, write_s: float, restart_s: float,
               step_s: float | None) -> Costs | None:
    """Of `sync`, `async` or `lazy`. None where the chip's host link is not known, and for lazy without a step time."""
    link, memory = topology.chip.host_link_bytes_per_s, topology.chip.hbm_bytes_per_s
    if not link or not memory:
        return None
    if mode == "lazy":
        if step_s is None:
            return None
        copy = size.resident / link  # the digests are made meanwhile
        stall = max(0.0, copy - forward_backward_s(size, topology, step_s)) + FIXED_STALL_S
        return Costs(stall_s=stall, commit_s=copy + FIXED_STALL_S + write_s + FIXED_COMMIT_S, restart_s=restart_s)
    stall = size.resident / memory + size.device / link + FIXED_STALL_S
    commit = stall + write_s + FIXED_COMMIT_S
    return Costs(stall_s=commit if mode == "sync" else stall, commit_s=commit, restart_s=restart_s)

"""Bytes of a checkpoint against the arrays themselves, and by Orbax's own rule for who writes what; seconds against sums by hand."""

import dataclasses
import math

import jax
import pytest
from orbax.checkpoint._src.serialization.replica_slices import get_replica_slices

from jaxmem import step
from jaxmem.cost.checkpoint_time import CheckpointBytes, checkpoint_bytes, forward_backward_s, mode_costs, read_s, write_s
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.workload import Workload

HERE = parse_topology("cpu:8")


@pytest.mark.parametrize("optimizer, plan", [("adamw", "fsdp=8"), ("adafactor", "data=2,fsdp=2,tensor=2"), ("muon", "data=4,fsdp=2,zero=1"),
                                             ("lion", "data=8")])
def test_bytes_are_those_of_the_arrays(optimizer, plan):
    workload = Workload.parse(model="decoder-tiny,layers=1", optimizer=optimizer, batch=8, seq=32)
    of = Plan.parse(plan, devices=8)
    leaves = jax.tree.leaves(step.build(workload, of, HERE, jax.devices()).state)
    found = checkpoint_bytes(workload, of, HERE)
    assert found.total == sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    assert found.resident == sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    # what each device hands over, by the code that will do it
    handed = dict.fromkeys(jax.devices(), 0)
    for leaf in leaves:
        array = jax.jit(lambda leaf=leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
        for one in get_replica_slices(array, replica_id=0, use_replica_parallel=True).replica_slices:
            handed[one.unsliced_data.device] += math.prod(one.data().shape) * leaf.dtype.itemsize
    assert found.device == max(handed.values()) and sum(handed.values()) == found.total == found.host


def test_hosts_share_the_writing_of_replicas():
    """gpt2 has dims that 16 divides; over 2 hosts each writes half, whether they hold shards or copies."""
    workload = Workload.parse(model="gpt2", batch=16, seq=128)
    for plan in ("fsdp=16", "data=2,fsdp=8", "data=16"):
        found = checkpoint_bytes(workload, Plan.parse(plan, devices=16), parse_topology("h100:2x8"))
        assert found.total == 12 * workload.model.parameters + 8  # AdamW in f32, its count and the step's
        assert found.host == pytest.approx(found.total / 2, rel=1e-6) and found.device == pytest.approx(found.total / 16, rel=1e-6)
        # vectors are whole under fsdp: gpt2's are under a thousandth
        assert found.resident == pytest.approx(found.total / {"fsdp=16": 16, "data=2,fsdp=8": 8, "data=16": 1}[plan], rel=0.02)


def test_copies_that_cannot_share_the_writing_are_written_by_the_hosts_of_the_first():
    """Four hosts of two devices, two copies of four shards, and no dim of a shard is even: what the hosts hand over, by Orbax's rule."""
    workload, plan = Workload.parse(model="mlp,layers=1,height=3,width=3,mlp=12,classes=5", batch=8), Plan.parse("data=2,fsdp=4")
    found, handed = checkpoint_bytes(workload, plan, parse_topology("h100:4x2")), dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(step.build(workload, plan, HERE, jax.devices()).state):
        array = jax.device_put(jax.numpy.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        for one in get_replica_slices(array, replica_id=0, use_replica_parallel=True).replica_slices:
            handed[one.unsliced_data.device] += math.prod(one.data().shape) * leaf.dtype.itemsize
    hosts = [sum(handed[device] for device in jax.devices()[i:i + 2]) for i in range(0, 8, 2)]
    assert found.host == max(hosts) and found.total == sum(hosts) and hosts[2] == 0 < hosts[1] < hosts[0]


SIZE = CheckpointBytes(total=80 * 10**9, host=10 * 10**9, device=int(1.25e9), resident=5 * 10**9, gradients=10**9)
H100 = parse_topology("h100:8x8")  # 64 GB/s to the host, 3.35 TB/s HBM


def test_writing_takes_as_long_as_the_narrowest_place():
    assert write_s(SIZE, bytes_per_s=40e9, host_bytes_per_s=None) == 2
    assert write_s(SIZE, bytes_per_s=40e9, host_bytes_per_s=1e9) == 10
    assert write_s(SIZE, bytes_per_s=None, host_bytes_per_s=1e9) == 10
    assert write_s(SIZE, bytes_per_s=None, host_bytes_per_s=None) is None
    # eight hosts read 40 GB each: their devices' shards
    assert read_s(SIZE, H100, bytes_per_s=40e9, host_bytes_per_s=None) == pytest.approx(8 + 5 / 64, rel=1e-3)
    assert read_s(SIZE, H100, bytes_per_s=None, host_bytes_per_s=None) is None
    # devices that hold the same 5 GB: of 10 GB in all no host reads more, however often its devices have them
    copies = dataclasses.replace(SIZE, total=10 * 10**9)
    assert read_s(copies, H100, bytes_per_s=40e9, host_bytes_per_s=None) == pytest.approx(2 + 5 / 64, rel=1e-9)
    assert read_s(copies, H100, bytes_per_s=40e9, host_bytes_per_s=1e9) == pytest.approx(10 + 5 / 64, rel=1e-9)


def test_costs_of_the_modes():
    assert H100.chip.host_link_bytes_per_s == 64e9
    # 1.25 GB at 64 GB/s are handed over, after 5 GB were read at HBM speed for the digests; 40 ms and 0.2 s are never less
    stall, own = 1.25 / 64 + 5e9 / H100.chip.hbm_bytes_per_s + 0.04, {"write_s": 2.0, "restart_s": 30.0}
    sync, later = (mode_costs(mode, SIZE, H100, step_s=None, **own) for mode in ("sync", "async"))
    assert sync.stall_s == sync.commit_s == later.commit_s == pytest.approx(stall + 2 + 0.2) and sync.restart_s == 30
    assert later.stall_s == pytest.approx(stall)
    assert mode_costs("lazy", SIZE, H100, step_s=None, **own) is None
    # 5 GB at 64 GB/s are 78 ms; the update moves 11 GB at HBM speed, 3.3 ms; of a step of 50 ms, 46.7 ms hide the copy
    hidden = forward_backward_s(SIZE, H100, 0.05)
    assert hidden == pytest.approx(0.05 - 11e9 / H100.chip.hbm_bytes_per_s)
    lazy = mode_costs("lazy", SIZE, H100, step_s=0.05, **own)
    assert lazy.stall_s == pytest.approx(5 / 64 - hidden + 0.04) and lazy.commit_s == pytest.approx(5 / 64 + 0.04 + 2 + 0.2)
    assert mode_costs("lazy", SIZE, H100, step_s=1.0, **own).stall_s == 0.04
    assert mode_costs("sync", SIZE, HERE, step_s=1.0, **own) is None  # nobody publishes a CPU's link to itself

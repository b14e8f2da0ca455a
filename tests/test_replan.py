"""A plan on fewer devices: against brute force over everything that it may choose from."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.hardware import Topology, parse_topology
from jaxmem.plan import Plan
from jaxmem.replan import replan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

SIZES = st.sampled_from([1, 2, 3, 4, 6])


def workload(batch: int = 16) -> Workload:
    return Workload.parse(model="decoder-tiny", batch=batch, seq=64)


def run(plan: str, topology: str, left: int, **kwargs) -> tuple[str, str]:
    where = parse_topology(topology)
    plan, smaller = replan(Plan.parse(plan, devices=where.devices), workload(), where, left, **kwargs)
    return str(plan), str(smaller)


def part(topology: Topology, devices: int) -> Topology | None:
    """The part with this many devices that whole slices, hosts or emulated devices make up."""
    if topology.chip.kind == "cpu":
        return dataclasses.replace(topology, shape=(devices,))
    if topology.chip.kind == "tpu":
        slices, rest = divmod(devices, topology.devices_per_slice)
        return None if rest else dataclasses.replace(topology, slices=slices)
    hosts, gpus = topology.shape
    if hosts == 1:
        return dataclasses.replace(topology, shape=(1, devices))
    return None if devices % gpus else dataclasses.replace(topology, shape=(devices // gpus, gpus))


@pytest.mark.parametrize("kind", ["cpu:{n}", "h100:{n}x2", "{n}xv5e-4"])
@settings(max_examples=60)
@given(data=SIZES, fsdp=SIZES, tensor=st.sampled_from([1, 2]), accumulate=st.sampled_from([1, 2]), batch=st.sampled_from([12, 16, 24]),
       lose=st.integers(0, 40), zero=st.sampled_from([0, 1, 3]))
def test_largest_legal_part_by_brute_force(kind, data, fsdp, tensor, accumulate, batch, lose, zero):
    plan = Plan(data=data, fsdp=fsdp, tensor=tensor, accumulate=accumulate, zero=zero, remat="block", loss_chunks=2)
    a_unit = parse_topology(kind.format(n=1)).devices
    if plan.devices % a_unit:
        return
    work, topology = workload(batch), parse_topology(kind.format(n=plan.devices // a_unit))
    left = max(1, topology.devices - lose)
    legal = {}
    for d in range(1, data + 1):
        for f in range(1, fsdp + 1):
            for parts in range(1, batch + 1):
                candidate = dataclasses.replace(plan, data=d, fsdp=f, accumulate=parts)
                where = part(topology, candidate.devices)
                if where is not None and candidate.devices <= left and not candidate.problems(work, where):
                    legal[candidate] = where
    if not legal:
        with pytest.raises(InputError):
            replan(plan, work, topology, left)
        return
    best, where = replan(plan, work, topology, left)
    assert legal[best] == where
    most = max(p.devices for p in legal)
    assert best.devices == most
    assert best.fsdp == max(p.fsdp for p in legal if p.devices == most)
    rows = max(1, batch // (data * fsdp * accumulate))  # at a time on a device

    def fits(p: Plan) -> bool:
        return batch // (p.data * p.fsdp * p.accumulate) <= rows

    assert fits(best)
    assert best.accumulate == min(p.accumulate for p in legal if (p.data, p.fsdp) == (best.data, best.fsdp) and fits(p))
    assert dataclasses.replace(best, data=data, fsdp=fsdp, accumulate=accumulate) == plan  # nothing else changed


@given(data=SIZES, fsdp=SIZES, lost=st.integers(0, 12), per=st.sampled_from([1, 2, 3, 4]))
def test_whole_processes_are_used(data, fsdp, lost, per):
    topology = parse_topology(f"cpu:{data * fsdp}")
    try:
        best, where = replan(Plan(data=data, fsdp=fsdp), workload(48), topology, max(1, topology.devices - lost), devices_per_process=per)
    except InputError:
        return
    assert where.devices == best.devices
    assert where.devices % per == 0


def test_examples():
    assert run("data=2,fsdp=2,tensor=2", "cpu:8", 6, devices_per_process=2) == ("fsdp=2,tensor=2,accumulate=2", "cpu:4")
    assert run("data=4,fsdp=2", "cpu:8", 8) == ("data=4,fsdp=2", "cpu:8")  # nothing lost, nothing changed
    assert run("data=2,fsdp=8", "h100:2x8", 15) == ("fsdp=8,accumulate=2", "h100:8")  # a host lost a GPU: the host is lost
    assert run("fsdp=8", "h100:8", 7) == ("fsdp=4,accumulate=2", "h100:4")
    assert run("fsdp=16", "h100:2x8", 8, devices_per_process=8) == ("fsdp=8,accumulate=2", "h100:8")
    assert run("data=4,fsdp=4", "4xv5e-4", 15) == ("data=2,fsdp=4,accumulate=2", "2xv5e-4")  # three slices do not divide 16 rows
    assert run("data=2,accumulate=8", "cpu:2", 1) == ("accumulate=16", "cpu:1")


@pytest.mark.parametrize(("plan", "topology", "left", "kwargs", "parts"), [
    ("data=2,fsdp=4", "2xv5e-4", 3, {}, ["3 devices are left of 2xv5e-4", "slice of 4"]),
    ("fsdp=16", "h100:2x8", 7, {}, ["7 devices are left", "host of 8"]),
    ("fsdp=2", "cpu:2", 1, {"devices_per_process": 2}, ["process of 2"]),
    ("tensor=4,data=2", "cpu:8", 3, {}, ["cpu:3", "tensor(4)"]),
    ("data=2", "cpu:2", 0, {}, ["no devices are left of cpu:2"]),
    ("data=2,tensor=3", "cpu:6", 3, {}, ["heads(4) is not a multiple of tensor(3)"]),
])
def test_what_cannot_run_says_why(plan, topology, left, kwargs, parts):
    with pytest.raises(InputError) as error:
        run(plan, topology, left, **kwargs)
    for text in parts:
        assert text in str(error.value)

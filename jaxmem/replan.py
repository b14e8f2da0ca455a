"""A plan for what is left of a topology when devices are lost: the same computation on fewer of them.

The global batch, tensor, zero, remat and every other field stay; data shrinks first, then fsdp. `accumulate` rises until a device
works through no more rows at a time than before, so that activations need no more memory. The state does: a smaller fsdp leaves a
larger share of it on each device, and no plan can change that.
"""

import dataclasses
from collections.abc import Iterator

from jaxmem.hardware import Topology
from jaxmem.plan import Plan, divisors
from jaxmem.spec import InputError
from jaxmem.workload import Workload


def replan(plan: Plan, workload: Workload, topology: Topology, devices_left: int, *,
           devices_per_process: int | None = None) -> tuple[Plan, Topology]:
    """The largest legal part of `topology` within `devices_left` devices, and the plan on it.

    Whole processes are used: slices of TPUs, hosts of GPUs, and on `cpu:N` groups of `devices_per_process` (default 1), which may be
    given for GPUs too. Of several splits of one device count the one with the largest fsdp is taken. Raises `InputError` with the
    reasons when no count is legal.
    """
    if devices_left < 1:
        raise InputError(f"no devices are left of {topology}")
    reasons: list[str] = []
    for smaller in smaller_topologies(topology, devices_left, devices_per_process):
        splits = list(_splits(plan, smaller.devices))
        if not splits:
            reasons.append(f"{smaller}: {smaller.devices} devices are not tensor({plan.tensor}) * data * fsdp with data at most "
                           f"{plan.data} and fsdp at most {plan.fsdp}")
        for data, fsdp in splits:
            wanted = dataclasses.replace(plan, data=data, fsdp=fsdp)
            wanted = dataclasses.replace(wanted, accumulate=_accumulate(plan, wanted, workload))
            problems = wanted.problems(workload, smaller)
            if not problems:
                return wanted, smaller
            reasons.append(f"{smaller} with data={data},fsdp={fsdp}: {problems[0]}")
    if not reasons:
        raise InputError(f"{devices_left} devices are left of {topology}, not one whole "
                         f"{_unit_name(topology, devices_per_process)}; nothing smaller can run")
    more = f"\n(and {len(reasons) - 5} more)" if len(reasons) > 5 else ""
    raise InputError(f"no plan like {plan or 'the default'} runs on {devices_left} of the {topology.devices} devices of {topology}:\n"
                     + "\n".join(reasons[:5]) + more)


def smaller_topologies(topology: Topology, devices_left: int, devices_per_process: int | None = None) -> Iterator[Topology]:
    """Parts of a topology that whole processes make up, with at most `devices_left` devices, largest first; itself when it is whole."""
    if topology.chip.kind == "tpu":
        for slices in range(min(topology.slices, devices_left // topology.devices_per_slice), 0, -1):
            yield dataclasses.replace(topology, slices=slices)
        return
    a_host = topology.devices_per_host
    unit = devices_per_process or (a_host if topology.hosts > 1 else 1)
    for devices in range(min(topology.devices, devices_left) // unit * unit, 0, -unit):
        if topology.chip.kind == "cpu":
            yield dataclasses.replace(topology, shape=(devices,))
        elif devices % a_host == 0:
            yield dataclasses.replace(topology, shape=(devices // a_host, a_host))
        elif devices < a_host:
            yield dataclasses.replace(topology, shape=(1, devices))


def _splits(plan: Plan, devices: int) -> Iterator[tuple[int, int]]:
    """(data, fsdp) of that many devices, neither larger than before, largest fsdp first."""
    if devices % plan.tensor:
        return
    rows = devices // plan.tensor
    for fsdp in reversed(divisors(rows)):
        if fsdp <= plan.fsdp and rows // fsdp <= plan.data:
            yield rows // fsdp, fsdp


def _accumulate(before: Plan, now: Plan, workload: Workload) -> int:
    """The smallest number of parts in which a device has no more rows at a time than under `before`."""
    rows, left_over = divmod(workload.batch, now.data * now.fsdp)
    if left_over:
        return before.accumulate  # not legal anyway, and `problems` says why
    most = max(1, workload.batch // (before.data * before.fsdp * before.accumulate))
    return rows // max(n for n in divisors(rows) if n <= most)


def _unit_name(topology: Topology, devices_per_process: int | None) -> str:
    if topology.chip.kind == "tpu":
        return f"slice of {topology.devices_per_slice}"
    if devices_per_process:
        return f"process of {devices_per_process}"
    return f"host of {topology.devices_per_host}"

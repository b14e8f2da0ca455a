"""State that stays on the device while a program runs that does not take it: evaluation sees the parameters, and the optimizer's
state lies beside it all the same."""

from typing import Any

from jaxmem.cost.memory import state_bytes
from jaxmem.hardware import Topology
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal, row_bytes, shards_of
from jaxmem.workload import Workload


def resident_bytes(workload: Workload, plan: Plan, program: str) -> int:
    """Bytes on one device, in closed form (estimate): optimizer state during `eval` and `gradients`, nothing elsewhere."""
    return state_bytes(workload, plan).opt_state if program in ("eval", "gradients") else 0


def rehearsal_bytes(rehearsal: Rehearsal | None, workload: Workload, plan: Plan) -> int:
    """Bytes on one device of the rehearsal buffer and its staged rows, in closed form (estimate). They lie beside every program."""
    return rehearsal.device_bytes(row_bytes(workload), shards_of(plan)) if rehearsal else 0


def name_rehearsal(check: dict[str, Any], rehearsal: Rehearsal, workload: Workload, plan: Plan, topology: Topology) -> None:
    """Say in a check, whose resident bytes were all taken for the optimizer's, which of them are the rehearsal buffer's."""
    here, shard = rehearsal_bytes(rehearsal, workload, plan), rehearsal.buffer_bytes(row_bytes(workload), shards_of(plan))
    for part in check["composition"]:
        if part["module"] == "optimizer (resident)":
            part["bytes"] -= here
            check["composition"].append({"kind": "other", "module": "rehearsal (resident)", "bytes": here})
            break
    check["composition"] = sorted((part for part in check["composition"] if part["bytes"]), key=lambda part: -part["bytes"])
    for program in check["timeline"]:
        for point in program["points"]:
            kinds = point["by_kind"]
            if left := kinds.pop("opt_state", 0) - here:
                kinds["opt_state"] = left
            kinds["other"] = kinds.get("other", 0) + here
    note = (f"rehearsal ({rehearsal}): programs have a batch of {workload.batch} rows, {rehearsal.r} of them drawn; {here} bytes a device "
            "of buffer and staged rows lie beside every program (estimate)")
    if rehearsal.memory == "pinned_host":
        check["host_bytes"] = (check["host_bytes"] or 0) + shard * topology.devices_per_host
        note += f", and {shard} bytes a device in the host's memory"
        if topology.chip.kind == "gpu":
            note += ", of which an update makes a copy on a GPU's host"
    check["warnings"].append(note)

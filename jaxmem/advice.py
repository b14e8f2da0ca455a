"""What would make it fit: single changes, cheapest in step time first, each compiled when asked for.

An estimate says what is known in closed form (state bytes of the changed plan) and leaves the rest unknown; only compiling decides.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxmem.cost.memory import state_bytes
from jaxmem.hardware import Topology
from jaxmem.plan import Plan, divisors
from jaxmem.workload import Workload

Change = tuple[str, Workload, Plan]
VERIFIED_AT_MOST = 6


def changes(workload: Workload, plan: Plan, topology: Topology) -> Iterator[Change]:
    """Legal single changes, those that cost the least time first; none of them changes the result of a step but `batch` and dtypes."""
    def with_plan(text: str, **fields: Any) -> Change:
        return text, workload, dataclasses.replace(plan, **fields)
    optimizer = workload.optimizer
    rows = workload.batch // (plan.data * plan.fsdp)
    if plan.zero < 3 and plan.data * plan.fsdp > 1:
        over = {"fsdp": plan.fsdp * plan.data, "data": 1} if topology.slices == 1 else {}
        yield with_plan(",".join(["zero=3", *(f"{k}={v}" for k, v in over.items())]), zero=3, **over)
    if plan.data > topology.slices and plan.zero == 3:
        yield with_plan(f"data={topology.slices},fsdp={plan.fsdp * plan.data // topology.slices}", data=topology.slices,
                        fsdp=plan.fsdp * plan.data // topology.slices)
    if plan.loss_chunks == 1:
        yield with_plan("loss_chunks=8", loss_chunks=8)
    if plan.tensor > 1 and plan.sequence == "whole":
        yield with_plan("sequence=tensor", sequence="tensor")
    for part in [d for d in divisors(max(rows, 1)) if d > plan.accumulate][:2]:
        yield with_plan(f"accumulate={part}", accumulate=part)
    if plan.remat in ("none", "dots", "attention"):
        for remat in {"none": ("attention", "dots", "block"), "attention": ("dots", "block"), "dots": ("block",)}[plan.remat]:
            yield with_plan(f"remat={remat}", remat=remat)
    elif plan.remat != "block" and "offload" not in plan.remat:
        yield with_plan("remat=block", remat="block")
    if plan.remat == "block":
        yield with_plan("remat=offload:decoder_layer_input", remat="offload:decoder_layer_input")
    if optimizer.moments == "f32" and optimizer.name in ("adamw", "lion", "muon"):
        yield ("optimizer moments=bf16", dataclasses.replace(workload, optimizer=dataclasses.replace(optimizer, moments="bf16")), plan)
    for tensor in (2, 4, 8):
        if tensor > plan.tensor and plan.fsdp * plan.tensor % tensor == 0:
            yield with_plan(f"tensor={tensor},fsdp={plan.fsdp * plan.tensor // tensor},sequence=tensor", tensor=tensor,
                            fsdp=plan.fsdp * plan.tensor // tensor, sequence="tensor")
    if workload.batch % 2 == 0:
        yield (f"batch={workload.batch // 2}", dataclasses.replace(workload, batch=workload.batch // 2), plan)
    if plan.params == "f32":
        yield with_plan("params=bf16", params="bf16")


def advise(workload: Workload, plan: Plan, topology: Topology, check: dict[str, Any], *,
           verify: Callable[[tuple[Workload, Plan]], dict[str, Any]] | None, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """`advice` of the check's dict. With `verify`, compiles until two changes fit or six were tried."""
    usable = check["usable_bytes"]
    now = state_bytes(workload, plan)
    state = now.params + now.opt_state
    out: list[dict[str, Any]] = []
    if any("host memory" in p for p in check["problems"]):
        return out  # no change here takes bytes off the host
    tried = fitting = 0
    for text, changed_workload, changed_plan in changes(workload, plan, topology):
        if changed_plan.problems(changed_workload, topology):
            continue
        after = state_bytes(changed_workload, changed_plan)
        needed = after.params + after.opt_state
        if usable is not None and needed > usable:
            continue  # its state alone is too large
        row = {"change": text, "plan": str(changed_plan), "workload": str(changed_workload), "topology": topology.text,
               "batch": changed_workload.batch, "peak_bytes": None, "step_s": None, "verdict": "unknown", "source": "estimate"}
        if verify is None:
            peak = check["peak_bytes"]
            state_only = changed_plan.accumulate == plan.accumulate and changed_plan.remat == plan.remat and needed < state
            if peak is not None and state_only and changed_workload.batch == workload.batch and changed_plan.sizes == plan.sizes:
                row["peak_bytes"] = peak - state + needed
                row["verdict"] = "fits" if usable is not None and row["peak_bytes"] <= usable else "does_not_fit"
            out.append(row)
            continue
        progress(f"advice: compiling with {text}")
        got = verify((changed_workload, changed_plan))
        out.append(row | {"peak_bytes": got["peak_bytes"], "step_s": got["step_s"], "verdict": got["verdict"], "source": "compile"})
        tried += 1
        fitting += got["verdict"] in ("fits", "tight")
        if fitting == 2 or tried == VERIFIED_AT_MOST:
            break
    order = {"fits": 0, "tight": 1, "unknown": 2, "does_not_fit": 3}
    if verify is not None:
        out.sort(key=lambda r: (order[r["verdict"]], r["step_s"] or float("inf")))
    else:
        out.sort(key=lambda r: r["verdict"] == "does_not_fit")
    if state > (usable or state):
        check["warnings"].append(f"parameters and optimizer state alone take {state / 2**30:.2f} GiB a device (estimate)"
                                 + (f", more than the {usable / 2**30:.2f} GiB usable" if usable else ""))
    return out

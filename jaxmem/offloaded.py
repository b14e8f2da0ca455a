"""What `remat=offload:...` really moves, by name: an offload that changes nothing is an error with the numbers, not a silence."""

import math
from collections.abc import Mapping
from typing import Any

from jaxmem.hlo.parse import Computation, Module, parse, trip_count
from jaxmem.models.configs import blocks
from jaxmem.plan import Plan, Remat
from jaxmem.targets.compile import Artifact
from jaxmem.workload import Workload

HOST = 5  # memory space of host buffers in the TPU compiler's layouts
ITEMSIZE = {"f32": 4, "bf16": 2, "f16": 2}


def expected(workload: Workload, plan: Plan, name: str) -> int:
    """Bytes of one saved value over all layers, on one device (estimate)."""
    c = blocks(workload.model)
    assert c is not None  # plans with remat are for models with blocks
    rows = workload.batch // (plan.data * plan.fsdp)
    kv = c.kv_heads if c.kv_heads % plan.tensor else c.kv_heads // plan.tensor
    residual = c.embed // (plan.tensor if plan.sequence == "tensor" else 1)
    width = {"decoder_layer_input": residual, "out_proj": residual, "mlp_down": residual,
             "query_proj": c.heads * c.head_dim // plan.tensor, "context": c.heads * c.head_dim // plan.tensor,
             "key_proj": kv * c.head_dim, "value_proj": kv * c.head_dim,
             "mlp_gate": c.mlp // plan.tensor, "mlp_up": c.mlp // plan.tensor}[name]
    return c.layers * rows * workload.seq * width * ITEMSIZE[plan.compute]


def moved(module: Module) -> dict[tuple[str, tuple[int, ...]], int]:
    """(dtype, shape of one transfer) -> bytes that one device copies to host memory in a step."""
    out: dict[tuple[str, tuple[int, ...]], int] = {}

    def walk(computation: Computation, times: int) -> None:
        for i in computation.instructions:
            if i.opcode == "while":
                inside = trip_count(module, i)
                if inside is None:
                    raise ValueError(f"{i.name}: its trip count is unknown, so the bytes it moves are")
                for name in i.called.get("body", ()):
                    walk(module.computations[name], times * inside)
            elif i.opcode in ("call", "conditional", "async-start"):
                for names in i.called.values():
                    for name in names:
                        walk(module.computations[name], times)
            elif i.opcode.removesuffix("-start") in ("copy", "dynamic-update-slice", "fusion", "custom-call"):
                leaves = [s for _, s in i.shape.leaves() if s.memory_space == HOST]
                sources = [computation.by_name[o].shape for o in i.operands if o in computation.by_name]
                device = [s for s in sources if not s.is_tuple and s.memory_space != HOST and s.dims]
                if not leaves or not device:
                    continue
                piece = max(device, key=lambda s: s.bytes)
                key = (piece.dtype, tuple(d for d in piece.dims if d != 1))
                out[key] = out.get(key, 0) + piece.bytes * times
    walk(module.entry, 1)
    return out


def report(workload: Workload, plan: Plan, artifacts: Mapping[str, Artifact]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """`[{"name", "bytes"}]` for every offloaded name, warnings for those that move less than they should, and errors for those that move
    nothing: a plan that does not do what it says is not checked."""
    names = Remat.parse(plan.remat).offload
    artifact = artifacts.get("train") or artifacts.get("gradients")
    if not names or artifact is None:
        return [], [], []
    text = artifact.text("hlo")
    if text is None:
        return [{"name": name, "bytes": None} for name in names], [], []
    found = moved(parse(text))
    per_layer = {name: expected(workload, plan, name) // workload.model.layers for name in names}
    by_size: dict[int, int] = {}
    for (dtype, shape), size in found.items():
        each = math.prod(shape) * {"bf16": 2, "f16": 2, "f32": 4}.get(dtype, 1)
        by_size[each] = by_size.get(each, 0) + size
    rows, warnings, errors = [], [], []
    for name in names:
        share = [n for n in names if per_layer[n] == per_layer[name]]  # values of one size cannot be told apart: shared equally
        size = by_size.get(per_layer[name] // plan.accumulate, 0) // len(share)
        rows.append({"name": name, "bytes": size})
        want = expected(workload, plan, name)
        if size == 0:
            errors.append(f"remat=offload:{name} moves nothing: {want / 2**20:.1f} MiB a device and step were to go to the host, 0 do")
        elif size < 0.9 * want:
            warnings.append(f"remat=offload:{name} moves {size / 2**20:.1f} of {want / 2**20:.1f} MiB a device and step to the host")
    return rows, warnings, errors

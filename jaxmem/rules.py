"""Array dim -> mesh axes, for each thing that can be split. No jax: the closed forms and the real arrays read the same tables.

Split: four tables (params, gradients, opt_state, activations) make data parallelism, ZeRO-1/2/3, tensor parallelism and the
sequence-split residual stream. They are tables, not classes.
"""

import math
from collections.abc import Mapping
from typing import Literal

from jaxmem.plan import Plan

Table = dict[str, tuple[str, ...]]
What = Literal["params", "gradients", "opt_state", "activations"]

BATCH_AXES = ("data", "fsdp")


def rules(plan: Plan, what: What) -> Table:
    """Dim -> mesh axes. `zero` 1 and 2 split over data x fsdp, 3 over fsdp alone (contract of the plan)."""
    table: Table = {"mlp": ("tensor",), "heads": ("tensor",), "kv_heads": ("tensor",), "vocab": ("tensor",)}
    if what == "activations":
        table |= {"batch": BATCH_AXES}
        if plan.sequence == "tensor":
            table |= {"seq_residual": ("tensor",)}
        return table
    if plan.zero >= {"opt_state": 1, "gradients": 2, "params": 3}[what]:
        table |= {"embed": ("fsdp",) if plan.zero == 3 else BATCH_AXES}
    return table


def partition(dims: tuple[str | None, ...], shape: tuple[int, ...], table: Table, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes over which each dim of one array is split.

    A dim that its axes do not divide gives up axes from the right. The state-splitting axes (those of `embed`) that found no place
    go to the largest other dim that they divide, except `layers`: slicing one layer out of a split stack would move all of it.
    """
    if len([d for d in dims if d != "layers"]) <= 1:  # vectors are whole: splitting a norm saves nothing and costs a gather a layer
        table = {dim: axes for dim, axes in table.items() if dim != "embed"}
    used: set[str] = set()
    out: list[tuple[str, ...]] = []
    for dim, size in zip(dims, shape, strict=True):
        axes = tuple(a for a in table.get(dim or "", ()) if a not in used and sizes[a] > 1)
        while axes and size % math.prod(sizes[a] for a in axes):
            axes = axes[:-1]
        used.update(axes)
        out.append(axes)
    homeless = tuple(a for a in table.get("embed", ()) if a not in used and sizes[a] > 1)
    if homeless and len(shape) > 1:
        def room(i: int) -> int:
            return shape[i] // math.prod(sizes[a] for a in out[i])
        parts = math.prod(sizes[a] for a in homeless)
        fitting = [i for i, dim in enumerate(dims) if dim != "layers" and room(i) % parts == 0]
        if fitting:
            best = max(fitting, key=room)
            out[best] = out[best] + homeless
    return tuple(out)


def shard_elements(dims: tuple[str | None, ...], shape: tuple[int, ...], table: Table, sizes: Mapping[str, int]) -> int:
    """Elements of one device's shard."""
    return math.prod(n // math.prod(sizes[a] for a in axes) for n, axes in zip(shape, partition(dims, shape, table, sizes), strict=True))

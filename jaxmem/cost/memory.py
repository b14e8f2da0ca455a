"""Bytes of a run's state on each device, in closed form: parameters, gradients, optimizer state, batch.

Split: by the tables of `rules.py`, the very ones that place the real arrays, so that a dim that does not divide is counted as
    it is placed: whole.
Moves: nothing.
Costs: AdamW in f32 keeps three numbers a parameter, and gradients a fourth while a step runs; activations are not state.
Use: a lower bound of what a plan needs, for any mesh, dtype and optimizer, in microseconds.
Avoid: as a verdict; only compiling sees activations, collective buffers and padding.

ZeRO: arXiv 1910.02054; FSDP: arXiv 2304.11277; Adafactor: arXiv 1804.04235. Everything is an estimate.
"""

import dataclasses
import math
from typing import Literal

from jaxmem.models.configs import parameter_shapes
from jaxmem.optim.configs import LEARNED_WEIGHTS, OptimizerConfig
from jaxmem.plan import Plan
from jaxmem.rules import BATCH_AXES, rules, shard_elements
from jaxmem.workload import Workload

ITEMSIZE = {"f32": 4, "int32": 4, "bf16": 2, "f16": 2, "int8": 1, "uint8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the state: whole shape, the names of its dims, bytes an element."""

    kind: Literal["params", "gradients", "opt_state"]
    path: str
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    itemsize: int

    def bytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * self.itemsize

    def device_bytes(self, plan: Plan) -> int:
        """Of one device's shard."""
        return shard_elements(self.dims, self.shape, rules(plan, self.kind), plan.sizes) * self.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a device. Gradients live during a step; the rest from step to step."""

    params: int
    gradients: int
    opt_state: int
    batch: int

    @property
    def persistent(self) -> int:
        """What is there between two steps (the step counter apart)."""
        return self.params + self.opt_state

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.opt_state + self.batch


def state_bytes(workload: Workload, plan: Plan) -> StateBytes:
    """Per device, under `plan`'s axis sizes, `zero` and dtypes."""
    of = {"params": 0, "gradients": 0, "opt_state": 0}
    for leaf in state_leaves(workload, plan):
        of[leaf.kind] += leaf.device_bytes(plan)
    row = sum(math.prod(shape) * ITEMSIZE[dtype] for shape, dtype in workload.rows.values())
    return StateBytes(**of, batch=row * workload.batch // math.prod(plan.sizes[axis] for axis in BATCH_AXES))


def state_leaves(workload: Workload, plan: Plan) -> list[Leaf]:
    """Every array of parameters, gradients (in the parameters' dtype) and optimizer state."""
    size = ITEMSIZE[plan.params]
    shapes = parameter_shapes(workload.model)
    leaves = [Leaf(kind=kind, path=path, shape=shape, dims=dims, itemsize=size)
              for kind in ("params", "gradients") for path, (shape, dims) in shapes.items()]
    for path, (shape, dims) in shapes.items():
        leaves += optimizer_leaves(workload.optimizer, path, shape, dims, size)
    return leaves + counters(workload.optimizer)


def optimizer_leaves(optimizer: OptimizerConfig, path: str, shape: tuple[int, ...], dims: tuple[str, ...],
                     itemsize: int) -> list[Leaf]:
    """What `optimizer` keeps of one parameter of `itemsize` bytes an element. First moments and momenta have the dtype `moments`,
    second moments the parameter's."""

    def like(name: str, size: int, without: int | None = None) -> Leaf:
        keep = [i for i in range(len(shape)) if i != without]
        return Leaf(kind="opt_state", path=f"{name}/{path}", shape=tuple(shape[i] for i in keep),
                    dims=tuple(dims[i] for i in keep), itemsize=size)

    def one_element(name: str) -> Leaf:
        return Leaf(kind="opt_state", path=f"{name}/{path}", shape=(1,), dims=(None,), itemsize=itemsize)

    o, moment = optimizer, ITEMSIZE[optimizer.moments]
    match o.name:
        case "sgd":
            return [] if o.momentum is None else [like("trace", moment)]
        case "lion":
            return [like("mu", moment)]
        case "muon" if is_orthogonalised(dims):
            return [like("mu", moment)]
        case "adamw" | "muon":
            return [like("mu", moment), like("nu", itemsize)]
        case "adafactor":
            ema = [] if o.momentum is None else [like("ema", moment)]
            order = sorted(range(len(shape)), key=lambda i: shape[i])  # stable, as for the arrays themselves
            if len(shape) < 2 or shape[order[-2]] < o.factored_above:
                return [one_element("v_row"), one_element("v_col"), like("v", itemsize), *ema]
            return [like("v_row", itemsize, order[-1]), like("v_col", itemsize, order[-2]), one_element("v"), *ema]
        case "learned":
            return learned_leaves(o, path, shape, dims)


def learned_leaves(optimizer: OptimizerConfig, path: str, shape: tuple[int, ...], dims: tuple[str, ...]) -> list[Leaf]:
    """Three momenta, a second moment, three of rows and of columns, all f32 but the momenta; a vector (in a layer) has three full second
    moments in place of rows and columns. Decays come first: a stack beside momenta, a dim of its own beside rows and columns."""

    def leaf(name: str, size: int, keep: list[int], *first: str | None) -> Leaf:
        return Leaf(kind="opt_state", path=f"{name}/{path}", shape=(*(3 for _ in first), *(shape[i] for i in keep)),
                    dims=(*first, *(dims[i] for i in keep)), itemsize=size)

    everything = list(range(len(shape)))
    own = sorted((i for i in everything if dims[i] != "layers"), key=lambda i: shape[i])
    leaves = [leaf("momenta", ITEMSIZE[optimizer.moments], everything, "layers"), leaf("second", 4, everything)]
    if optimizer.moments == "int8":
        leaves.append(leaf("scales", 4, everything[:-1] if own else everything, "layers"))
    if len(own) < 2:
        return [*leaves, leaf("rows", 4, everything, "layers")]
    without = {"rows": own[-1], "cols": own[-2]}
    return [*leaves, *(leaf(name, 4, [i for i in everything if i != dropped], None) for name, dropped in without.items())]


def is_orthogonalised(dims: tuple[str, ...]) -> bool:
    """Muon's own parameters: matrices of the blocks; tables, the matrix of the pixels, head and vectors go to its Adam part."""
    return len([d for d in dims if d != "layers"]) >= 2 and "embed" in dims and not {"vocab", "positions", "pixels"} & set(dims)


def counters(optimizer: OptimizerConfig) -> list[Leaf]:
    """Step counts (int32), the three coefficients of Muon's polynomial, a learned rule's weights; whole on every device."""
    of: dict[str, list[tuple[int, ...]]] = {"adamw": [()], "lion": [()], "sgd": [], "muon": [(), (), (3,)],
                                            "adafactor": [()] if optimizer.momentum is None else [(), ()],
                                            "learned": [(), *LEARNED_WEIGHTS[optimizer.rule].values()]}
    return [Leaf(kind="opt_state", path=f"count_{i}", shape=shape, dims=(None,) * len(shape), itemsize=4)
            for i, shape in enumerate(of[optimizer.name])]

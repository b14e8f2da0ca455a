"""The plan: how a workload is split over devices and what is kept, recomputed or moved to save memory.

A plan prints as one line and parses back: `fsdp=16,tensor=4,remat=save:query_proj+out_proj`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jaxmem import spec
from jaxmem.hardware import Topology
from jaxmem.kernel_limits import attention_problems
from jaxmem.models.configs import DecoderConfig, MlpConfig, blocks, mask
from jaxmem.spec import InputError
from jaxmem.workload import Workload

AXES = ("data", "fsdp", "tensor")  # mesh axes, outermost first
SAVED_NAMES = ("decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj",
               "mlp_gate", "mlp_up", "mlp_down")

Dtype = Literal["f32", "bf16", "f16"]


@dataclass(frozen=True, kw_only=True)
class Remat:
    """What the backward pass finds stored: `policy`, or by name what is kept on the device and what goes to the host."""

    policy: Literal["none", "dots", "attention", "block", "names"]
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Remat":
        """`none | dots | attention | block | save:a+b | offload:c | save:a+offload:b+c`; unknown names are refused."""
        if text in ("none", "dots", "attention", "block"):
            return cls(policy=text)  # type: ignore[arg-type]
        names: dict[str, list[str]] = {"save": [], "offload": []}
        mode = None
        for item in text.split("+"):
            prefix, colon, name = item.partition(":")
            if colon:
                if prefix not in names:
                    raise InputError(f"remat={text}: unknown kind {prefix!r}{spec.nearest(prefix, names)}")
                mode = prefix
            else:
                name = item
            if mode is None:
                raise InputError(f"remat={text}: expected none, dots, attention, block, save:NAME+NAME or offload:NAME+NAME"
                                 + spec.nearest(text, ("none", "dots", "attention", "block")))
            if name not in SAVED_NAMES:
                raise InputError(f"remat={text}: unknown name {name!r}{spec.nearest(name, SAVED_NAMES)}")
            if name in names["save"] + names["offload"]:
                raise InputError(f"remat={text}: {name} is named twice")
            names[mode].append(name)
        return cls(policy="names", save=tuple(names["save"]), offload=tuple(names["offload"]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes count JAX devices and their product is the device count.

    data, fsdp, tensor: mesh axis sizes. The batch is split over data and fsdp.
    zero: what is split: 0 nothing, 1 optimizer state, 2 and gradients (both over data x fsdp), 3 and parameters (all over fsdp).
    sequence: the residual stream between blocks is whole, or split along the sequence over `tensor`.
    accumulate: the batch is worked through in this many equal parts, gradients summed.
    remat: see `Remat`.
    loss_chunks: head and loss are worked through in this many parts of the sequence; logits of one part exist at a time.
    layers: one compiled loop over the layers, or every layer written out.
    params, compute: dtype of stored parameters, and of activations and matmuls.
    attention: which implementation; auto takes the target's fused kernel where shapes allow.
    step: one train program, or a gradient program and a donating update program.
    flags: named compiler flag set of the chip.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: Literal[0, 1, 2, 3] = 3
    sequence: Literal["whole", "tensor"] = "whole"
    accumulate: int = 1
    remat: str = "none"
    loss_chunks: int = 1
    layers: Literal["scan", "unroll"] = "scan"
    params: Dtype = "f32"
    compute: Dtype = "bf16"
    attention: Literal["auto", "xla", "splash", "triton", "cudnn"] = "auto"
    step: Literal["fused", "split"] = "fused"
    flags: str = "default"

    def __post_init__(self) -> None:
        for name in (*AXES, "accumulate", "loss_chunks"):
            if getattr(self, name) < 1:
                raise InputError(f"plan: {name}={getattr(self, name)}: at least 1")
        Remat.parse(self.remat)

    @classmethod
    def parse(cls, text: str, *, devices: int | None = None) -> "Plan":
        """One axis may be `*` and takes what the others leave of `devices`."""
        items = spec.split(text)
        free = [i for i, item in enumerate(items) if item.replace(" ", "").endswith("=*")]
        if free:
            names = [items[i].partition("=")[0].strip() for i in free]
            if len(free) > 1 or names[0] not in AXES:
                raise InputError(f"plan {text!r}: one of {', '.join(AXES)} may be *")
            if devices is None:
                raise InputError(f"plan {text!r}: {names[0]}=* needs a topology to take the rest of")
            rest = cls(**spec.fields_from(cls, [x for i, x in enumerate(items) if i not in free], "plan"))  # type: ignore[arg-type]
            if devices % rest.devices:
                raise InputError(f"plan {text!r}: {rest.product()} does not divide the {devices} devices, so {names[0]}=* has no size; "
                                 f"sizes that divide: {', '.join(map(str, divisors(devices)))}")
            items[free[0]] = f"{names[0]}={devices // rest.devices}"
        return cls(**spec.fields_from(cls, items, "plan"))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join(spec.differences(self, Plan()))

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    def product(self) -> str:
        return " * ".join(f"{a}({n})" for a, n in self.sizes.items() if n > 1) or "1 device"

    def problems(self, workload: Workload, topology: Topology) -> list[str]:
        """Every reason why this plan cannot run this workload there, as sentences with numbers and the nearest legal choices."""
        out = []
        m = workload.model
        if self.devices != topology.devices:
            close = sorted({self.devices // self.fsdp * f for f in divisors(topology.devices)
                            if self.devices // self.fsdp * f == topology.devices})
            hint = (f"; fsdp={topology.devices // (self.data * self.tensor)} would" if close else
                    f"; sizes that divide {topology.devices}: {', '.join(map(str, divisors(topology.devices)))}")
            out.append(f"{self.product()} uses {self.devices} devices and {topology} has {topology.devices}{hint}")
        if topology.slices > 1 and self.data % topology.slices:
            out.append(f"data({self.data}) is not a multiple of the {topology.slices} slices, and only data may cross slices; "
                       f"nearest: data={nearest_multiple(self.data, topology.slices)}")
        stack = blocks(m)
        if stack is None:
            out += self._without_blocks(workload)
        else:
            out += multiple("heads", stack.heads, "tensor", self.tensor)
            if self.tensor % stack.kv_heads:  # more shards than kv heads: each is repeated a whole number of times
                out += multiple("kv_heads", stack.kv_heads, "tensor", self.tensor)
        out += multiple("mlp", m.mlp, "tensor", self.tensor)
        if isinstance(m, DecoderConfig) and m.vocab % self.tensor and workload.seq % self.tensor:
            out.append(f"neither vocab({m.vocab}) nor seq({workload.seq}) is a multiple of tensor({self.tensor}), so the logits cannot "
                       f"be split; nearest: {choices('tensor', workload.seq, self.tensor)}")
        rows = self.data * self.fsdp
        if workload.batch % (rows * self.accumulate):
            unit = rows * self.accumulate
            other = f", or accumulate={nearest_divisor(workload.batch // rows, self.accumulate)}" if workload.batch % rows == 0 else ""
            out.append(f"batch({workload.batch}) is not a multiple of data({self.data}) * fsdp({self.fsdp}) * "
                       f"accumulate({self.accumulate}) = {unit}; nearest: batch={nearest_multiple(workload.batch, unit)}{other}")
        if self.sequence == "tensor":
            out += multiple("seq", workload.seq, "tensor", self.tensor)
        if not isinstance(m, DecoderConfig) and self.loss_chunks > 1:
            out.append(f"loss_chunks={self.loss_chunks}: {workload.model_name} has one loss an image, no sequence of them; loss_chunks=1")
        elif workload.seq % self.loss_chunks:
            out.append(f"seq({workload.seq}) is not a multiple of loss_chunks({self.loss_chunks}); "
                       f"nearest: loss_chunks={nearest_divisor(workload.seq, self.loss_chunks)}")
        kinds = {"splash": "tpu", "triton": "gpu", "cudnn": "gpu"}
        if (want := kinds.get(self.attention)) and topology.chip.kind != want:
            out.append(f"attention={self.attention} is a {want.upper()} kernel and {topology} is a {topology.chip.kind.upper()}; "
                       "attention=auto takes the target's own")
        if self.attention != "auto" and stack is not None:
            out += attention_problems(self.attention, seq=workload.seq, head_dim=stack.head_dim, heads=stack.heads,
                                      kv_heads=stack.kv_heads, window=stack.window, softcap=stack.attention_softcap, mask=mask(m))
        axes = {0: (), 1: ("data", "fsdp"), 2: ("data", "fsdp"), 3: ("fsdp",)}[self.zero]
        parts = math.prod(self.sizes[a] for a in axes)
        dim, size = ("mlp", m.mlp) if isinstance(m, MlpConfig) else ("embed", m.embed)
        if size % parts:  # whatever it does not take would lie whole on every device
            over = " * ".join(f"{a}({self.sizes[a]})" for a in axes)
            out.append(f"zero={self.zero} splits {dim}({size}) over {over} = {parts}, which does not divide it; "
                       f"nearest: {choices(' * '.join(axes), size, parts)}")
        return out + workload.problems()

    def _without_blocks(self, workload: Workload) -> list[str]:
        """What a plan cannot ask of a model without transformer blocks."""
        default = Plan()
        return [f"{name}={getattr(self, name)}: {workload.model_name} has no transformer blocks; {name}={getattr(default, name)}"
                for name in ("remat", "layers", "attention") if getattr(self, name) != getattr(default, name)]


def multiple(dim: str, size: int, axis: str, parts: int) -> list[str]:
    if size % parts == 0:
        return []
    return [f"{dim}({size}) is not a multiple of {axis}({parts}); nearest: {choices(axis, size, parts)}"]


def choices(axis: str, size: int, wanted: int) -> str:
    """The legal sizes just below and above `wanted`: `tensor=4 or tensor=8`."""
    legal = divisors(size)
    near = [max((n for n in legal if n < wanted), default=None), min((n for n in legal if n > wanted), default=None)]
    return " or ".join(f"{axis}={n}" for n in near if n)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest_divisor(size: int, wanted: int) -> int:
    return min(divisors(max(size, 1)), key=lambda d: (abs(d - wanted), d))


def nearest_multiple(value: int, unit: int) -> int:
    return max(unit, round(value / unit) * unit)

"""How long one step of a compiled program takes, and what limits it: the frame that both kinds of chip share.

The optimized HLO is a schedule. It is replayed on streams: one computes, and one for each thing that moves beside it (links of a
mesh axis, the host's link, copies in HBM). An operation that starts a transfer lets the compute stream run on; the one that is
done with it waits until the transfer has ended. What was waited for is exposed, the rest is hidden. A loop costs its body times
its trip count, a conditional its slowest branch. The two-stream form is MAD-Max's (Hsia et al., arXiv:2310.02784).

What an instruction costs is the chip's matter: `speed_tpu.py` (the compiler's cycles) and `speed_gpu.py` (a roofline). Every
number is a prediction made from a compile.
"""
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxmem.hardware import Topology
from jaxmem.hlo.parse import Computation, Instruction, Module, trip_count

Limit = Literal["math", "memory", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes that one device sends over `stream` by one execution of an instruction.

    `stream` is a mesh axis, "host" (its link) or "memory" (copies inside HBM and to on-chip memory). Transfers of one stream and
    `lane` follow one another; the two directions of a link are two lanes. `opcode` is what `traffic` shows: all-gather,
    reduce-scatter, ..., device-to-host.
    """
    stream: str
    seconds: float
    bytes: float = 0.0
    opcode: str = ""
    lane: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """One execution of one instruction on one device.

    `seconds` are of the compute stream, limited by the matrix units ("math") or HBM ("memory"). `mode` says what the compute
    stream does about `transfers`: it "waits" for them here, or "starts" them under the name `key` (default: the instruction's)
    for a later instruction whose `awaits` has that name. `unknown` says what keeps the cost from being known; the prediction is
    then None.
    """
    seconds: float = 0.0
    limit: Limit = "none"
    flops: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    mode: Literal["waits", "starts"] = "waits"
    key: str | None = None
    awaits: tuple[str, ...] = ()
    unknown: str | None = None


FREE = Cost()
CostOf = Callable[[Instruction, Computation], Cost]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one mesh axis (or the host's link) carries in one step: `bytes` are those that one device sends."""
    axis: str
    collective: str
    count: float
    bytes: float
    exposed_s: float
    hidden_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """One step on one device of a topology.

    `seconds_by_limit`: `math`, `memory`, `memory_hidden`, `<axis>_exposed`, `<axis>_hidden`, `host_exposed`, `host_hidden`,
    `overhead`, `bubble`; all but the hidden ones add up to `step_s`. None: unknown, and `warnings` say why. `flops` are what the
    device computes (2 a multiply and add), recomputation included.
    """
    step_s: float | None
    seconds_by_limit: Mapping[str, float] | None
    flops: float | None
    traffic: tuple[Traffic, ...] = ()
    warnings: tuple[str, ...] = ()
    source: Literal["estimate", "compile", "measure"] = "compile"


def predict(module: Module, topology: Topology, mesh: Mapping[str, Any] | None, *, model_flops: float | None = None) -> Speed:
    """Predicted step of `module`, compiled for `topology`.

    `mesh` is `result.json`'s: `{"axes": {"fsdp": 64}, "places": [[x, y, z, core, slice, process], ...], "ids": [...]}`.
    `model_flops` of the whole step (all devices) lets a prediction of more than 100% MFU be refused: None and a warning.
    """
    kind = topology.chip.kind
    if kind == "tpu":
        from jaxmem.hlo import speed_tpu
        speed = speed_tpu.predict(module, topology, mesh)
    elif kind == "gpu":
        from jaxmem.hlo import speed_gpu
        speed = speed_gpu.predict(module, topology, mesh)
    else:
        return Speed(step_s=None, seconds_by_limit=None, flops=None,
                     warnings=(f"no peak is known for {topology}: its speed is unknown",))
    return refuse_impossible(speed, topology, model_flops)


def refuse_impossible(speed: Speed, topology: Topology, model_flops: float | None, dtype: str = "bf16") -> Speed:
    """`speed`, or None in its place where it would need more than the peak of all devices."""
    peak = topology.chip.peak_flops.get(dtype)
    if speed.step_s is None or peak is None:
        return speed
    needed = (model_flops or 0.0) / topology.devices / peak
    if speed.step_s > 0 and needed <= speed.step_s:
        return speed
    warning = (f"predicted {speed.step_s:.4g} s a step, but the model's FLOPs alone take {needed:.4g} s at the {dtype} peak of "
               f"{topology}: more than 100% MFU is impossible, so the prediction is withheld")
    return dataclasses.replace(speed, step_s=None, seconds_by_limit=None, warnings=(*speed.warnings, warning))


def _sums() -> dict[tuple[str, str], float]:
    return defaultdict(float)


@dataclasses.dataclass(kw_only=True)
class Replay:
    """Sums of a replayed computation, for one execution of it; those of transfers are by (stream, opcode)."""
    seconds: float = 0.0
    flops: float = 0.0
    by_limit: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    exposed: dict[tuple[str, str], float] = dataclasses.field(default_factory=_sums)
    hidden: dict[tuple[str, str], float] = dataclasses.field(default_factory=_sums)
    counts: dict[tuple[str, str], float] = dataclasses.field(default_factory=_sums)
    sent: dict[tuple[str, str], float] = dataclasses.field(default_factory=_sums)
    unknown: dict[str, None] = dataclasses.field(default_factory=dict)  # an ordered set

    def add(self, other: "Replay", times: float) -> None:
        self.seconds += times * other.seconds
        self.flops += times * other.flops
        for mine, theirs in ((self.by_limit, other.by_limit), (self.exposed, other.exposed), (self.hidden, other.hidden),
                             (self.counts, other.counts), (self.sent, other.sent)):
            for key, value in theirs.items():  # type: ignore[attr-defined]
                mine[key] += times * value     # type: ignore[index]
        self.unknown.update(other.unknown)


def replay(module: Module, cost_of: CostOf) -> Replay:
    """The whole program once, in schedule order. Instructions inside fusions belong to the fusion's cost."""
    return _replay(module, module.entry, cost_of, {})


def _replay(module: Module, computation: Computation, cost_of: CostOf, done: dict[str, Replay]) -> Replay:
    if computation.name in done:
        return done[computation.name]
    total = Replay()
    free_at: dict[tuple[str, str], float] = defaultdict(float)  # stream and lane -> when its last transfer ends
    running: dict[str, list[tuple[Transfer, float]]] = {}       # key -> its transfers, each with its end
    for instruction in computation.instructions:
        inner = _called(module, instruction)
        if inner:
            branches = [_replay(module, called, cost_of, done) for called in inner]
            slowest = max(branches, key=lambda branch: branch.seconds)
            times: float | None = trip_count(module, instruction) if instruction.opcode == "while" else 1
            if times is None:
                total.unknown[f"loop {instruction.name}: its trip count is unknown"] = None
                times = 1
            total.add(slowest, times)
            continue
        cost = cost_of(instruction, computation)
        for name in cost.awaits:
            _wait(total, running.pop(name, []))
        total.seconds += cost.seconds
        total.by_limit[cost.limit] += cost.seconds
        total.flops += cost.flops
        if cost.unknown:
            total.unknown[cost.unknown] = None
        started = []
        for transfer in cost.transfers:
            lane = transfer.stream, transfer.lane
            free_at[lane] = max(total.seconds, free_at[lane]) + transfer.seconds
            started.append((transfer, free_at[lane]))
            total.counts[transfer.stream, transfer.opcode] += 1
            total.sent[transfer.stream, transfer.opcode] += transfer.bytes
        if cost.mode == "starts":
            running[cost.key or instruction.name] = started
        else:
            _wait(total, started)
    for started in running.values():  # started and never awaited in this computation: over by its end
        _wait(total, started)
    done[computation.name] = total
    return total


def _wait(total: Replay, started: list[tuple[Transfer, float]]) -> None:
    for transfer, end in sorted(started, key=lambda pair: pair[1]):
        exposed = max(0.0, end - total.seconds)
        total.seconds += exposed
        key = transfer.stream, transfer.opcode
        total.exposed[key] += exposed
        total.hidden[key] += max(0.0, transfer.seconds - exposed)


def _called(module: Module, instruction: Instruction) -> list[Computation]:
    """Computations that run as part of the schedule: a loop's body, the branches of a conditional, a call."""
    roles = {"while": ("body",), "call": ("to_apply", "calls", "called_computations"),
             "conditional": ("true_computation", "false_computation", "branch_computations")}.get(instruction.opcode, ())
    return [module.computations[name] for role in roles for name in instruction.called.get(role, ())]


def speed_of(total: Replay, *, overhead_s: float = 0.0, warnings: tuple[str, ...] = ()) -> Speed:
    """`Replay` of the entry computation -> `Speed`; `overhead_s` is what a step takes besides its schedule."""
    limits: dict[str, float] = {"math": total.by_limit.get("math", 0.0), "memory": total.by_limit.get("memory", 0.0)}
    for stream in dict.fromkeys(stream for stream, _ in total.counts):
        exposed, hidden = (sum(seconds for (name, _), seconds in sums.items() if name == stream)
                           for sums in (total.exposed, total.hidden))
        if stream == "memory":
            limits["memory"] += exposed
        else:
            limits[f"{stream}_exposed"] = exposed
        limits[f"{stream}_hidden"] = hidden
    limits["overhead"] = overhead_s + total.by_limit.get("none", 0.0)
    limits["bubble"] = 0.0
    traffic = tuple(Traffic(axis=stream, collective=opcode, count=count, bytes=total.sent[stream, opcode],
                            exposed_s=total.exposed[stream, opcode], hidden_s=total.hidden[stream, opcode])
                    for (stream, opcode), count in total.counts.items() if stream != "memory")
    if total.unknown:
        return Speed(step_s=None, seconds_by_limit=None, flops=None, traffic=traffic, warnings=(*warnings, *total.unknown))
    return Speed(step_s=total.seconds + overhead_s, seconds_by_limit=limits, flops=total.flops, traffic=traffic,
                 warnings=warnings)

"""What each instruction of a TPU program costs.

Compute: the compiler's own estimate in cycles over the clock; attention kernels from their shapes; what has neither, a roofline.
Collectives: bytes over the links of the torus that the group spans (`torus.py`). Copies between HBM and on-chip memory run beside
the computation at HBM's bandwidth, copies to and from the host on the host's link.
"""
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxmem.cost.calibration import TPU, Calibration
from jaxmem.cost.collectives import Route, seconds
from jaxmem.cost.kernels import KernelCost, kernel_time
from jaxmem.hardware import Topology
from jaxmem.hlo import torus
from jaxmem.hlo.collectives import OPCODES, Collective, axes_of, collectives_of
from jaxmem.hlo.kernel_calls import attention_work, elementwise_work
from jaxmem.hlo.parse import HOST, Computation, Instruction, Module, Shape
from jaxmem.hlo.speed import FREE, Cost, Limit, Speed, Transfer, replay, speed_of
from jaxmem.hlo.work import NO_WORK, hbm_bytes, instruction_flops

UNKNOWN_CYCLES = 2**63 - 1  # what the compiler writes when it has no estimate
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_ASYNC_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


def predict(module: Module, topology: Topology, mesh: Mapping[str, Any] | None, constants: Calibration = TPU) -> Speed:
    """See `speed.predict`."""
    return Reader(module, topology, mesh).speed(constants)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """Work of the compute stream: `cycles` by the compiler's estimate, None without one."""
    flops: float
    hbm_bytes: float
    cycles: int | None
    kernel: KernelCost | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One transfer before it has seconds: over the torus (`route`, or `pairs` of a permute) or over another stream at `rate`."""
    stream: str
    opcode: str
    sent_bytes: float
    whole_bytes: float = 0.0
    lane: str = ""
    rate: float | None = None
    route: Route | None = None
    pairs: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What the text says of one instruction, without any constant: `Cost` before it has seconds."""
    compute: Compute | None = None
    links: tuple[Link, ...] = ()
    starts: str | None = None
    awaits: tuple[str, ...] = ()
    unknown: str | None = None


NOTHING = Reading()


class Reader:
    """Reads the instructions of one program once; `speed` then takes any constants."""

    def __init__(self, module: Module, topology: Topology, mesh: Mapping[str, Any] | None):
        self.module, self.topology, self.chip = module, topology, topology.chip
        self.axes: dict[str, int] = dict((mesh or {}).get("axes") or {})
        self.places: list[list[int]] | None = (mesh or {}).get("places")
        self.readings: dict[int, Reading] = {}

    def speed(self, constants: Calibration) -> Speed:
        def cost(instruction: Instruction, computation: Computation) -> Cost:
            found = self.readings.get(id(instruction))
            if found is None:
                found = self.readings[id(instruction)] = self.read(instruction, computation)
            return FREE if found is NOTHING else self.cost(found, constants)
        return speed_of(replay(self.module, cost))

    # --- seconds of what was read
    def cost(self, reading: Reading, constants: Calibration) -> Cost:
        time, limit, flops = self.compute_seconds(reading.compute, constants) if reading.compute else (0.0, "none", 0.0)
        transfers = tuple(self.transfer(link, constants) for link in reading.links)
        return Cost(seconds=time, limit=limit, flops=flops, transfers=transfers, mode="starts" if reading.starts else "waits",
                    key=reading.starts, awaits=reading.awaits, unknown=reading.unknown)

    def compute_seconds(self, compute: Compute, constants: Calibration) -> tuple[float, Limit, float]:
        math_s = compute.flops / self.chip.peak_flops["bf16"]
        memory_s = compute.hbm_bytes / (self.chip.hbm_bytes_per_s or float("inf"))
        if compute.kernel:
            # Softmax waits for the scores of its block and the next matmul for the softmax: matrix and vector unit take turns.
            # The exponential unit works beside the vector unit, and HBM beside all.
            unit = kernel_time(compute.kernel, self.chip)
            turns = (unit.math_s or 0.0) + max(unit.vector_s or 0.0, unit.exponential_s or 0.0)
            time = max(turns, unit.memory_s or 0.0)
        elif compute.cycles is not None and self.chip.clock_hz:
            bound = max(math_s, memory_s)
            time = bound + constants.estimate_share * max(0.0, compute.cycles / self.chip.clock_hz - bound)
        else:
            time = memory_s
        return max(time, math_s), "math" if compute.flops and math_s >= memory_s else "memory", compute.flops

    def transfer(self, link: Link, constants: Calibration) -> Transfer:
        time, lane = 0.0, link.lane
        if link.rate:
            time = link.sent_bytes / link.rate
        elif link.pairs and self.places:
            time, lane = torus.permute_seconds(link.whole_bytes, link.pairs, self.places, self.topology,
                                               constants.link_efficiency)
        elif link.route:
            route = torus.at_efficiency(link.route, constants.link_efficiency)
            time = seconds(OPCODES[link.opcode], link.whole_bytes, route) or 0.0  # type: ignore[arg-type]
        return Transfer(stream=link.stream, lane=lane, seconds=time, bytes=link.sent_bytes, opcode=link.opcode)

    # --- reading
    def read(self, instruction: Instruction, computation: Computation) -> Reading:
        opcode = instruction.opcode
        if found := collectives_of(self.module, instruction):
            return self.collective(instruction, computation, found)
        if opcode in NO_WORK:
            return NOTHING
        operands = [computation.by_name[name].shape for name in instruction.operands]
        if opcode in _ASYNC_COPIES:
            return Reading(links=(self.copy(*_started(instruction, operands)),), starts=instruction.name)
        if opcode.endswith("-done") and instruction.operands:
            return Reading(awaits=(instruction.operands[0],))
        if opcode == "custom-call":
            return self.custom_call(instruction, computation)
        if any(leaf.memory_space == HOST for shape in (*operands, instruction.shape) for _, leaf in shape.leaves()):
            moved = min((shape for shape in (*operands, instruction.shape) if shape.bytes), key=lambda shape: shape.bytes)
            return Reading(links=(self.copy(operands[0], instruction.shape, moved),))
        return Reading(compute=self.compute(instruction, computation))

    def compute(self, instruction: Instruction, computation: Computation) -> Compute:
        found = _CYCLES.search(instruction.raw_attributes)
        cycles = int(found.group(1)) if found else UNKNOWN_CYCLES
        return Compute(flops=instruction_flops(self.module, computation, instruction),
                       hbm_bytes=hbm_bytes(self.module, computation, instruction),
                       cycles=None if cycles >= UNKNOWN_CYCLES else cycles)

    def custom_call(self, instruction: Instruction, computation: Computation) -> Reading:
        if instruction.custom_call_target != "tpu_custom_call":
            return NOTHING  # the compiler's markers: AllocateBuffer, ConcatBitcast, Sharding
        work = attention_work(computation, instruction) or elementwise_work(computation, instruction)
        if work is None:
            return Reading(unknown=f"the kernel {instruction.name} is opaque to the compiler, and none whose cost is known")
        return Reading(compute=Compute(flops=work.flops, hbm_bytes=work.hbm_bytes, cycles=None, kernel=work))

    def copy(self, source: Shape, target: Shape, moved: Shape) -> Link:
        if any(leaf.memory_space == HOST for shape in (source, target) for _, leaf in shape.leaves()):
            outward = any(leaf.memory_space == HOST for _, leaf in target.leaves())
            name = "device-to-host" if outward else "host-to-device"
            return Link(stream="host", lane=name, opcode=name, sent_bytes=moved.bytes, rate=self.chip.host_link_bytes_per_s)
        return Link(stream="memory", opcode="copy", sent_bytes=moved.tiled_bytes, rate=self.chip.hbm_bytes_per_s)

    def collective(self, instruction: Instruction, computation: Computation, found: list[Collective]) -> Reading:
        """A chain's fusion computes beside the collective that it goes on with; only its first one sends, its last one waits."""
        compute = self.compute(instruction, computation) if _CYCLES.search(instruction.raw_attributes) else None
        sending = [one for one in found if one.role in ("whole", "start")]
        awaits = tuple(dict.fromkeys(one.key for one in found if one.role == "done"))
        unread = next((one.instruction.name for one in sending if one.groups is None), None)
        unknown = f"the device groups of {unread} are in a form that is not understood" if unread else None
        if self.places is None and any(one.size > 1 for one in sending):
            unknown = f"where the devices of {sending[0].instruction.name} sit on the torus is unknown"
        return Reading(compute=compute, links=tuple(self.link(one) for one in sending), awaits=awaits, unknown=unknown,
                       starts=next((one.key for one in sending if one.role == "start"), None))

    def link(self, one: Collective) -> Link:
        groups = one.groups or ()
        axis = axes_of(groups, self.axes) if groups else "devices"
        permute = one.opcode == "collective-permute"
        known = one.size > 1 and self.places is not None
        route = torus.route_of(groups[0], self.places, self.topology) if known and not permute and self.places else None
        return Link(stream=axis, opcode=one.opcode, sent_bytes=one.sent_bytes, whole_bytes=one.whole_bytes, route=route,
                    pairs=groups if permute and known else ())


def _started(instruction: Instruction, operands: list[Shape]) -> tuple[Shape, Shape, Shape]:
    """(source, target, what is moved) of an asynchronous copy. Results: `copy-start` (target, source, ...), the others (operands,
    target, ...); an update moves its second operand into the first."""
    elements = instruction.shape.elements or (instruction.shape,)
    if instruction.opcode == "copy-start":
        return operands[0], elements[0], elements[0]
    target = elements[min(1, len(elements) - 1)]
    return (operands[1], target, operands[1]) if instruction.opcode == "dynamic-update-slice-start" else (operands[0], target, target)

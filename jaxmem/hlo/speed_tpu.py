"""What each instruction of a TPU program costs.

Compute: the compiler's own estimate in cycles over the clock; attention kernels from their shapes; what has neither, a roofline.
Collectives: bytes over the links of the torus that the group spans (`torus.py`). Copies between HBM and on-chip memory run beside
the computation at HBM's bandwidth, copies to and from the host on the host's link.
"""
import re
from collections.abc import Mapping
from typing import Any

from jaxmem.cost.calibration import TPU, Calibration
from jaxmem.cost.collectives import seconds
from jaxmem.cost.kernels import kernel_time
from jaxmem.hardware import Topology
from jaxmem.hlo import torus
from jaxmem.hlo.collectives import OPCODES, Collective, axes_of, collectives_of
from jaxmem.hlo.kernel_calls import attention_work
from jaxmem.hlo.parse import HOST, Computation, Instruction, Module, Shape
from jaxmem.hlo.speed import FREE, Cost, Speed, Transfer, replay, speed_of
from jaxmem.hlo.work import NO_WORK, hbm_bytes, instruction_flops

UNKNOWN_CYCLES = 2**63 - 1
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


def predict(module: Module, topology: Topology, mesh: Mapping[str, Any] | None, constants: Calibration = TPU) -> Speed:
    """See `speed.predict`."""
    model = _Model(module, topology, mesh or {}, constants)
    return speed_of(replay(module, model.cost))


class _Model:
    """Costs of one program's instructions; holds what they have in common."""

    def __init__(self, module: Module, topology: Topology, mesh: Mapping[str, Any], constants: Calibration):
        self.module, self.topology, self.chip, self.constants = module, topology, topology.chip, constants
        self.axes: dict[str, int] = dict(mesh.get("axes") or {})
        self.places: list[list[int]] | None = mesh.get("places")
        self.peak = self.chip.peak_flops["bf16"]

    def cost(self, instruction: Instruction, computation: Computation) -> Cost:
        opcode = instruction.opcode
        if opcode in NO_WORK:
            return FREE
        if found := collectives_of(self.module, instruction):
            return self.collective(instruction, computation, found)
        if opcode in _COPIES:
            return Cost(transfers=(self.copy(instruction, computation),), mode="starts")
        if opcode.endswith("-done") and instruction.operands:
            return Cost(awaits=(instruction.operands[0],))
        if opcode == "custom-call":
            return self.custom_call(instruction, computation)
        if host := self.host_transfer(instruction, computation):
            return Cost(transfers=(host,))
        return self.compute(instruction, computation)

    def compute(self, instruction: Instruction, computation: Computation) -> Cost:
        flops = instruction_flops(self.module, computation, instruction)
        math_s = flops / self.peak
        memory_s = hbm_bytes(self.module, computation, instruction) / (self.chip.hbm_bytes_per_s or float("inf"))
        found = _CYCLES.search(instruction.raw_attributes)
        if found and int(found.group(1)) < UNKNOWN_CYCLES and self.chip.clock_hz:
            time = max(math_s, int(found.group(1)) / self.chip.clock_hz * self.constants.cycles)
        else:
            time = max(math_s, memory_s)
        return Cost(seconds=time, limit="math" if flops and math_s >= memory_s else "memory", flops=flops)

    def custom_call(self, instruction: Instruction, computation: Computation) -> Cost:
        if instruction.custom_call_target != "tpu_custom_call":
            return FREE  # markers of the compiler: AllocateBuffer, ConcatBitcast, Sharding
        work = attention_work(computation, instruction)
        if work is None:
            return Cost(unknown=f"the kernel {instruction.name} is opaque to the compiler and none of those whose cost is known")
        time = kernel_time(work, self.chip, efficiency=self.constants.kernel_efficiency)
        limit = "memory" if (time.memory_s or 0.0) > max(time.math_s or 0.0, time.exponential_s or 0.0) else "math"
        return Cost(seconds=time.seconds or 0.0, limit=limit, flops=work.flops)  # type: ignore[arg-type]

    # --- transfers
    def copy(self, instruction: Instruction, computation: Computation) -> Transfer:
        source = computation.by_name[instruction.operands[0]].shape
        target = instruction.shape.elements[0] if instruction.shape.elements else instruction.shape
        if instruction.opcode == "slice-start" and instruction.shape.elements:
            target = instruction.shape.elements[1]
        return self.moved(source, target, target)

    def moved(self, source: Shape, target: Shape, what: Shape) -> Transfer:
        spaces = {shape.memory_space for _, shape in source.leaves()}, {shape.memory_space for _, shape in target.leaves()}
        if HOST in spaces[0] | spaces[1]:
            outward = HOST in spaces[1]
            name, rate = "device-to-host" if outward else "host-to-device", self.chip.host_link_bytes_per_s or float("inf")
            return Transfer(stream="host", lane=name, opcode=name, bytes=what.bytes, seconds=what.bytes / rate)
        rate = self.chip.hbm_bytes_per_s or float("inf")
        return Transfer(stream="memory", opcode="copy", bytes=what.tiled_bytes, seconds=what.tiled_bytes / rate)

    def host_transfer(self, instruction: Instruction, computation: Computation) -> Transfer | None:
        """A copy or a slice to or from the host that is not asynchronous."""
        operands = [computation.by_name[name].shape for name in instruction.operands]
        inward = any(leaf.memory_space == HOST for shape in operands for _, leaf in shape.leaves())
        outward = any(leaf.memory_space == HOST for _, leaf in instruction.shape.leaves())
        if not (inward or outward):
            return None
        what = min((shape for shape in (*operands, instruction.shape) if shape.bytes), key=lambda shape: shape.bytes)
        return self.moved(operands[0], instruction.shape, what)

    def collective(self, instruction: Instruction, computation: Computation, found: list[Collective]) -> Cost:
        beside = self.compute(instruction, computation) if _CYCLES.search(instruction.raw_attributes) else FREE
        started = [one for one in found if one.role in ("whole", "start")]
        awaits = tuple(dict.fromkeys(one.key for one in found if one.role == "done"))
        transfers = tuple(self.transfer(one) for one in started)
        unread = next((one.instruction.name for one in started if one.groups is None), None)
        if awaits or not started:
            return Cost(seconds=beside.seconds, limit=beside.limit, flops=beside.flops, awaits=awaits)
        return Cost(seconds=beside.seconds, limit=beside.limit, flops=beside.flops, transfers=transfers, key=started[0].key,
                    mode="starts" if started[0].role == "start" else "waits",
                    unknown=f"the device groups of {unread} are in a form that is not understood" if unread else None)

    def transfer(self, one: Collective) -> Transfer:
        groups, efficiency = one.groups or (), self.constants.link_efficiency
        axis = axes_of(groups, self.axes) if groups else "devices"
        if one.size < 2 or self.places is None:
            return Transfer(stream=axis, seconds=0.0, bytes=one.sent_bytes, opcode=one.opcode)
        if one.opcode == "collective-permute":
            time, lane = torus.permute_seconds(one.whole_bytes, groups, self.places, self.topology, efficiency)
            return Transfer(stream=axis, lane=lane, seconds=time, bytes=one.sent_bytes, opcode=one.opcode)
        route = torus.route_of(groups[0], self.places, self.topology, efficiency)
        time = seconds(OPCODES[one.opcode], one.whole_bytes, route) or 0.0  # type: ignore[arg-type]
        return Transfer(stream=axis, seconds=time, bytes=one.sent_bytes, opcode=one.opcode)

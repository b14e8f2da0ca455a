"""Seconds of a GPU program: a roofline for every kernel of the optimized HLO, and collectives over NVLink and network beside it.

Split: nothing; the text is one device's program.
Moves: what the kernels touch in memory (`kernel_work.py`) and the collectives between devices (`collectives.py`).
Costs: a kernel takes its matmuls at the rate that the GPU sustains, quantised to tiles and to waves of tiles over the SMs, or its
    bytes, whichever is longer, and a launch. A collective takes the slowest medium that its ring passes: NVLink inside a domain,
    one NIC a GPU outside. While it runs beside kernels it holds some SMs, which the kernels lack.
Use: a prediction without the machine. Avoid: for programs of many small kernels, whose launches are a guess.

XLA for GPU leaves no cost estimate in its text and, without a device, tunes no GEMM. The rates are published measurements or named
estimates (`FOUND` says whose, `RANGES` how far they lie apart); nothing is fitted.
Roofline: Williams et al., doi:10.1145/1498765.1498785.
"""
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxmem.chips import Chip
from jaxmem.cost import collectives as closed_form
from jaxmem.cost import kernels
from jaxmem.hardware import Topology
from jaxmem.hlo.collectives import Collective, axes_of, collectives_of
from jaxmem.hlo.kernel_work import AttentionCall, AttentionKind, Matmul, Work, WorkReader
from jaxmem.hlo.parse import Computation, Instruction, Module
from jaxmem.hlo.speed import FREE, Cost, Limit, Replay, Speed, Transfer, replay, speed_of

End = Literal["typical", "pessimistic", "optimistic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Achieved:
    """What hardware does of what its datasheet says, each a part in (0, 1] unless the name has a unit.

    math: of the matrix peak, by long GEMMs that leave no SM idle, under the power limit. memory: of HBM bandwidth, by copies and
    element-wise kernels. launch_s: from the end of one kernel to the start of the next. nvlink, network, host: of a link's rate,
    by payload. collective_sms: SMs that a running collective holds. The attention entries: of the full rate of the slowest unit
    (matrix, exponential or vector), by a fused kernel in one direction.
    """

    math: float = 0.75
    memory: float = 0.92
    launch_s: float = 2e-6
    nvlink: float = 0.82
    network: float = 0.88
    collective_sms: float = 16
    host: float = 0.85
    triton_forward: float = 0.35
    triton_backward: float = 0.18
    cudnn_forward: float = 0.52
    cudnn_backward: float = 0.45


RANGES: dict[str, tuple[float, float]] = {  # pessimistic, optimistic
    "math": (0.65, 0.82), "memory": (0.85, 0.94), "launch_s": (5e-6, 1e-6), "nvlink": (0.75, 0.85), "network": (0.50, 0.95),
    "collective_sms": (24, 8), "host": (0.75, 0.90), "triton_forward": (0.25, 0.50), "triton_backward": (0.10, 0.35),
    "cudnn_forward": (0.45, 0.65), "cudnn_backward": (0.35, 0.55),
}
FOUND: dict[str, str] = {
    "math": "H100 and H200 SXM: about 720 of 989 TFLOP/s bf16 over GEMMs of language models, whose waves fill the SMs to 97% "
            "(SemiAnalysis, MI300X vs H100 vs H200, training, 2024-12); 794.5 at the best shape (stas00/ml-engineering, maximum "
            "achievable matmul FLOPS, 2025). Other chips: see MATH",
    "memory": "H100: the sum of two vectors of 4 GiB in 4.1 ms, 94% of 3.35 TB/s (jax-ml.github.io/scaling-book/gpus)",
    "launch_s": "a small addition takes 1.5 us in JAX on an H100 (jax-ml.github.io/scaling-book/gpus)",
    "nvlink": "8 H100: large messages at about 370 of 450 GB/s, an all-gather of 512 MiB at 310 (jax-ml.github.io/scaling-book/gpus); "
              "peer copies at 380 (NVIDIA/nccl issue 1264, 2024)",
    "network": "46 to 48 of 50 GB/s a NIC as NVIDIA expects (NVIDIA/nccl-tests issue 290, 2025); 2 GB gathered over 32 hosts at 200 of "
               "400 GB/s a host (NVIDIA/nccl issue 1218, 2024)",
    "collective_sms": "16 channels over eight 400 Gb/s NICs (NVIDIA/nccl issue 1218); DeepSeek-V3 keeps 20 (arXiv:2412.19437)",
    "host": "estimate: what PCIe's headers leave",
    "triton_forward": "FlashAttention-2, the same algorithm without Hopper's instructions, uses 35% of an H100 "
                      "(arXiv:2407.08608)",
    "triton_backward": "estimate: its tiles of 32 x 32 do 64 FLOP for a byte from L2, which at some 5.5 TB/s feeds a third of the "
                       "matrix units",
    "cudnn_forward": "estimate after the curves of arXiv:2407.08608 (causal, head size 128, an H100)",
    "cudnn_backward": "estimate after the curves of arXiv:2407.08608",
}
# `Achieved.math` of other GPUs. At the best shapes 0.87 (A100 SXM), 0.81 (A100 PCIe), 0.78 (B200), 0.73 (GB200) and 0.79 (B300)
# of the peak (stas00/ml-engineering, 2025); at shapes of language models 0.64 to 0.69 on B200 (arXiv:2604.23466), waves included.
# Where only the best is known 0.04 is taken off, as H100's two figures differ. An unlisted chip has the default, an estimate.
MATH: dict[str, float] = {"a100-40gb": 0.83, "a100-80gb": 0.83, "a100-80gb-pcie": 0.77, "b200": 0.70, "gb200": 0.69, "b300": 0.75}

# Tiles [m, n] that GEMM libraries choose from, and the part of an SM's rate that they reach: smaller ones load more for a FLOP.
TILES: tuple[tuple[int, int, float], ...] = (
    (128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 256, 0.92), (256, 64, 0.92), (128, 64, 0.75), (64, 128, 0.75),
    (64, 64, 0.55))
SPLITS = (1, 2, 4, 8, 16, 32)  # parts of k worked on at once and summed afterwards, when there are few tiles
PROLOGUE_K = 128               # loads before a tile's first product and stores after its last, as so much more of k


def achieved_by(chip: Chip, end: End = "typical") -> Achieved:
    """What `chip` achieves, or the end of every range at once. A MIG slice achieves what its GPU does."""
    typical = Achieved(math=MATH.get(chip.parent or chip.name, Achieved.math))
    if end == "typical":
        return typical
    ends = {name: pair[end == "optimistic"] for name, pair in RANGES.items()}
    ends["math"] *= typical.math / Achieved.math
    return Achieved(**ends)


def predict(module: Module, topology: Topology, mesh: Mapping[str, Any] | None, *, achieved: Achieved | None = None,
            attention: AttentionKind | None = None) -> Speed:
    """Predicted step of `module`, compiled for the GPUs of `topology`; `mesh` is what `speed.predict` describes.

    `attention` costs fused attention as if by that kernel, whichever the program calls. A loop without a trip count and a dtype
    or a link without a published rate make the step unknown (None). A kernel whose arithmetic the text hides counts its bytes
    alone, and a warning says so.
    """
    model = _Model(module, topology, mesh or {}, achieved or achieved_by(topology.chip), attention)
    total = replay(module, model.cost)
    return _slowed(speed_of(total, warnings=tuple(model.warnings)), total, topology.chip, model.achieved)


def _slowed(speed: Speed, total: Replay, chip: Chip, achieved: Achieved) -> Speed:
    """`speed` with the kernels slowed that ran beside a collective, on the SMs that it left them."""
    if speed.step_s is None or speed.seconds_by_limit is None or not chip.sm_count:
        return speed
    beside_s = sum(seconds for (stream, _), seconds in total.hidden.items() if stream not in ("host", "memory"))
    slowed_s = min(beside_s, speed.seconds_by_limit["math"]) * min(1.0, achieved.collective_sms / chip.sm_count)
    limits = {**speed.seconds_by_limit, "math": speed.seconds_by_limit["math"] + slowed_s}
    return dataclasses.replace(speed, step_s=speed.step_s + slowed_s, seconds_by_limit=limits)


class _Model:
    """Costs of one program's instructions; holds what they have in common."""

    def __init__(self, module: Module, topology: Topology, mesh: Mapping[str, Any], achieved: Achieved,
                 attention: AttentionKind | None):
        self.module, self.chip = module, topology.chip
        self.achieved, self.attention = achieved, attention
        self.axes: Mapping[str, int] = mesh.get("axes") or {}
        self.domains = domains(topology, mesh, module.partitions * module.replicas)
        self.reader = WorkReader(module)
        self.warnings: dict[str, None] = {}  # an ordered set

    def cost(self, instruction: Instruction, computation: Computation) -> Cost:
        found = collectives_of(self.module, instruction)
        if found:
            return self.collective(instruction, found)
        if instruction.opcode in ("send", "recv", "send-done", "recv-done"):
            return Cost(unknown=f"{instruction.name}: point-to-point transfers are not costed")
        if instruction.opcode.endswith("-done"):
            return Cost(awaits=instruction.operands[:1])
        return self.kernel(instruction, self.reader.work(instruction, computation))

    def kernel(self, instruction: Instruction, work: Work) -> Cost:
        if work == Work() and instruction.opcode not in ("fusion", "custom-call"):
            return FREE
        chip, achieved = self.chip, self.achieved
        if work.opaque:
            self.warnings[f"{work.opaque}: only its bytes are counted, its arithmetic is unknown"] = None
        if chip.hbm_bytes_per_s is None:
            return Cost(unknown=f"{chip.name}: no published memory bandwidth")
        times = [matmul_seconds(matmul, chip, achieved) for matmul in work.matmuls]
        flops = sum(matmul.flops for matmul in work.matmuls)
        if work.attention:
            seconds, attention_flops = attention_cost(work.attention, chip, achieved, self.attention)
            times.append(seconds)
            flops += attention_flops
        math_s = sum(time for time in times if time is not None)
        if None in times:
            return Cost(unknown=f"{chip.name}: no published peak, clock or SM count for {instruction.name}")
        memory_s = work.hbm_bytes / (chip.hbm_bytes_per_s * achieved.memory)
        busy_s = max(math_s, memory_s)
        limit: Limit = "none" if busy_s < achieved.launch_s else "math" if math_s >= memory_s else "memory"
        if not work.host_bytes:
            return Cost(seconds=busy_s + achieved.launch_s, limit=limit, flops=flops)
        if chip.host_link_bytes_per_s is None:
            return Cost(unknown=f"{chip.name}: no published rate of the host link")
        transfer = Transfer(stream="host", seconds=work.host_bytes / (chip.host_link_bytes_per_s * achieved.host),
                            bytes=work.host_bytes, opcode=work.host_direction, lane=work.host_direction)
        mode = "starts" if instruction.opcode.endswith("-start") else "waits"
        return Cost(seconds=math_s + achieved.launch_s, limit="math" if math_s else "none", flops=flops, transfers=(transfer,),
                    mode=mode)  # type: ignore[arg-type]

    def collective(self, instruction: Instruction, found: list[Collective]) -> Cost:
        if found[0].role == "done":
            return Cost(awaits=(found[0].key,))
        if found[0].role == "continue":
            return FREE
        transfers = []
        for collective in found:
            if collective.groups is None:
                return Cost(unknown=f"{instruction.name}: device groups of a form that is not known")
            seconds = collective_seconds(collective, self.domains, self.chip, self.achieved)
            if seconds is None:
                return Cost(unknown=f"{self.chip.name}: no published rate of a link that {instruction.name} passes")
            transfers.append(Transfer(stream=axes_of(collective.groups, self.axes), seconds=seconds, bytes=collective.sent_bytes,
                                      opcode=collective.opcode))
        waits = found[0].role == "whole" or '"is_sync":true' in instruction.raw_attributes
        return Cost(seconds=self.achieved.launch_s, transfers=tuple(transfers), mode="waits" if waits else "starts",
                    key=found[0].key)


# ---------------------------------------------------------------- collectives

def domains(topology: Topology, mesh: Mapping[str, Any], partitions: int) -> list[int]:
    """NVLink domain of each partition, in mesh order: from its device's process, or in device order where that is not known.

    A domain wider than a host (NVL72) joins whole hosts; any other ends with its host.
    """
    hosts_joined = max(1, topology.chip.domain_size // topology.chip.chips_per_host)
    places = mesh.get("places") or []
    hosts = [place[5] if place and len(place) > 5 and place[5] is not None else number // topology.devices_per_host
             for number, place in enumerate([*places, *[None] * (partitions - len(places))])]
    return [host // hosts_joined for host in hosts]


def spread(collective: Collective, domain_of: list[int]) -> tuple[int, int]:
    """(devices within one domain, domains) of the group that spans most domains."""
    widest = (1, 1)  # domains, devices
    for group in collective.groups or ():
        members = [domain_of[device] for device in group]
        widest = max(widest, (len(set(members)), max(map(members.count, set(members)))))
    return widest[1], widest[0]


def collective_seconds(collective: Collective, domain_of: list[int], chip: Chip, achieved: Achieved) -> float | None:
    """NCCL's rings pass a host's GPUs and leave it by every NIC in turn, so they are as fast as their slowest medium."""
    near, far = spread(collective, domain_of)
    kind = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}.get(collective.opcode, collective.opcode)
    route = _route(near, far, chip, achieved.nvlink, achieved.network)
    return closed_form.seconds(kind, collective.whole_bytes, route)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _route(near: int, far: int, chip: Chip, nvlink: float, network: float) -> closed_form.Route:
    inner, outer = chip.domain, chip.network
    medium: Literal["NVLink", "PCIe"] = "NVLink" if chip.domain_kind == "NVLink" else "PCIe"
    return closed_form.Route(together="streamed", levels=(
        closed_form.Level(medium=medium, size=near, bytes_per_s=inner.total_bytes_per_s * nvlink if inner else None,
                          latency_s=inner.latency_s if inner else 0.0),
        closed_form.Level(medium="network", size=far, bytes_per_s=outer.total_bytes_per_s * network if outer else None,
                          latency_s=outer.latency_s if outer else 0.0)))


# ---------------------------------------------------------------- one matmul, one attention call

def matmul_seconds(matmul: Matmul, chip: Chip, achieved: Achieved) -> float | None:
    """None where the chip has no published peak for the dtype; a chip without tf32 takes it as f32."""
    peak = chip.peak_flops.get(matmul.dtype) or (chip.peak_flops.get("f32") if matmul.dtype == "tf32" else None)
    if not peak:
        return None
    return matmul.flops / (peak * achieved.math * fill(matmul.batch, matmul.m, matmul.n, matmul.k, chip.sm_count))


@functools.lru_cache(maxsize=16384)
def fill(batch: int, m: int, n: int, k: int, sm_count: int | None) -> float:
    """Part of the sustained rate that a GEMM gets from the best of `TILES` and `SPLITS`, in [0, 1].

    Tiles at the edge are computed whole, SMs without a tile in the last wave idle (not counted where `sm_count` is None), and
    every split reads and writes the result once more.
    """
    best = 0.0
    for tile_m, tile_n, rate in TILES:
        tiles = batch * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        for split in SPLITS:
            seats = math.ceil(tiles * split / sm_count) * sm_count if sm_count else tiles * split
            depth = k / split
            best = max(best, rate * batch * m * n * split / (seats * tile_m * tile_n) * depth / (depth + PROLOGUE_K * split))
    return best


def attention_cost(call: AttentionCall, chip: Chip, achieved: Achieved,
                   kind: AttentionKind | None = None) -> tuple[float | None, float]:
    """(seconds, FLOPs) of one call, as if by kernel `kind` if given. Seconds: None where the chip's figures are unknown."""
    kind = kind or call.kind
    batch = max(1, call.queries // (call.seq * call.groups))
    costs = kernels.attention_kernels(kind, batch=batch, seq=call.seq, heads=call.groups, kv_heads=1, head_dim=call.head_dim,
                                      block_q=128, block_kv=128, itemsize=call.itemsize)
    # The closed form is of causal squares. A full mask, or fewer queries than keys, has another number of scores.
    scores = costs["forward"].scores
    scale = call.queries * call.seq / scores if call.mask == "full" else call.queries / (batch * call.seq * call.groups)
    share = getattr(achieved, f"{kind}_{call.direction}")
    total, flops = 0.0, 0.0
    for name, cost in costs.items():
        if (name == "forward") != (call.direction == "forward"):
            continue
        scaled = dataclasses.replace(cost, flops=cost.flops * scale, scores=cost.scores * scale,
                                     vector_ops=cost.vector_ops * scale)
        dtype = "bf16" if call.itemsize == 2 else "tf32"
        seconds = kernels.kernel_time(scaled, chip, dtype=dtype, efficiency=share).seconds
        if seconds is None:
            return None, 0.0
        total, flops = total + seconds, flops + scaled.flops
    return total, flops

"""FLOPs, vector work and HBM bytes of fused attention kernels, from shapes and block sizes.

Split: nothing; shapes are those that one device sees.
Moves: blocks of keys and values from HBM for every block of queries (forward, dq), and of queries for every block of keys (dkv).
Costs: matmuls over the blocks that the causal or windowed mask leaves, and one exponential a score. A TPU's systolic array works
    on squares of 128 (256 from v6e on), so a head size below that leaves a part of it idle.
Use: where a compiler has no estimate: Pallas and Triton kernels are opaque to it.
Avoid: for attention written in XLA, whose operations the compiler's own estimates or the roofline cover.

FlashAttention-2: arXiv 2307.08691; 3: arXiv 2407.08608. Everything is an estimate.
Shape letters: B batch, S sequence, N query heads, K kv heads, H head size.
"""

import dataclasses
import math
from typing import Literal

from jaxmem.hardware import Chip

Kernel = Literal["splash", "splash_fused", "triton", "cudnn"]

# Matmuls over the scores in each pass. A backward that makes dq and (dk, dv) in two passes computes scores and dP twice.
PASSES: dict[Kernel, dict[str, int]] = {
    "splash": {"forward": 2, "dq": 3, "dkv": 4},
    "splash_fused": {"forward": 2, "backward": 5},  # writes one partial dq a block of keys
    "triton": {"forward": 2, "dq": 3, "dkv": 4},
    "cudnn": {"forward": 2, "backward": 5},
}

# Vector operations a score besides the exponential, counted in the kernels' text: two for the segment mask, subtract, scale to
# base 2, convert; forward: row maximum and row sum; dq: dP - D and the product with P; dkv: those and a second conversion.
VECTOR_OPS = {"forward": 7, "dq": 7, "dkv": 8, "backward": 9}

# Side of the systolic array (cloud.google.com/tpu/docs/system-architecture-tpu-vm: 256 from v6e on); TensorCores of a JAX device.
MXU_SIDE = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}
TENSOR_CORES = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}
# A vector register is 8 x 128 lanes; four arithmetic units a lane (jax-ml.github.io/scaling-book/tpus), one transcendental unit.
VPU_LANES, VPU_UNITS, EUP_UNITS = 8 * 128, 4, 1
# Exponentials an SM and clock (CUDA programming guide, arithmetic throughput: 16 for 8.0, 9.0 and 10.0; B300 doubles them).
SFU_PER_SM = {"default": 16, "b300": 32, "gb300": 32}
# Single-precision additions an SM and clock (the same table).
FPU_PER_SM = {"default": 128, "a100-40gb": 64, "a100-80gb": 64, "a100-80gb-pcie": 64, "v100": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCost:
    """Work of one kernel call. `flops` counts multiply and add as two and holds whole blocks, masked scores in them included."""

    flops: float
    scores: float  # scores computed, all heads: one exponential each
    vector_ops: float
    hbm_bytes: float
    head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Seconds of each unit at full rate, and of the kernel; None where the chip's figure is unknown."""

    math_s: float | None
    vector_s: float | None
    exponential_s: float | None
    memory_s: float | None
    efficiency: float

    @property
    def seconds(self) -> float | None:
        """The slowest unit at full rate over `efficiency`: the others hide behind it, and `efficiency` says how badly."""
        if self.math_s is None or self.memory_s is None:
            return None
        return max(self.math_s, self.vector_s or 0.0, self.exponential_s or 0.0, self.memory_s) / self.efficiency


def visited_blocks(seq: int, block_q: int, block_kv: int, window: int | None = None) -> int:
    """Blocks of the causal S x S score matrix that hold at least one score that the mask leaves; wholly masked ones are skipped.

    A query at i sees keys max(0, i - window + 1) .. i, as `window` counts the query itself.
    """
    count = 0
    for first in range(0, seq, block_q):
        last = min(first + block_q, seq) - 1
        lowest = 0 if window is None else max(0, first - window + 1)
        count += last // block_kv - lowest // block_kv + 1
    return count


def attention_kernels(kernel: Kernel, *, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int,
                      window: int | None = None, block_q: int = 512, block_kv: int = 512,
                      itemsize: int = 2) -> dict[str, KernelCost]:
    """`{pass: cost}` of causal attention over q [B, S, N, H] and k, v [B, S, K, H]; passes as in `PASSES`.

    `itemsize` is bytes of q, k, v, o. The exponent sums and row terms that the backward reads are f32, one a query.
    """
    block_q, block_kv = min(block_q, seq), min(block_kv, seq)
    blocks = batch * heads * visited_blocks(seq, block_q, block_kv, window)
    scores = float(blocks * block_q * block_kv)
    q, kv = (batch * seq * n * head_dim * itemsize for n in (heads, kv_heads))
    row = batch * seq * heads * 4
    kv_block, q_block = block_kv * head_dim * itemsize, block_q * head_dim * itemsize
    streamed = kernel in ("splash", "splash_fused")  # no cache: every visit of a block is a read; a GPU's L2 holds a head
    kv_reads = 2 * blocks * kv_block if streamed else 2 * kv
    q_reads = 2 * blocks * q_block if streamed else 2 * q
    bytes_of = {
        "forward": 2 * q + row + kv_reads,  # q, o, row sums; k and v
        "dq": 3 * q + 2 * row + kv_reads,  # q, do, dq, row sums and D; k and v
        "dkv": q_reads + 4 * kv + 2 * row,  # q and do; k, v, dk, dv
        "backward": q_reads + 4 * kv + 2 * row + (q * math.ceil(seq / block_kv) if kernel == "splash_fused" else q),
    }
    return {name: KernelCost(flops=2.0 * matmuls * head_dim * scores, scores=scores, vector_ops=VECTOR_OPS[name] * scores,
                             hbm_bytes=float(bytes_of[name]), head_dim=head_dim)
            for name, matmuls in PASSES[kernel].items()}


def kernel_time(cost: KernelCost, chip: Chip, *, dtype: str = "bf16", efficiency: float = 1.0) -> KernelTime:
    """Seconds of one kernel on one device of `chip`; `efficiency` in (0, 1] divides the slowest unit's time, the caller's."""
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency={efficiency}: expected more than 0 and at most 1")
    peak = chip.peak_flops.get(dtype)
    vector, exponential = vector_rates(chip)
    return KernelTime(
        math_s=cost.flops / (peak * mxu_fill(chip, cost.head_dim)) if peak else None,
        vector_s=cost.vector_ops / vector if vector else None,
        exponential_s=cost.scores / exponential if exponential else None,
        memory_s=cost.hbm_bytes / chip.hbm_bytes_per_s if chip.hbm_bytes_per_s else None,
        efficiency=efficiency)


def mxu_fill(chip: Chip, head_dim: int) -> float:
    """Part of the systolic array that matmuls with one dim of `head_dim` keep busy: 0.5 for 128 on v6e; 1.0 on a GPU."""
    side = MXU_SIDE.get(chip.name)
    return 1.0 if side is None else head_dim / (math.ceil(head_dim / side) * side)


def vector_rates(chip: Chip) -> tuple[float | None, float | None]:
    """(f32 vector operations, exponentials) a second and device; None where clock or core count is unknown."""
    if chip.clock_hz is None:
        return None, None
    if chip.kind == "tpu":
        lanes = TENSOR_CORES[chip.name] * VPU_LANES * chip.clock_hz
        return lanes * VPU_UNITS, lanes * EUP_UNITS
    if chip.sm_count is None:
        return None, None
    name = chip.parent or chip.name
    sms = chip.sm_count * chip.clock_hz
    return sms * FPU_PER_SM.get(name, FPU_PER_SM["default"]), sms * SFU_PER_SM.get(name, SFU_PER_SM["default"])

"""Kernels in a compiled TPU program: which, with what shapes and blocks, and so what work.

A Pallas kernel is opaque to the compiler, which gives no estimate of it. Its call carries the kernel's name, its operands' shapes
and (splash attention) its block sizes.
"""
import json
import math
import re

from jaxmem.cost.kernels import Kernel, KernelCost, attention_kernels
from jaxmem.hlo.parse import HBM, Computation, Instruction

_PASSES = {"fwd": "forward", "dkv": "dkv", "dq": "dq"}
_BLOCKS = {"forward": ("block_q", "block_kv"), "dq": ("block_q_dq", "block_kv_dq"), "dkv": ("block_q_dkv", "block_kv_dkv")}


def attention_work(computation: Computation, instruction: Instruction) -> KernelCost | None:
    """Work of a splash attention call on one device, mapped over its batch; None for any other custom call.

    Of the operands, q [B, N, S, H] is the first with four dims (three without a batch, five where runs are stacked before it) and k the
    second. The mask's table of blocks, [heads or 1, query blocks, steps], says how many blocks of keys a query block visits at most, and
    so the window.
    """
    name = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", instruction.name + " " + (instruction.op_name or ""))
    if instruction.custom_call_target != "tpu_custom_call" or name is None:
        return None
    operands = [computation.by_name[operand].shape for operand in instruction.operands]
    arrays = [shape for shape in operands if shape.dtype in ("bf16", "f32", "f16") and 3 <= len(shape.dims) <= 5]
    if len(arrays) < 2:
        return None
    q, k = arrays[0], arrays[1]
    batch = math.prod(q.dims[:-3])
    heads, seq, head_dim = q.dims[-3:]
    kv_heads = k.dims[-3]
    which = _PASSES[name.group(1)]
    blocks = _block_sizes(instruction)
    block_q, block_kv = (blocks.get(key, 512) for key in _BLOCKS[which])
    kernel: Kernel = "splash_fused" if which == "dkv" and blocks.get("use_fused_bwd_kernel") else "splash"
    tables = [shape for shape in operands if shape.dtype == "s8" and len(shape.dims) == 3 and shape.dims[0] in (1, heads)]
    inner, block = (1, block_q) if which == "dkv" else (2, block_kv)  # dkv goes over query blocks for every block of keys
    steps = min((shape.dims[inner] for shape in tables), default=0)
    window = (steps - 1) * block if 1 < steps < -(-seq // block) else None
    costs = attention_kernels(kernel, batch=batch, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
                              block_q=block_q, block_kv=block_kv, itemsize=q.element_bits // 8)
    return costs["backward" if kernel == "splash_fused" else which]


def elementwise_work(computation: Computation, instruction: Instruction) -> KernelCost | None:
    """Work of a kernel that reads each operand and writes each result once and is named after its vector and special operations for each
    element of its first operand of three dims (`optim/learned/kernels.py`); None for any other custom call. What is in VMEM is not read
    from memory."""
    name = re.search(r"elementwise_v(\d+)_s(\d+)", instruction.name + " " + (instruction.op_name or ""))
    if instruction.custom_call_target != "tpu_custom_call" or name is None:
        return None
    operands = [computation.by_name[operand].shape for operand in instruction.operands]
    shapes = [leaf for shape in (*operands, instruction.shape) for _, leaf in shape.leaves()]
    elements = float(next((math.prod(shape.dims) for shape in operands if len(shape.dims) == 3), 0))
    return KernelCost(flops=0.0, vector_ops=int(name.group(1)) * elements, scores=int(name.group(2)) * elements,
                      hbm_bytes=float(sum(shape.tiled_bytes for shape in shapes if shape.memory_space == HBM)), head_dim=128)


def _block_sizes(instruction: Instruction) -> dict[str, int]:
    found = re.search(r'"xprof_metadata":"(\{.*?\})"', instruction.raw_attributes, re.S)
    if found is None:
        return {}
    try:
        values = json.loads(found.group(1).replace('\\"', '"'))
    except json.JSONDecodeError:
        return {}
    return {key: int(value) for key, value in values.items() if isinstance(value, (int, bool))}

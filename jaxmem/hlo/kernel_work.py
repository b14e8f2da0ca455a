"""What one kernel of a GPU program does: matmuls with their sizes, passes of fused attention, bytes that it touches in memory.

The text names shapes, not work. Matmuls are read from dots, also inside fusions, and from the configurations of library calls.
Bytes are those of operands and results, where a slice counts as itself and not as the array it is cut from, and an update in
place as the part that it writes. Re-reading of tiles that the L2 cache serves is not counted. `speed_gpu.py` makes seconds of it.
"""
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from jaxmem.hlo.parse import HOST, Computation, Instruction, Module, Shape

Dtype = Literal["f64", "f32", "tf32", "bf16", "f16", "fp8", "int8", "fp4"]
AttentionKind = Literal["triton", "cudnn"]
Bytes = tuple[float, float]  # in device memory, in host memory

# Opcodes that launch nothing: names of values, not work.
FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "optimization-barrier",
    "partition-id", "replica-id", "domain"})
# Through these a value is still the same array, so what a later slice takes of the result is what is read of the operand.
_SAME = frozenset({"bitcast", "reshape", "transpose", "convert", "copy", "bitcast-convert"})
_DTYPES: dict[str, Dtype] = {
    "f64": "f64", "f32": "tf32", "bf16": "bf16", "f16": "f16", "s8": "int8", "u8": "int8", "s4": "int8", "f4e2m1fn": "fp4"}


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """`batch` products [m, k] x [k, n]; `dtype` is what the matrix units work in."""

    batch: int
    m: int
    n: int
    k: int
    dtype: Dtype

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A fused attention kernel: `queries` rows (batch x heads x sequence), `seq` keys, `groups` query heads a kv head."""

    kind: AttentionKind
    direction: Literal["forward", "backward"]
    queries: int
    groups: int
    seq: int
    head_dim: int
    itemsize: int
    mask: Literal["causal", "full"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """`hbm_bytes` are read and written in device memory, `host_bytes` in host memory. `opaque` names a kernel whose arithmetic
    the text hides."""

    matmuls: tuple[Matmul, ...] = ()
    attention: AttentionCall | None = None
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0
    host_direction: Literal["device-to-host", "host-to-device"] = "host-to-device"
    opaque: str | None = None


class WorkReader:
    """Work of the instructions of one module; keeps what it has found of a computation."""

    def __init__(self, module: Module):
        self.module = module
        self.users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}

    def work(self, instruction: Instruction, computation: Computation) -> Work:
        """Of one execution of `instruction`, which stands in `computation`. Collectives, control flow and instructions that wait
        for something started before are the caller's."""
        if instruction.opcode in FREE:
            return Work()
        called = self.called(instruction)
        read = self.read(instruction, computation, called)
        written = self.written(called.root, called, fused=True) if called else self.written(instruction, computation, fused=False)
        kernels = list(self.inside(called)) if called else [(instruction, computation)]
        # a library's workspace is memory that it may use, not bytes that it must move
        library = any(kernel.opcode.startswith("custom-call") for kernel, _ in kernels)
        workspace = sum(leaf.bytes for index, leaf in instruction.shape.leaves() if index and leaf.dtype in ("s8", "u8"))
        work = Work(hbm_bytes=read[0] + written[0] - (workspace if library else 0), host_bytes=read[1] + written[1],
                    host_direction="device-to-host" if written[1] else "host-to-device")
        for kernel, scope in kernels:
            work = _with_arithmetic(work, kernel, scope)
        return work

    def called(self, instruction: Instruction) -> Computation | None:
        """The fused computation; None for an instruction that is its own kernel."""
        if instruction.opcode in ("fusion", "fusion-start", "call-start", "async-start"):
            return self.module.computations[next(iter(instruction.called.values()))[0]]
        return None

    def inside(self, computation: Computation) -> Iterator[tuple[Instruction, Computation]]:
        for instruction in computation.instructions:
            if instruction.opcode == "fusion":
                yield from self.inside(self.module.computations[instruction.called["calls"][0]])
            else:
                yield instruction, computation

    # ---------------------------------------------------------------- bytes

    def read(self, instruction: Instruction, computation: Computation, called: Computation | None) -> Bytes:
        total = (0.0, 0.0)
        for position, name in enumerate(instruction.operands):
            operand = computation.by_name[name]
            share: float | None = 1.0
            if called and not operand.shape.is_tuple:
                share = self.share_read(called, called.parameters[position])
            elif not called:
                share = _part_of_slice(operand, instruction, position)
            total = _add(total, _placed(operand.shape, 1.0 if share is None else share))
        return total

    def share_read(self, computation: Computation, value: Instruction) -> float:
        """Part of `value`'s bytes that its users in a fused `computation` read, at most 1."""
        if value is computation.root:
            return 1.0
        users = self.users_of(computation).get(value.name, [])
        return min(1.0, sum(self.share_of_use(computation, value, user, position) for user, position in users))

    def share_of_use(self, computation: Computation, value: Instruction, user: Instruction, position: int) -> float:
        part = _part_of_slice(value, user, position)
        if part is not None:
            return part if part or self.in_place(computation, user) else 1.0
        if user.opcode in _SAME and user is not computation.root:
            return self.share_read(computation, user)
        if user.opcode == "fusion":
            called = self.module.computations[user.called["calls"][0]]
            return self.share_read(called, called.parameters[position])
        return 1.0

    def in_place(self, computation: Computation, update: Instruction) -> bool:
        """Whether an update inside a fusion writes into its first operand: an argument, of which only the result is made."""
        target = computation.by_name[update.operands[0]]
        while target.opcode == "bitcast":
            target = computation.by_name[target.operands[0]]
        users = self.users_of(computation).get(update.name, [])
        return target.opcode == "parameter" and all(user.opcode in ("tuple", "bitcast") for user, _ in users)

    def written(self, root: Instruction, computation: Computation, *, fused: bool) -> Bytes:
        opcode = root.opcode
        if opcode == "tuple":
            total = (0.0, 0.0)
            for name in root.operands:
                total = _add(total, self.written(computation.by_name[name], computation, fused=fused))
            return total
        if opcode == "bitcast":
            return self.written(computation.by_name[root.operands[0]], computation, fused=fused)
        if opcode == "fusion":
            called = self.module.computations[root.called["calls"][0]]
            return self.written(called.root, called, fused=True)
        if opcode in ("dynamic-update-slice", "scatter") and (not fused or self.in_place(computation, root)):
            update = computation.by_name[root.operands[1 if opcode == "dynamic-update-slice" else len(root.operands) // 2 + 1]]
            target = next(leaf for _, leaf in root.shape.leaves())
            times = 1 if opcode == "dynamic-update-slice" else 2  # a scatter reads what it adds to
            return _placed(root.shape, min(1.0, times * math.prod(update.shape.dims) / max(1, math.prod(target.dims))))
        return _placed(root.shape.at((0,)) if opcode == "copy-start" else root.shape, 1.0)

    def users_of(self, computation: Computation) -> dict[str, list[tuple[Instruction, int]]]:
        if computation.name not in self.users:
            users: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
            for instruction in computation.instructions:
                for position, name in enumerate(instruction.operands):
                    users[name].append((instruction, position))
            self.users[computation.name] = users
        return self.users[computation.name]


def _add(one: Bytes, other: Bytes) -> Bytes:
    return one[0] + other[0], one[1] + other[1]


def _part_of_slice(value: Instruction, user: Instruction, position: int) -> float | None:
    """Part of `value` that `user` reads if it cuts a slice from it or writes one into it (0 then); None for other uses."""
    if position or value.shape.is_tuple:
        return None
    if user.opcode in ("dynamic-slice", "slice", "gather"):
        return min(1.0, math.prod(user.shape.dims) / max(1, math.prod(value.shape.dims)))
    return 0.0 if user.opcode in ("dynamic-update-slice", "scatter") else None


def _placed(shape: Shape, share: float) -> Bytes:
    leaves = [leaf for _, leaf in shape.leaves()]
    return (share * sum(leaf.bytes for leaf in leaves if leaf.memory_space != HOST),
            share * sum(leaf.bytes for leaf in leaves if leaf.memory_space == HOST))


# ---------------------------------------------------------------- arithmetic

def _with_arithmetic(work: Work, kernel: Instruction, computation: Computation) -> Work:
    """`work` and what `kernel`, an instruction of `computation`, computes besides."""
    target, name = kernel.custom_call_target or "", kernel.op_name or ""
    if kernel.opcode == "dot":
        return replace(work, matmuls=(*work.matmuls, dot(kernel, computation)))
    if kernel.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return replace(work, matmuls=(*work.matmuls, convolution(kernel, computation)))
    if target.startswith(("__cublas$", "__cutlass$")):
        return replace(work, matmuls=(*work.matmuls, library_matmul(kernel, computation)))
    if target.startswith("__cudnn$fmha"):
        return replace(work, attention=cudnn_attention(kernel, computation))
    if "mha_preprocess_backward" in name:
        return work  # row sums of dO x O: bytes alone
    if target and ("mha_forward" in name or "mha_backward" in name):
        return replace(work, attention=pallas_attention(kernel, computation))
    if "triton" in target or "mosaic" in target or (target and "pallas" in name):
        return replace(work, opaque=f"kernel {name or kernel.name} ({target})")
    return work


def matmul_dtype(dtype: str, attributes: str = "") -> Dtype:
    """What the matrix units work in for operands of `dtype`: f32 is rounded to tf32 unless the highest precision is asked for."""
    algorithm = re.search(r"algorithm=dot_(bf16|tf32|f16|f32|f64)", attributes)
    if algorithm:
        return algorithm.group(1)  # type: ignore[return-value]
    if dtype == "f32" and "highest" in attributes.lower():
        return "f32"
    return "fp8" if dtype.startswith("f8") else _DTYPES.get(dtype, "f32")


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text or "")))


def _matmul(shapes: list[Shape], contracting: list[tuple[int, ...]], batching: list[tuple[int, ...]], dtype: Dtype) -> Matmul:
    """Of (left, right) shapes with the contracting and batch dims of each."""
    left, right = (math.prod(size for dim, size in enumerate(shape.dims) if dim not in contracting[side] + batching[side])
                   for side, shape in enumerate(shapes))
    return Matmul(batch=math.prod(shapes[0].dims[dim] for dim in batching[0]), m=left, n=right,
                  k=math.prod(shapes[0].dims[dim] for dim in contracting[0]), dtype=dtype)


def dot(instruction: Instruction, computation: Computation) -> Matmul:
    shapes = [computation.by_name[name].shape for name in instruction.operands[:2]]
    dims = {what: [_numbers(instruction.attributes.get(f"{side}_{what}_dims")) for side in ("lhs", "rhs")]
            for what in ("contracting", "batch")}
    return _matmul(shapes, dims["contracting"], dims["batch"], matmul_dtype(shapes[0].dtype, instruction.raw_attributes))


def library_matmul(instruction: Instruction, computation: Computation) -> Matmul:
    """A cuBLAS call: its dims stand in the backend configuration."""
    shapes = [computation.by_name[name].shape for name in instruction.operands[:2]]
    found = re.search(r'"dot_dimension_numbers":(\{[^}]*\})', instruction.raw_attributes)
    if found is None:
        raise ValueError(f"{instruction.name}: a library matmul without dot_dimension_numbers")
    numbers = json.loads(found.group(1))
    dims = {what: [tuple(map(int, numbers.get(f"{side}_{what}_dimensions", ()))) for side in ("lhs", "rhs")]
            for what in ("contracting", "batch")}
    highest = re.search(r'"operand_precision":\[[^\]]*"HIGHEST"', instruction.raw_attributes)
    return _matmul(shapes, dims["contracting"], dims["batch"], matmul_dtype(shapes[0].dtype, "highest" if highest else ""))


def convolution(instruction: Instruction, computation: Computation) -> Matmul:
    """As the matmul that it amounts to: every position of the result times the window of each output feature.

    Reads `dim_labels=b01f_01io->b01f`, of convolutions and cuDNN calls; in backward passes data, kernel and result change places.
    """
    labels = re.split(r"_|->", instruction.attributes.get("dim_labels", "__->"))
    data, kernel = (computation.by_name[name].shape for name in instruction.operands[:2])
    result = next(leaf for _, leaf in instruction.shape.leaves())
    if "BackwardFilter" in (instruction.custom_call_target or ""):
        kernel, result = result, kernel
    elif "BackwardInput" in (instruction.custom_call_target or ""):
        result = data
    features = kernel.dims[labels[1].index("o")] if "o" in labels[1] else 1
    return Matmul(batch=1, m=math.prod(result.dims) // features, n=features, k=math.prod(kernel.dims) // features,
                  dtype=matmul_dtype(data.dtype))


def pallas_attention(instruction: Instruction, computation: Computation) -> AttentionCall:
    """`jax.experimental.pallas.ops.gpu.attention`: q [..., H] with every query head, k [B, S, K, H].

    Taken as causal, as this project's programs call it: the text does not say.
    """
    q, k = (computation.by_name[name].shape for name in instruction.operands[:2])
    return AttentionCall(
        kind="triton", direction="backward" if "mha_backward" in (instruction.op_name or "") else "forward",
        queries=math.prod(q.dims) // q.dims[-1], groups=max(1, math.prod(q.dims) // math.prod(k.dims)), seq=k.dims[-3],
        head_dim=k.dims[-1], itemsize=k.element_bits // 8, mask="causal")


def cudnn_attention(instruction: Instruction, computation: Computation) -> AttentionCall:
    """`__cudnn$fmha...`: the configuration has the shape [B, N, S, T] of the scores and the mask."""
    q, k = (computation.by_name[name].shape for name in instruction.operands[:2])
    found = re.search(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]', instruction.raw_attributes)
    if found is None:
        raise ValueError(f"{instruction.name}: fused attention without intermediate_tensor_shape")
    scores = _numbers(found.group(1))
    queries = math.prod(scores[:-1])
    return AttentionCall(
        kind="cudnn", direction="backward" if "Backward" in (instruction.custom_call_target or "") else "forward",
        queries=queries, groups=max(1, math.prod(q.dims) // math.prod(k.dims)), seq=scores[-1],
        head_dim=math.prod(q.dims) // queries, itemsize=q.element_bits // 8,
        mask="causal" if "CAUSAL" in instruction.raw_attributes else "full")

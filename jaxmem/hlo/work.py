"""FLOPs and HBM bytes of the instructions of optimized HLO, from shapes.

A multiply and an add are two FLOPs; only `dot` and `convolution` count, as element-wise work never bounds the matrix units. A TPU
writes a matmul as a convolution, with window and padding for its batch dims: taps that fall into padding are not counted.
"""
import math
import re

from jaxmem.hlo.parse import HBM, Computation, Instruction, Module, Shape, trip_count

NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
           "partition-id", "replica-id", "iota", "add-dependency", "opt-barrier", "send", "recv", "send-done")


def hlo_flops(module: Module, computation: Computation | None = None) -> float | None:
    """Matmul FLOPs of one run of the program on one device, loop bodies times their trip counts; of a conditional, the largest
    branch. None where a trip count is unknown."""
    total = 0.0
    for instruction in (computation or module.entry).instructions:
        if instruction.opcode == "while":
            times, body = trip_count(module, instruction), hlo_flops(module, module.computations[instruction.called["body"][0]])
            if body and times is None:
                return None
            if body is None:
                return None
            total += (times or 0) * body
        elif instruction.opcode == "conditional":
            branches = [hlo_flops(module, called) for called in _called(module, instruction)]
            if None in branches:
                return None
            total += max((branch for branch in branches if branch is not None), default=0.0)
        elif instruction.opcode == "call":
            inner = [hlo_flops(module, called) for called in _called(module, instruction)]
            if None in inner:
                return None
            total += sum(branch for branch in inner if branch is not None)
        else:
            total += instruction_flops(module, computation or module.entry, instruction)
    return total


def _called(module: Module, instruction: Instruction) -> list[Computation]:
    return [module.computations[name] for names in instruction.called.values() for name in names]


def instruction_flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """FLOPs of one instruction, of everything inside when it is a fusion or an asynchronous wrapper."""
    if instruction.opcode == "dot":
        lhs = computation.by_name[instruction.operands[0]].shape
        contracted = _numbers(instruction.attributes.get("lhs_contracting_dims", ""))
        return 2.0 * math.prod(instruction.shape.dims) * math.prod(lhs.dims[dim] for dim in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode in ("fusion", "async-start"):
        return sum(instruction_flops(module, called, inner) for called in _called(module, instruction)
                   for inner in called.instructions)
    return 0.0


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    lhs, rhs = (computation.by_name[name].shape for name in instruction.operands[:2])
    labels = instruction.attributes["dim_labels"]
    left, rest = labels.split("_")
    right, out = rest.split("->")
    window = dict(re.findall(r"(\w+)=([^\s{}]+)", instruction.attributes.get("window", "")))
    groups = int(instruction.attributes.get("batch_group_count", "1"))
    taps = 1
    spatial = [character for character in left if character.isdigit()]

    def of(name: str, position: int, default: int) -> list[int]:
        return [int(part) for part in window[name].split("x")[position].split("_")] if name in window else [default]

    for position, character in enumerate(sorted(spatial)):
        low = of("pad", position, 0)[0]
        stride, input_gap, kernel_gap = (of(name, position, 1)[0] for name in ("stride", "lhs_dilate", "rhs_dilate"))
        taps *= _valid_taps(inputs=lhs.dims[left.index(character)], outputs=instruction.shape.dims[out.index(character)],
                            kernel=rhs.dims[right.index(character)], stride=stride, low=low, input_gap=input_gap,
                            kernel_gap=kernel_gap)
    # the taps already count every output position
    rest_of_output = math.prod(size for size, label in zip(instruction.shape.dims, out, strict=True) if not label.isdigit())
    return 2.0 * taps * rest_of_output * rhs.dims[right.index("i")] / groups


def _valid_taps(*, inputs: int, outputs: int, kernel: int, stride: int, low: int, input_gap: int, kernel_gap: int) -> int:
    """Pairs of output and kernel position that meet a real input along one spatial dim."""
    count = 0
    for tap in range(kernel):
        # position = output * stride + tap * kernel_gap - low must be a multiple of input_gap within the input
        for output in range(outputs):
            position = output * stride + tap * kernel_gap - low
            count += position >= 0 and position % input_gap == 0 and position // input_gap < inputs
    return count


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def hbm_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes that an instruction reads from and writes to HBM: operands and results outside VMEM. Of an operand that is only
    sliced, the slices; of one that is updated in place, the update."""
    if instruction.opcode in NO_WORK:
        return 0.0
    operands = [computation.by_name[name].shape for name in instruction.operands]
    if instruction.opcode != "fusion":
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2.0 * _in_hbm(instruction.shape)
        if instruction.opcode == "dynamic-update-slice":
            return 2.0 * _in_hbm(operands[1])
        return float(sum(map(_in_hbm, operands)) + _in_hbm(instruction.shape))
    fused = module.computations[instruction.called["calls"][0]]
    total = 0.0
    for parameter, shape in zip(fused.parameters, operands, strict=False):
        users = [inner for inner in fused.instructions if parameter.name in inner.operands]
        if users and all(user.opcode in ("dynamic-slice", "slice") for user in users):
            total += min(_in_hbm(shape), sum(user.shape.tiled_bytes for user in users) if shape.memory_space == HBM else 0)
        elif users and all(user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name for user in users):
            continue  # written in place: the result below counts the update
        else:
            total += _in_hbm(shape)
    roots = [fused.root] if fused.root.opcode != "tuple" else [fused.by_name[name] for name in fused.root.operands]
    for root in roots:
        while root.opcode == "bitcast":
            root = fused.by_name[root.operands[0]]
        if root.opcode == "dynamic-update-slice":
            total += fused.by_name[root.operands[1]].shape.tiled_bytes if root.shape.memory_space == HBM else 0
        elif root.opcode != "parameter":
            total += _in_hbm(root.shape)
    return total


def _in_hbm(shape: Shape) -> int:
    return sum(leaf.tiled_bytes for _, leaf in shape.leaves() if leaf.memory_space == HBM)

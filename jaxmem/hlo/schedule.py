"""When each array of a scheduled TPU program is alive: the compiler's own dataflow and live-range rules, replayed on its text.

The rules are those of XLA's dataflow analysis and live ranges: a value is one array, defined once; tuples, `get-tuple-element`,
`bitcast` and async pairs forward it; loop carries, in-place updates and fusions that reuse an operand give a new value in the
same memory. Values that share memory form a group. The schedule is flattened: a loop's body stands once, just before the loop.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxmem.hlo.parse import Computation, Instruction, Module, Shape

Index = tuple[int, ...]
Leaves = dict[Index, int]  # arrays of one instruction's result: index path -> value number

FORWARDING = ("bitcast", "opt-barrier", "optimization-barrier", "domain", "add-dependency")
_ASYNC_RESULT: Mapping[str, int] = {
    "copy-done": 0,
    "recv-done": 0,
}  # which element of the started tuple a `done` hands on; 1 otherwise
_BARE_START = ("all-reduce-start", "reduce-scatter-start")  # starts whose result has the shape of the finished one

_ALIASING = re.compile(r'"aliasing_operands":\{"lists":\[(?:\{"indices":\[[^\]]*\]\},?)*\]\}')


@dataclass(kw_only=True)
class Value:
    """One array: `tiled_bytes` in `memory_space` from schedule point `start` to `end`, both included."""

    number: int
    shape: Shape
    instruction: Instruction
    computation: str
    index: Index
    group: int
    start: int
    end: int
    parameter: int | None = None  # entry parameter number
    depth: int = 0  # how many loops it is inside of
    users: list[tuple[Instruction, str]] = field(default_factory=list)  # and the computation they stand in
    reads: "list[Value]" = field(default_factory=list)  # operands of the instruction that defines it


@dataclass(kw_only=True)
class Schedule:
    values: list[Value]
    length: int  # schedule points
    points: list[Instruction]  # instruction at each point
    outputs: Leaves  # of the entry computation
    groups: dict[int, list[Value]] = field(default_factory=dict)  # filled once: values that share memory


class _Replay:
    def __init__(self, module: Module):
        self.module = module
        self.values: list[Value] = []
        self.parents: list[int] = []
        self.points: list[Instruction] = []
        self.passing: dict[str, set[Index]] = {}
        self.depth = 0

    # --- groups: union-find over values
    def find(self, number: int) -> int:
        while self.parents[number] != number:
            self.parents[number] = self.parents[self.parents[number]]
            number = self.parents[number]
        return number

    def join(self, one: int, other: int) -> None:
        self.parents[self.find(other)] = self.find(one)

    def define(self, instruction: Instruction, computation: str, index: Index, shape: Shape, time: int) -> int:
        number = len(self.values)
        self.values.append(
            Value(
                number=number,
                shape=shape,
                instruction=instruction,
                computation=computation,
                index=index,
                group=number,
                start=time,
                end=time,
                depth=self.depth,
            )
        )
        self.parents.append(number)
        return number

    def use(self, leaves: Leaves, time: int, user: Instruction, computation: str) -> None:
        for number in leaves.values():
            value = self.values[number]
            value.end = max(value.end, time)
            value.users.append((user, computation))

    # --- one computation, its instructions in order
    def walk(self, computation: Computation, arguments: list[Leaves] | None) -> Leaves:
        """Values of the root. `arguments` are bound to the parameters; None for the entry, whose parameters are defined here."""
        known: dict[str, Leaves] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                number = int(instruction.literal or 0)
                if arguments is None:
                    known[instruction.name] = {
                        index: self.define(instruction, computation.name, index, shape, 0)
                        for index, shape in instruction.shape.leaves()
                    }
                    for value in known[instruction.name].values():
                        self.values[value].parameter = number
                else:
                    known[instruction.name] = arguments[number]
                    for value in arguments[number].values():  # a loop's own carry is defined by the caller; show where it enters
                        self.values[value].end = max(self.values[value].end, len(self.points))
                self.points.append(instruction)
                continue
            operands = [known[name] for name in instruction.operands]
            known[instruction.name] = self.visit(instruction, computation, operands)
        leaves = known[computation.root.name]
        for number in leaves.values():
            self.values[number].end = max(self.values[number].end, len(self.points) - 1)
        return leaves

    def visit(self, instruction: Instruction, computation: Computation, operands: list[Leaves]) -> Leaves:
        opcode = instruction.opcode
        if opcode == "tuple":
            self.points.append(instruction)
            return {(position, *index): number for position, leaves in enumerate(operands) for index, number in leaves.items()}
        if opcode == "get-tuple-element":
            self.points.append(instruction)
            position = int(instruction.attributes["index"])
            return {index[1:]: number for index, number in operands[0].items() if index[0] == position}
        if opcode == "while":
            return self.loop(instruction, computation, operands[0])
        if opcode == "conditional":
            return self.conditional(instruction, computation, operands)
        if opcode == "call":
            leaves = self.walk(self.module.computations[next(iter(instruction.called.values()))[0]], operands)
            self.points.append(instruction)
            return leaves
        time = len(self.points)
        self.points.append(instruction)
        for leaves in operands:
            self.use(leaves, time, instruction, computation.name)
        if opcode in FORWARDING:
            return dict(operands[0])
        if opcode.endswith("-done"):
            return self.done(instruction, operands[0])
        given = self.given_operands(instruction, operands)
        result: Leaves = {}
        for index, shape in instruction.shape.leaves():
            result[index] = given[index] if index in given else self.define(instruction, computation.name, index, shape, time)
            if index not in given:
                self.values[result[index]].reads = [self.values[number] for leaves in operands for number in leaves.values()]
        self.share(instruction, operands, result)
        return result

    def given_operands(self, instruction: Instruction, operands: list[Leaves]) -> Leaves:
        """Leaves of a started operation that are its operands, kept alive until it is done."""
        opcode = instruction.opcode
        if opcode.endswith("-update"):  # a started call is handed what it had not been given yet
            wanted = {index for index, _ in instruction.shape.leaves()}
            later = {
                (0, position, *index): number for position, leaves in enumerate(operands[1:]) for index, number in leaves.items()
            }
            return {index: number for index, number in operands[0].items() if index in wanted} | (
                later if len(operands) > 1 else {}
            )
        if not opcode.endswith("-start") and opcode != "send" or opcode in _BARE_START or not operands:
            return {}
        if opcode == "copy-start":
            return {(1, *index): number for index, number in operands[0].items()}
        if instruction.shape.is_tuple and instruction.shape.at((0,)).is_tuple:
            return {(0, position, *index): number for position, leaves in enumerate(operands) for index, number in leaves.items()}
        return {(0, *index): number for index, number in operands[0].items()}

    def done(self, instruction: Instruction, started: Leaves) -> Leaves:
        wanted = {index for index, _ in instruction.shape.leaves()}
        if set(started) == wanted:
            return dict(started)
        position = _ASYNC_RESULT.get(instruction.opcode, 1)
        return {index[1:]: number for index, number in started.items() if index and index[0] == position and index[1:] in wanted}

    def share(self, instruction: Instruction, operands: list[Leaves], result: Leaves) -> None:
        """Joins results with the operands whose memory they reuse."""
        before = [number for leaves in operands for _, number in sorted(leaves.items())]
        after = [number for _, number in sorted(result.items())]
        for numbers in aliasing_operands(instruction):
            members = [(before + after)[number] for number in numbers if number < len(before) + len(after)]
            for other in members[1:]:
                self.join(members[0], other)
        for output, (operand, inner) in output_operand_aliases(instruction).items():
            if output in result and inner in operands[operand]:
                self.join(operands[operand][inner], result[output])
        for output, operand in self.updates_in_place(instruction).items():
            if output in result and () in operands[operand]:
                self.join(operands[operand][()], result[output])

    def updates_in_place(self, instruction: Instruction) -> dict[Index, int]:
        """Result leaf -> operand that a dynamic-update-slice overwrites, also at the root of a fusion."""
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            return {(): 0}
        if instruction.opcode == "dynamic-update-slice-start":
            return {(1,): 0}
        if instruction.opcode not in ("fusion", "async-start") or "calls" not in instruction.called:
            return {}
        fused = self.module.computations[instruction.called["calls"][0]]
        roots = (
            {(): fused.root}
            if fused.root.opcode != "tuple"
            else {(i,): fused.by_name[name] for i, name in enumerate(fused.root.operands)}
        )
        found: dict[Index, int] = {}
        for index, root in roots.items():
            root = _through_bitcasts(fused, root)
            if root.opcode in ("dynamic-update-slice", "scatter"):
                target = _through_bitcasts(fused, fused.by_name[root.operands[0]])
                if target.opcode == "parameter":
                    found[(1, *index) if instruction.opcode == "async-start" else index] = int(target.literal or 0)
        return found

    # --- control flow
    def loop(self, instruction: Instruction, computation: Computation, initial: Leaves) -> Leaves:
        body = self.module.computations[instruction.called["body"][0]]
        passing = self.passed_through(body)
        self.depth += 1
        carry = {
            index: number
            if index in passing
            else self.define(body.parameters[0], body.name, index, self.values[number].shape, len(self.points))
            for index, number in initial.items()
        }
        begin = len(self.points)
        final = self.walk(body, [carry])
        self.depth -= 1
        time = len(self.points)
        self.points.append(instruction)
        result: Leaves = {}
        for index, number in initial.items():
            if index in passing:
                self.use({index: number}, time, instruction, computation.name)
                result[index] = number
                continue
            self.values[number].end = max(self.values[number].end, begin)
            self.values[number].users.append((instruction, computation.name))
            result[index] = self.define(instruction, computation.name, index, self.values[number].shape, time)
            for other in (carry[index], final[index], result[index]):
                self.join(number, other)
        return result

    def passed_through(self, body: Computation) -> set[Index]:
        """Carry leaves that the body hands on untouched."""
        if body.name not in self.passing:
            replay = _Replay(self.module)
            replay.passing = self.passing
            parameter = body.parameters[0]
            carry = {index: replay.define(parameter, body.name, index, shape, 0) for index, shape in parameter.shape.leaves()}
            final = replay.walk(body, [carry])
            self.passing[body.name] = {index for index, number in carry.items() if final.get(index) == number}
        return self.passing[body.name]

    def conditional(self, instruction: Instruction, computation: Computation, operands: list[Leaves]) -> Leaves:
        names = [
            name
            for role in ("true_computation", "false_computation", "branch_computations")
            for name in instruction.called.get(role, ())
        ]
        finals = [self.walk(self.module.computations[name], [operands[1 + position]]) for position, name in enumerate(names)]
        time = len(self.points)
        self.points.append(instruction)
        for leaves in operands:
            self.use(leaves, time, instruction, computation.name)
        result: Leaves = {}
        for index, shape in instruction.shape.leaves():
            result[index] = self.define(instruction, computation.name, index, shape, time)
            for final in finals:
                self.join(final[index], result[index])
        return result


def _through_bitcasts(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = computation.by_name[instruction.operands[0]]
    return instruction


def aliasing_operands(instruction: Instruction) -> list[list[int]]:
    """Lists of arrays in one memory, as TPU configs record them: operands are counted first, then the arrays of the result."""
    match = _ALIASING.search(instruction.raw_attributes)
    lists = re.findall(r'"indices":\[([^\]]*)\]', match.group(0)) if match else []
    return [[int(number) for number in re.findall(r'"(\d+)"', numbers)] for numbers in lists]


def output_operand_aliases(instruction: Instruction) -> dict[Index, tuple[int, Index]]:
    """`output_to_operand_aliasing={{1}: (0, {})}` -> {(1,): (0, ())}."""
    text = (
        instruction.attributes.get("output_to_operand_aliasing", "")
        if "output_to_operand_aliasing" in instruction.raw_attributes
        else ""
    )

    def index(digits: str) -> Index:
        return tuple(int(digit) for digit in digits.split(",") if digit.strip())

    return {
        index(output): (int(operand), index(inner))
        for output, operand, inner in re.findall(r"\{([\d, ]*)\}:\s*\((\d+),\s*\{([\d, ]*)\}", text)
    }


def replay(module: Module) -> Schedule:
    """Every value of the program with its first and last schedule point. Raises ValueError when the text is not a schedule."""
    if not module.is_scheduled:
        raise ValueError(
            f"HloModule {module.name} is not scheduled (is_scheduled=true is missing): its order says nothing about lifetimes"
        )
    state = _Replay(module)
    outputs = state.walk(module.entry, None)
    for output, (parameter, inner) in module.aliases.items():
        for value in state.values:
            if value.parameter == parameter and value.index == inner and output in outputs:
                state.join(value.number, outputs[output])
    schedule = Schedule(values=state.values, length=len(state.points), points=state.points, outputs=outputs)
    for value in state.values:
        value.group = state.find(value.number)
        schedule.groups.setdefault(value.group, []).append(value)
    return schedule

"""Optimized HLO text -> computations, instructions and shapes.

The text is what `compiled.as_text()` prints on TPU, GPU and CPU. A model of several billion parameters prints megabytes of it,
so a line is cut only into name, shape, opcode and operands; everything after the operands stays text until somebody asks for
it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxmem.hlo.shapes import ARRAY, COMMENT, parse_shape
from jaxmem.hlo.shapes import HBM as HBM  # this file is what other readers import
from jaxmem.hlo.shapes import HOST as HOST
from jaxmem.hlo.shapes import VMEM as VMEM
from jaxmem.hlo.shapes import Shape as Shape


@dataclass(frozen=True)
class Frames:
    """The tables at the head of the text that say where a `stack_frame_id` is."""

    files: Mapping[int, str] = field(default_factory=dict)
    locations: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # location -> file, line
    frames: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # frame -> location, parent frame (0: none)

    def source(self, frame: int) -> str | None:
        """`file.py:line` of the innermost frame outside the libraries below, else of the innermost one."""
        innermost = None
        for _ in range(len(self.frames) + 1):
            if frame not in self.frames:
                break
            location, frame = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            path = self.files.get(file)
            if path is None:
                continue
            innermost = innermost or _short_source(path, line)
            if not _LIBRARY.search(path):
                return _short_source(path, line)
        return innermost


_LIBRARY = re.compile(r"/(?:site|dist)-packages/(?:jax|jaxlib|flax|optax|chex|equinox|haiku|orbax)/")


def _short_source(path: str, line: int) -> str:
    return "/".join(path.split("/")[-2:]) + f":{line}"


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    index: int  # position in its computation: the schedule, when the module is scheduled
    literal: str | None  # what stands between the parentheses of a constant or a parameter
    raw_attributes: str = field(repr=False)
    frames: Frames = field(repr=False, compare=False)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Attributes by name, each as its text; `metadata` and `backend_config` among them."""
        return dict(_split_attributes(self.raw_attributes))

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of called computations by role: `calls`, `body`, `condition`, `to_apply`, `branch_computations`, ..."""
        roles = (
            "calls",
            "to_apply",
            "body",
            "condition",
            "true_computation",
            "false_computation",
            "branch_computations",
            "called_computations",
        )
        return {role: tuple(_OPERAND.findall(self.attributes[role])) for role in roles if role in self.attributes}

    @cached_property
    def op_name(self) -> str | None:
        match = _OP_NAME.search(self.raw_attributes)
        return re.sub(r"\\(.)", r"\1", match.group(1)) if match else None

    @cached_property
    def source(self) -> str | None:
        """`file.py:line`, with the folder when there is one; None when the compiler kept no trace."""
        frame = _STACK_FRAME.search(self.raw_attributes)
        if frame:
            return self.frames.source(int(frame.group(1)))
        match = _SOURCE.search(self.raw_attributes)
        return _short_source(match.group(1), int(match.group(2))) if match else None

    @property
    def backend_config(self) -> str | None:
        return self.attributes.get("backend_config")

    @property
    def custom_call_target(self) -> str | None:
        target = self.attributes.get("custom_call_target")
        return target.strip('"') if target else None


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: list[Instruction]
    root: Instruction

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def parameters(self) -> list[Instruction]:
        """In parameter order, which is not the order of the text."""
        found = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return sorted(found, key=lambda instruction: int(instruction.literal or 0))


@dataclass(frozen=True)
class Module:
    name: str
    computations: dict[str, Computation]
    entry: Computation
    is_scheduled: bool
    aliases: dict[
        tuple[int, ...], tuple[int, tuple[int, ...]]
    ]  # output index -> entry parameter number, index inside that parameter
    config: dict[str, str]  # the attributes of the first line, each as its text

    @property
    def partitions(self) -> int:
        return int(self.config.get("num_partitions", "1"))

    @property
    def replicas(self) -> int:
        return int(self.config.get("replica_count", "1"))


_OPERAND = re.compile(r"%([^\s,(){}]+)")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+)\s*(?:\(.*)?\{\s*$")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_STACK_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="([^"]*)" source_line=(\d+)')
_END = re.compile(r"\}(?:, execution_thread=\"[^\"]*\")?\s*")
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")


def _closing(text: str, start: int) -> int:
    """Position just after the bracket that closes the one at `start`; quoted text does not count."""
    depth = 0
    for match in _TOKEN.finditer(text, start):
        character = match.group()
        if character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
            if depth == 0:
                return match.end()
    raise ValueError(f"no closing bracket: {text[start : start + 80]!r}")


def _is_open(text: str) -> bool:
    """Whether a bracket is still open: then the next line belongs to this instruction (Pallas metadata has line breaks)."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match.group() in "({[") - (match.group() in ")}]")
    return depth > 0


def _split_attributes(text: str) -> Iterator[tuple[str, str]]:
    """`, name=value` pairs of the top level, with the brackets and quotes of the values intact."""
    depth, begin = 0, 0
    pieces = []
    for match in _TOKEN.finditer(text):
        character = match.group()
        if character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == "," and depth == 0:
            pieces.append(text[begin : match.start()])
            begin = match.end()
    pieces.append(text[begin:])
    for piece in pieces:
        name, equals, value = piece.strip().partition("=")
        if equals:
            yield name, value


def _instruction(line: str, index: int, shapes: dict[str, Shape], frames: Frames) -> tuple[Instruction, bool]:
    head = _INSTRUCTION.match(line)
    if head is None:
        raise ValueError(f"not an instruction: {line[:120]!r}")
    start = head.end()
    if line[start] == "(":
        shape_end = _closing(line, start)
    else:
        match = ARRAY.match(line, start)
        if match is None:
            raise ValueError(f"no shape in: {line[:160]!r}")
        shape_end = match.end()
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        raise ValueError(f"no opcode in: {line[:160]!r}")
    end = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : end - 1]
    literal = inside if opcode.group(1) in ("constant", "parameter") else None
    instruction = Instruction(
        name=head.group(2),
        opcode=opcode.group(1),
        shape=parse_shape(line[start:shape_end], shapes),
        operands=() if literal is not None else _operands(inside),
        index=index,
        literal=literal,
        raw_attributes=line[end:],
        frames=frames,
    )
    return instruction, head.group(1) is not None


def _operands(inside: str) -> tuple[str, ...]:
    named = _OPERAND.findall(inside)
    if named or not inside.strip():
        return tuple(named)
    return tuple(piece.split()[-1] for piece in COMMENT.sub("", inside).split(","))


def _aliases(text: str) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """`{ {0}: (3, {}, may-alias), ... }` -> {(0,): (3, ())}."""

    def index(digits: str) -> tuple[int, ...]:
        return tuple(int(digit) for digit in digits.split(",") if digit.strip())

    return {
        index(output): (int(number), index(inner))
        for output, number, inner in re.findall(r"\{([\d, ]*)\}:\s*\((\d+),\s*\{([\d, ]*)\}", text)
    }


def parse(text: str) -> Module:
    """The module that `text` prints. Raises ValueError, quoting the line, for text that is not HLO.

    Text: `HloModule NAME, attributes`, tables of stack frames, then computations `NAME (parameters) -> shape { instructions }`.
    """
    lines = text.splitlines()
    while lines and not lines[0].startswith("HloModule"):
        lines.pop(0)
    if not lines:
        raise ValueError("no line begins with HloModule: this is not HLO text")
    name, _, header = lines[0][len("HloModule ") :].partition(",")
    config = dict(_split_attributes(header))
    files: dict[int, str] = {}
    locations: dict[int, tuple[int, int]] = {}
    stack: dict[int, tuple[int, int]] = {}
    frames = Frames(files=files, locations=locations, frames=stack)
    shapes: dict[str, Shape] = {}
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    table, current, is_entry = "", None, False
    pending: list[str] = []

    def close(name: str, bodies: list[str]) -> Computation:
        instructions, root = [], None
        for index, line in enumerate(bodies):
            instruction, is_root = _instruction(line, index, shapes, frames)
            instructions.append(instruction)
            root = instruction if is_root else root
        if not instructions:
            raise ValueError(f"computation {name} has no instructions")
        return Computation(name=name, instructions=instructions, root=root or instructions[-1])

    for line in lines[1:]:
        if current is None:
            match = _COMPUTATION.match(line)
            if match:
                current, is_entry, pending = match.group(2), match.group(1) is not None, []
            elif row := _TABLE_ROW.match(line):
                number, rest = int(row.group(1)), row.group(2)
                values = [int(value) for value in re.findall(r"=(\d+)", rest)]
                if table == "FileNames":
                    files[number] = rest.strip('"')
                elif table == "FileLocations":
                    locations[number] = (values[0], values[2])
                elif table == "StackFrames":
                    stack[number] = (values[0], values[1] - 1)  # the text counts parents from one: 1 means there is none
            elif line.strip():
                table = line.strip()
        elif _END.fullmatch(line) and not (pending and _is_open(pending[-1])):
            computation = close(current, pending)
            computations[current] = computation
            entry = computation if is_entry else entry
            current = None
        elif _INSTRUCTION.match(line):
            pending.append(line)
        elif pending:
            pending[-1] += "\n" + line  # a literal or a configuration that runs over several lines
    if entry is None:
        raise ValueError(f"HloModule {name} has no ENTRY computation")
    return Module(
        name=name.strip(),
        computations=computations,
        entry=entry,
        is_scheduled=config.get("is_scheduled") == "true",
        aliases=_aliases(config.get("input_output_alias", "")),
        config=config,
    )


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often a `while` runs its body: what the compiler knows, else read from `counter < constant`; None when neither says.

    GPU text carries `known_trip_count`. TPU text does not: there the condition compares a counter of the carry with a constant;
    the counter starts at a constant of the caller (0 when it cannot be traced, as every scan starts there) and grows by a constant
    of the body (2 in the compiler's own loops of collective matmuls).
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.raw_attributes)
    if known:
        return int(known.group(1))
    condition = module.computations[loop.called["condition"][0]]
    compare, scope = condition.root, condition
    binding: dict[int, Instruction] = {}
    while compare.opcode in ("fusion", "call", "bitcast", "copy"):
        if compare.opcode in ("bitcast", "copy"):
            compare = scope.by_name[compare.operands[0]]
            continue
        binding = {number: scope.by_name[operand] for number, operand in enumerate(compare.operands)}
        scope = module.computations[(compare.called.get("calls") or compare.called["to_apply"])[0]]
        compare = scope.root
    if compare.opcode != "compare":
        return None
    sides = [_origin(scope.by_name[operand], scope, binding, condition) for operand in compare.operands]
    counters = [side for side in sides if side.opcode == "get-tuple-element"]
    bounds = [side for side in sides if side.opcode == "constant"]
    if len(counters) != 1 or len(bounds) != 1:
        return None
    position = int(counters[0].attributes["index"])
    bound, start = _integer(bounds[0]), _initial_value(module, loop, position)
    direction = compare.attributes.get("direction")
    if sides[0] is bounds[0]:
        direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction or "")
    step = _step(module, loop, position)
    if bound is None or not step or direction not in ("LT", "LE"):
        return None
    return max(0, -(-(bound - (start or 0) + (direction == "LE")) // step))


def _origin(instruction: Instruction, scope: Computation, binding: Mapping[int, Instruction], caller: Computation) -> Instruction:
    """What a value is, through copies and out of a fusion into its caller."""
    while True:
        if instruction.opcode in ("copy", "bitcast", "convert"):
            instruction = scope.by_name[instruction.operands[0]]
        elif instruction.opcode == "parameter" and int(instruction.literal or 0) in binding:
            instruction, scope, binding = binding[int(instruction.literal or 0)], caller, {}
        else:
            return instruction


def _step(module: Module, loop: Instruction, position: int) -> int | None:
    """The constant that the body adds to an element of its carry; None when it does something else with it."""
    body = module.computations[loop.called["body"][0]]
    if body.root.opcode != "tuple":
        return None
    grown, scope = body.by_name[body.root.operands[position]], body
    binding: dict[int, Instruction] = {}
    while grown.opcode in ("copy", "bitcast", "fusion", "get-tuple-element"):
        element = None
        if grown.opcode == "get-tuple-element":  # one result of a fusion with several
            element, grown = int(grown.attributes["index"]), scope.by_name[grown.operands[0]]
            if grown.opcode != "fusion":
                return None
        if grown.opcode == "fusion":
            binding = {number: scope.by_name[operand] for number, operand in enumerate(grown.operands)}
            scope = module.computations[grown.called["calls"][0]]
            grown = scope.root if element is None else scope.by_name[scope.root.operands[element]]
        else:
            grown = scope.by_name[grown.operands[0]]
    if grown.opcode != "add":
        return None
    sides = [_origin(scope.by_name[operand], scope, binding, body) for operand in grown.operands]
    steps = [_integer(side) for side in sides if side.opcode == "constant"]
    counters = [side for side in sides if side.opcode == "get-tuple-element" and side.attributes["index"] == str(position)]
    return steps[0] if len(steps) == len(counters) == 1 else None


def _integer(instruction: Instruction) -> int | None:
    return int(instruction.literal) if instruction.literal and re.fullmatch(r"-?\d+", instruction.literal) else None


def _initial_value(module: Module, loop: Instruction, position: int) -> int | None:
    for computation in module.computations.values():
        if computation.by_name.get(loop.name) is loop:
            carry = computation.by_name[loop.operands[0]]
            if carry.opcode != "tuple":
                return None
            return _integer(_origin(computation.by_name[carry.operands[position]], computation, {}, computation))
    return None

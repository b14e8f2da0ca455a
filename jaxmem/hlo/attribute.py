"""What a buffer is for and which part of the model it belongs to, from the names that tracing left in the program.

JAX writes the stack of named scopes into every operation:
`jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/blocks/mlp/mul` is the `mul` of the scope `blocks/mlp`,
made again in the backward pass. What the compiler adds by itself (copies, layout changes, staging) carries no such name and
takes that of the data it moves.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jaxmem.hlo.parse import Computation, Instruction, Module
from jaxmem.hlo.schedule import Schedule, Value, output_operand_aliases

Phase = Literal["plain", "forward", "backward", "recomputed"]

_NOISE = frozenset(
    {
        "while",
        "body",
        "cond",
        "scan",
        "closed_call",
        "core_call",
        "checkpoint",
        "remat",
        "remat2",
        "rematted_computation",
        "eval_jaxpr",
        "shard_map",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "pjit",
        "xla_call",
        "named",
        "true_fun",
        "false_fun",
        "body_fun",
        "cond_fun",
        "main",
        "fori_loop",
    }
)
_WRAPPER = re.compile(r"^(transpose|jvp|vmap|remat|checkpoint|pmap|linearize|mul_by)\((.*)\)$")
_DROPPED = re.compile(r"^(?:p?jit|branch_\d+_fun|cond_branch)(?:\(.*\))?$|->|^branch_\d+_fun$")
_KERNEL = re.compile(r"(?:static_sparsity_)?splash|mha_|flash_attention|ragged_")  # names of Pallas kernels, not of modules
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
_MOVES = frozenset(
    {
        "copy",
        "copy-start",
        "convert",
        "slice-start",
        "dynamic-slice-start",
        "slice",
        "dynamic-slice",
        "bitcast",
        "bitcast-convert",
        "transpose",
        "reshape",
        "async-start",
        "pad",
        "concatenate",
        "tuple",
        "get-tuple-element",
        "parameter",
        "constant",
        "reduce-precision",
    }
)
_MOVING_CALLS = ("ConcatBitcast", "MoveToHost", "MoveToDevice", "annotate_device_placement", "SliceBitcast")
_LOSS_SCOPES = ("head", "loss", "logits", "lm_head")
_STATE = ("params", "opt_state", "batch", "rng")
_TREE_ROOTS = frozenset(
    {"params", "state", "train_state", "opt_state", "opt", "model", "batch", "mu", "nu", "trace", "inner_state"}
)
_RANK = {
    kind: rank
    for rank, kind in enumerate(
        (
            "params",
            "opt_state",
            "batch",
            "rng",
            "output",
            "gradients",
            "saved",
            "logits",
            "collective",
            "recomputed",
            "activations",
            "workspace",
            "other",
        )
    )
}


@dataclass(frozen=True)
class Label:
    kind: str | None = None
    module: str | None = None
    source: str | None = None
    op_name: str | None = None
    path: str | None = None
    sharding: str | None = None


@lru_cache(maxsize=65536)
def scope(op_name: str | None) -> tuple[Phase, str | None]:
    """Phase and module path of an operation's name: `("backward", "blocks/mlp")`. The module is None where no scope was open."""
    if not op_name or "/" not in op_name:
        return "plain", None
    phase: Phase = "plain"
    parts: list[str] = []
    pieces = list(_components(op_name))
    for piece in pieces[:-1]:
        inside = piece
        while wrapped := _WRAPPER.match(inside):
            if wrapped.group(1) == "transpose":
                phase = "backward"
            elif wrapped.group(1) == "jvp" and phase == "plain":
                phase = "forward"
            inside = wrapped.group(2)
        for part in inside.split("/") if not _DROPPED.search(inside) else []:
            if part == "rematted_computation":
                phase = "recomputed"
            if (
                part and part not in _NOISE and not _KERNEL.match(part) and part not in parts[-1:]
            ):  # a scope entered again inside itself says nothing new
                parts.append(part)
    return phase, "/".join(parts) or None


def _components(op_name: str) -> Iterator[str]:
    """Split at the slashes that stand outside parentheses."""
    depth, begin = 0, 0
    for position, character in enumerate(op_name):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "/" and depth <= 0:
            yield op_name[begin:position]
            begin = position + 1
    yield op_name[begin:]


def classify(
    op_name: str | None, *, opcode: str = "", dims: tuple[int, ...] = (), parameter_dims: frozenset[tuple[int, ...]] = frozenset()
) -> tuple[str | None, str | None]:
    """Kind and module of the result of one operation, from its name alone; None where the name does not say.

    `dims` is the shape of the result on one device and `parameter_dims` are those of the parameters, whole and split: what the
    backward pass makes in such a shape is a gradient, anything else that it makes is an activation's.
    """
    phase, module = scope(op_name)
    if is_collective(opcode):
        reduced = opcode.startswith(("all-reduce", "reduce-scatter")) and phase == "backward" and dims in parameter_dims
        return "gradients" if reduced else "collective", module
    if module is None and phase == "plain":
        return None, None
    first = (module or "").split("/")[0]
    if first == "optimizer":
        return "workspace", module
    if phase == "recomputed":
        return "recomputed", module
    if phase == "backward" and dims in parameter_dims or first == "gradients":
        return "gradients", module
    if any(part in _LOSS_SCOPES for part in (module or "").split("/")) and dims not in parameter_dims:
        return "logits", module
    return "activations", module


def is_collective(opcode: str) -> bool:
    return opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def _weight(value: Value) -> int:
    return value.shape.tiled_bytes


class Attribution:
    """Labels of the groups of one schedule.

    `result` is the artifact's `result.json`; without its lists, arguments are read from their names.
    """

    def __init__(self, module: Module, schedule: Schedule, result: Mapping[str, Any]):
        self.module, self.schedule = module, schedule
        self.arguments: Sequence[Mapping[str, Any]] = result.get("arguments") or []
        self.outputs: Sequence[Mapping[str, Any]] = result.get("outputs") or []
        self.labels: dict[int, Label] = {}
        self.defined: dict[tuple[str, str], list[Value]] = {}
        for value in schedule.values:
            self.defined.setdefault((value.computation, value.instruction.name), []).append(value)
        self.output_order = {number: position for position, (_, number) in enumerate(sorted(schedule.outputs.items()))}
        self.owner: dict[int, int] = {value.number: group for group, values in schedule.groups.items() for value in values}
        self.parameter_dims = self._parameter_dims()
        self.home = {name: _common_scope(computation) for name, computation in module.computations.items()}
        self.groups: dict[int, Label] = {}
        self._open: set[int] = set()  # values and groups being labelled: a loop leads back to itself
        self._open_groups: set[int] = set()

    def _parameter_dims(self) -> frozenset[tuple[int, ...]]:
        """Shapes of parameters, whole and split, and of one layer of a stack; vectors are told apart too badly to count."""
        found = set()
        for value in self.schedule.values:
            if value.parameter is not None and self._argument(value).kind == "params":
                shapes = [value.shape.dims]
                if value.parameter < len(self.arguments) and self.arguments[value.parameter].get("shape"):
                    shapes.append(tuple(self.arguments[value.parameter]["shape"]))
                for dims in shapes:
                    found |= {dims, dims[1:], (1, *dims[1:])}
        return frozenset(dims for dims in found if sum(size > 1 for size in dims) >= 2)

    def _argument(self, value: Value) -> Label:
        name = value.instruction.op_name
        if value.parameter is not None and value.parameter < len(self.arguments):
            entry = self.arguments[value.parameter]
            kind = entry.get("kind") or "other"
            module = entry.get("module") or _path_module(entry.get("path") or name or "")
            return Label(
                kind=kind,
                module=module or kind,
                source=None,
                op_name=name,
                path=entry.get("path"),
                sharding=entry.get("sharding"),
            )
        kind = (
            "opt_state"
            if re.match(r"opt|.*\bopt_state", name or "")
            else "params"
            if re.search(r"param", name or "")
            else "other"
        )
        return Label(kind=kind, module=_path_module(name or ""), op_name=name)

    # --- one value
    def of_value(self, value: Value) -> Label:
        """Label of one array by itself, without the rest of its group."""
        if value.number in self.labels:
            return self.labels[value.number]
        if value.parameter is not None:
            label = self._argument(value)
        elif value.number in self._open:
            return Label()
        else:
            self._open.add(value.number)
            label = self._derive(value)
            self._open.discard(value.number)
        self.labels[value.number] = label
        return label

    def _derive(self, value: Value) -> Label:
        instruction = value.instruction
        if instruction.opcode in ("parameter", "while", "conditional") and (instruction.op_name or "while").endswith("while"):
            return (
                Label()
            )  # a carry: the other members of its group say more; a matmul that the compiler made a loop has its own name
        if value.index in output_operand_aliases(instruction):  # handed on as it came, while something else is computed
            handed_on = [read for read in value.reads if self.owner[read.number] == self.owner[value.number]]
            return self.of_value(handed_on[0]) if handed_on else Label()
        op_name, source = self._named(instruction, value.index)
        opcode = self._collective(value) or instruction.opcode
        kind, module = classify(op_name, opcode=opcode, dims=value.shape.dims, parameter_dims=self.parameter_dims)
        if instruction.opcode == "custom-call" and value.index and value.shape.dtype == "s8":
            return Label(kind="workspace", module=module, source=source, op_name=op_name)  # scratch of a library's matmul
        moved = self._moved(value)
        if moved is not None and not is_collective(opcode):
            inherited = self._origin(moved)
            state = (
                inherited.kind in _STATE
                or inherited.kind == "saved"
                and (kind is None or scope(op_name)[0] in ("backward", "recomputed"))
            )
            if state or kind is None or module is None:
                carried = (
                    moved.instruction.opcode == "parameter" and moved.parameter is None
                )  # by a loop: its own scope says more
                return Label(
                    kind=inherited.kind if state or kind is None else kind,
                    module=(self.home.get(value.computation) if carried and not state else None) or inherited.module,
                    source=source or inherited.source,
                    op_name=op_name or inherited.op_name,
                )
        if module is None or (op_name or "").endswith("dynamic_update_slice"):  # a loop's stack: of what is written into it
            data = self._module_of_data(value)
            module = data if module is None or (data or "").startswith(f"{module}/") else module
        return Label(kind=kind, module=module, source=source, op_name=op_name)

    def _made_by(self, instruction: Instruction, index: tuple[int, ...]) -> Instruction | None:
        """The operation inside a fusion that makes the array at `index` of its result."""
        if instruction.opcode not in ("fusion", "async-start") or "calls" not in instruction.called:
            return None
        fused = self.module.computations[instruction.called["calls"][0]]
        inner = fused.root
        if inner.opcode == "tuple" and index and index[0] < len(inner.operands):
            inner = fused.by_name[inner.operands[index[0]]]
        return inner

    def _named(self, instruction: Instruction, index: tuple[int, ...] = ()) -> tuple[str | None, str | None]:
        """The name of what makes one array of a result: of the part of a fusion that does, else its own, else of most bytes."""
        candidates = [instruction]
        if inner := self._made_by(instruction, index):
            candidates = [inner, instruction] if instruction.shape.is_tuple else [instruction, inner]
            fused = self.module.computations[instruction.called["calls"][0]]
            while inner.opcode in ("bitcast", "dynamic-update-slice", "convert", "copy", "reduce-precision") and inner.operands:
                inner = fused.by_name[inner.operands[inner.opcode == "dynamic-update-slice"]]
                candidates.insert(-1 if instruction.shape.is_tuple else len(candidates), inner)
        named = [part for part in candidates if part.op_name and "/" in part.op_name]
        if named:
            best = max(named, key=lambda part: (scope(part.op_name)[1] or "").count("/") + (scope(part.op_name)[1] is not None))
            return best.op_name, best.source
        if "calls" not in instruction.called:
            return None, instruction.source
        weights: Counter[str] = Counter()
        sources: dict[str, str | None] = {}
        for part in self.module.computations[instruction.called["calls"][0]].instructions:
            if part.op_name and "/" in part.op_name and not part.shape.is_tuple:
                weights[part.op_name] += part.shape.bytes
                sources.setdefault(part.op_name, part.source)
        if not weights:
            return None, instruction.source
        most = weights.most_common(1)[0][0]
        return most, sources[most]

    def _collective(self, value: Value) -> str | None:
        """The collective that makes an array: itself, inside an async wrapper, or at the end of a fusion with slices around it.

        A fusion that computes while a collective runs beside it makes arrays of its own as well; those are not the collective's.
        """
        if is_collective(value.instruction.opcode):
            return value.instruction.opcode
        inner = self._made_by(value.instruction, value.index)
        if inner is None:
            return None
        fused = self.module.computations[value.instruction.called["calls"][0]]
        while not is_collective(inner.opcode):
            before = [fused.by_name[name] for name in inner.operands]
            if inner.opcode not in _MOVES and inner.opcode != "custom-call" or not before:
                return None
            inner = next((part for part in before if is_collective(part.opcode)), before[0])
        return inner.opcode

    def _moved(self, value: Value) -> Value | None:
        """The array whose elements this one holds unchanged, in another place, layout or precision."""
        instruction = value.instruction
        reads = [source for source in value.reads if source.number != value.number]
        if instruction.opcode.startswith("dynamic-update-slice"):
            return reads[1] if len(reads) > 1 else None
        moves = instruction.opcode in _MOVES or instruction.custom_call_target in _MOVING_CALLS
        if instruction.opcode == "fusion":
            moves = all(inner.opcode in _MOVES for inner in self.module.computations[instruction.called["calls"][0]].instructions)
        if not moves:
            return None
        return max(reads, key=_weight, default=None)

    def _origin(self, value: Value) -> Label:
        """Label of the memory that an array lies in, or of the array itself while that memory is being labelled."""
        group = self.owner[value.number]
        if group in self.groups or group not in self._open_groups:
            return self.of_group(group)
        others = [self.of_value(value)] + [self.of_value(other) for other in self.schedule.groups[group]]
        return min(others, key=_informative)

    def _module_of_data(self, value: Value) -> str | None:
        """The module of what a nameless operation reads, largest first, then of the computation that it stands in."""
        for source in sorted(value.reads, key=_weight, reverse=True):
            module = self.of_value(source).module
            if module is not None and self.owner[source.number] != self.owner[value.number]:
                return module
        return self.home.get(value.computation)

    # --- one group
    def of_group(self, group: int) -> Label:
        """Label of a piece of memory: the argument or result that it is, else what says most among the arrays that it holds."""
        if group in self.groups:
            return self.groups[group]
        self._open_groups.add(group)
        values = self.schedule.groups[group]
        arguments = [value for value in values if value.parameter is not None]
        results = [value for value in values if value.number in self.output_order]
        if arguments:
            label = self._argument(arguments[0])
        elif results and self.output_order[results[0].number] < len(self.outputs):
            entry = self.outputs[self.output_order[results[0].number]]
            kind = entry.get("kind") or "output"
            made = self.of_value(results[0])
            label = Label(
                kind="output" if kind == "other" else kind,
                module=entry.get("module") or made.module or "output",
                source=made.source,
                op_name=made.op_name,
                path=entry.get("path"),
            )
        else:
            label = self._best(values)
        self._open_groups.discard(group)
        self.groups[group] = label
        return label

    def _best(self, values: list[Value]) -> Label:
        deepest_first = sorted(
            values, key=lambda value: -value.depth
        )  # of a loop's carry, what the loop makes rather than what it got
        labels = [self.of_value(value) for value in deepest_first]
        best = min(labels, key=_informative)
        phases = {scope(label.op_name)[0] for label in labels if label.op_name}
        kind = best.kind
        if (
            kind in ("activations", "recomputed")
            and "forward" in phases
            and "backward" not in phases
            and self._read_backward(values)
        ):
            kind = "saved"
        module = best.module or next((label.module for label in labels if label.module), None)
        if kind is None or module is None:
            readers = [self.of_value(reader) for value in values for reader in self._readers(value)]
            reader = min(readers, key=_informative, default=Label())
            module = module or reader.module
            kind = kind or ("workspace" if module else None)
        source = best.source or next((label.source for label in labels if label.source), None)
        return Label(
            kind=kind,
            module=module,
            source=source,
            op_name=best.op_name or next((label.op_name for label in labels if label.op_name), None),
        )

    def _readers(self, value: Value) -> Iterator[Value]:
        for user, computation in value.users:
            yield from self.defined.get((computation, user.name), [])

    def _read_backward(self, values: list[Value]) -> bool:
        return any(
            scope(self._named(user)[0])[0] in ("backward", "recomputed")
            for value in values
            for user, _ in value.users
            if user.opcode != "while"
        )


def _informative(label: Label) -> tuple[bool, bool, int]:
    return label.kind is None, label.module is None, _RANK.get(label.kind or "", len(_RANK))


def _common_scope(computation: Computation) -> str | None:
    """The scope that all named operations of a computation share: `blocks` for a loop over layers."""
    modules = [
        module.split("/") for module in (scope(instruction.op_name)[1] for instruction in computation.instructions) if module
    ]
    if not modules:
        return None
    shared = modules[0]
    for module in modules[1:]:
        shared = shared[
            : next((i for i, (a, b) in enumerate(zip(shared, module, strict=False)) if a != b), min(len(shared), len(module)))
        ]
    return "/".join(shared) or None


def _path_module(path: str) -> str | None:
    """`params['blocks']['mlp']['up']`, `0/opt_state/0/mu/blocks/mlp/up` -> `blocks/mlp`: without roots and leaf."""
    names = [name for name in re.findall(r"[A-Za-z_]\w*", path) if name not in _TREE_ROOTS]
    return "/".join(names[:-1]) or (names[0] if names else None)

"""From a rule (features, network, step) to an optax transformation: accumulators, normalisation, folding, blocks.

Three exact foldings make it cheap. The network's first layer is linear, so (1) each feature's normaliser is multiplied into the
weights, (2) the step embedding, equal for all elements, becomes a bias, and (3) so do row and column features, a bias for each row
and one for each column. What is left for each element are 16 of small_fc's 39 features.

A tensor is passed over twice: once to update its accumulators and take every feature's mean square, once to make the step. Nothing
as large as the tensor exists in between but the accumulators; the step is written over the gradient.

Arrays of one tensor are [A, layers, *shape]: A accumulators first. Layers that a scan stacks are tensors of their own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmem.optim.learned import accumulators
from jaxmem.optim.learned.accumulators import Moments
from jaxmem.optim.learned.blocks import blocks
from jaxmem.optim.learned.features import Channels, Seen
from jaxmem.optim.learned.fused import Kernel, update_matrix

Weights = dict[str, jax.Array]

# Elements of a block, for CPUs: what a block makes on the way stays in their caches. TPUs and GPUs want tensors whole (chunk=None):
# their compilers fuse what would be made on the way, and a loop of small blocks leaves them idle. GPUs want them fenced, too: XLA
# otherwise writes each pass as one kernel that takes minutes to compile.
CHUNK = 2**18

# (network outputs, seen, count) -> step, for one block
StepOf = Callable[[list[jax.Array], Seen, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What makes one learned optimizer. `floor` bounds what factored statistics are divided by, `momentum_floor` the same for momenta of
    tensors without lines; `normaliser` maps a mean square to a feature's factor; `unit` steps have a root mean square of one a layer."""

    momentum_decays: Callable[[Weights], jax.Array]  # [3]
    second_decay: Callable[[Weights], jax.Array]  # []
    factored_decays: Callable[[Weights], jax.Array]  # [3]
    elements: Callable[[Seen], Channels]
    lines: Callable[[list[jax.Array], list[jax.Array]], Channels]
    floor: float
    momentum_floor: float
    normaliser: Callable[[jax.Array], jax.Array]
    bias: Callable[[Weights, jax.Array], jax.Array]  # (weights, count) -> [hidden]
    step: StepOf
    size: Literal["learned", "unit"]


class State(NamedTuple):
    """`steps` done; `momenta` [3, *shape]; `scales` [3, *shape without the last] (int8 only); `second` [*shape]; `rows` and `cols`
    [3, *shape without the largest or the second largest dim]. Tensors of fewer than two dims have `rows` [3, *shape] and no `cols`."""

    steps: jax.Array
    momenta: Any
    scales: Any
    second: Any
    rows: Any
    cols: Any


class Leaf(NamedTuple):
    """The state of one parameter."""

    momenta: jax.Array
    scales: Any
    second: jax.Array
    rows: jax.Array
    cols: Any


def scale_by(rule: Rule, weights: Weights, *, stacked: Any = None, moments: Moments = "f32",
             chunk: int | None = CHUNK, fenced: bool = False, kernel: Kernel | None = None) -> optax.GradientTransformationExtraArgs:
    """The steps of `rule`, to be subtracted: chain `optax.scale_by_learning_rate` and weight decay behind it.

    `stacked` is a tree like the parameters with 1 where the first dim counts layers, each a tensor of its own (None: nowhere).
    `chunk`, `fenced` and `kernel` (for the matrices it does) are about speed alone; see `CHUNK`.
    `update` needs the parameters, and the loss neither as `value` nor otherwise. Every array is made as the parameter is split.
    """
    layers_of = {jax.tree_util.keystr(path): n for path, n in jax.tree_util.tree_flatten_with_path(stacked)[0]}

    def init(params: optax.Params) -> State:
        paths, tree = _flatten(params)
        new = [new_leaf(p.shape, layers_of.get(jax.tree_util.keystr(path), 0), moments) for path, p in paths]
        return State(jnp.zeros((), jnp.int32), *_fields(tree, new))

    def update(updates: optax.Updates, state: State, params: optax.Params | None = None, *, value: object = None,
               **extra: object) -> tuple[optax.Updates, State]:
        del value, extra
        if params is None:
            raise ValueError("a learned optimizer's update needs the parameters: update(gradients, state, params)")
        paths, tree = _flatten(params)
        gradients = tree.flatten_up_to(updates)
        # A scale of the whole tree, `None` for a state without scales, is no leaf of any parameter.
        states = [Leaf(*leaf) for leaf in zip(*(tree.flatten_up_to(field) if field is not None else [None] * len(paths)
                                                for field in state[1:]), strict=True)]
        out: list[tuple[jax.Array | None, Leaf]] = []
        for (path, p), g, leaf in zip(paths, gradients, states, strict=True):
            if g is None:  # optax's mark of a parameter that takes no part
                out.append((None, leaf))
                continue
            name = jax.tree_util.keystr(path)
            stack = layers_of.get(name, 0)
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                if kernel is not None and kernel.does(name, p.shape, stack, moments):
                    out.append(update_matrix(kernel, name, rule, weights, state.steps, g, p, leaf, stack, moments))
                else:
                    out.append(update_leaf(rule, weights, state.steps, g, p, leaf, stack, moments, chunk, fenced))
        new = State(optax.safe_increment(state.steps), *_fields(tree, [leaf for _, leaf in out]))
        return tree.unflatten([u for u, _ in out]), new

    return optax.GradientTransformationExtraArgs(init, update)


def _flatten(params: optax.Params) -> tuple[list[tuple[Any, jax.Array]], Any]:
    return jax.tree_util.tree_flatten_with_path(params)


def _fields(tree: Any, leaves: list[Leaf]) -> list[Any]:
    """Leaf states -> one tree a field, and None for a field that no leaf has."""
    fields = [list(column) for column in zip(*leaves, strict=True)] if leaves else [[]] * len(Leaf._fields)
    return [None if name == "scales" and all(x is None for x in column) else tree.unflatten(column)
            for name, column in zip(Leaf._fields, fields, strict=True)]


def new_leaf(shape: tuple[int, ...], stacked: int, moments: Moments) -> Leaf:
    own = shape[stacked:]
    dims = accumulators.factored_dims(own)
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    rows, cols = [shape if dims is None else tuple(n for i, n in enumerate(shape) if i != stacked + d) for d in dims or (0, 0)]
    scales = zeros((3, *(shape[:-1] if own else shape))) if moments == "int8" else None
    return Leaf(momenta=jnp.zeros((3, *shape), accumulators.STORED[moments]), scales=scales, second=zeros(shape), rows=zeros((3, *rows)),
                cols=optax.MaskedNode() if dims is None else zeros((3, *cols)))


def update_leaf(rule: Rule, weights: Weights, count: jax.Array, g: jax.Array, p: jax.Array, leaf: Leaf, stacked: int,
                moments: Moments, chunk: int | None, fenced: bool) -> tuple[jax.Array, Leaf]:
    """(step, new state) of one parameter [layers if stacked, *shape]."""
    layers, own = (p.shape[0] if stacked else 1), p.shape[stacked:] or (1,)
    plan = blocks(own, layers, chunk, fenced=fenced)
    cut = plan.cut
    along = 2 if len(own) == 1 else -1  # of a cut array: the last dim of the tensor, along which int8 has a scale

    def seen(read: dict, g: jax.Array, momenta: list[jax.Array], v: jax.Array, diagonal: jax.Array | None) -> Seen:
        common = dict(g=g[0].astype(jnp.float32), p=read["p"][0].astype(jnp.float32), m=momenta, v=v,
                      mean_square_g=read["mean_square_g"][0])
        if diagonal is None:
            return Seen(rows=[], cols=[], row_factor=list(read["row_factor"]), col_factor=list(read["col_factor"]),
                        momentum_factor=None, **common)
        one = jnp.ones((), jnp.float32)
        factor = [lax.rsqrt(jnp.maximum(d + rule.floor, rule.floor)) for d in diagonal]
        return Seen(rows=list(diagonal), cols=list(diagonal), row_factor=factor, col_factor=[one] * 3,
                    momentum_factor=[lax.rsqrt(d + rule.momentum_floor) for d in diagonal], **common)

    def channels(s: Seen) -> Channels:
        return dict(sorted((rule.elements(s) | (rule.lines(s.rows, s.cols) if s.rows else {})).items()))

    # ---- row and column statistics, and what follows from them
    read: dict[str, Any] = {"p": cut(p.reshape(1, layers, *own))}
    gradient = g.reshape(1, layers, *own)
    factored, rows, cols, lines = statistics(rule, weights, gradient, leaf, own, layers)
    read |= {name: cut(x) for name, x in factored.items()}

    # ---- first pass: accumulators, and the mean square of every feature
    keep_v, keep_m = (jnp.clip(rule.second_decay(weights), 0, 1), rule.momentum_decays(weights))
    keep_d = jnp.clip(rule.factored_decays(weights), 0, 1)
    stored = {"m": cut(leaf.momenta.reshape(3, layers, *own)), "v": cut(leaf.second.reshape(1, layers, *own))}
    if leaf.scales is not None:
        stored["s"] = cut(leaf.scales.reshape(3, layers, *own[:-1], 1))
    if lines is None:
        stored["d"] = cut(leaf.rows.reshape(3, layers, *own))

    def accumulate(read: dict, write: dict) -> tuple[dict, jax.Array]:
        g = read["g"].astype(jnp.float32)
        expand = (slice(None),) + (None,) * (g.ndim - 1)
        m = keep_m[expand] * accumulators.decode(write["m"], write.get("s")) + (1 - keep_m)[expand] * g
        new = {"v": keep_v * write["v"] + (1 - keep_v) * g * g}
        new["m"], scales = accumulators.encode(m, moments, count, along)
        if scales is not None:
            new["s"] = scales
        if "d" in write:
            new["d"] = keep_d[expand] * write["d"] + (1 - keep_d)[expand] * (g * g + 1e-30)
        new = lax.optimization_barrier(new)  # made once, not again for every feature
        s = seen(read, read["g"], list(accumulators.decode(new["m"], new.get("s"))), new["v"][0], new.get("d"))
        shape = s.g.shape
        squares = [jnp.sum(jnp.square(jnp.broadcast_to(x, shape)), axis=tuple(range(1, len(shape)))) for x in channels(s).values()]
        return new, jnp.stack(squares)

    names = element_channels(rule, has_lines=lines is not None)
    stored, sums = plan.over(accumulate, read | {"g": cut(gradient)}, stored, len(names))

    # ---- the first layer with everything folded in
    size = gradient.size // layers
    w0 = weights["w0"]
    factors, first = rule.normaliser(sums / size), w0[jnp.asarray(names)]  # [channels, layers], [channels, hidden]
    hidden = w0.shape[1]
    # A whole stack would have channels x hidden numbers for each layer, which XLA for TPU does not fuse: it makes every product as large
    # as the stack. There the features are multiplied by their factors instead.
    fold = layers == 1 or not plan.whole
    scaled = first[:, :, None] * factors[:, None, :] if fold else first[:, :, None]
    second = dict(read, m=stored["m"], v=stored["v"])
    second |= {name: stored[name] for name in ("s", "d") if name in stored}
    second["w"] = scaled.reshape(len(names) * hidden, -1, *(1,) * (len(own) + 1))
    if not fold:
        second["factors"] = factors.reshape(len(names), layers, *(1,) * (len(own) + 1))
    second["lines"] = [cut(x) for x in line_terms(rule, w0, lines)] if lines is not None else []
    bias = rule.bias(weights, count)
    layer = [(weights[f"w{i}"], weights[f"b{i}"]) for i in (1, 2)]

    # ---- second pass: the step
    def apply(read: dict, write: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        s = seen(read, write, list(accumulators.decode(read["m"], read.get("s"))), read["v"][0], read.get("d"))
        x = list(channels(s).values())
        if not fold:
            x = [a * factor for a, factor in zip(x, read["factors"], strict=True)]
        y = [sum((x[i] * read["w"][i * hidden + h] for i in range(len(x))), sum((t[h] for t in read["lines"]), bias[h]))
             for h in range(hidden)]
        for w, b in layer:
            y = [jax.nn.relu(a) for a in y]
            y = [sum((a * w[i, o] for i, a in enumerate(y)), b[o]) for o in range(w.shape[1])]
        step = rule.step(y, s, count)
        if rule.size == "learned":
            return step[None].astype(write.dtype), None
        return step[None].astype(write.dtype), jnp.sum(jnp.square(step), axis=tuple(range(1, step.ndim)))[None]

    step, total = plan.over(apply, second, cut(gradient), 1)
    step = plan.join(step)
    if rule.size == "unit":
        factor = lax.rsqrt(jnp.maximum(total / size, 1e-38)).reshape(1, layers, *(1,) * len(own))
        step = (step * factor).astype(g.dtype)
    new = Leaf(momenta=plan.join(stored["m"]).reshape(leaf.momenta.shape),
               scales=None if leaf.scales is None else plan.join(stored["s"]).reshape(leaf.scales.shape),
               second=plan.join(stored["v"]).reshape(leaf.second.shape),
               rows=(plan.join(stored["d"]) if lines is None else rows).reshape(leaf.rows.shape),
               cols=cols if lines is None else cols.reshape(leaf.cols.shape))
    return step.reshape(g.shape), new


def element_channels(rule: Rule, *, has_lines: bool) -> list[int]:
    """The network's inputs that differ for each element."""
    z = [jnp.zeros(())] * 3
    s = Seen(g=z[0], p=z[0], m=z, v=z[0], rows=z, cols=z, row_factor=z, col_factor=z, momentum_factor=None, mean_square_g=z[0])
    return sorted(rule.elements(s) | ({} if has_lines else rule.lines(z, z)))


def statistics(rule: Rule, weights: Weights, gradient: jax.Array, leaf: Leaf, own: tuple[int, ...], layers: int
               ) -> tuple[dict[str, jax.Array], jax.Array, jax.Array, Channels | None]:
    """(factors for elements, new rows, new columns, line features by channel); arrays keep dims of one in place of what they lack.
    A tensor of fewer than two dims has no lines (None)."""
    square = jnp.square(gradient.astype(jnp.float32)) + 1e-30
    dims = accumulators.factored_dims(own)
    if dims is None:
        return {"mean_square_g": square.mean(range(2, square.ndim), keepdims=True)}, leaf.rows, leaf.cols, None
    largest, second = (2 + d for d in dims)
    keep = jnp.clip(rule.factored_decays(weights), 0, 1).reshape(3, *(1,) * (square.ndim - 1))

    def average(old: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        mean = square.mean(axis, keepdims=True)
        return mean, keep * old.reshape(3, *mean.shape[1:]) + (1 - keep) * mean

    mean, rows = average(leaf.rows, largest)
    _, cols = average(leaf.cols, second)
    row_factor = lax.rsqrt(jnp.maximum(rows / (rows.mean(second, keepdims=True) + rule.floor), rule.floor))
    col_factor = lax.rsqrt(jnp.maximum(cols, rule.floor))
    factors = {"mean_square_g": mean.mean(range(2, mean.ndim), keepdims=True), "row_factor": row_factor, "col_factor": col_factor}
    return factors, rows, cols, rule.lines(list(rows), list(cols))


def line_terms(rule: Rule, w0: jax.Array, lines: Channels) -> list[jax.Array]:
    """What rows and columns add to the first layer: one array [hidden, layers, ...] of row terms and one of column terms."""
    terms: dict[tuple[int, ...], jax.Array] = {}
    for channel, x in lines.items():
        factor = rule.normaliser(jnp.square(x).mean(range(1, x.ndim), keepdims=True))
        term = w0[channel].reshape(-1, *(1,) * x.ndim) * (factor * x)
        terms[x.shape] = terms[x.shape] + term if x.shape in terms else term
    return list(terms.values())

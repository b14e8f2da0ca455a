"""Both passes of a learned rule over a matrix as Pallas kernels for TPU and GPU.

Split: one program a block of rows and columns of one layer; a sharded matrix is worked on where its shards are (`shard_map`).
Moves: the sums of squares, one number a feature, are added up over the devices that share a matrix.
Costs: the first pass reads gradient, parameter and four accumulators and writes four, 40 bytes a parameter; the second reads the same
    again and writes the step, 28. The mean squares of the gradient for row and column statistics are XLA's, 4 more.
Use: for matrices of whole tiles (`blocks_for`), with momenta in f32 or bf16. Everything else stays with XLA.

L layers, R rows, C columns; a matrix has L = 1 where nothing is stacked.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.optim.learned import accumulators
from jaxmem.optim.learned.accumulators import Moments
from jaxmem.optim.learned.features import Seen

Backend = Literal["tpu", "gpu", "interpret"]
SUBLANES, LANES = 8, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """A program's block [rows, columns], and how many of its rows are computed at a time: what these need fits the registers."""

    rows: int
    columns: int
    at_once: int


def blocks_for(rows: int, columns: int, backend: Backend) -> Tiles | None:
    """Blocks that divide a device's part [rows, columns] of a matrix, or None where there are none."""
    if backend == "gpu":  # a power of two of elements, some for each thread of four warps
        wide, high = (next((n for n in sizes if of % n == 0), 0) for sizes, of in (((256, 128, 64), columns), ((4, 2, 1), rows)))
        return Tiles(rows=high, columns=wide, at_once=high) if wide and high else None
    wide = next((n for n in (512, 256, LANES) if columns % n == 0), 0)
    high = next((n for n in (256, 128, 64, 32, 16, SUBLANES) if rows % n == 0), 0)
    return Tiles(rows=high, columns=wide, at_once=SUBLANES) if wide and high else None


def local_shape(shape: tuple[int, ...], sharding: NamedSharding | None) -> tuple[int, ...]:
    return tuple(shape) if sharding is None else sharding.shard_shape(shape)


def fits(shape: tuple[int, ...], stacked: int, moments: Moments, backend: Backend, sharding: NamedSharding | None) -> bool:
    """Whether the kernels do a parameter of this shape, one or no dim of which counts layers."""
    if len(shape) - stacked != 2 or moments == "int8":
        return False
    local = local_shape(shape, sharding)
    return blocks_for(local[-2], local[-1], backend) is not None


class Passes:
    """The two passes over g, p [L, R, C] f32 or bf16, m [3, L, R, C], v [L, R, C] of one device."""

    def __init__(self, *, elements: Callable[[Seen], dict[int, jax.Array]], features: int, hidden: int, moments: Moments, tiles: Tiles,
                 backend: Backend):
        self.elements, self.features, self.hidden, self.moments, self.tiles, self.backend = (
            elements, features, hidden, moments, tiles, backend)

    # ---- first pass

    def accumulate(self, numbers: jax.Array, g: jax.Array, p: jax.Array, m: jax.Array, v: jax.Array, row_factor: jax.Array,
                   col_factor: jax.Array, mean_square: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(m, v, sums of squares [features, L]). `numbers` f32 [5]: three decays of m, one of v, and the step count; factors
        [3, L, R, 1] and [3, L, 1, C]; mean_square [L, 1, 1] of the gradient."""
        at = self.specs(g.shape)
        m, v, sums = self.call(
            self.accumulate_kernel, g.shape, name=self.named(lambda x: self.first([x] * 3, x, x, x, x, [x] * 3, x, [x] * 3, [x] * 3, x)[2]),
            inputs=(at.numbers, at.block, at.block, at.three, at.block, at.rows3, at.cols3, at.layer),
            outputs=((at.three, m.shape, m.dtype), (at.block, v.shape, v.dtype), self.sums(g.shape, self.features)),
            aliases={3: 0, 4: 1})(numbers, g, p, m, v, row_factor, col_factor, mean_square)
        return m, v, sums.sum((1, 3)).T

    def accumulate_kernel(self, numbers, g_ref, p_ref, m_ref, v_ref, row_ref, col_ref, mean_ref, m_out, v_out, sums_out):
        keep_m, keep_v, count = [numbers[i] for i in range(3)], numbers[3], numbers[4]

        def part(rows, sums):
            g, row, col = g_ref[rows, :].astype(jnp.float32), [row_ref[i, rows, :] for i in range(3)], [col_ref[i, :, :] for i in range(3)]
            stored, v, squares = self.first(keep_m, keep_v, count, g, p_ref[rows, :], [m_ref[i, rows, :] for i in range(3)], v_ref[rows, :],
                                            row, col, mean_ref[:, :])
            v_out[rows, :] = v
            for i, x in enumerate(stored):
                m_out[i, rows, :] = x
            return [total + self.reduced(jnp.broadcast_to(x, g.shape)) for total, x in zip(sums, squares, strict=True)]
        self.store(sums_out, self.over_rows(part, self.features))

    def first(self, keep_m, keep_v, count, g, p, m, v, row, col, mean) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
        """(momenta as stored, v, every feature's square)."""
        v = keep_v * v + (1 - keep_v) * g * g
        new = [keep * accumulators.decode(x, None) + (1 - keep) * g for keep, x in zip(keep_m, m, strict=True)]
        stored = [accumulators.encode(x, self.moments, count.astype(jnp.int32), -1)[0] for x in new]
        s = seen(g, p, [accumulators.decode(x, None) for x in stored], v, row, col, mean)
        return stored, v, [jnp.square(x) for x in in_order(self.elements(s))]

    # ---- second pass

    def apply(self, step: Callable, layers: Sequence[tuple[int, int]], numbers: jax.Array, network: jax.Array, g: jax.Array, p: jax.Array,
              m: jax.Array, v: jax.Array, row_factor: jax.Array, col_factor: jax.Array, mean_square: jax.Array, row_terms: jax.Array,
              col_terms: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(step, in place of g; its sum of squares [L]). `network` f32 [L, K]: the first layer's weights [features, hidden], then
        weights and biases of the others, whose (in, out) are `layers`; terms [hidden, L, R, 1] and [hidden, L, 1, C] are what rows,
        with the bias, and columns add to the first layer."""
        at = self.specs(g.shape)
        rows = self.spec((self.hidden, None, self.tiles.rows, 1), lambda n, i, j: (0, n, i, 0))
        cols = self.spec((self.hidden, None, 1, self.tiles.columns), lambda n, i, j: (0, n, 0, j))
        kernel = functools.partial(self.apply_kernel, step=step, layers=layers, size=network.shape[1])
        out, total = self.call(
            kernel, g.shape, name=self.named(
                lambda x: self.second(step, layers, x, lambda i: x, [x] * self.hidden, x, x, [x] * 3, x, [x] * 3, [x] * 3, x)),
            inputs=(at.numbers, at.numbers, at.block, at.block, at.three, at.block, at.rows3, at.cols3, at.layer, rows, cols),
            outputs=((at.block, g.shape, g.dtype), self.sums(g.shape, 1)), aliases={2: 0})(
                numbers, network.reshape(-1), g, p, m, v, row_factor, col_factor, mean_square, row_terms, col_terms)
        return out, total.sum((1, 2, 3))

    def apply_kernel(self, numbers, network, g_ref, p_ref, m_ref, v_ref, row_ref, col_ref, mean_ref, row_terms, col_terms, out, total_out,
                     *, step, layers, size):
        first = pl.program_id(0) * size
        count = jnp.full((1, 1), numbers[4])  # powers are for vectors alone

        def part(rows, sums):
            g, row, col = g_ref[rows, :].astype(jnp.float32), [row_ref[i, rows, :] for i in range(3)], [col_ref[i, :, :] for i in range(3)]
            terms = [row_terms[h, rows, :] + col_terms[h, :, :] for h in range(self.hidden)]  # the bias is in the row terms
            u = self.second(step, layers, count, lambda i: network[first + i], terms, g, p_ref[rows, :],
                            [m_ref[i, rows, :] for i in range(3)], v_ref[rows, :], row, col, mean_ref[:, :])
            u = jnp.broadcast_to(u, g.shape)
            out[rows, :] = u.astype(out.dtype)
            return [sums[0] + self.reduced(jnp.square(u))]
        self.store(total_out, self.over_rows(part, 1))

    def second(self, step, layers, count, number, terms, g, p, m, v, row, col, mean) -> jax.Array:
        """The step; `number(i)` is the i-th number of the network."""
        s, y, at = seen(g, p, [accumulators.decode(x, None) for x in m], v, row, col, mean), terms, 0
        for f in in_order(self.elements(s)):
            y = [a + f * number(at + h) for h, a in enumerate(y)]
            at += self.hidden
        for into, out_of in layers:
            y = [jax.nn.relu(a) for a in y]
            y = [sum((a * number(at + i * out_of + o) for i, a in enumerate(y)), number(at + into * out_of + o)) for o in range(out_of)]
            at += into * out_of + out_of
        return step(y, s, count)

    # ---- what both share

    def over_rows(self, part: Callable, sums: int) -> list[jax.Array]:
        """`part(rows, sums) -> sums` for all rows of the block, as many at a time as the registers take."""
        zero = jnp.zeros((), jnp.float32) if self.backend == "gpu" else jnp.zeros((1, self.tiles.columns), jnp.float32)
        n = self.tiles.at_once
        if n == self.tiles.rows:
            return part(slice(None), [zero] * sums)
        return lax.fori_loop(0, self.tiles.rows // n, lambda i, found: part(pl.ds(pl.multiple_of(i * n, n), n), found), [zero] * sums)

    def reduced(self, x: jax.Array) -> jax.Array:
        """A sum over the block where programs end in a number (GPU), and over its rows where lanes stay apart (TPU)."""
        return x.sum() if self.backend == "gpu" else x.sum(0, keepdims=True)

    def store(self, out, sums: list[jax.Array]) -> None:
        for i, total in enumerate(sums):
            if self.backend == "gpu":
                out[i, 0] = total
            else:
                out[i:i + 1, :] = total

    def sums(self, shape: tuple[int, ...], features: int) -> tuple[pl.BlockSpec, tuple[int, ...], Any]:
        """[L, blocks of rows, features, columns or blocks of columns]."""
        layers, rows, columns = shape
        width = 1 if self.backend == "gpu" else self.tiles.columns
        whole = (layers, rows // self.tiles.rows, features, columns // self.tiles.columns * width)
        return self.spec((None, None, features, width), lambda n, i, j: (n, i, 0, j)), whole, jnp.float32

    def specs(self, shape: tuple[int, ...]) -> "Specs":
        r, c = self.tiles.rows, self.tiles.columns
        return Specs(block=self.spec((None, r, c), lambda n, i, j: (n, i, j)),
                     three=self.spec((3, None, r, c), lambda n, i, j: (0, n, i, j)),
                     rows3=self.spec((3, None, r, 1), lambda n, i, j: (0, n, i, 0)),
                     cols3=self.spec((3, None, 1, c), lambda n, i, j: (0, n, 0, j)),
                     layer=self.spec((None, 1, 1), lambda n, i, j: (n, 0, 0)), numbers=self.scalars())

    def spec(self, block: tuple, index: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(block, index)

    def scalars(self) -> pl.BlockSpec:
        if self.backend == "tpu":
            from jax.experimental.pallas import tpu as pltpu
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec()

    def named(self, math: Callable) -> str:
        """The compiler sees nothing of a kernel: what it does for each element is in its name, for `hlo/kernel_calls.py` to read."""
        vector, special = operations(math)
        return f"elementwise_v{vector}_s{special}"

    def call(self, kernel: Callable, shape: tuple[int, ...], *, name: str, inputs: tuple, outputs: tuple,
             aliases: dict[int, int]) -> Callable:
        layers, rows, columns = shape
        params: dict[str, Any] = {}
        if self.backend == "gpu":
            from jax.experimental.pallas import triton
            params = {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
        elif self.backend == "tpu":
            from jax.experimental.pallas import tpu as pltpu
            params = {"compiler_params": pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3)}
        return pl.pallas_call(
            kernel, grid=(layers, rows // self.tiles.rows, columns // self.tiles.columns), in_specs=list(inputs),
            out_specs=[spec for spec, *_ in outputs], out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
            input_output_aliases=aliases, name=name, interpret=self.backend == "interpret", **params)


def seen(g, p, m, v, row, col, mean) -> Seen:
    return Seen(g=g, p=p.astype(jnp.float32), m=m, v=v, rows=[], cols=[], row_factor=row, col_factor=col, momentum_factor=None,
                mean_square_g=mean)


def in_order(channels: dict[int, jax.Array]) -> list[jax.Array]:
    return list(dict(sorted(channels.items())).values())


SPECIAL = {"rsqrt", "sqrt", "exp", "exp2", "log", "tanh", "pow", "div", "logistic"}
FREE = {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy", "bitcast_convert_type"}


def operations(math: Callable) -> tuple[int, int]:
    """(vector, special) operations of a function of f32 numbers: what the vector and the transcendental units are asked for."""
    vector = special = 0
    waiting = [jax.make_jaxpr(math)(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr]
    while waiting:
        for eqn in waiting.pop().eqns:
            inner = [x.jaxpr for x in eqn.params.values() if hasattr(x, "jaxpr")]
            waiting += inner
            special += eqn.primitive.name in SPECIAL
            vector += not inner and eqn.primitive.name not in SPECIAL | FREE
    return vector, special


@dataclasses.dataclass(frozen=True, kw_only=True)
class Specs:
    block: pl.BlockSpec
    three: pl.BlockSpec
    rows3: pl.BlockSpec
    cols3: pl.BlockSpec
    layer: pl.BlockSpec
    numbers: pl.BlockSpec


def axes_of(spec: P) -> tuple[str, ...]:
    """Every mesh axis that splits something."""
    found: list[str] = []
    for entry in spec:
        found += [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
    return tuple(found)


def placed(run: Callable, sharding: NamedSharding | None, inputs: tuple[P, ...], outputs: tuple[P, ...]) -> Callable:
    """`run` on every device's own part."""
    if sharding is None:
        return run
    return jax.shard_map(run, mesh=sharding.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

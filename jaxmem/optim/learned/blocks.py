"""One tensor, block by block, so that what a rule makes on the way is as large as a block and not as large as the tensor.

Split: the stack of layers is never split over devices, so blocks are single layers; within a layer, block j of k takes the rows
    j, k + j, 2 k + j, ... : every device keeps its own rows, and a block needs no communication.
Moves: nothing. Costs: a loop with as many rounds as blocks.

Arrays here are [A, layers, rows, k, ...]: A accumulators (1 for others), `k` blocks of rows. A dim of one stands for any size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The rows of a block stay a multiple of the powers of two in the row count, up to this, so that devices still divide them.
WIDEST_SPLIT = 128


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a tensor [layers, *shape] is cut: `layers` x `k` blocks, or one where `whole`, kept apart from the rest where `fenced`."""

    shape: tuple[int, ...]
    layers: int
    k: int
    whole: bool
    fenced: bool = False

    def cut(self, x: jax.Array) -> jax.Array:
        """[A, layers, rows, ...] -> [A, layers, rows / k, k, ...]; a dim of one stays."""
        rows = x.shape[2]
        return x.reshape(*x.shape[:2], *((1, 1) if rows == 1 else (rows // self.k, self.k)), *x.shape[3:])

    def join(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])

    def over(self, body: Callable[[Any, Any], tuple[Any, jax.Array | None]], read: Any, write: Any, sums: int
             ) -> tuple[Any, jax.Array]:
        """`body(read block, write block) -> (new write block, sums [sums, layers or 1] or None)` for every block.

        `read` and `write` are trees of cut arrays; every block of `write` is replaced, in place. Returns (`write`, sums [sums, layers]).
        """
        if self.whole:
            if self.fenced:
                read, write = lax.optimization_barrier((read, write))
            write, found = body(read, write)
            if self.fenced:
                write, found = lax.optimization_barrier((write, found))
            return write, jnp.zeros((sums, self.layers), jnp.float32) if found is None else found

        def take(x: jax.Array, layer: jax.Array, j: jax.Array) -> jax.Array:
            at = (0, layer if x.shape[1] > 1 else 0, 0, j if x.shape[3] > 1 else 0) + (0,) * (x.ndim - 4)
            return lax.dynamic_slice(x, at, (x.shape[0], 1, x.shape[2], 1, *x.shape[4:]))

        def round_(i: jax.Array, carry: Any) -> Any:
            write, total = carry
            layer, j = i // self.k, i % self.k
            # reading, computing and writing apart: fused, XLA copies all of `write` each round, and on CPU gives up vector instructions
            now = lax.optimization_barrier(jax.tree.map(lambda x: take(x, layer, j), (read, write)))
            new, found = lax.optimization_barrier(body(*now))
            write = jax.tree.map(lambda x, b: lax.dynamic_update_slice(x, b.astype(x.dtype), (0, layer, 0, j) + (0,) * (x.ndim - 4)),
                                 write, new)
            if found is not None:
                total = lax.dynamic_update_slice(total, lax.dynamic_slice(total, (0, layer), (sums, 1)) + found, (0, layer))
            return write, total
        return lax.fori_loop(0, self.layers * self.k, round_, (write, jnp.zeros((sums, self.layers), jnp.float32)))


def blocks(shape: tuple[int, ...], layers: int, chunk: int | None, *, fenced: bool = False) -> Blocks:
    """Blocks of at most `chunk` elements, where the rows of [layers, *shape] allow it; None: one block."""
    size = math.prod(shape)
    if chunk is None or size * layers <= chunk:
        return Blocks(shape, layers, 1, True, fenced)
    k = 1
    if len(shape) > 1 and size > chunk:  # a vector stays whole: lines along the last dim have a scale each
        rows = shape[0]
        keep = math.gcd(rows, WIDEST_SPLIT)
        enough = [d for d in range(1, rows // keep + 1) if (rows // keep) % d == 0]
        k = next((d for d in enough if size // d <= chunk), enough[-1])
    return Blocks(shape, layers, k, layers * k == 1)

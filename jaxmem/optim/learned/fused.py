"""A learned rule's update of one matrix by the two kernels of `kernels.py`; what they compute is what `rule.update_leaf` does."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.optim.learned import kernels
from jaxmem.optim.learned.accumulators import Moments
from jaxmem.optim.learned.kernels import Backend, Passes, axes_of, blocks_for, local_shape, placed

if TYPE_CHECKING:
    from jaxmem.optim.learned.rule import Leaf, Rule, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Where the kernels run, and how each parameter's state is split: `jax.tree_util.keystr` of its path -> sharding; {}: on one device."""

    backend: Backend
    shardings: Mapping[str, NamedSharding]

    def does(self, path: str, shape: tuple[int, ...], stacked: int, moments: Moments) -> bool:
        return kernels.fits(shape, stacked, moments, self.backend, self.shardings.get(path))


def update_matrix(kernel: Kernel, path: str, rule: "Rule", weights: "Weights", count: jax.Array, g: jax.Array, p: jax.Array, leaf: "Leaf",
                  stacked: int, moments: Moments) -> tuple[jax.Array, "Leaf"]:
    """(step, new state) of one matrix [R, C] or stack of matrices [L, R, C]."""
    from jaxmem.optim.learned.rule import element_channels, line_terms, statistics  # which calls this

    layers, own = (p.shape[0] if stacked else 1), p.shape[stacked:]
    size, sharding = own[0] * own[1], kernel.shardings.get(path)
    local = local_shape(p.shape, sharding)
    tiles = blocks_for(local[-2], local[-1], kernel.backend)
    assert tiles is not None
    names = element_channels(rule, has_lines=True)
    w0, hidden = weights["w0"], weights["w0"].shape[1]
    passes = Passes(elements=rule.elements, features=len(names), hidden=hidden, moments=moments, tiles=tiles, backend=kernel.backend)

    # ---- how everything is split, as [accumulators, layers, rows, columns]
    spec = P(None, None) if sharding is None else P(*sharding.spec, *(None,) * (p.ndim - len(sharding.spec)))
    r, c = spec[-2:]
    matrix, three = P(None, r, c), P(None, None, r, c)
    rows_at, cols_at = P(None, None, r, None), P(None, None, None, c)
    axes = axes_of(P(r, c))

    def everywhere(x: jax.Array) -> jax.Array:
        return lax.psum(x, axes) if axes else x

    # ---- statistics, by XLA
    stack = (layers, *own)
    gradient, parameter = g.reshape(stack), p.reshape(stack)
    factors, rows, cols, lines = statistics(rule, weights, gradient[None], leaf, own, layers)
    assert lines is not None
    row_factor, col_factor = sorted((factors["row_factor"], factors["col_factor"]), key=lambda x: x.shape[3] != 1)
    mean_square = factors["mean_square_g"][0]
    keep_v = jnp.clip(rule.second_decay(weights), 0, 1)
    numbers = jnp.concatenate([rule.momentum_decays(weights), keep_v[None], count.astype(jnp.float32)[None]])

    # ---- first pass
    def first(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, v, sums = passes.accumulate(*arrays)
        return m, v, everywhere(sums)
    m, v, sums = placed(first, sharding, (P(), matrix, matrix, three, matrix, rows_at, cols_at, P()), (three, matrix, P()))(
        numbers, gradient, parameter, leaf.momenta.reshape(3, *stack), leaf.second.reshape(stack), row_factor, col_factor, mean_square)

    # ---- the network, with everything folded in
    scaled = w0[jnp.asarray(names)][:, :, None] * rule.normaliser(sums / size)[:, None, :]  # [features, hidden, L]
    rest = [(weights[f"w{i}"], weights[f"b{i}"]) for i in (1, 2)]
    flat = jnp.concatenate([x.reshape(-1) for pair in rest for x in pair])
    network = jnp.concatenate([scaled.transpose(2, 0, 1).reshape(layers, -1), jnp.broadcast_to(flat, (layers, flat.size))], 1)
    row_terms, col_terms = sorted(line_terms(rule, w0, lines), key=lambda x: x.shape[3] != 1)
    row_terms = row_terms + rule.bias(weights, count).reshape(-1, 1, 1, 1)

    # ---- second pass
    def second(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        step, total = passes.apply(rule.step, [(w.shape[0], w.shape[1]) for w, _ in rest], *arrays)
        return step, everywhere(total)
    step, total = placed(second, sharding, (P(), P(), matrix, matrix, three, matrix, rows_at, cols_at, P(), rows_at, cols_at),
                         (matrix, P()))(
        numbers, network, gradient, parameter, m, v, row_factor, col_factor, mean_square, row_terms, col_terms)
    if rule.size == "unit":
        step = (step * lax.rsqrt(jnp.maximum(total / size, 1e-38))[:, None, None]).astype(g.dtype)
    return step.reshape(g.shape), leaf._replace(momenta=m.reshape(leaf.momenta.shape), second=v.reshape(leaf.second.shape),
                                                rows=rows.reshape(leaf.rows.shape), cols=cols.reshape(leaf.cols.shape))

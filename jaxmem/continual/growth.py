"""A larger model that computes what the smaller one did: loss before equals loss after, and training goes on.

What may grow, and how exact it is:
* `mlp`: units are split in two (Net2Net, Chen et al. 2016, arXiv 1511.05641). Both get the unit's input weights, and its output weights
  are divided between them, each number by a share of its own, so that their gradients differ from the first step on. The parts add up
  to the number exactly; sums are made in another order, so the loss agrees to the last digits of the dtype.
* `heads`, `kv_heads`: a key/value head with its query heads, or a query head within its group, is split in the same way.
* `layers`: blocks on top of the others that add zero, their inner weights fresh. The same bits.
* `max_positions`: fresh rows of a learned table; the same bits, for sequences that were possible before.
* `vocab`: the logits of the old tokens stay the same bits. The new tokens take probability: their rows and columns are the mean of all
  old ones, so that (Jensen) the loss rises by log(new / old size of the vocabulary) at most.
`embed` and `head_dim` cannot: norms and rotary frequencies depend on them.

Moments of an optimizer grow along: those of a split unit's input weights are halved (second moments quartered), for on average its
gradient is; new blocks, rows and columns have first moment 0 and the mean second moment of the others, so that no first step is large.

A flat tree here is `{"blocks/mlp/up": array}`. L layers, F mlp, K kv heads, G query heads a kv head.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.configs import DecoderConfig, parameter_shapes
from jaxmem.spec import differences

Flat = Mapping[str, jax.Array]
GROWS = ("layers", "mlp", "heads", "kv_heads", "vocab", "max_positions")
SENDERS = {"mlp": "blocks/mlp/down", "kv_heads": "blocks/attention/out", "group": "blocks/attention/out"}


def problems(old: DecoderConfig, new: DecoderConfig) -> list[str]:
    """Why `new` is not `old` grown, with the numbers."""
    found = []
    for name in GROWS:
        if getattr(new, name) < getattr(old, name):
            found.append(f"{name}={getattr(new, name)} is less than the {getattr(old, name)} it has: a model only grows")
    others = dataclasses.replace(new, **{name: getattr(old, name) for name in GROWS})
    if left := differences(others, old):
        found.append(f"{', '.join(left)}: what grows is {', '.join(GROWS)}; the rest stays")
    if not found and new.heads // new.kv_heads < old.heads // old.kv_heads:
        found.append(f"heads={new.heads},kv_heads={new.kv_heads}: {old.heads // old.kv_heads} query heads share a key/value head, and "
                     f"fewer cannot; nearest: kv_heads={old.kv_heads}, or heads={new.kv_heads * (old.heads // old.kv_heads)}")
    return found


def grow(tree: Flat, old: DecoderConfig, new: DecoderConfig, *, fresh: Flat, seed: int, degree: int = 0) -> dict[str, jax.Array]:
    """`tree` of shapes `parameter_shapes(old)` -> of shapes `parameter_shapes(new)`; call it under `jit` with the new shardings.

    `fresh`: parameters of the new model, as it would begin by itself. `seed` says which units are split, and how.
    `degree`: 0 for parameters, 1 for first moments (and momenta), 2 for second moments.
    """
    dims = {path: names for path, (_, names) in parameter_shapes(new).items()}
    out = dict(tree)
    group = {"old": old.heads // old.kv_heads, "new": new.heads // new.kv_heads}
    for dim, size, wanted in (("mlp", old.mlp, new.mlp), ("kv_heads", old.kv_heads, new.kv_heads), ("group", group["old"], group["new"])):
        while size < wanted:  # a unit is split in two; more than double takes another round
            extra = min(size, wanted - size)
            chosen = np.argsort(np.random.PCG64([seed, size]).random_raw(size), kind="stable")[:extra]
            heads = (new.kv_heads if dim == "group" else size, size if dim == "group" else group["old"])
            for path, x in out.items():
                if (axis := _axis(dims[path], dim)) is not None:
                    own = zlib.crc32(f"{seed} {path} {dim} {size}".encode())
                    split = _sender(chosen, own, degree) if path == SENDERS[dim] else _receiver(chosen, degree)
                    out[path] = _along(x, dims[path], dim, axis, heads, split)
            size += extra
    for dim, old_size, new_size in (("layers", old.layers, new.layers), ("vocab", old.vocab, new.vocab),
                                    ("positions", old.max_positions, new.max_positions)):
        for path in [path for path in out if dim in dims[path]] if old_size < new_size else []:
            axis = dims[path].index(dim)
            more = jax.lax.slice_in_dim(fresh[path], old_size, new_size, axis=axis)
            out[path] = jnp.concatenate([out[path], _added(out[path], more, path, dim, axis, new, degree)], axis)
    return out


# ---------------------------------------------------------------- units split in two

def _axis(dims: tuple[str, ...], dim: str) -> int | None:
    """Where units of `dim` stand: query heads count both for their group and for the key/value head of it."""
    wanted = {"mlp": ("mlp",), "kv_heads": ("kv_heads", "heads"), "group": ("heads",)}[dim]
    return next((dims.index(name) for name in wanted if name in dims), None)


def _along(x: jax.Array, dims: tuple[str, ...], dim: str, axis: int, heads: tuple[int, int], split: Callable[[jax.Array, int], jax.Array]
           ) -> jax.Array:
    """`split` along `axis`; query heads are seen as [K, G] meanwhile."""
    if dims[axis] != "heads":
        return split(x, axis)
    apart = split(x.reshape(*x.shape[:axis], *heads, *x.shape[axis + 1:]), axis + (dim == "group"))
    return apart.reshape(*x.shape[:axis], math.prod(apart.shape[axis:axis + 2]), *x.shape[axis + 1:])


def _receiver(chosen: np.ndarray, degree: int) -> Callable[[jax.Array, int], jax.Array]:
    """What a unit reads: both halves have it whole. Half of the gradient reaches each, on average."""
    def split(x: jax.Array, axis: int) -> jax.Array:
        at = (slice(None),) * axis + (chosen,)
        half = x[at] * jnp.asarray(0.5 ** degree, x.dtype)
        return jnp.concatenate([x.at[at].set(half), half], axis)
    return split


def _sender(chosen: np.ndarray, seed: int, degree: int) -> Callable[[jax.Array, int], jax.Array]:
    """What a unit writes: a number is divided between the halves. The larger part is 1/2 to 3/4, so that the difference, which is the
    other part, is exact (Sterbenz), and so is their sum. The gradient of each half is that of the whole."""
    def split(x: jax.Array, axis: int) -> jax.Array:
        at = (slice(None),) * axis + (chosen,)
        whole = x[at]
        if degree:
            return jnp.concatenate([x, whole], axis)
        bits = jax.random.bits(jax.random.key(seed), whole.shape, jnp.uint32)
        share = 0.5 + (bits >> jnp.uint32(1)).astype(jnp.float32) * jnp.float32(2.0 ** -33)
        larger = (whole.astype(jnp.float32) * share).astype(x.dtype)
        smaller, first = whole - larger, (bits & jnp.uint32(1)) == 0
        return jnp.concatenate([x.at[at].set(jnp.where(first, larger, smaller)), jnp.where(first, smaller, larger)], axis)
    return split


# ---------------------------------------------------------------- blocks, tokens and positions added

def _added(x: jax.Array, fresh: jax.Array, path: str, dim: str, axis: int, config: DecoderConfig, degree: int) -> jax.Array:
    """What stands behind `x`, of the shape and dtype of `fresh` and of `x`."""
    if degree == 0 and dim != "vocab":
        silent = silent_value(path, config) if dim == "layers" else None
        return (fresh if silent is None else jnp.full_like(fresh, silent)).astype(x.dtype)
    if degree == 1:
        return jnp.zeros(fresh.shape, x.dtype)
    return jnp.broadcast_to(x.astype(jnp.float32).mean(axis, keepdims=True), fresh.shape).astype(x.dtype)


def silent_value(path: str, config: DecoderConfig) -> float | None:
    """The number that, all over a parameter of a block, keeps the block from adding anything; None where it may be anything."""
    if config.post_norms == "both":  # a norm would blow up the gradient of an output that is zero, so the norm is what is closed
        scale = {f"blocks/{of}_post_norm/scale": -1.0 if config.norm_offset == "one" else 0.0 for of in ("attention", "mlp")}
        return (scale | {f"blocks/{of}_post_norm/bias": 0.0 for of in ("attention", "mlp")}).get(path)
    closed = ("blocks/attention/out", "blocks/attention/out_bias", "blocks/mlp/down", "blocks/mlp/down_bias")
    return 0.0 if path in closed else None

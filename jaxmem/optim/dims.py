"""Which dims each leaf of an optimizer's state has, so that it is split like the parameter it belongs to."""

from collections.abc import Container, Mapping
from typing import Any

import jax
import numpy as np

Path = tuple[str, ...]


def names(path: tuple) -> Path:
    """A tree path as plain strings: `("0", "mu", "blocks", "attention", "query")`."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def owner_of(path: Path, params: Container[Path]) -> Path | None:
    """The parameter that a leaf of an optimizer's state belongs to: the one whose path ends the leaf's own. None for counters."""
    return next((path[i:] for i in range(len(path)) if path[i:] in params), None)


def state_dims(path: Path, shape: tuple[int, ...], params: dict[Path, tuple[tuple[int, ...], tuple[str, ...]]]
               ) -> tuple[tuple[str | None, ...], Path | None]:
    """Dims of one leaf of an optimizer's state, and the parameter it belongs to (None for counters).

    A leaf belongs to the parameter whose path ends its own. It has the parameter's shape, or (Adafactor's `v_row`, `v_col`,
    arXiv 1804.04235) that shape without its largest or second largest dim, or one element where nothing is kept. A learned rule's
    are described in `learned_dims`; its weights are constants. Raises ValueError for a shape that none of these explains.
    """
    owner = owner_of(path, params)
    if owner is None:
        if "weights" in path:
            return (None,) * len(shape), None
        if len(shape) > 1 or (shape and shape[0] > 16):  # counters and constants
            raise ValueError(f"optimizer state {'/'.join(path)} of shape {shape} belongs to no parameter")
        return (None,) * len(shape), None
    param_shape, dims = params[owner]
    field = path[-len(owner) - 1] if len(path) > len(owner) else ""
    learned = learned_dims(field, param_shape, dims)
    if learned is not None and shape == learned[0]:
        return learned[1], owner
    if shape == param_shape:
        return dims, owner
    if shape == (1,):
        return (None,), owner
    order = np.argsort(param_shape)
    for name, dropped in (("v_row", int(order[-1])), ("v_col", int(order[-2]))):
        if name in path and shape == tuple(np.delete(param_shape, dropped)):
            return tuple(d for i, d in enumerate(dims) if i != dropped), owner
    raise ValueError(f"optimizer state {'/'.join(path)}: shape {shape} does not follow from the parameter's {param_shape}")


def learned_dims(field: str, shape: tuple[int, ...], dims: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str | None, ...]] | None:
    """Shape and dims of a learned rule's accumulators of one parameter: three decays first, then the parameter's own.

    A dim of decays is a stack like `layers`: it is never split, and a vector's momenta stay as whole as the vector. That of row and
    column statistics has no name, so that they count as matrices and are split over what is left of the parameter's dims.
    """
    own = [i for i, dim in enumerate(dims) if dim != "layers"]
    if field == "momenta" or field == "rows" and len(own) < 2:
        return (3, *shape), ("layers", *dims)
    if field == "scales":
        return (3, *(shape[:-1] if own else shape)), ("layers", *(dims[:-1] if own else dims))
    if field not in ("rows", "cols") or len(own) < 2:
        return None
    order = sorted(own, key=lambda i: shape[i])
    dropped = order[-1] if field == "rows" else order[-2]
    keep = [i for i in range(len(shape)) if i != dropped]
    return (3, *(shape[i] for i in keep)), (None, *(dims[i] for i in keep))


def flatten(tree: object) -> dict[Path, jax.ShapeDtypeStruct]:
    return {names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def flatten_dims(tree: object) -> dict[Path, tuple[str, ...]]:
    return {names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))[0]}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"blocks/mlp/up": x}` -> `{"blocks": {"mlp": {"up": x}}}`."""
    out: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        inner = out
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return out

"""Which dims each leaf of an optimizer's state has, so that it is split like the parameter it belongs to."""

import jax
import numpy as np

Path = tuple[str, ...]


def names(path: tuple) -> Path:
    """A tree path as plain strings: `("0", "mu", "blocks", "attention", "query")`."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def state_dims(path: Path, shape: tuple[int, ...], params: dict[Path, tuple[tuple[int, ...], tuple[str, ...]]]
               ) -> tuple[tuple[str | None, ...], Path | None]:
    """Dims of one leaf of an optimizer's state, and the parameter it belongs to (None for counters).

    A leaf belongs to the parameter whose path ends its own. It has the parameter's shape, or (Adafactor's `v_row`, `v_col`,
    arXiv 1804.04235) that shape without its largest or second largest dim, or one element where nothing is kept.
    Raises ValueError for a shape that none of these explains.
    """
    owner = next((path[i:] for i in range(len(path)) if path[i:] in params), None)
    if owner is None:
        if len(shape) > 1 or (shape and shape[0] > 16):  # counters and constants
            raise ValueError(f"optimizer state {'/'.join(path)} of shape {shape} belongs to no parameter")
        return (None,) * len(shape), None
    param_shape, dims = params[owner]
    if shape == param_shape:
        return dims, owner
    if shape == (1,):
        return (None,), owner
    order = np.argsort(param_shape)
    for field, dropped in (("v_row", int(order[-1])), ("v_col", int(order[-2]))):
        if field in path and shape == tuple(np.delete(param_shape, dropped)):
            return tuple(d for i, d in enumerate(dims) if i != dropped), owner
    raise ValueError(f"optimizer state {'/'.join(path)}: shape {shape} does not follow from the parameter's {param_shape}")


def flatten(tree: object) -> dict[Path, jax.ShapeDtypeStruct]:
    return {names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def flatten_dims(tree: object) -> dict[Path, tuple[str, ...]]:
    return {names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))[0]}

"""All that a model knows of sharding: `constrain(x, "batch", "seq", "embed")` names the dims of an array.

The assembly sets the active table once while it traces a step; without one, `constrain` does nothing and models run on one device.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]

_active: Constrain | None = None


@contextlib.contextmanager
def layout(constrain_with: Constrain) -> Iterator[None]:
    """Makes `constrain` pin layouts with `constrain_with(x, dims)` inside the block."""
    global _active
    before, _active = _active, constrain_with
    try:
        yield
    finally:
        _active = before


def constrain(x: jax.Array, *dims: str | None) -> jax.Array:
    """Pins the layout of `x`, one name (or None) a dim."""
    if _active is None:
        return x
    if len(dims) != x.ndim:
        raise ValueError(f"{len(dims)} dims {dims} named for an array of shape {x.shape}")
    return _active(x, dims)

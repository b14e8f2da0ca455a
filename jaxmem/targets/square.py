"""The smallest program worth compiling, one matrix product on one device: `jaxmem doctor --compile` checks it on each kind of target."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def build(mesh_for: Callable) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...], dict]:
    """As `jaxmem check --program=square.py:build` calls it."""
    return (lambda x: x @ x), (jax.ShapeDtypeStruct((256, 256), jnp.bfloat16),), {}

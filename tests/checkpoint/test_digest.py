"""Digests do not depend on the split and see every kind of damage; the reference is the same sum in NumPy, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.checkpoint.digest import digests


def reference(x: np.ndarray) -> str:
    """In Python integers, from the description: mix(bits ^ mix(index + golden ratio)), summed; and the same mixed again."""
    def mix(v: int) -> int:
        v = ((v ^ (v >> 16)) * 0x85EBCA6B) % 2**32
        v = ((v ^ (v >> 13)) * 0xC2B2AE35) % 2**32
        return v ^ (v >> 16)
    first = second = 0
    for i, bits in enumerate(x.view(f"u{x.dtype.itemsize}").ravel().tolist()):
        one = mix(bits ^ mix((i + 0x9E3779B9) % 2**32))
        first, second = first + one, second + mix(one ^ 0x5BD1E995)
    return f"{first % 2**32:08x}{second % 2**32:08x}"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("split", [P(), P("a", "b"), P(("b", "a")), P(None, "b")])
def test_any_split_gives_the_reference(mesh, dtype, split):
    values = np.random.default_rng(0).normal(size=(8, 12)) * 50
    x = np.asarray(jnp.asarray(np.abs(values) if dtype == "uint8" else values).astype(dtype))
    found, bad = digests({"w": jax.device_put(x, NamedSharding(mesh, split))})
    assert found == {"w": reference(x)}
    assert bad == 0


def test_damage_changes_the_digest(mesh):
    x = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
    whole = digests({"w": jnp.asarray(x)})[0]["w"]
    zeroed, swapped, flipped = x.copy(), x.copy(), x.copy()
    zeroed[4:8, 4:8] = 0
    swapped[[0, 1]] = swapped[[1, 0]]
    flipped.view(np.uint32)[3, 5] ^= 1
    for other in (zeroed, swapped, flipped, x.T.copy()):
        assert digests({"w": jnp.asarray(other)})[0]["w"] != whole


def test_numbers_that_are_not_finite_are_counted():
    x = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, 0.0])
    assert digests({"a": x, "b": (x.astype(jnp.bfloat16), jnp.arange(3))})[1] == 6

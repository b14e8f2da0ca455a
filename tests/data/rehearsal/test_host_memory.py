"""Arrays in pinned host memory on their way into a checkpoint: the same digests, and a snapshot that is a copy."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.checkpoint import digest, lazy
from jaxmem.plan import Plan
from jaxmem.sharding import make_mesh


@pytest.mark.parametrize("part_bytes", [2**28, 400], ids=["whole", "in parts"])
def test_digests_do_not_depend_on_the_memory(monkeypatch, part_bytes):
    mesh = make_mesh(Plan(data=4, tensor=2), jax.devices())
    x = np.random.default_rng(0).normal(size=(4, 3, 10, 7)).astype(np.float32)
    x[1, 2, 9, 3] = np.nan
    tree = {"x": x, "b": x > 0, "h": x.astype(ml_dtypes.bfloat16), "u": np.arange(840).astype(np.uint8).reshape(x.shape),
            "s": np.float32(3)}
    before = digest.digests(tree)
    assert before[1] == 2
    monkeypatch.setattr(digest, "PART_BYTES", part_bytes)
    jax.clear_caches()
    placed = {name: jax.device_put(a, NamedSharding(mesh, P("data") if a.ndim else P(), memory_kind="pinned_host"))
              for name, a in tree.items()}
    assert digest.digests(placed) == before
    other = placed | {"x": jax.device_put(np.where(x == x[0, 0, 5, 0], 0, x), placed["x"].sharding)}
    assert digest.digests(other)[0]["x"] != before[0]["x"]


def test_a_snapshot_of_host_memory_is_a_copy():
    """An alias would be donated to the next update while it is written."""
    sharding = NamedSharding(make_mesh(Plan(data=8), jax.devices()), P("data"), memory_kind="pinned_host")
    x = jax.device_put(np.arange(64, dtype=np.int32).reshape(8, 8), sharding)
    copy = lazy.to_pinned_host(x)
    np.testing.assert_array_equal(copy, x)
    assert copy.sharding == x.sharding
    for one, other in zip(copy.addressable_shards, x.addressable_shards, strict=True):
        assert one.data.unsafe_buffer_pointer() != other.data.unsafe_buffer_pointer()

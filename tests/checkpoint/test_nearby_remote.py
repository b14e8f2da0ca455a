"""Slices of what Orbax wrote, in each of its formats, and the bytes that were asked for and read."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.checkpoint.nearby_remote import OrbaxRemote
from jaxmem.spec import InputError

W = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def tree():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return {"params": {"w": jax.device_put(W, NamedSharding(mesh, P("a", "b"))),  # shards of 16 x 16
                       "half": jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), NamedSharding(mesh, P()))},
            "opt_state": ({"count": jax.device_put(np.int32(5), NamedSharding(mesh, P()))}, None)}


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_slices_of_what_orbax_wrote(tmp_path, options):
    item = tmp_path / "step" / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(item, args=ocp.args.PyTreeSave(tree()))
    remote = OrbaxRemote(item)
    np.testing.assert_array_equal(remote.read("params/w", ((3, 20), (30, 32))), W[3:20, 30:32])
    half, count = remote.read("params/half", ((2, 4),)), remote.read("opt_state/0/count", ())
    assert half.dtype == jnp.bfloat16 and half.tolist() == [2, 3]
    assert count.shape == () and count.dtype == np.int32 and count == 5
    assert remote.slice_bytes == 17 * 2 * 4 + 2 * 2 + 4
    with pytest.raises(InputError, match="no array params/v there"):
        remote.read("params/v", ((0, 1),))
    for box in (((0, 65), (0, 32)), ((0, 1),)):
        with pytest.raises(InputError, match=r"params/w has shape \[64, 32\] there"):
            remote.read("params/w", box)


def test_chunks_are_the_shards_that_were_saved(tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=ocp.args.PyTreeSave(tree()))
    shard = 16 * 16 * 4
    for box, chunks in ((((16, 32), (0, 16)), 1), (((17, 18), (3, 4)), 1), (((15, 17), (15, 17)), 4), (((0, 64), (31, 32)), 4)):
        remote = OrbaxRemote(tmp_path / "state")
        remote.read("params/w", box)
        assert remote.chunk_bytes == chunks * shard

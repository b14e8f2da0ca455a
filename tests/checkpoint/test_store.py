"""Checkpoints on disk: committed, kept, refused, restored elsewhere. User reports 17 and 18."""

import gc
import json
import pathlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.checkpoint import lazy
from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.keep import Keep
from jaxmem.checkpoint.store import SaveFailed, Store, read_meta, read_tree
from jaxmem.spec import InputError

# After an error Orbax closes its event loop while other reads and writes that it started still end; Python prints that and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:int(np.prod(shape))]).reshape(shape), ("a", "b"))


def state_on(mesh: Mesh, seed: int = 0, split: P | None = None) -> dict:
    split = P("a", "b") if split is None else split
    rng = np.random.default_rng(seed)
    return {"params": {"w": jax.device_put(rng.normal(size=(8, 16)).astype(np.float32), NamedSharding(mesh, split)),
                       "n": jax.device_put(jnp.asarray(rng.normal(size=16), jnp.bfloat16), NamedSharding(mesh, P()))},
            "step": jax.device_put(jnp.int32(seed), NamedSharding(mesh, P()))}


def abstract(state: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def bits(x: object) -> np.ndarray:
    return np.atleast_1d(np.asarray(x)).view(np.uint8)


def same(a: dict, b: dict) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), a, b)


def meta_of(state: dict, **more: object) -> dict:
    return {"digests": digests(state)[0], "workload": "w", "plan": "fsdp=8", "topology": "cpu:8", "eval_loss": None} | more


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "checkpoints", keep=Keep(last=2), run_id="me")
    yield made
    made.close()


def save(store: Store, step: int, mesh: Mesh | None = None, **more: object) -> dict:
    state = state_on(mesh or mesh_of(2, 4), step)
    store.save(step, state, meta_of(state, **more), wait=True)
    return state


@pytest.mark.parametrize("shape, split", [((2, 4), P("b", "a")), ((1, 8), P(None, "b")), ((1, 2), P("a", "b")), ((1, 1), P())])
def test_restores_onto_any_mesh(store, shape, split):
    saved = save(store, 3)
    other = state_on(mesh_of(*shape), 9, split)
    found = store.restore(abstract(other))
    assert found.step == 3 and found.refused == ()
    same(found.state, saved)
    assert found.state["params"]["w"].sharding == other["params"]["w"].sharding


def test_only_parameters(store):
    saved = save(store, 3)
    part = {"params": abstract(saved)["params"]}
    same(read_tree(store.directory / "3" / "state", part), {"params": saved["params"]})


def test_another_model_is_named_with_what_was_saved(store):
    saved = save(store, 3)
    other = abstract(saved)
    other["params"]["w"] = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=other["params"]["w"].sharding)
    with pytest.raises(InputError, match=r"params/w: saved as float32\[8, 16\], wanted float32\[8, 32\]"):
        store.restore(other)
    with pytest.raises(InputError, match="plan fsdp=8 on cpu:8"):
        store.restore(other)


def test_the_latest_two_stay_and_the_best(tmp_path):
    store = Store(tmp_path, keep=Keep(last=2, best=1), run_id="me")
    for step, loss in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0), (5, 2.0)):
        save(store, step, eval_loss=loss)
    assert store.steps() == [2, 4, 5]
    store.close()


def test_what_others_put_there_stays(store, tmp_path):
    """orbax#394: a checkpoint that was copied in is not this run's to delete."""
    save(store, 1)
    other = Store(tmp_path / "other", keep=Keep(), run_id="someone")
    save(other, 2)
    other.close()
    shutil.copytree(tmp_path / "other" / "2", store.directory / "2")
    shutil.copytree(store.directory / "1", store.directory / "1.backup")
    shutil.copytree(store.directory / "1", store.directory / "7.orbax-checkpoint-tmp-copied")
    for step in (3, 4, 5):
        save(store, step)
    assert store.steps() == [2, 4, 5]
    again = Store(store.directory, keep=Keep(last=2), run_id="me")
    again.close()
    assert {p.name for p in store.directory.iterdir()} >= {"1.backup", "7.orbax-checkpoint-tmp-copied", "2"}


def test_latest_means_latest_committed(store):
    """maxtext#5260: what a killed save left is no checkpoint, and is cleared if this run began it."""
    saved = save(store, 3)
    half = store.directory / "4.orbax-checkpoint-tmp"
    shutil.copytree(store.directory / "3", half)
    (store.directory / ".writing-4").write_text("me")
    uncommitted = store.directory / "5"
    shutil.copytree(store.directory / "3", uncommitted)
    for mark in uncommitted.rglob("commit_success.txt"):
        mark.unlink()
    (uncommitted / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    (uncommitted / "meta" / "metadata").unlink()
    (store.directory / ".deleting-1").mkdir()
    assert store.steps() == [3]
    found = store.restore(abstract(saved))
    assert found.step == 3
    again = Store(store.directory, keep=Keep(), run_id="me")
    again.close()
    assert not half.exists() and not (store.directory / ".deleting-1").exists() and uncommitted.exists()


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((p for p in (folder / "state").rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "zero"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_taken(store, how):
    before = save(store, 3)
    save(store, 4)
    file = largest(store.directory / "4")
    data = bytearray(file.read_bytes())
    if how == "delete":
        file.unlink()
    else:
        if how == "flip":
            data[len(data) // 2] ^= 0x10
        if how == "zero":
            data[len(data) // 3: 2 * len(data) // 3] = bytes(2 * len(data) // 3 - len(data) // 3)
        file.write_bytes(data[:len(data) // 2] if how == "truncate" else data)
    found = store.restore(abstract(before))
    assert found.step == 3
    assert [step for step, _ in found.refused] == [4]
    same(found.state, before)


def test_silent_damage_is_seen_by_the_digests(store):
    before = save(store, 3)
    wrong = state_on(mesh_of(2, 4), 4)
    store.save(4, wrong, meta_of(before), wait=True)
    found = store.restore(abstract(before))
    assert found.step == 3
    assert "3 of 3 arrays differ from what was written" in found.refused[0][1]


def test_a_refused_step_is_set_aside_and_written_again(store):
    save(store, 3)
    saved = save(store, 4)
    largest(store.directory / "4").write_bytes(b"")
    (store.directory / "4" / "meta" / "metadata").write_text("{")  # not even whose it is can be read
    assert store.restore(abstract(saved)).step == 3
    assert store.steps() == [3] and (store.directory / "4.damaged").is_dir()
    saved = save(store, 4)
    found = store.restore(abstract(saved))
    assert found.step == 4 and found.refused == ()
    for step in (5, 6):
        save(store, step)
    assert sorted(p.name for p in store.directory.iterdir()) == ["5", "6"]


def test_nothing_readable_is_an_error_that_lists_why(store):
    saved = save(store, 3)
    largest(store.directory / "3").write_bytes(b"")
    with pytest.raises(InputError, match="step 3: "):
        store.restore(abstract(saved))


@pytest.fixture
def no_room():
    """No file of this process may grow beyond 200 bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda on: resource.setrlimit(resource.RLIMIT_FSIZE, (200 if on else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("wait", [True, False])
def test_a_failed_save_is_said_once_and_the_next_one_works(store, no_room, wait):
    save(store, 3)
    state = state_on(mesh_of(2, 4), 4)
    no_room(True)
    with pytest.raises(SaveFailed, match="step 4"):
        store.save(4, state, meta_of(state), wait=wait)
        store.wait()
    no_room(False)
    assert store.steps() == [3]
    saved = save(store, 5)
    store.wait()
    found = store.restore(abstract(saved))
    assert found.step == 5
    same(found.state, saved)


def test_no_room_even_for_a_mark_is_a_failed_save(store, monkeypatch):
    """The very first file of a save meets a full disk."""
    saved = save(store, 3)
    real = pathlib.Path.write_text

    def full(self, *args, **kwargs):
        if self.name.startswith(".writing"):
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)
    monkeypatch.setattr(pathlib.Path, "write_text", full)
    state = state_on(mesh_of(2, 4), 4)
    with pytest.raises(SaveFailed, match="No space left"):
        store.save(4, state, meta_of(state), wait=False)
    monkeypatch.undo()
    assert save(store, 5) is not None and store.steps() == [3, 5]
    same(store.restore(abstract(saved), step=3).state, saved)


@pytest.mark.parametrize("mode", ["async", "lazy"])
def test_the_snapshot_is_of_its_moment_though_training_goes_on(store, mode):
    """Bitwise equal to a synchronous save, although the state is donated and overwritten at once."""
    state = state_on(mesh_of(2, 4), 1)
    reference = jax.tree.map(lambda x: np.array(x, copy=True), state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * jnp.asarray(3, x.dtype) + jnp.asarray(1, x.dtype), s), donate_argnums=0)
    if mode == "lazy":
        snapshots = lazy.Snapshots(store)
        snapshots.start(1, state, {})
        taken = snapshots.take()
        digest = taken.digests[0]
        state = overwrite(state)
        store.save(1, taken.state, {"digests": digest, "eval_loss": None}, wait=False)
    else:
        store.save(1, state, meta_of(state), wait=False)
    for _ in range(20):
        state = overwrite(state)
    store.wait()
    found = store.restore(abstract(state_on(mesh_of(2, 4))))
    same(found.state, reference)


def test_meta_is_in_the_same_commit(store):
    save(store, 3, position=17)
    assert read_meta(store.directory / "3")["position"] == 17
    assert json.loads((store.directory / "3" / "meta" / "metadata").read_text())["run_id"] == "me"


def pinned_bytes() -> int:
    """Of buffers, not of arrays: an array and its shards are several arrays over the same buffers."""
    buffers = {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for x in jax.live_arrays()
               if x.sharding.memory_kind == "pinned_host" for shard in x.addressable_shards}
    return sum(buffers.values())


def test_a_snapshot_that_the_pool_cannot_hold_is_refused(store):
    state = state_on(mesh_of(2, 4), 1)
    bytes_here = 8 * 16 * 4 + 8 * (16 * 2 + 4)  # w once; n and step on each of eight devices
    lazy.Snapshots(store, pool_bytes=bytes_here).start(1, state, {})
    with pytest.raises(InputError, match=f"takes {bytes_here} bytes of pinned host memory and the pool has {bytes_here - 1}"):
        lazy.Snapshots(store, pool_bytes=bytes_here - 1).start(1, state, {})


@pytest.mark.parametrize("copies", [1, 2])
def test_the_pool_never_holds_more_than_its_bound(tmp_path, copies):
    """Snapshots as fast as they can be taken: what is pinned never passes the bound, for the next one waits for the writer."""
    gc.collect()
    store = Store(tmp_path, keep=Keep(last=1), run_id="me")
    before, size = pinned_bytes(), lazy.local_bytes(state_on(mesh_of(2, 4)))
    snapshots = lazy.Snapshots(store, copies * size)
    seen = []
    for step in range(1, 9):
        state = state_on(mesh_of(2, 4), step)
        snapshots.start(step, state, {})
        seen.append(pinned_bytes() - before)
        taken = snapshots.take()
        store.save(step, taken.state, {"digests": taken.digests[0], "eval_loss": None}, wait=False, release=True)
        del taken
    store.close()
    assert min(seen) >= size and max(seen) <= copies * size

"""Local-first restore. Four processes of two devices are emulated in one: a thread each, a folder each, the devices shared out.

What must be local, from peers and missing is computed from masks of single elements, which know nothing of boxes.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxmem import step as step_module
from jaxmem.checkpoint import nearby_read
from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.nearby import Nearby, assemble, leaves_of
from jaxmem.checkpoint.nearby_exchange import among_threads
from jaxmem.checkpoint.nearby_ledger import Ledger
from jaxmem.checkpoint.nearby_read import NearbyFailed
from jaxmem.checkpoint.nearby_remote import OrbaxRemote
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

STEP = 40
PROCESSES = 4


def abstract(plan: str, devices: list, optimizer: str = "lion"):
    """The state of a decoder whose dims 8, 6, 4, 3 and 2 all divide."""
    workload = Workload.parse(model="decoder-tiny,embed=48,mlp=96,vocab=96,heads=6,kv_heads=2,head_dim=8", batch="24", seq="16",
                              optimizer=optimizer)
    return step_module.build(workload, Plan.parse(plan), parse_topology(f"cpu:{len(devices)}"), devices).state


def filled(structs, seed: int = 0):
    generator = np.random.default_rng(seed)

    def one(leaf):
        raw = generator.integers(0, 1 << 14, leaf.shape) if leaf.dtype == np.int32 else generator.standard_normal(leaf.shape)
        return jax.device_put(raw.astype(leaf.dtype), leaf.sharding)
    return jax.tree.map(one, structs)


@dataclass(frozen=True)
class Saved:
    """A state of eight devices, saved to a folder by each of four processes and to shared storage."""

    state: object
    digests: dict[str, str]
    folders: list[pathlib.Path]
    remote: pathlib.Path


def save(where: pathlib.Path, plan: str, seed: int = 0) -> Saved:
    devices = jax.devices()
    state = filled(abstract(plan, devices), seed)
    folders = [where / f"place{i}" for i in range(PROCESSES)]
    saved = {"any name": f"{seed}"}  # real digests are for the real processes below: they compile for each mesh
    for i, folder in enumerate(folders):
        one = Nearby(folder, process=i, process_of=lambda device: devices.index(device) // 2)
        one.keep(STEP, one.shards_of(state), saved)
        one.committed(STEP)
    remote = where / "shared" / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(remote, args=ocp.args.PyTreeSave(state))
    return Saved(state, saved, folders, remote)


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """`saves(plan)`: a copy for the test of what was saved under a plan, once."""
    made: dict[str, Saved] = {}

    def get(plan: str, tmp_path: pathlib.Path) -> Saved:
        if plan not in made:
            made[plan] = save(tmp_path_factory.mktemp("saved"), plan)
        one = made[plan]
        for folder in one.folders:
            shutil.copytree(folder, tmp_path / folder.name)
        return Saved(one.state, one.digests, [tmp_path / folder.name for folder in one.folders], one.remote)
    return get


def restore(saved: Saved, survivors: list[int], plan: str, remotes=None) -> tuple[object, Ledger]:
    """The state on the survivors' devices, renumbered from 0, through a thread for each."""
    devices = [d for i in survivors for d in jax.devices()[2 * i:2 * i + 2]]
    wanted = abstract(plan, devices)
    together, remote = among_threads(len(survivors)), OrbaxRemote(saved.remote)

    def one(process: int):
        nearby = Nearby(saved.folders[survivors[process]], process=process, process_of=lambda device: devices.index(device) // 2,
                        exchange=together[process])
        return nearby.read(wanted, STEP, remotes[process] if remotes else remote, saved.digests)
    with concurrent.futures.ThreadPoolExecutor(len(survivors)) as pool:
        found = list(pool.map(one, range(len(survivors))))
    arrays, ledgers = [f[0] for f in found], [f[1] for f in found]
    assert all(str(ledger) == str(ledgers[0]) and ledger.processes == ledgers[0].processes for ledger in ledgers)
    assert remotes or remote.slice_bytes == ledgers[0].remote_bytes
    whole = {path: {box: array for one in arrays for box, array in one[path].items()} for path in arrays[0]}
    return assemble(wanted, whole), ledgers[0]


def bits(state) -> dict[str, bytes]:
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves_of(state).items()}


def assert_same(state, saved: Saved, plan: str) -> None:
    assert bits(state) == bits(saved.state)
    devices = [d for d in jax.devices() if d in jax.tree.leaves(state)[0].sharding.device_set]
    assert jax.tree.all(jax.tree.map(lambda x, want: x.sharding == want.sharding, state, abstract(plan, devices)))


# ---------------------------------------------------------------- the expectation, element by element

def mask(sharding, shape, devices) -> np.ndarray:
    """True where one of `devices` holds the element."""
    out = np.zeros(shape, bool)
    for device, index in sharding.devices_indices_map(shape).items():
        if device in devices:
            out[index] = True
    return out


def expected(saved: Saved, survivors: list[int], plan: str, lost=lambda process, path: None) -> list[dict[str, int]]:
    """Bytes by tier of each survivor, but for who of several fetches what is missing: `missing` counts that once a run, in entry 0.
    `lost(process, path)`: a mask of what a survivor no longer has."""
    places = {i: jax.devices()[2 * i:2 * i + 2] for i in range(PROCESSES)}
    wanted = leaves_of(abstract(plan, [d for i in survivors for d in places[i]]))
    out = [dict(local=0, other=0, missing=0) for _ in survivors]
    for path, leaf in leaves_of(saved.state).items():
        held = [mask(leaf.sharding, leaf.shape, places[i]) for i in survivors]
        for i, own in zip(survivors, held, strict=True):
            if (gone := lost(i, path)) is not None:
                own &= ~gone
        anyone = np.logical_or.reduce(held)
        for entry, i, own in zip(out, survivors, held, strict=True):
            need = mask(wanted[path].sharding, leaf.shape, places[i])
            # a device's shards may overlap nobody else's of the same process: boxes are distinct, not shared out
            assert need.sum() == sum(np.zeros(leaf.shape)[index].size for index in
                                     {str(x): x for d, x in wanted[path].sharding.devices_indices_map(leaf.shape).items()
                                      if d in places[i]}.values())
            entry["local"] += int((need & own).sum()) * leaf.dtype.itemsize
            entry["other"] += int((need & ~own).sum()) * leaf.dtype.itemsize
        out[0]["missing"] += int((~anyone).sum()) * leaf.dtype.itemsize
    return out


def assert_ledger(ledger: Ledger, want: list[dict[str, int]]) -> None:
    assert [p.local_bytes for p in ledger.processes] == [w["local"] for w in want]
    assert [p.peer_bytes + p.remote_bytes for p in ledger.processes] == [w["other"] for w in want]
    assert ledger.remote_bytes == want[0]["missing"]
    assert f"{want[0]['missing']:,} from shared storage" in str(ledger)


CASES = [  # plan of the eight, who is lost, plan of the rest, whether anything is missing
    ("fsdp=8", [1], "fsdp=6", True),
    ("fsdp=8", [0, 3], "data=2,tensor=2", True),
    ("fsdp=4,tensor=2", [2], "fsdp=2,data=3", True),
    ("fsdp=4,tensor=2", [1, 2], "fsdp=2,tensor=2", True),
    ("data=2,fsdp=4", [3], "fsdp=6", False),  # the other half of `data` has it all
    ("data=2,fsdp=4", [1, 3], "fsdp=4", True),
    ("data=8,zero=1", [3], "data=6,zero=1", True),
    ("data=8,zero=0", [0, 2], "data=2,fsdp=2", False),
]


@pytest.mark.parametrize("plan, lost, after, something", CASES)
def test_survivors_restore_on_another_mesh_and_read_afar_what_was_lost(saves, tmp_path, plan, lost, after, something):
    saved = saves(plan, tmp_path)
    survivors = [i for i in range(PROCESSES) if i not in lost]
    state, ledger = restore(saved, survivors, after)
    assert_same(state, saved, after)
    want = expected(saved, survivors, after)
    assert_ledger(ledger, want)
    assert (want[0]["missing"] > 0) == something and ledger.notes == []
    assert ledger.state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(saved.state)) > want[0]["missing"]


def test_with_zero_1_only_optimizer_state_is_missing(saves, tmp_path):
    saved = saves("data=8,zero=1", tmp_path)
    seen = []

    class Watched(OrbaxRemote):
        def read(self, path, box):
            seen.append(path)
            return super().read(path, box)
    restore(saved, [0, 1, 2], "data=6,zero=1", [Watched(saved.remote)] * 3)
    assert seen and all(path.startswith("opt_state/0/") for path in seen)


def test_all_come_back_on_the_same_mesh_and_read_only_their_own(saves, tmp_path):
    saved = saves("fsdp=4,tensor=2", tmp_path)
    state, ledger = restore(saved, [0, 1, 2, 3], "fsdp=4,tensor=2")
    assert_same(state, saved, "fsdp=4,tensor=2")
    assert ledger.peer_bytes == ledger.remote_bytes == 0 and ledger.local_bytes >= ledger.state_bytes


def test_one_with_an_empty_folder_is_served_by_the_others(saves, tmp_path):
    saved = saves("data=2,fsdp=4", tmp_path)
    shutil.rmtree(saved.folders[1])
    state, ledger = restore(saved, [0, 1, 2, 3], "data=2,fsdp=4")
    assert_same(state, saved, "data=2,fsdp=4")
    assert ledger.remote_bytes == ledger.processes[1].local_bytes == 0 < ledger.processes[1].peer_bytes


# ---------------------------------------------------------------- damage, and steps that do not agree

def piece_of(folder: pathlib.Path, path: str) -> dict:
    return next(p for p in json.loads((folder / f"step.{STEP}" / "index.json").read_text()[9:])["pieces"] if p["path"] == path)


def flip(folder: pathlib.Path, offset: int) -> None:
    data = folder / f"step.{STEP}" / "data"
    raw = bytearray(data.read_bytes())
    raw[offset] ^= 0x10
    data.write_bytes(raw)


@pytest.mark.parametrize("plan, from_afar", [("data=2,fsdp=4", False), ("fsdp=8", True)])
def test_a_damaged_piece_comes_from_elsewhere_and_is_said(saves, tmp_path, plan, from_afar):
    saved, path = saves(plan, tmp_path), "params/embed"
    piece = piece_of(saved.folders[2], path)
    flip(saved.folders[2], piece["offset"] + 3)
    gone = np.zeros(piece["shape"], bool)
    gone[tuple(slice(*bounds) for bounds in piece["box"])] = True
    survivors = [0, 1, 2, 3]
    state, ledger = restore(saved, survivors, plan)
    assert_same(state, saved, plan)
    want = expected(saved, survivors, plan, lambda process, name: gone if (process, name) == (2, path) else None)
    assert_ledger(ledger, want)
    assert ledger.remote_bytes == (gone.sum() * 4 if from_afar else 0)
    assert ledger.processes[2].peer_bytes == (0 if from_afar else gone.sum() * 4)
    assert len(ledger.notes) == 1 and re.match(r"process 2: .*params/embed\[.*checksum", ledger.notes[0])


def test_other_steps_and_other_states_of_the_step_are_never_mixed_in(saves, tmp_path):
    saved, other = saves("fsdp=8", tmp_path), save(tmp_path / "other", "fsdp=8", seed=1)
    (saved.folders[0] / f"step.{STEP}").rename(saved.folders[0] / f"step.{STEP - 10}")  # has an older step alone
    shutil.rmtree(saved.folders[1])
    shutil.copytree(other.folders[1], saved.folders[1])  # step 40 as it was before a rollback
    survivors = [0, 1, 2]
    state, ledger = restore(saved, survivors, "fsdp=6")
    assert_same(state, saved, "fsdp=6")
    want = expected(saved, survivors, "fsdp=6", lambda process, path: np.True_ if process in (0, 1) else None)
    assert_ledger(ledger, want)
    assert ledger.processes[0].local_bytes == ledger.processes[1].local_bytes == 0 < ledger.processes[2].local_bytes


def test_a_peer_that_does_not_answer_is_replaced_by_shared_storage(saves, tmp_path, monkeypatch):
    saved = saves("data=2,fsdp=4", tmp_path)
    shutil.rmtree(saved.folders[1])

    def unreachable(*_):
        raise ConnectionRefusedError("nobody there")
    monkeypatch.setattr(nearby_read, "fetch", unreachable)
    state, ledger = restore(saved, [0, 1, 2, 3], "data=2,fsdp=4")
    assert_same(state, saved, "data=2,fsdp=4")
    one = ledger.processes[1]
    assert one.remote_bytes == ledger.remote_bytes > 0 == one.peer_bytes == one.local_bytes
    assert "process 1: taken from shared storage, not from process" in ledger.notes[0] and "nobody there" in ledger.notes[0]


def test_a_failure_in_one_process_ends_the_restore_in_all(saves, tmp_path):
    saved = saves("fsdp=8", tmp_path)

    class Broken:
        def read(self, path, box):
            raise OSError("bucket is gone")
    devices, together = jax.devices()[:6], among_threads(3)
    wanted = abstract("fsdp=6", devices)
    remotes = [OrbaxRemote(saved.remote), OrbaxRemote(saved.remote), Broken()]  # process 2 alone will hold what is missing

    def one(process: int) -> str:
        nearby = Nearby(saved.folders[process], process=process, process_of=lambda device: devices.index(device) // 2,
                        exchange=together[process])
        with pytest.raises(NearbyFailed) as error:
            nearby.read(wanted, STEP, remotes[process], saved.digests)
        return str(error.value)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == ["process 2: OSError: bucket is gone"] * 3


def test_processes_that_want_different_states_are_refused(saves, tmp_path):
    saved, together = saves("fsdp=8", tmp_path), among_threads(2)
    devices = jax.devices()[:4]

    def one(process: int) -> None:
        nearby = Nearby(saved.folders[process], process=process, process_of=lambda device: devices.index(device) // 2,
                        exchange=together[process])
        with pytest.raises(NearbyFailed, match=r"they want steps \[40, 41\]"):
            nearby.read(abstract("fsdp=4", devices), STEP + process, OrbaxRemote(saved.remote), saved.digests)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


# ---------------------------------------------------------------- one real process, and two

class Untouched:
    def read(self, path, box):
        raise AssertionError(f"{path} was read from shared storage")


def test_one_process_restores_from_its_own_disk_and_verifies(tmp_path):
    devices = jax.devices()
    state = filled(abstract("data=2,fsdp=2,tensor=2", devices))
    saved, _ = digests(state)
    nearby, wanted = Nearby(tmp_path), abstract("fsdp=4", devices[:4])
    assert nearby.keep(STEP, nearby.shards_of(state), saved) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    found, ledger = nearby.restore(wanted, STEP, Untouched(), saved)
    assert bits(found) == bits(state)
    assert (ledger.peer_bytes, ledger.remote_bytes, ledger.local_bytes) == (0, 0, ledger.state_bytes)
    # donating restored arrays, whose replicas began as one host array, must not change the others
    grow = jax.jit(lambda tree: jax.tree.map(lambda x: x + jax.numpy.ones((), x.dtype), tree), donate_argnums=0)
    grown = jax.tree.map(lambda leaf: np.asarray(leaf) + np.ones((), leaf.dtype), state)
    assert bits(grow(found)) == bits(grown)
    # a state that is not the one whose digests are given
    wrong = dict(saved) | {"params/embed": "0" * 16}
    nearby.keep(STEP, nearby.shards_of(state), wrong)
    with pytest.raises(NearbyFailed, match=r"1 of \d+ arrays differ from what was saved, params/embed among them"):
        nearby.restore(wanted, STEP, Untouched(), wrong)


def test_another_model_is_not_taken_for_the_saved_one(saves, tmp_path):
    saved = saves("fsdp=8", tmp_path)
    wanted = abstract("fsdp=8", jax.devices(), optimizer="adafactor")  # has leaves that lion has not
    nearby = Nearby(tmp_path / "place0")
    with pytest.raises(NearbyFailed):
        nearby.restore(wanted, STEP, OrbaxRemote(saved.remote), saved.digests)


def test_keep_is_at_least_one(tmp_path):
    with pytest.raises(InputError, match="keep=0: expected at least 1"):
        Nearby(tmp_path, keep=0)


TWO = """
import json, pathlib, shutil, sys
process, port, where = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.nearby import Nearby
from jaxmem.checkpoint.nearby_remote import OrbaxRemote

values = {"w": np.arange(128, dtype=np.float32).reshape(16, 8), "v": np.arange(8, dtype=np.float32), "step": np.int32(3)}
def shardings(w, mesh):
    return {"w": NamedSharding(mesh, w), "v": NamedSharding(mesh, P()), "step": NamedSharding(mesh, P())}
def put(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
state = jax.tree.map(put, values, shardings(P("a"), Mesh(np.array(jax.devices()), ("a",))))  # rows 8 to 15 are process 1's
saved, _ = digests(state)
nearby = Nearby(where / f"place{process}")
nearby.keep(3, nearby.shards_of(state), saved)
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    checkpointer.save(where / "shared", args=ocp.args.PyTreeSave(state))
nearby.committed(3)
if process == 1:  # a new machine in place of the old one
    shutil.rmtree(where / "place1")
new = shardings(P("b", "a"), Mesh(np.array(jax.devices()[::-1]).reshape(2, 2), ("a", "b")))  # columns 0 to 3 are process 1's
abstract = jax.tree.map(lambda value, sharding: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding), values, new)
for attempt in range(2):
    found, ledger = nearby.restore(abstract, 3, OrbaxRemote(where / "shared"), saved)
same = all(np.array_equal(shard.data, values[name][shard.index]) for name in values for shard in found[name].addressable_shards)
print(json.dumps([same, str(ledger), [[p.local_bytes, p.peer_bytes, p.remote_bytes] for p in ledger.processes], ledger.notes]))
"""


def test_two_real_processes_over_tcp(tmp_path, repository):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(repository), "JAX_PLATFORMS": "cpu"}
    running = [subprocess.Popen([sys.executable, "-c", TWO, str(i), str(port), str(tmp_path)], env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(2)]
    try:
        out = [process.communicate(timeout=60) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], out
    one, two = (json.loads(text.splitlines()[-1]) for text, _ in out)
    assert one == two
    same, line, tiers, notes = one
    quarter, small = 16 * 8 * 4 // 4, 8 * 4 + 4  # of w; v and step
    assert same and notes == []
    assert tiers == [[quarter + small, 0, quarter], [0, quarter + small, quarter]]
    assert f"{2 * quarter} from shared storage" in line

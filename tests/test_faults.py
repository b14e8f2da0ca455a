"""Faults: what the flag says, that each strikes once in a run, and that each does what it is for."""

import errno
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from small_disk import on_a_small_disk

from jaxmem import damage, faults, step
from jaxmem.damage import Ballast, corrupt, poisoned
from jaxmem.faults import Fault, Faults, parse
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

MIB = 2 ** 20


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    """A run's folder."""
    (tmp_path / "logs").mkdir()
    return tmp_path


def events(run: pathlib.Path) -> list[dict]:
    path = run / "logs" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------- the flag

def test_parse():
    text = "kill:step=12,process=1; kill:step=8,phase=commit;term:step=3;hang:step=4,seconds=1.5;slow:step=2,seconds=0.25,steps=3;" \
           "nan:step=5;spike:step=6;corrupt:step=20,how=truncate;fill_disk:step=9;"
    found = parse(text, processes=2, steps=20)
    assert found == [Fault(kind="kill", step=12, process=1), Fault(kind="kill", step=8, phase="commit"), Fault(kind="term", step=3),
                     Fault(kind="hang", step=4, seconds=1.5), Fault(kind="slow", step=2, seconds=0.25, steps=3), Fault(kind="nan", step=5),
                     Fault(kind="spike", step=6), Fault(kind="corrupt", step=20, how="truncate"), Fault(kind="fill_disk", step=9)]
    assert str(found[0]) == "kill:step=12,process=1" and str(found[4]) == "slow:step=2,seconds=0.25,steps=3"
    assert parse(";".join(map(str, found))) == found
    assert parse("") == []


@pytest.mark.parametrize("text, said", [
    ("kil:step=3", "fault kil:step=3: unknown kind 'kil'; did you mean kill?"),
    ("kill", "fault kill: step is missing, as in kill:step=12"),
    ("kill:step=3,proces=1", "fault kill:step=3,proces=1: kill has no field 'proces'; did you mean process?"),
    ("kill:step=0", "fault kill:step=0: step=0 is less than 1"),
    ("kill:step=x", "fault kill:step=x: step=x: expected a whole number"),
    ("kill:step=3,step=4", "fault kill:step=3,step=4: step is given twice"),
    ("kill:step=3,process=2", "fault kill:step=3,process=2: there is no process 2; nearest: process=1"),
    ("kill:step=3,process=-1", "fault kill:step=3,process=-1: process=-1 is less than 0"),
    ("kill:step=31", "fault kill:step=31: the run has no step 31; nearest: step=30"),
    ("kill:step=3,phase=comit",
     "fault kill:step=3,phase=comit: phase=comit: expected step|commit|committed; did you mean commit or committed?"),
    ("nan:step=3,process=1", "fault nan:step=3,process=1: nan has no field 'process' (it strikes every process); known: step"),
    ("slow:step=3", "fault slow:step=3: seconds is missing, as in slow:step=12,seconds=2"),
    ("hang:step=3,seconds=0", "fault hang:step=3,seconds=0: seconds=0 is not more than 0"),
    ("kill:step=3,process=–1", "fault kill:step=3,process=–1: process=-1 is less than 0"),  # a typographic dash
])
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(InputError) as caught:
        parse(text, processes=2, steps=30)
    assert str(caught.value) == said


def test_all_problems_are_said_at_once():
    with pytest.raises(InputError) as caught:
        parse("kil:step=3;nan:step=5;slow:step=0,second=1;kill:process=9", processes=2)
    assert str(caught.value).splitlines() == [
        "fault kil:step=3: unknown kind 'kil'; did you mean kill?",
        "fault slow:step=0,second=1: slow has no field 'second'; did you mean seconds?",
        "fault slow:step=0,second=1: seconds is missing, as in slow:step=12,seconds=2",
        "fault slow:step=0,second=1: step=0 is less than 1",
        "fault kill:process=9: step is missing, as in kill:step=12"]


# ---------------------------------------------------------------- once in a run

RUN = textwrap.dedent("""
    import os, pathlib, signal, sys
    from jaxmem.faults import Faults, parse
    folder, process, attempt = pathlib.Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    faults = Faults(parse(sys.argv[2]), folder, process, attempt=attempt)
    signal.signal(signal.SIGTERM, lambda *_: print("term"))
    for step in range(1, 7):
        faults.before_step(step)
        print(step)
        sys.stdout.flush()
        if step % 2 == 0:
            faults.on_save_started(step)
            faults.on_committed(step, folder)
            print("saved")
            sys.stdout.flush()
    print("left", len(faults.pending))
""")


def start(run: pathlib.Path, text: str, process: int = 0, attempt: int = 0) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", RUN, str(run), text, str(process), str(attempt)], capture_output=True, text=True,
                          timeout=60)
    assert "Error" not in done.stderr
    return done.returncode, " ".join(done.stdout.split())


def test_each_strikes_once_across_restarts(run):
    text = "kill:step=3;kill:step=4,phase=commit;term:step=5;kill:step=2,process=1;kill:step=4,phase=committed,process=1"
    assert start(run, text, attempt=0) == (-signal.SIGKILL, "1 2 saved")
    assert start(run, text, attempt=1) == (-signal.SIGKILL, "1 2 saved 3 4")
    assert start(run, text, attempt=2) == (0, "1 2 saved 3 4 saved term 5 6 saved left 0")
    assert start(run, text, attempt=3) == (0, "1 2 saved 3 4 saved 5 6 saved left 0")
    assert start(run, text, process=1, attempt=3) == (-signal.SIGKILL, "1")
    assert start(run, text, process=1, attempt=4) == (-signal.SIGKILL, "1 2 saved 3 4")
    assert [(e["kind"], e["text"], e["step"], e["process"], e["attempt"]) for e in events(run)] == [
        ("fault", "kill:step=3", 3, 0, 0), ("fault", "kill:step=4,phase=commit", 4, 0, 1), ("fault", "term:step=5", 5, 0, 2),
        ("fault", "kill:step=2,process=1", 2, 1, 3), ("fault", "kill:step=4,process=1,phase=committed", 4, 1, 4)]


def test_written_twice_it_strikes_twice(run):
    text = "kill:step=2;kill:step=2"
    assert [start(run, text, attempt=k) for k in range(3)] == [(-signal.SIGKILL, "1")] * 2 + [(0, "1 2 saved 3 4 saved 5 6 saved left 0")]


def struck(run: pathlib.Path, process: int, attempt: int) -> bool:
    """Whether a new start's "nan:step=5" is still to come."""
    return Faults(parse("nan:step=5"), run, process, attempt=attempt).pending == []


def test_a_fault_of_all_processes_strikes_all_of_them_or_none(run):
    params, mesh = {"w": jnp.ones(2)}, Mesh(np.array(jax.devices()[:1]), "a")
    first = Faults(parse("nan:step=5"), run, 0, attempt=1)
    assert first.poison(4, params, mesh) is None
    assert first.poison(5, params, mesh) is not None
    assert first.poison(5, params, mesh) is None  # a rollback brought the step back
    # process 1 may read the events of this start late, and must still strike; at the next start none may, though 1 was killed before it
    assert [struck(run, process, 1) for process in (0, 1)] == [True, False]
    assert [struck(run, process, 2) for process in (0, 1)] == [True, True]


def test_written_twice_it_strikes_twice_however_many_processes_wrote_it_down(run):
    params, mesh = {"w": jnp.ones(2)}, Mesh(np.array(jax.devices()[:1]), "a")
    for process in (0, 1):
        assert Faults(parse("nan:step=5;nan:step=5"), run, process, attempt=0).poison(5, params, mesh) is not None
    assert len(Faults(parse("nan:step=5;nan:step=5"), run, 1, attempt=1).pending) == 1


def test_what_cannot_be_written_down_does_not_strike(run, monkeypatch, capfd):
    hit = Faults(parse("term:step=1"), run, 0)
    with monkeypatch.context() as patch:
        patch.setattr(faults.Lines, "write", lambda *_: False)
        hit.before_step(1)  # SIGTERM would end the tests
    assert "fault term:step=1 cannot be written down and does not strike process 0" in capfd.readouterr().err


def test_slow_and_hang(run, monkeypatch):
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(faults.time, "sleep", sleep)
    monkeypatch.setattr(faults.time, "monotonic", lambda: now[0])
    hit = Faults(parse("slow:step=2,seconds=3,steps=2;hang:step=5,seconds=130"), run, 0)
    for number in range(1, 7):
        slept.append(-number)
        hit.before_step(number)
    assert slept == [-1, -2, 3, -3, 3, -4, -5, 60, 60, 10, -6]


# ---------------------------------------------------------------- parameters

def test_poisoned_leaves_dtypes_shardings_and_the_old_parameters():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    place = NamedSharding(mesh, P("a", "b"))
    params = {"n": jax.device_put(jnp.arange(8), NamedSharding(mesh, P("b"))),
              "v": jax.device_put(jnp.full((4, 8), 0.5, jnp.bfloat16), place), "w": jax.device_put(jnp.full((4, 8), 2.0), place)}
    nan, spike = poisoned(params, mesh, "nan"), poisoned(params, mesh, "spike")
    for new in (nan, spike):
        jax.tree.map(lambda a, b: (a.dtype, a.sharding) == (b.dtype, b.sharding) or pytest.fail(f"{a} {b}"), new, params)
        np.testing.assert_array_equal(new["n"], np.arange(8))
    assert np.isnan(np.asarray(nan["v"], np.float32)).all() and (np.asarray(nan["w"]) == 2).all()
    assert (np.asarray(spike["v"], np.float32) == 4).all() and (np.asarray(spike["w"]) == 16).all()
    assert (np.asarray(params["v"], np.float32) == 0.5).all()


def test_a_spike_is_finite_and_far_higher_and_nan_is_nan():
    """On the program that a run executes, with parameters of the size of a run's first: later ones are larger and make more of it."""
    work = Workload.parse(model="decoder-tiny,layers=1", optimizer="sgd", batch=8, seq=32)
    built = step.build(work, Plan.parse("fsdp=2"), parse_topology("cpu:2"), jax.devices()[:2])
    rng = np.random.default_rng(0)

    def value(path, leaf):
        norm = "norm" in jax.tree_util.keystr(path)
        return jax.device_put((np.ones(leaf.shape) if norm else rng.normal(size=leaf.shape) * 0.05).astype(leaf.dtype), leaf.sharding)

    params = jax.tree_util.tree_map_with_path(value, built.state["params"])
    batch = {"tokens": rng.integers(0, work.model.vocab, (8, 32)), "targets": rng.integers(0, work.model.vocab, (8, 32)),
             "segment_ids": np.ones((8, 32)), "positions": np.tile(np.arange(32), (8, 1))}
    on_devices = {name: jax.device_put(value.astype(np.int32), built.batch[name].sharding) for name, value in batch.items()}
    evaluate = built["eval"].jitted()

    def loss(params):
        with jax.set_mesh(built.mesh):
            found = evaluate(params, on_devices)
        return float(found["loss_sum"]) / float(found["tokens"])

    before, after = loss(params), loss(poisoned(params, built.mesh, "spike"))
    assert math.isfinite(after) and after > 3 * before > 0
    assert math.isnan(loss(poisoned(params, built.mesh, "nan")))


# ---------------------------------------------------------------- checkpoints

DAMAGED = textwrap.dedent("""
    import hashlib, json, pathlib, sys
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from jaxmem.checkpoint.digest import digests
    from jaxmem.checkpoint.keep import Keep
    from jaxmem.checkpoint.store import Store
    from jaxmem.faults import Faults, parse
    jax.config.update("jax_num_cpu_devices", 8)

    def files(folder):
        return {str(p.relative_to(folder)): [p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest()]
                for p in folder.rglob("*") if p.is_file()}

    def on_commit(commit):
        folder = run / "checkpoints" / str(commit.step)
        found[how] |= {"before": files(folder)}
        faults.on_committed(commit.step, folder)

    place = NamedSharding(Mesh(np.array(jax.devices()), "a"), P("a"))
    found = {}
    for how in ("flip", "truncate", "delete"):
        run = pathlib.Path(sys.argv[1]) / how
        (run / "logs").mkdir(parents=True)
        faults = Faults(parse(f"corrupt:step=4,how={how}"), run, 0)
        found[how] = {}
        store = Store(run / "checkpoints", keep=Keep(last=3), run_id="me", on_commit=on_commit)
        for step in (2, 4):
            state = {"params": {"w": jax.device_put(np.random.default_rng(step).normal(size=(64, 512)).astype(np.float32), place)}}
            meta = {"digests": digests(state)[0], "workload": "w", "plan": "", "topology": "cpu:8", "eval_loss": None}
            store.save(step, state, meta, wait=True)
        found[how]["after"] = files(run / "checkpoints" / "4")
        restored = store.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))
        found[how] |= {"restored": restored.step, "refused": [step for step, _ in restored.refused]}
        store.close()
    print(json.dumps(found))
""")


def test_a_corrupted_checkpoint_is_refused_and_the_one_before_it_taken(tmp_path, repository):
    """In a process of its own: Orbax leaves unfinished reads behind a failed one."""
    done = subprocess.run([sys.executable, "-c", DAMAGED, str(tmp_path)], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(repository)})
    assert done.returncode == 0, done.stderr
    for how, found in json.loads(done.stdout).items():
        before, after = found["before"], found["after"]
        (changed,) = [name for name in before if before[name] != after.get(name)]
        assert before[changed][0] == max(size for size, _ in before.values())
        size = after[changed][0] if changed in after else None
        assert size == {"flip": before[changed][0], "truncate": before[changed][0] // 2, "delete": None}[how]
        assert (found["restored"], found["refused"]) == (2, [4])


def test_corrupt_takes_the_largest_data_file_and_flips_its_middle(tmp_path):
    for name, size in {"state/d/aa": 100, "state/d/bb": 10001, "state/_METADATA": 20000, "meta/metadata": 30000,
                       "state/array_metadatas/process_0": 30000}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    old = (tmp_path / "state/d/bb").read_bytes()
    assert corrupt(tmp_path, "flip") == tmp_path / "state/d/bb"
    new = (tmp_path / "state/d/bb").read_bytes()
    differ = [i for i in range(len(old)) if old[i] != new[i]]
    assert len(new) == len(old) and differ == list(range((10001 - 4096) // 2, (10001 - 4096) // 2 + 4096))
    assert all(new[i] == old[i] ^ 0xFF for i in differ)
    (tmp_path / "state/d/aa").unlink()
    (tmp_path / "state/d/bb").unlink()
    with pytest.raises(FileNotFoundError, match="no file of array data to corrupt"):
        corrupt(tmp_path, "flip")


# ---------------------------------------------------------------- the disk

DISK = textwrap.dedent("""
    import errno, json, os, pathlib, subprocess, sys, time
    from jaxmem.faults import Faults, parse
    run = pathlib.Path(sys.argv[1])

    def writes(size):
        path = run / "checkpoint"
        try:
            path.write_bytes(b"x" * size)
            return True
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return False
        finally:
            path.unlink(missing_ok=True)

    def until(size):
        for _ in range(600):
            if writes(size):
                return True
            time.sleep(0.05)

    (run / "logs").mkdir()
    found, large = {}, 2**20
    faults = Faults(parse("fill_disk:step=1;fill_disk:step=2,seconds=0.5;fill_disk:step=3;fill_disk:step=4"), run, 0)
    found["before"] = writes(large)
    faults.before_step(1)
    found["filled"], found["small"] = writes(large), writes(4096)
    faults.on_save_failed()
    found["after a failed save"] = writes(large)
    faults.before_step(2)
    found["filled for a while"], found["after a while"] = writes(large), until(large)
    faults.before_step(3)
    found["filled again"] = writes(large)
    faults.close()
    found["after close"] = writes(large)
    faults.close()
    killed = subprocess.Popen([sys.executable, "-c", "import pathlib, time; from jaxmem.damage import Ballast; "
                               f"b = Ballast(pathlib.Path({str(run)!r})); print(b.bytes, flush=True); time.sleep(60)"],
                              stdout=subprocess.PIPE)
    found["by another"] = int(killed.stdout.readline())
    found["filled by another"] = writes(large)
    killed.kill()
    killed.wait()
    found["after it was killed"] = until(large)
    found["files"] = sorted(path.name for path in run.iterdir())
    print(json.dumps(found))
""")


def test_fill_disk_fills_a_real_file_system_and_gives_it_back(tmp_path, repository):
    """On a tmpfs of 8 MiB in a mount namespace of its own."""
    done = on_a_small_disk(tmp_path, 8, sys.executable, "-W", "error", "-c", DISK, tmp_path, timeout_s=60, PYTHONPATH=str(repository))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    taken = found.pop("by another")
    assert 7 * MIB < taken < 8 * MIB
    assert found == {"before": True, "filled": False, "small": True, "after a failed save": True, "filled for a while": False,
                     "after a while": True, "filled again": False, "after close": True, "filled by another": False,
                     "after it was killed": True, "files": ["logs"]}
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_keeps_some_for_itself_is_filled_all_the_same(tmp_path, monkeypatch):
    room, used = 5 * MIB, [0]

    def allocate(_fd, offset, size):
        if offset + size > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert offset == used[0]
        used[0] += size

    monkeypatch.setattr(damage, "free_bytes", lambda _: 6 * MIB - used[0])
    monkeypatch.setattr(damage.os, "posix_fallocate", allocate)
    ballast = Ballast(tmp_path)
    ballast.close()
    assert room - 4096 < ballast.bytes == used[0] <= room


def test_a_large_file_system_is_refused_at_the_start(run, monkeypatch):
    monkeypatch.setattr(damage, "free_bytes", lambda _: 9 * 2**30 + 2**29)
    with pytest.raises(InputError, match=r"is on a file system with 9.5 GiB free, and at most 8 GiB are filled; put --out on a small file "
                                         r"system, e.g. a tmpfs of 64 MB"):
        Faults(parse("fill_disk:step=3"), run, 0)
    Faults(parse("fill_disk:step=3,process=1"), run, 0)  # another's disk

"""`jaxmem export`, from a checkpoint that the store wrote: the parameters alone, any step, verified, refused by name."""

import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.formats.models import TINY, config_for, random_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.checkpoint.digest import digests
from jaxmem.checkpoint.formats import read, read_into, saved
from jaxmem.checkpoint.formats.saved import saved_params
from jaxmem.checkpoint.keep import Keep
from jaxmem.checkpoint.store import Store
from jaxmem.cli import main
from jaxmem.workload import Workload

# After an error Orbax closes its event loop while other reads that it started still end; Python prints that and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def spread(tree):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(
        *[None] * (x.ndim - 1), "a" if x.ndim and x.shape[-1] % 4 == 0 else None) if x.ndim else P())), tree)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run folder, {step: params}) of steps 4 and 8, saved on eight devices with a piece of optimizer state."""
    folder, kept = tmp_path_factory.mktemp("run"), {}
    store = Store(folder / "checkpoints", keep=Keep(last=5), run_id="me")
    workload = Workload.parse(model=TINY["llama"], optimizer="sgd", batch=8, seq=32)
    for step in (4, 8):
        kept[step] = random_params(config_for("llama"), seed=step)
        state = spread({"params": kept[step], "opt_state": {"mu": kept[step]["embed"]}, "step": jnp.int32(step)})
        store.save(step, state, {"digests": digests(state)[0], "workload": str(workload), "plan": "fsdp=8", "topology": "cpu:8"}, wait=True)
    store.close()
    return folder, kept


def run(capsys, *argv):
    status = main.main(["export", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes(), a, b))


@pytest.mark.parametrize("layout, flags, step", [("llama", (), 8), ("llama", ("--step=4",), 4), ("jaxmem", ("--layout=jaxmem",), 8)])
def test_a_runs_parameters_come_out_bit_for_bit(trained, layout, flags, step, tmp_path, capsys):
    folder, kept = trained
    status, out, err = run(capsys, f"--run={folder}", f"--out={tmp_path / 'out'}", *flags)
    config = config_for("llama")
    assert (status, err) == (0, "")
    assert out.startswith(f"step {step} of {folder}: {config.parameters:,} parameters, layout {layout}, ") and "in 1 file: " in out
    assert same(read(tmp_path / "out", config)[1], kept[step])
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["model_type"] == layout and described.get("max_position_embeddings") == (512 if layout == "llama" else None)


def test_relative_folders_are_taken(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained[0].parent)
    status, _, err = run(capsys, f"--run={trained[0].name}", f"--out={tmp_path / 'out'}")
    assert (status, err) == (0, "")


def test_what_was_exported_is_what_init_from_reads(trained, tmp_path, capsys):
    folder, kept = trained
    assert run(capsys, f"--run={folder}", f"--out={tmp_path / 'out'}", "--dtype=f32")[0] == 0
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), spread(kept[8]))
    found = read_into(tmp_path / "out", config_for("llama"), targets)
    assert same(jax.tree.map(np.asarray, found), kept[8])


def test_one_parameter_at_a_time_is_restored(trained, monkeypatch, tmp_path):
    """Nothing is read before it is written, and then that parameter alone."""
    asked, read_tree = [], saved.read_tree

    def watched(path, abstract):
        asked.append([x.shape for x in jax.tree.leaves(abstract)])
        return read_tree(path, abstract)
    monkeypatch.setattr(saved, "read_tree", watched)
    found = saved_params(trained[0] / "checkpoints")
    assert asked == [] and found.step == 8 and found.workload.seq == 32
    value = found.params["blocks"]["mlp"]["up"].load()
    assert asked == [[(2, 24, 40)]] and len(value.devices()) == 1
    assert value.tobytes() == trained[1][8]["blocks"]["mlp"]["up"].tobytes()


@pytest.mark.parametrize("flags, words", [
    (("--out=x",), "export needs --run=FOLDER"),
    (("--run=nowhere", "--out=x"), "--run=nowhere is no run"),
    (("--run={run}", "--out=x", "--step=5"), "step=5 is not in .*; committed steps: 4, 8"),
    (("--run={run}", "--out=x", "--layout=lama"), "layout=lama: unknown; did you mean llama"),
    (("--run={run}", "--out=x", "--layout=gpt2"), "layout=gpt2 cannot hold this model"),
    (("--run={run}", "--out=x", "--dtype=fp16"), "dtype=fp16: unknown; did you mean f16 or bf16"),
    (("--run={run}", "--out={run}"), "exists, and nothing is overwritten"),
    (("--run={run}", "--out=x", "more"), "export takes flags only, not 'more'"),
])
def test_bad_input_is_one_message_and_status_2(trained, flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *(flag.format(run=trained[0]) for flag in flags))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert re.search(words, err), err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_step_is_refused_and_the_one_before_is_named(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    meta = folder / "checkpoints" / "8" / "meta" / "metadata"
    held = json.loads(meta.read_text())
    held["digests"]["params/final_norm/scale"] = "0" * 16
    meta.write_text(json.dumps(held))
    status, _, err = run(capsys, f"--run={folder}", f"--out={tmp_path / 'out'}")
    assert status == 2 and "step 8 is damaged: final_norm/scale differs from what was written; step=4 is the one before" in err
    largest = max((p for p in (folder / "checkpoints" / "8" / "state").rglob("*") if p.is_file() and "/d/" in str(p)),
                  key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2:len(data) // 2 + 64] = bytes(64)
    largest.write_bytes(data)
    status, _, err = run(capsys, f"--run={folder}", f"--out={tmp_path / 'out'}")
    assert status == 2 and "step 8 " in err and "step=4 is the one before" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    assert run(capsys, f"--run={folder}", f"--out={tmp_path / 'out'}", "--step=4")[0] == 0
    assert pathlib.Path(tmp_path / "out" / "config.json").is_file()

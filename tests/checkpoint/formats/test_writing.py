"""Round trips to the last bit, the bytes of the reference's own files, file sizes, and what is refused."""

import json
import pathlib

import jax
import numpy as np
import pytest
from checkpoint.formats.models import TINY, config_for, random_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

from jaxmem.checkpoint.formats import writing
from jaxmem.checkpoint.formats.reading import read
from jaxmem.checkpoint.formats.writing import write
from jaxmem.spec import InputError

GOLDEN = pathlib.Path(__file__).parents[2] / "fixtures" / "hf"


def bits(tree):
    return jax.tree.map(lambda x: (x.dtype.name, x.shape, x.tobytes()), tree)


def tensors(folder):
    """`{name: (dtype, shape, bytes)}` by safetensors itself, and the file of each."""
    found, where = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - it is no dict
                x = file.get_tensor(name)
                found[name], where[name] = (x.dtype.name, x.shape, x.tobytes()), path.name
    return found, where


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("layout", TINY)
def test_round_trips_are_exact(layout, dtype, tmp_path):
    config = config_for(layout)
    params = random_params(config, dtype)
    write(tmp_path / "out", config, params, layout=layout)
    back_config, back = read(tmp_path / "out")
    assert back_config == config
    assert bits(back) == bits(params)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]


@pytest.mark.parametrize("name", ["llama", "llama3", "gpt2", "qwen2", "qwen3"])
def test_the_references_files_come_back_tensor_by_tensor(name, tmp_path):
    config, params = read(GOLDEN / name)
    layout = json.loads((GOLDEN / name / "config.json").read_text())["model_type"]
    write(tmp_path / "out", config, params, layout=layout)
    assert tensors(tmp_path / "out")[0] == tensors(GOLDEN / name)[0]


@pytest.mark.parametrize("layout", ["llama", "gpt2", "jaxmem"])
def test_files_stay_below_the_size_and_the_index_finds_everything(layout, tmp_path):
    config = config_for(layout)
    params = random_params(config)
    write(tmp_path / "one", config, params, layout=layout)
    write(tmp_path / "many", config, params, layout=layout, file_bytes=40_000)
    (found, where), index = tensors(tmp_path / "many"), json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in found.values()) == 4 * config.parameters
    held = {file: [len(found[name][2]) for name in where if where[name] == file] for file in files}
    assert all(sum(sizes) <= 40_000 or len(sizes) == 1 for sizes in held.values())
    assert found == tensors(tmp_path / "one")[0]
    assert bits(read(tmp_path / "many")[1]) == bits(params)


@pytest.mark.parametrize("layout", ["llama", "gpt2", "jaxmem"])
def test_sharded_arrays_are_written_as_their_whole_and_keep_no_host_copy(layout, tmp_path):
    config = config_for(layout)
    params = random_params(config)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def put(x):
        axes = iter(("a", "b"))
        spec = [next(axes, None) if n % 4 == 0 else None for n in x.shape]
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))
    spread = jax.tree.map(put, params)
    assert any(len(x.sharding.device_set) == 8 and not x.is_fully_replicated for x in jax.tree.leaves(spread))
    write(tmp_path / "out", config, spread, layout=layout)
    write(tmp_path / "host", config, params, layout=layout)
    assert tensors(tmp_path / "out")[0] == tensors(tmp_path / "host")[0]
    assert all(x._npy_value is None for x in jax.tree.leaves(spread))


@pytest.mark.parametrize("layout", ["llama", "jaxmem"])
def test_no_more_than_a_layers_tensor_is_on_the_host(layout, tmp_path, monkeypatch):
    config, sizes = config_for(layout), []
    host = writing._host

    def watched(value, layer):
        sizes.append((np.size(value) // (1 if layer is None else config.layers), host(value, layer).size))
        return host(value, layer)
    monkeypatch.setattr(writing, "_host", watched)
    write(tmp_path / "out", config, random_params(config), layout=layout)
    assert all(got == one for one, got in sizes) and sum(got for _, got in sizes) == config.parameters


@pytest.mark.parametrize("layout", ["gpt2", "qwen2"])
def test_what_loads_itself_is_loaded_once_and_when_it_is_written(layout, tmp_path, monkeypatch):
    config, order, host = config_for(layout), [], writing._host
    params = random_params(config)
    monkeypatch.setattr(writing, "_host", lambda value, layer: order.append("write") or host(value, layer))

    def later(x):
        return writing.Later(shape=x.shape, dtype=x.dtype, load=lambda: order.append("load") or x)
    write(tmp_path / "out", config, jax.tree.map(later, params), layout=layout)
    assert bits(read(tmp_path / "out")[1]) == bits(params)
    text = "".join(word[0] for word in order)
    assert text.count("l") == len(jax.tree.leaves(params)) and max(map(len, text.split("w"))) == (3 if layout == "gpt2" else 1)


def test_another_dtype_rounds_to_nearest(tmp_path):
    config = config_for("llama")
    params = jax.tree.map(lambda x: np.random.default_rng(1).normal(size=x.shape).astype(np.float32), random_params(config))
    write(tmp_path / "out", config, params, layout="llama", dtype="bf16")
    back = read(tmp_path / "out")[1]

    def rounded(x):  # half to even, on the bits
        word = x.view(np.uint32)
        return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert got.dtype.name == "bfloat16"
        np.testing.assert_array_equal(got.view(np.uint16), rounded(want))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_refusals(tmp_path):
    config = config_for("llama")
    params = random_params(config)
    with pytest.raises(InputError, match="dtype=fp8: unknown"):
        write(tmp_path / "out", config, params, layout="llama", dtype="fp8")
    with pytest.raises(InputError, match="layout=gpt2 cannot hold this model, which has .*positions=rope.*layouts that can: llama"):
        write(tmp_path / "out", config, params, layout="gpt2")
    mixed = params | {"embed": np.zeros((96, 24), np.float16)}
    with pytest.raises(InputError, match="parameters are float16, float32; give one dtype"):
        write(tmp_path / "out", config, mixed, layout="llama")
    with pytest.raises(ValueError, match=r"embed: \[95, 24\], the model has \[96, 24\]"):
        write(tmp_path / "out", config, params | {"embed": params["embed"][1:]}, layout="llama")
    with pytest.raises(ValueError, match="head: absent"):
        write(tmp_path / "out", config, {k: v for k, v in params.items() if k != "head"}, layout="llama")
    large = jax.tree.map(lambda x: np.full(x.shape, 7e4, np.float32), params)
    with pytest.raises(InputError, match="embed: values beyond the range of float16; use bf16 or f32"):
        write(tmp_path / "out", config, large, layout="llama", dtype="f16")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(InputError, match="exists, and nothing is overwritten"):
        write(tmp_path / "out", config, params, layout="llama")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, monkeypatch):
    config, calls = config_for("llama"), []

    def fails(value, layer):
        calls.append(layer)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return np.asarray(value if layer is None else value[layer])
    monkeypatch.setattr(writing, "_host", fails)
    with pytest.raises(InputError, match="out was not written: No space left on device"):
        write(tmp_path / "out", config, random_params(config), layout="llama")
    assert len(calls) == 6 and list(tmp_path.iterdir()) == []

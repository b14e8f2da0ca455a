"""What is missing or wrong is said at once; slices are the slices of the whole; devices read their own bytes."""

import collections
import dataclasses
import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.formats.models import TINY, config_for, random_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from jaxmem.checkpoint.formats import reading
from jaxmem.checkpoint.formats.folder import Folder
from jaxmem.checkpoint.formats.layouts import by_layer, places
from jaxmem.checkpoint.formats.reading import read, read_into
from jaxmem.checkpoint.formats.turning import turned
from jaxmem.checkpoint.formats.writing import write
from jaxmem.hardware import parse_topology
from jaxmem.optim.dims import flatten
from jaxmem.plan import Plan
from jaxmem.rules import partition, rules, shard_elements
from jaxmem.spec import InputError
from jaxmem.step import build
from jaxmem.workload import Workload

GOLDEN = pathlib.Path(__file__).parents[2] / "fixtures" / "hf"


def written(tmp_path, layout, dtype="f32", **options):
    config = config_for(layout)
    params = random_params(config, dtype)
    return config, params, write(tmp_path / layout, config, params, layout=layout, **options)


def changed(folder, change):
    """The tensors of a folder of one file, changed in place."""
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---------------------------------------------------------------- one error for all

def test_everything_that_is_wrong_is_in_one_error(tmp_path):
    folder = written(tmp_path, "llama")[2]

    def change(held):
        for layer in (0, 1):
            del held[f"model.layers.{layer}.mlp.up_proj.weight"]
        del held["lm_head.weight"]
        held["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        held["model.layers.1.self_attn.o_proj.weight"] = held["model.layers.1.self_attn.o_proj.weight"].T.copy()
        held["model.norm.weight"] = np.zeros(24, np.int8)
    with pytest.raises(InputError) as error:
        read(changed(folder, change))
    assert str(error.value).splitlines() == [
        f"{folder} does not hold the model of its config.json:",
        "missing: model.layers.0-1.mlp.up_proj.weight",
        "missing: lm_head.weight",
        "not expected: model.layers.0.self_attn.q_proj.bias",
        "shape: model.layers.1.self_attn.o_proj.weight is [64, 24], expected [24, 64]",
        "dtype: model.norm.weight is I8, expected F32, BF16, F16",
    ]


@pytest.mark.parametrize("layout", TINY)
def test_every_tensor_has_its_parameters_dims_in_order_or_turned(layout):
    for place in places(layout, config_for(layout)).values():
        stored = [d for group in place.groups for d in group]
        own = [d for d in place.dims if d in stored]
        assert own == ([*place.groups[1], *place.groups[0]] if place.turned else stored), place.path


@pytest.mark.parametrize("shape", [(1, 1), (16, 3), (17, 40), (100, 33)])
def test_turned_is_transposed_and_cast(shape):
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    found = turned(matrix, np.full(shape[::-1], np.nan, np.float32))
    np.testing.assert_array_equal(found, matrix.T.astype(np.float32))


def test_layers_are_named_in_runs():
    names = [f"h.{i}.b" for i in (0, 1, 2, 5, 7, 8)] + ["x.weight", "h.3.c"]
    assert by_layer(names) == ["h.0-2,5,7-8.b", "x.weight", "h.3.c"]


def test_another_model_than_asked_is_refused_with_the_flag_that_reads_it(tmp_path):
    config, params, folder = written(tmp_path, "qwen3")
    assert read(folder, config)[0] == config
    with pytest.raises(InputError, match="holds another model, with tied=true, qk_norm=true; as --model=decoder-tiny,embed=24,mlp=40,"
                                         "vocab=96,tied=true,qk_norm=true it can be read"):
        read(folder, dataclasses.replace(config, qk_norm=False, tied=False))


@pytest.mark.parametrize("damage, words", [
    (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    (lambda f: (f / "config.json").write_text("[1]"), "expected a JSON object"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
     "has neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin is not read"),
    (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]), "is damaged or no safetensors file"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "is damaged or no safetensors file"),
    (shutil.rmtree, "no such folder"),
])
def test_folders_that_cannot_be_read(tmp_path, damage, words):
    folder = written(tmp_path, "llama")[2]
    damage(folder)
    with pytest.raises(InputError, match=words):
        read(folder)


def test_indexes_that_cannot_be_used(tmp_path):
    folder = written(tmp_path, "llama", file_bytes=40_000)[2]
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    files = sorted(set(held["weight_map"].values()))
    (folder / files[1]).rename(folder / "away")
    with pytest.raises(InputError, match=f"1 of {len(files)} files that model.safetensors.index.json names are missing: {files[1]}"):
        read(folder)
    (folder / "away").rename(folder / files[1])
    held["weight_map"]["model.norm.weight"] = next(f for f in files if f != held["weight_map"]["model.norm.weight"])
    index.write_text(json.dumps(held))
    with pytest.raises(InputError, match="missing: model.norm.weight"):
        read(folder)
    for wrong in ({"x": "../outside.safetensors"}, ["x"], {"x": 1}):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(InputError, match="expected weight_map"):
            read(folder)


# ---------------------------------------------------------------- what real folders have besides

def test_bare_names_masks_and_a_stored_tied_head_are_read(tmp_path):
    """As the first released GPT-2 files: no prefix, a mask a layer, and a head that repeats the table."""
    params, folder = written(tmp_path, "gpt2")[1:]

    def change(held):
        for name in list(held):
            held[name.removeprefix("transformer.")] = held.pop(name)
        held["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
        held["h.1.attn.masked_bias"] = np.full((), -1e4, np.float32)
        held["lm_head.weight"] = held["wte.weight"].copy()
    found = read(changed(folder, change))[1]
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, params))

    def last_bit(held):
        held["lm_head.weight"].view(np.uint32)[-1, -1] ^= 1
    changed(folder, last_bit)
    with pytest.raises(InputError, match="not expected: lm_head.weight"):
        read(folder)


def test_layers_of_unlike_dtypes_meet_in_f32(tmp_path):
    params, folder = written(tmp_path, "llama", "bf16")[1:]
    held = {name: x.astype(np.float32) if name == "model.layers.0.mlp.up_proj.weight" else x
            for name, x in reading_all(folder).items()}
    save_file(held, folder / "model.safetensors")
    found = read(folder)[1]
    assert found["blocks"]["mlp"]["up"].dtype == np.float32 and found["blocks"]["mlp"]["gate"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(found["blocks"]["mlp"]["up"], params["blocks"]["mlp"]["up"].astype(np.float32))


def reading_all(folder):
    with Folder(folder, None) as files:
        return {name: files.take(name, (slice(None),) * len(shape)) for name, (shape, _) in files.tensors.items()}


# ---------------------------------------------------------------- slices

@pytest.mark.parametrize("layout", TINY)
def test_any_slice_is_the_slice_of_the_whole(layout, tmp_path):
    config, params, folder = written(tmp_path, layout)
    rng = np.random.default_rng(3)
    flat = {"/".join(path): x for path, x in flatten(params).items()}
    with Folder(folder, None) as files:
        for path, place in places(layout, config).items():
            for _ in range(8):
                ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in place.shape]
                index = tuple(slice(int(a), int(b)) for a, b in ends)
                found = reading._part(files, place, index, None)
                assert found.tobytes() == flat[path][index].tobytes() and found.shape == flat[path][index].shape


@pytest.mark.parametrize("layout, plan", [("llama", "fsdp=8"), ("qwen2", "data=2,fsdp=2,tensor=2"), ("gpt2", "fsdp=2,tensor=4"),
                                          ("jaxmem", "fsdp=4,tensor=2"), ("llama", "data=8")])
def test_each_slice_is_read_once_and_devices_hold_their_own(layout, plan, tmp_path, monkeypatch):
    """Arrays equal the whole, in the dtype of the plan, and the bytes read are those of the plan's shards in closed form."""
    config, params, folder = written(tmp_path, layout, "bf16", file_bytes=30_000)
    workload = Workload.parse(model=TINY[layout], optimizer="sgd", batch=8, seq=32)
    plan = Plan.parse(plan, devices=8)
    programs = build(workload, plan, parse_topology("cpu:8"), jax.devices())
    targets = programs.state["params"]
    calls, take = [], Folder.take

    def counted(self, name, index):
        found = take(self, name, index)
        calls.append(found.nbytes)
        return found
    monkeypatch.setattr(Folder, "take", counted)
    told = []
    found = read_into(folder, config, targets, on_read=told.append)

    for path, want in flatten(params).items():
        got, target = flatten(found)[path], flatten(targets)[path]
        assert got.sharding == target.sharding and got.dtype == target.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32))
    table, sizes, stored, whole = rules(plan, "params"), plan.sizes, 0, 0
    for place in places(layout, config).values():
        axes = dict(zip(place.dims, partition(place.dims, place.shape, table, sizes), strict=True))
        used = math.prod(sizes[a] for dim in axes for a in axes[dim])
        # a head's dims lie together on disk: a device that holds some of them reads the head
        twice = math.prod(sizes[a] for a in axes.get("head_dim", ())) if place.groups != tuple((d,) for d in place.dims) else 1
        assert shard_elements(place.dims, place.shape, table, sizes) == math.prod(place.shape) // used
        stored += 2 * math.prod(place.shape) * twice
        whole += 2 * math.prod(place.shape)
    assert sum(calls) == sum(told) == stored and len(told) == len(places(layout, config))
    assert whole == 2 * config.parameters <= stored < 1.02 * whole


def test_a_device_reads_its_eighth(tmp_path, monkeypatch):
    """What the callback of each device reads, and no parameter is whole on the host on the way."""
    config, _, folder = written(tmp_path, "llama")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    shapes = {path: place for path, place in places("llama", config).items()}
    split = {path: P(*("x" if d in ("embed", "vocab") and n % 8 == 0 and first else None
                       for d, n, first in _firsts(place))) for path, place in shapes.items()}
    targets = reading.nested({path: jax.ShapeDtypeStruct(place.shape, jnp.float32, sharding=NamedSharding(mesh, split[path]))
                              for path, place in shapes.items()})
    read_by, part = collections.defaultdict(list), reading._part

    def counted(files, place, index, dtype):
        before = files.bytes_read
        found = part(files, place, index, dtype)
        read_by[place.path].append(files.bytes_read - before)
        return found
    monkeypatch.setattr(reading, "_part", counted)
    read_into(folder, config, targets)
    for path, place in shapes.items():
        whole = 4 * int(np.prod(place.shape))
        assert read_by[path] == ([whole // 8] * 8 if "x" in split[path] else [whole]), path
    assert sum("x" in spec for spec in split.values()) == len(shapes)


def _firsts(place):
    seen = False
    for d, n in zip(place.dims, place.shape, strict=True):
        fits = d in ("embed", "vocab") and n % 8 == 0
        yield d, n, fits and not seen
        seen |= fits


def test_donating_what_was_read_leaves_the_replicas_alone(tmp_path):
    """Devices that hold the same slice got it from one host array; updating in place must not show through."""
    config = config_for("llama")
    params = jax.tree.map(lambda x: np.random.default_rng(1).normal(size=x.shape).astype(np.float32), random_params(config))
    folder = write(tmp_path / "out", config, params, layout="llama")
    whole = NamedSharding(jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), P())
    half = NamedSharding(whole.mesh, P("y"))
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=half if len(x) % 2 == 0 else whole), params)
    found = read_into(folder, config, targets)
    once = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(found)
    for got, want in zip(jax.tree.leaves(once), jax.tree.leaves(params), strict=True):
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index] + np.float32(1))
    assert all(x.is_deleted() for x in jax.tree.leaves(found))


def test_targets_of_another_model_are_a_mistake_of_the_caller(tmp_path):
    config, _, folder = written(tmp_path, "llama")
    with pytest.raises(ValueError, match="targets of another model: embed: "):
        read_into(folder, config, {})


def test_the_references_sharded_folder_is_read_slice_by_slice():
    config, whole = read(GOLDEN / "llama")
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(
        *[None] * (x.ndim - 1), "b" if x.shape[-1] % 4 == 0 else None))), whole)
    found = read_into(GOLDEN / "llama", config, targets)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == b.tobytes(), found, whole))

"""Whole checks through real compilers, as small as they can be: own programs in three styles, one text for check and training, advice."""

import json
import pathlib

import flax.linen as linen
import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import step, verdict
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.targets.compile import Request, compile_programs
from jaxmem.workload import Workload

SCHEMA = json.loads((pathlib.Path(jaxmem.__file__).parent / "check.schema.json").read_text())
LINES: list[str] = []


def replicated(tree, mesh):
    sharding = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def test_a_linen_model():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(256, name="second")(linen.relu(linen.Dense(512, name="first")(x)))
    mesh = jaxmem.mesh("v5e-1", {"data": 1})
    x = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)

    def loss(params, x):
        return Net().apply(params, x).sum()
    out = jaxmem.check(jax.grad(loss), replicated(params, mesh), replicated(x, mesh), topology="v5e-1", progress=LINES.append)
    jsonschema.validate(out, SCHEMA)
    assert out["verdict"] == "fits"
    (program,) = out["programs"].values()
    weights = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    assert weights + 128 * 256 * 4 <= program["argument_bytes"] <= 1.05 * (weights + 128 * 256 * 4)
    modules = {row["module"] for row in out["composition"]}
    assert any(m and "first" in m for m in modules) and any(m and "second" in m for m in modules)


def test_an_nnx_model_over_four_devices():
    """Shards of the state are what arrives on one device, donated state counts once, and the collectives are on the mesh's axis."""
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(256, 1024, rngs=rngs), nnx.Linear(1024, 256, rngs=rngs)

        def __call__(self, x):
            with jax.named_scope("mlp"):
                return self.down(nnx.relu(self.up(x)))
    graph, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    mesh = jaxmem.mesh("v5e-4", {"fsdp": 4})
    state = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, P("fsdp"))), state)
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))

    def train_step(state, x):
        grads = jax.grad(lambda s: (nnx.merge(graph, s)(x) ** 2).mean())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
    out = jaxmem.check(train_step, state, x, topology="v5e-4", donate_argnums=0, progress=LINES.append)
    jsonschema.validate(out, SCHEMA)
    (program,) = out["programs"].values()
    one_device = 4 * (256 * 1024 + 1024 + 1024 * 256 + 256) // 4 + 512 * 256 * 4 // 4
    assert one_device <= program["argument_bytes"] <= one_device + 8192
    assert program["alias_bytes"] >= 4 * 2 * 256 * 1024 // 4
    assert out["traffic"] and {row["axis"] for row in out["traffic"]} == {"fsdp"}
    assert out["step_s"] > 0 and out["sources"]["step_s"] == "estimate"


def test_a_jitted_function_keeps_its_donation():
    """What jax.jit donates is counted once, as if donate_argnums were given here."""
    from jaxmem.targets import foreign
    where = parse_topology("v5e-4")
    mesh = jaxmem.mesh("v5e-4", {"fsdp": 4})
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    step_fn = jax.jit(lambda state, x: ({"w": state["w"] + x.sum(0)[None]}, x), donate_argnums=0)
    _, about = foreign.export(step_fn, ({"w": x}, x), {}, where)
    assert about["donate"] == [0] and about["paths"] == ["state/w", "x"]


@pytest.mark.parametrize("value", [np.ones((8, 8)), 3, jax.ShapeDtypeStruct((8, 8), jnp.float32)])
def test_keyword_arguments_are_checked_too(value):
    with pytest.raises(InputError, match="argument scale="):
        jaxmem.check(lambda x, *, scale: x * scale, topology="v5e-4", scale=value, progress=LINES.append)


@pytest.mark.parametrize(("make", "words"), [
    (lambda mesh: jnp.ones((8, 8)), ["concrete array of shape (8, 8)", "ShapeDtypeStruct"]),
    (lambda mesh: np.ones((8, 8)), ["concrete array"]),
    (lambda mesh: jax.ShapeDtypeStruct((8, 8), jnp.float32), ["no sharding", "4 devices", "PartitionSpec() replicates"]),
    (lambda mesh: 3, ["is a int", "static_argnums"]),
    (lambda mesh: jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp"))),
     ["not a multiple of fsdp(4)", "4 or 8"]),
    (lambda mesh: jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(jaxmem.mesh("v5e-8", {"a": 8}), P())),
     ["mesh of 8", "has 4"]),
])
def test_arguments_that_cannot_be_used(make, words):
    mesh = jaxmem.mesh("v5e-4", {"fsdp": 4})
    with pytest.raises(InputError) as caught:
        jaxmem.check(lambda x: x, make(mesh), topology="v5e-4", progress=LINES.append)
    assert all(w in str(caught.value) for w in words), caught.value


def test_a_mesh_of_another_size():
    with pytest.raises(InputError, match=r"fsdp\(3\) = 3 devices, and v5e-4 has 4"):
        jaxmem.mesh("v5e-4", {"fsdp": 3})


def test_what_is_checked_is_what_is_trained():
    """The compile child and this process build the three strings' programs on their own: the lowered texts are equal."""
    work, plan, where = Workload.parse(model="decoder-tiny", batch=8, seq=32), Plan.parse("fsdp=4,tensor=2"), parse_topology("cpu:8")
    request = Request(spec={"kind": "workload", "workload": str(work), "plan": str(plan)}, programs=("train", "save"), topology=where,
                      flags=())
    checked = compile_programs(request, progress=LINES.append)
    here = step.build(work, plan, where, jax.devices())
    import hashlib
    for name, artifact in checked.items():
        assert artifact.result["text_sha256"] == hashlib.sha256(here[name].lower().as_text().encode()).hexdigest()


@pytest.fixture(scope="module")
def tiny_check():
    """`decoder-tiny` on a v5e slice, every program."""
    work, plan = Workload.parse(model="decoder-tiny", batch=8, seq=128), Plan.parse("fsdp=4,remat=block")
    return verdict.check_workload(work, plan, parse_topology("v5e-4"), progress=LINES.append)


@pytest.mark.long
def test_a_check_of_a_workload(tiny_check):
    jsonschema.validate(tiny_check, SCHEMA)
    assert tiny_check["verdict"] == "fits" and set(tiny_check["programs"]) == {"init", "train", "eval", "save"}
    assert tiny_check["headroom_bytes"] == tiny_check["usable_bytes"] - tiny_check["peak_bytes"]
    assert tiny_check["parameters"] == 139_584
    state = 139_584 * 4 // 4
    assert tiny_check["programs"]["save"]["host_bytes"] >= 3 * state, "the copy of parameters and both moments is on the host"
    assert {t["program"] for t in tiny_check["timeline"]} == set(tiny_check["programs"])
    listed = sum(row["bytes"] for row in tiny_check["composition"]) + tiny_check["unattributed_bytes"]
    assert listed >= 0.9 * tiny_check["peak_bytes"]
    again = verdict.check_workload(Workload.parse_line(tiny_check["workload"]), Plan.parse(tiny_check["plan"]), parse_topology("v5e-4"),
                                   progress=LINES.append)
    assert again["cached"] and again["wall_s"] < tiny_check["wall_s"]
    same = ("verdict", "peak_bytes", "composition", "step_s", "traffic", "buffers")
    assert {k: again[k] for k in same} == {k: tiny_check[k] for k in same}


@pytest.mark.long
def test_advice_is_verified_by_compiling():
    """Logits of 64 x 4096 tokens over a vocabulary of 262,144 do not fit one v5e; doing the loss in parts is found, compiled and fits."""
    work = Workload.parse(model="decoder-tiny,vocab=262144", batch=8, seq=4096)
    out = verdict.check_workload(work, Plan.parse("remat=block"), parse_topology("v5e-1"), programs=("train",), advise=True,
                                 progress=LINES.append)
    assert out["verdict"] == "does_not_fit" and out["worst_program"] == "train"
    jsonschema.validate(out, SCHEMA)
    best = out["advice"][0]
    assert best["verdict"] in ("fits", "tight") and best["source"] == "compile" and best["peak_bytes"] < out["usable_bytes"]


def test_two_slices(tmp_path):
    """`data` over two slices of four: the all-reduce of a mean is on the axis that crosses them."""
    path = tmp_path / "mine.py"
    path.write_text("""
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
def build(mesh_for):
    mesh = mesh_for({"data": 2, "fsdp": 4})
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=NamedSharding(mesh, P("data", "fsdp")))
    return lambda x: x - x.mean(0, keepdims=True), (x,)
""")
    out = verdict.check_program(str(path), "build", parse_topology("2xv5e-4"), progress=LINES.append)
    jsonschema.validate(out, SCHEMA)
    assert out["devices"] == 8 and out["verdict"] == "fits"
    assert {row["axis"] for row in out["traffic"]} == {"data"}

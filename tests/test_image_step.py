"""Step programs of MLP and vision transformer: every plan gives the loss, the hits and the gradients of one device, the state is split
as the closed form says, and the text depends on the strings."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import step
from jaxmem.cost.flops import step_flops
from jaxmem.cost.memory import state_bytes
from jaxmem.hardware import parse_topology
from jaxmem.models.ops import Ops
from jaxmem.models.vit import Vit
from jaxmem.parallel.attend import attention
from jaxmem.parallel.saving import run_layers
from jaxmem.plan import Plan, Remat
from jaxmem.spec import InputError
from jaxmem.workload import Workload

BATCH = 16
MLP, VIT = "mlp,layers=3", "vit-tiny"
QUICK = ((MLP, "data=2,fsdp=2,tensor=2,accumulate=2"), (VIT, "data=2,fsdp=2,tensor=2,sequence=tensor,remat=block,accumulate=2"))
LONG = ((MLP, "data=8,zero=0"), (MLP, "data=8,zero=1"), (MLP, "data=4,fsdp=2,zero=2"), (MLP, "fsdp=8"), (MLP, "tensor=8"),
        (VIT, "data=8,zero=0"), (VIT, "data=4,fsdp=2,zero=2"), (VIT, "fsdp=8,zero=1,remat=attention"), (VIT, "fsdp=8,remat=dots"),
        (VIT, "fsdp=4,tensor=2,layers=unroll"), (VIT, "data=2,tensor=4,remat=save:query_proj+mlp_up"),
        ("vit-tiny,classes=12", "fsdp=2,tensor=4"))
NO_GRADIENT = "['blocks']['attention']['key_bias']"  # softmax does not see what is added to all of a query's scores


@functools.cache
def workload(model: str, optimizer: str = "adamw") -> Workload:
    return Workload.parse(model=model, optimizer=optimizer, batch=BATCH)


def programs(plan_text: str, work: Workload) -> step.Programs:
    plan = Plan.parse(plan_text)
    return step.build(work, plan, parse_topology(f"cpu:{plan.devices}"), jax.devices()[:plan.devices])


def batch_of(work: Workload) -> dict[str, np.ndarray]:
    """Two images do not count."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, work.model.outputs, BATCH).astype(np.int32)
    labels[[3, 10]] = -1
    return {"images": rng.random((BATCH, *work.rows["images"][0]), np.float32), "labels": labels}


@functools.cache
def params_on_host(model: str) -> dict:
    """Every parameter has a random part, so that no bias or norm is what it begins as."""
    params = jax.device_get(programs("compute=f32", workload(model))["init"].jitted()(np.uint32(3))["params"])
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: (x + rng.normal(0, 0.05, x.shape)).astype(x.dtype), params)


@functools.cache
def results(model: str, plan_text: str):
    """(loss, gradients by path)."""
    built = programs(plan_text, workload(model))
    args = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), (params_on_host(model), batch_of(workload(model))),
                        built["gradients"].args)
    loss, grads = built["gradients"].lower().compile()(*args)
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(grads))
    return float(loss), {jax.tree_util.keystr(path): leaf for path, leaf in flat}


@functools.cache
def evaluation(model: str, plan_text: str) -> dict[str, float]:
    built = programs(plan_text, workload(model))
    args = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), (params_on_host(model), batch_of(workload(model))), built["eval"].args)
    return {name: float(value) for name, value in built["eval"].lower().compile()(*args).items()}


def assert_evaluates_as_one_device(model: str, plan: str) -> None:
    found, want = evaluation(model, plan + ",compute=f32"), evaluation(model, "compute=f32")
    assert want["images"] == found["images"] == BATCH - 2 and want["correct"] == found["correct"] > 0
    assert found["loss_sum"] == pytest.approx(want["loss_sum"], rel=1e-5)
    assert want["loss_sum"] / 14 == pytest.approx(results(model, "step=split,compute=f32")[0], rel=1e-6)


def assert_same_as_one_device(model: str, plan: str) -> None:
    loss, grads = results(model, plan + ",step=split,compute=f32")
    want_loss, want_grads = results(model, "step=split,compute=f32")
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for path, reference in want_grads.items():
        size = np.abs(reference).max()
        if path == NO_GRADIENT:
            assert max(size, np.abs(grads[path]).max()) < 1e-4 * np.abs(want_grads[path.replace("key", "query")]).max()
            continue
        assert size > 1e-5, f"{path}: the reference gradient is tiny and would prove nothing"
        assert np.abs(grads[path] - reference).max() < 2e-5 * size, path


@pytest.mark.parametrize(("model", "plan"), QUICK)
def test_plan_equals_one_device(model, plan):
    assert_same_as_one_device(model, plan)


@pytest.mark.long
@pytest.mark.parametrize(("model", "plan"), LONG)
def test_every_plan_equals_one_device(model, plan):
    assert_same_as_one_device(model, plan)
    assert_evaluates_as_one_device(model, plan)


def test_the_step_attends_to_every_patch():
    """The gradient program's loss against the module's own with full attention, and not with causal."""
    def alone(mask):
        ops = Ops(attend=attention("xla", None, mask=mask), attend_local=None,
                  run_blocks=run_layers(Remat(policy="none"), layers=2, unroll=False))
        graph, variables = nnx.split(nnx.eval_shape(lambda: Vit(workload(VIT).model, rngs=nnx.Rngs(0), dtype=jnp.float32)))
        model = nnx.merge(graph, step.pure_to_state(variables, params_on_host(VIT)))
        return float(jax.jit(lambda batch: model.loss_sum(batch, ops, jnp.dtype(jnp.float32), chunks=1))(batch_of(workload(VIT)))) / 14
    loss = results(VIT, "step=split,compute=f32")[0]
    assert loss == pytest.approx(alone("full"), rel=1e-5)
    assert abs(loss - alone("causal")) > 1e-3 * loss


def test_evaluation_equals_one_device():
    assert_evaluates_as_one_device(MLP, "data=2,fsdp=2,tensor=2")


def test_gradients_are_the_loss_s():
    """Central differences of the evaluation program's loss along a direction that every array has a part in."""
    model, rng = "mlp,layers=1,activation=gelu", np.random.default_rng(5)
    work, params = workload(model), params_on_host(model)
    built = programs("compute=f32,step=split", work)
    run, given = built["eval"].lower().compile(), batch_of(work)
    _, grads = results(model, "step=split,compute=f32")
    norm = math.sqrt(sum(np.square(grad.astype(np.float64)).sum() for grad in grads.values()))
    direction = {path: grad / norm * rng.uniform(0.2, 2, grad.shape) for path, grad in grads.items()}

    def loss(at: float) -> float:
        moved = jax.tree_util.tree_map_with_path(lambda path, p: np.float32(p + at * direction[jax.tree_util.keystr(path)]), params)
        placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), (moved, given), built["eval"].args)
        return float(run(*placed)["loss_sum"]) / 14
    slope = sum((grads[path].astype(np.float64) * direction[path]).sum() for path in grads)
    assert abs(slope) > 0.1
    assert (loss(1e-2) - loss(-1e-2)) / 2e-2 == pytest.approx(slope, rel=0.005)


def test_flops_are_what_xla_counts():
    """Forward and backward of a wide MLP, where matmuls are nearly all: of the images there is no gradient."""
    work = Workload.parse(model="mlp,layers=3,mlp=512,height=32,width=32", batch=64)
    built = programs("compute=f32,step=split", work)
    counted = built["gradients"].lower().compile().cost_analysis()["flops"]
    found = step_flops(work, Plan())
    assert found.forward + found.backward == pytest.approx(counted, rel=0.02)
    assert found.backward < 1.75 * found.forward


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor,momentum=0.9,factored_above=32", "muon"])
@pytest.mark.parametrize(("model", "plan"), [(MLP, "data=2,fsdp=2,tensor=2"), (VIT, "data=2,fsdp=4"), (VIT, "data=4,fsdp=2,zero=1")])
def test_state_is_what_the_closed_form_says(model, plan, optimizer):
    """Bytes of a device's shards of parameters and optimizer state, and of its part of the batch."""
    work = workload(model, optimizer)
    built, form = programs(plan, work), state_bytes(work, Plan.parse(plan))

    def held(tree) -> int:
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    assert (held(built.state["params"]), held(built.state["opt_state"]), held(built.batch)) == (form.params, form.opt_state, form.batch)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(built.state["opt_state"]))
    assert held(built.state["opt_state"]) < 0.6 * whole


def test_muon_leaves_pixels_positions_and_head_to_adam():
    state = programs("data=8,zero=0", workload(VIT, "muon")).state["opt_state"]
    paths = {jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0] if leaf.size > 1}
    second = {path for path in paths if ".nu" in path}
    for name in ("['patches']['weights']", "['positions']", "['head']['weights']"):
        assert any(path.endswith(name) for path in second), name
    assert not any(path.endswith("['mlp']['up']") for path in second) and any(path.endswith("['mlp']['up']") for path in paths)


def test_matrices_decay_and_biases_do_not():
    """One AdamW step from no gradient at all: what decays has shrunk by lr x weight_decay."""
    work = workload("mlp,layers=1", "adamw,weight_decay=0.5")
    built = programs("compute=f32,step=split", work)
    params = jax.tree.map(lambda x: np.ones_like(x), params_on_host("mlp,layers=1"))
    update = built["update"]
    opt_state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), built.state["opt_state"])
    state = {"params": params, "opt_state": opt_state, "step": np.int32(0)}
    values = (state, np.float32(1), jax.tree.map(np.zeros_like, params), {"lr": np.float32(0.1), "clip": np.float32(1)})
    new, _ = update.lower().compile()(*jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), values, update.args))
    flat = {jax.tree_util.keystr(path): float(leaf.min()) for path, leaf in jax.tree_util.tree_flatten_with_path(new["params"])[0]}
    assert flat == pytest.approx({"['hidden_0']['weights']": 0.95, "['hidden_0']['bias']": 1.0, "['head']['weights']": 0.95,
                                  "['head']['bias']": 1.0})


@pytest.mark.parametrize("model", [MLP, VIT])
def test_text_depends_on_the_three_strings_alone(model):
    one, two = (programs(plan, workload(model))["train"].lower().as_text() for plan in ("fsdp=4,tensor=2", "tensor=2,fsdp=4"))
    assert one == two
    assert programs("fsdp=8", workload(model))["train"].lower().as_text() != one


def test_arguments_say_what_they_are():
    built = programs("fsdp=8", workload(VIT))
    labels = {label["path"]: (label["kind"], label["module"]) for label in built["train"].labels}
    assert labels["1/images"] == labels["1/labels"] == ("batch", "input")
    assert labels["0/params/patches/weights"] == ("params", "patches") and labels["0/params/head/bias"] == ("params", "head")
    assert [label["path"] for label in built["eval"].output_labels] == ["correct", "images", "loss_sum"]


def test_full_attention_follows_the_target():
    work = Workload.parse(model="vit-tiny,height=32,width=32,patch=2", batch=8)
    found = {name: step.choose_attention(work, Plan.parse("fsdp=8"), parse_topology(name)) for name in ("h100:8", "v5e-8", "cpu:8")}
    assert found == {"h100:8": "xla", "v5e-8": "splash", "cpu:8": "xla"}
    assert step.choose_attention(Workload.parse(model="mlp", batch=8), Plan.parse("fsdp=8"), parse_topology("h100:8")) == "xla"
    with pytest.raises(InputError, match="attention=triton is causal"):
        programs_for = Plan.parse("fsdp=8,attention=triton")
        step.build(work, programs_for, parse_topology("h100:8"), jax.devices())

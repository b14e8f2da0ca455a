"""The step programs: every plan gives the loss and gradients of one device, state is split from init, the text depends on the strings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import step
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.rules import rules, shard_elements
from jaxmem.spec import InputError
from jaxmem.workload import Workload
from tests import plans

BATCH, SEQ = 16, 64


@functools.cache
def workload(optimizer: str = "adamw", model: str = "decoder-tiny") -> Workload:
    return Workload.parse(model=model, optimizer=optimizer, batch=BATCH, seq=SEQ)


def programs(plan_text: str, work: Workload | None = None) -> step.Programs:
    plan = Plan.parse(plan_text)
    return step.build(work or workload(), plan, parse_topology(f"cpu:{plan.devices}"), jax.devices()[:plan.devices])


def batch_of(vocab: int) -> dict[str, np.ndarray]:
    """Two documents a row, of uneven lengths; the last target of each is not asked for."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (BATCH, SEQ + 1), dtype=np.int32)
    cut = rng.integers(8, SEQ - 8, (BATCH, 1))
    place = np.arange(SEQ)[None, :]
    segments = np.where(place < cut, 1, 2).astype(np.int32)
    positions = np.where(place < cut, place, place - cut).astype(np.int32)
    last = (place == cut - 1) | (place == SEQ - 1)
    return {"tokens": tokens[:, :-1], "targets": np.where(last, -1, tokens[:, 1:]).astype(np.int32), "segment_ids": segments,
            "positions": positions}


@functools.cache
def params_on_host(model: str = "decoder-tiny") -> dict:
    """Parameters far from zero gradients: the embedding is made larger than a real start has it."""
    built = programs("compute=f32", workload(model=model))
    params = jax.device_get(built["init"].jitted()(np.uint32(3))["params"])
    params["embed"] = params["embed"] * 10
    return params


def gradients(plan_text: str, model: str = "decoder-tiny"):
    """(loss, gradients by path) of one gradient program."""
    work = workload(model=model)
    built = programs(plan_text + ",step=split" if plan_text else "step=split,compute=f32", work)
    program = built["gradients"]
    with jax.set_mesh(built.mesh):
        args = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), (params_on_host(model), batch_of(work.model.vocab)), program.args)
        loss, grads = program.jitted()(*args)
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(grads))
    return float(loss), {jax.tree_util.keystr(path): leaf for path, leaf in flat}


@pytest.fixture(scope="module")
def reference():
    return gradients("")


def assert_same(got, want):
    assert abs(got[0] - want[0]) < 1e-5 * want[0]
    for path, reference_grad in want[1].items():
        size = np.abs(reference_grad).max()
        assert size > 1e-5, f"{path}: the reference gradient is tiny and would prove nothing"
        error = np.abs(got[1][path] - reference_grad).max() / size
        assert error < 2e-5, f"{path}: relative error {error:.1e}"


@pytest.mark.parametrize("plan", plans.QUICK)
def test_plan_equals_one_device(plan, reference):
    assert_same(gradients(plan), reference)


@pytest.mark.long
@pytest.mark.parametrize("plan", plans.LONG)
def test_every_plan_equals_one_device(plan, reference):
    assert_same(gradients(plan), reference)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor,momentum=0.9,factored_above=32", "muon"])
def test_state_is_split_from_init(optimizer):
    """Shards of parameters and of every optimizer's state have the closed form's size, in the abstract state and in init's output."""
    work = workload(optimizer)
    plan = Plan.parse("data=2,fsdp=4")
    built = programs(str(plan), work)
    lowered = built["init"].lower()
    out = jax.tree.leaves(lowered.out_info)
    abstract = jax.tree.leaves(built.state)
    assert len(out) == len(abstract)
    split = [leaf for leaf in abstract if leaf.size > 1000]
    assert all(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in split), "a large array is whole on every device"
    query = built.state["params"]["blocks"]["attention"]["query"]
    dims = ("layers", "embed", "heads", "head_dim")
    assert np.prod(query.sharding.shard_shape(query.shape)) == shard_elements(dims, query.shape, rules(plan, "params"), plan.sizes)


@pytest.mark.parametrize(("zero", "want"), [(0, (1, 1, 1)), (1, (8, 1, 1)), (2, (8, 8, 1)), (3, (4, 4, 4))])
def test_zero_says_what_is_split(zero, want):
    """Parts of (optimizer state, gradients, parameters): 1 and 2 split over data x fsdp = 8, 3 over fsdp = 4."""
    built = programs(f"data=2,fsdp=4,zero={zero},step=split")
    query = built.state["params"]["blocks"]["attention"]["query"]
    moment = built.state["opt_state"][0].mu["blocks"]["attention"]["query"]
    grad = built["update"].args[2]["blocks"]["attention"]["query"]
    parts = lambda x: x.size // np.prod(x.sharding.shard_shape(x.shape))  # noqa: E731
    assert (parts(moment), parts(grad), parts(query)) == want


def test_text_depends_on_the_three_strings_alone():
    """Built twice, and with real devices in place of the first build's: the same text. Another plan: another text."""
    one, two = programs("fsdp=4,tensor=2"), programs("tensor=2,fsdp=4")
    texts = [{name: p.lower().as_text() for name, p in x.programs.items()} for x in (one, two)]
    assert texts[0] == texts[1]
    assert programs("fsdp=8")["eval"].lower().as_text() != texts[0]["eval"]


def test_learning_rate_and_clip_are_inputs():
    text = programs("fsdp=8")["train"].lower().as_text(debug_info=True)
    assert "hyper['lr']" in text and "hyper['clip']" in text


def test_train_step_is_one_optax_step():
    """Split programs and the fused one agree with optax.adamw applied on the host in float64 to the reference gradients."""
    work = workload()
    built = programs("fsdp=8,compute=f32")
    state = {"params": params_on_host(), "opt_state": jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), built.state["opt_state"]),
             "step": np.int32(0)}
    _, grads = gradients("")
    with jax.set_mesh(built.mesh):
        put = lambda tree, like: jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), tree, like)  # noqa: E731
        new, metrics = built["train"].jitted()(put(state, built.state), put(batch_of(work.model.vocab), built.batch),
                                               {"lr": jnp.float32(1e-2), "clip": jnp.float32(1.0)})
    norm = np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in grads.values()))
    assert norm > 1, "the clip must act"
    assert abs(float(metrics["grad_norm"]) - norm) < 1e-4 * norm
    o = work.optimizer
    before, _ = jax.tree_util.tree_flatten_with_path(params_on_host())
    after = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_flatten_with_path(jax.device_get(new["params"]))[0]}
    for path, p in before:
        key = jax.tree_util.keystr(path)
        g = grads[key].astype(np.float64) / norm
        decay = o.weight_decay if ("norm" not in key) else 0.0
        moment, second = (1 - o.b1) * g / (1 - o.b1), (1 - o.b2) * g * g / (1 - o.b2)
        want = p - 1e-2 * (moment / (np.sqrt(second) + o.eps) + decay * p.astype(np.float64))
        # Adam's first step is a sign: compare where the gradient is far from rounding
        clear = np.abs(g) > 1e-3 * np.abs(g).max()
        np.testing.assert_allclose(after[key][clear], want[clear], rtol=1e-4, atol=1e-6)


def test_problems_are_raised_whole():
    with pytest.raises(InputError) as caught:
        programs("fsdp=3,tensor=5")
    text = str(caught.value)
    assert "heads(4) is not a multiple of tensor(5)" in text and "batch(16) is not a multiple" in text


def test_save_stages_the_state_on_the_host():
    """Values equal, in pinned host memory, split as the state is; the host's bytes are those of the shards."""
    built = programs("fsdp=8")
    values = np.random.default_rng(0)
    state = jax.tree.map(lambda s: jax.device_put(values.integers(0, 100, s.shape).astype(s.dtype), s.sharding), built.state)
    with jax.set_mesh(built.mesh):
        staged = built["save"].jitted()(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(staged), strict=True):
        assert after.sharding.memory_kind == "pinned_host" and after.sharding.spec == before.sharding.spec
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(("topology", "want"), [("h100:8", "triton"), ("a6000:8", "xla"), ("v5e-8", "splash"), ("cpu:8", "xla")])
def test_attention_follows_the_target(topology, want):
    work = Workload.parse(model="decoder-tiny", batch=8, seq=128)
    assert step.choose_attention(work, Plan.parse("fsdp=8"), parse_topology(topology)) == want

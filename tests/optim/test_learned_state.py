"""A learned rule as an optax citizen: where its state lies, in which bits, and who may leave it out."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import step
from jaxmem.hardware import parse_topology
from jaxmem.optim import transforms
from jaxmem.optim.configs import LEARNED_WEIGHTS, OptimizerConfig
from jaxmem.optim.dims import flatten, names, state_dims
from jaxmem.optim.learned import accumulators, blocks
from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.celo import scale_by_celo
from jaxmem.optim.learned.small_fc import scale_by_small_fc
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

QUICK = {"xla_backend_optimization_level": 0}
RULES = {"small_fc": scale_by_small_fc, "celo": scale_by_celo}


def untrained(rule):
    """Random in every array, so that nothing is multiplied by zero."""
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape) * (0.03 if "decays" in name else 0.6), jnp.float32)
            for name, shape in LEARNED_WEIGHTS[rule].items()}


def random(shapes, seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape) + 0.3, jnp.float32) for name, shape in shapes.items()}


# ---------------------------------------------------------------- split over devices

SPLIT = {"w": ((64, 32), ("f", "t")), "table": ((24, 16), ("t", "f")), "stack": ((2, 32, 8, 4), ("layers", "f", "t", "head_dim")),
         "norms": ((2, 16), ("layers", "embed"))}


@pytest.mark.parametrize(("rule", "moments"), [("small_fc", "f32"), ("celo", "int8")])
def test_split_state(rule, moments):
    """On a 4 x 2 mesh, cut into blocks: the steps and the state of one device, an eighth of the state of matrices on each, row and column
    statistics split as what is left of their parameter, and no gather in the compiled update."""
    mesh = jax.make_mesh((4, 2), ("f", "t"), axis_types=(AxisType.Auto,) * 2)
    shapes = {name: shape for name, (shape, _) in SPLIT.items()}
    known = {(name,): value for name, value in SPLIT.items()}
    tx = RULES[rule](untrained(rule), stacked={"w": 0, "table": 0, "stack": 1, "norms": 1}, moments=moments, chunk=600)
    params, gradients = random(shapes, 1), [random(shapes, seed) for seed in (2, 3)]

    def spec(dims):
        return P(*(d if d in ("f", "t") else None for d in dims))

    of_params = {name: NamedSharding(mesh, spec(dims)) for name, (_, dims) in SPLIT.items()}
    abstract = jax.eval_shape(tx.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    of_state = jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, spec(state_dims(names(path), x.shape, known)[0])), abstract)
    for field, want in {"momenta": P(None, "f", "t"), "second": P("f", "t"), "rows": P(None, "t"), "cols": P(None, "f")}.items():
        assert getattr(of_state, field)["w"].spec == want, field
    for path, leaf in flatten(abstract).items():
        sharding = flatten(of_state)[path]
        parts = leaf.size / np.prod(sharding.shard_shape(leaf.shape))
        if path[0] in ("momenta", "second") and path[1] != "norms":
            assert parts == 8, path
        assert path[0] == "steps" or path[1] == "norms" or parts >= 2, path

    split = jax.jit(tx.update, in_shardings=(of_params, of_state, of_params), out_shardings=(of_params, of_state))
    put = lambda tree, where: jax.tree.map(jax.device_put, tree, where)  # noqa: E731
    state, whole = put(tx.init(params), of_state), tx.init(params)
    compiled = split.lower(put(gradients[0], of_params), state, put(params, of_params)).compile(compiler_options=QUICK)
    moves = re.findall(r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(", compiled.as_text())
    assert set(moves) == {"all-reduce"}
    one = jax.jit(tx.update, compiler_options=QUICK)
    for g in gradients:
        got, state = compiled(put(g, of_params), state, put(params, of_params))
        want, whole = one(g, whole, params)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            error = np.abs(a - b).max() if moments == "f32" else np.quantile(np.abs(a - b), 0.98)  # a last bit can move a code by one
            assert error <= (1e-5 if moments == "f32" else 1e-2) * np.abs(b).max()
    for a, b, where in zip(jax.tree.leaves(state), jax.tree.leaves(whole), jax.tree.leaves(of_state), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= (1 if moments == "int8" else 1e-5) * max(np.abs(b).max(), 1e-6)
        assert where is not None
    for array, where in zip(jax.tree.leaves(state), jax.tree.leaves(of_state), strict=True):
        assert array.sharding.is_equivalent_to(where, array.ndim), "an update must leave the state where it was"


@pytest.mark.long
@pytest.mark.parametrize("text", ["learned", "learned,rule=small_fc,moments=int8"])
def test_in_the_step_programs(text):
    """The update program of a model on 4 x 2 devices gathers no matrix, and its state has the closed form's bytes."""
    work = Workload.parse(model="decoder-tiny,layers=2", optimizer=text, batch=8, seq=16)
    plan = Plan.parse("fsdp=4,tensor=2,step=split")
    built = step.build(work, plan, parse_topology("cpu:8"), jax.devices()[:8])
    text = built["update"].lower().compile(compiler_options=QUICK).as_text()
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\].* all-gather(?:-start)?\(", text)
    gathered = [np.prod([int(n) for n in re.findall(r"\d+", dims)]) for dims in shapes]
    matrix = 64 * 64
    assert max(gathered, default=0) < matrix, "a parameter-sized array is gathered"


def test_text_does_not_depend_on_the_file(tmp_path):
    """The file is not read to build or compile; a run puts its numbers in, and until then everything is NaN."""
    path = tmp_path / "w.json"
    config = OptimizerConfig(name="learned", weights=str(path))
    dims, params = {"w": ("embed", "mlp")}, {"w": jnp.ones((4, 6))}
    tx = transforms.build(config, dims)
    texts, states = set(), []
    for seed in (0, 1):
        weights = {name: x + seed for name, x in untrained("celo").items()}
        learned_weights.save(path, weights)
        state = tx.init(params)
        assert all(np.isnan(x).all() for x in state[0].weights.values())
        state = transforms.with_trained_weights(state, config)
        texts.add(jax.jit(tx.update).lower(params, state, params).as_text())
        states.append(state[0].weights)
        for name, x in weights.items():
            np.testing.assert_array_equal(state[0].weights[name], x)
    assert len(texts) == 1 and not np.array_equal(states[0]["w0"], states[1]["w0"])


def test_untrained_weights_are_said_once(caplog):
    learned_weights._said.clear()
    tx = transforms.build(OptimizerConfig(name="learned", weights=None), {"w": ("embed", "mlp")})
    for _ in range(2):
        tx.init({"w": jnp.ones((4, 6))})
    assert [r.getMessage() for r in caplog.records if "UNTRAINED" in r.getMessage()] == [
        "optimizer learned: rule=celo has UNTRAINED weights; weights=FILE gives trained ones"]


# ---------------------------------------------------------------- optax

def test_masked_and_multi_transform():
    """Whoever is left out is untouched, whoever is in gets what it gets alone; a stack is still a stack; the loss may come or not."""
    params, g = random({"a": (2, 3, 4), "b": (5,)}, 1), random({"a": (2, 3, 4), "b": (5,)}, 2)
    tx = scale_by_celo(untrained("celo"), stacked={"a": 1, "b": 0})
    alone, _ = tx.update({"a": g["a"]}, tx.init({"a": params["a"]}), {"a": params["a"]})
    masked = optax.masked(tx, {"a": True, "b": False})
    many = optax.partition({"learned": tx, "sgd": optax.sgd(0.5)}, {"a": "learned", "b": "sgd"})
    for other, want in ((masked, g["b"]), (many, -0.5 * g["b"])):
        with jax.numpy_dtype_promotion("standard"):
            got, _ = optax.with_extra_args_support(other).update(g, other.init(params), params, value=jnp.float32(3.0))
        np.testing.assert_array_equal(got["b"], want)
        np.testing.assert_allclose(got["a"], alone["a"], rtol=1e-6)


def test_none_takes_no_part():
    params = random({"a": (3, 4), "b": (5,)}, 1)
    tx = scale_by_small_fc(untrained("small_fc"))
    state = tx.init(params)
    step_, after = tx.update({"a": params["a"], "b": None}, state, params)
    assert step_["b"] is None and (after.momenta["b"] == 0).all() and not (after.momenta["a"] == 0).any()
    assert int(after.steps) == 1
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, state)


def test_bf16_parameters_keep_their_type():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random({"a": (3, 4)}, 1))
    tx = scale_by_celo(untrained("celo"))
    step_, state = tx.update(params, tx.init(params), params)
    assert step_["a"].dtype == jnp.bfloat16 and state.momenta["a"].dtype == state.second["a"].dtype == jnp.float32
    assert abs(float(jnp.sqrt(jnp.square(step_["a"].astype(jnp.float32)).mean())) - 1) < 0.01


# ---------------------------------------------------------------- bits

@pytest.mark.parametrize(("moments", "noise"), [("bf16", 0.03), ("int8", 0.25)])
def test_slow_averages_do_not_stand_still(moments, noise):
    """Averages with decay 0.999 of 0.25 to 1, from zero, beside one that is there already: after 2,000 steps they are at
    1 - 0.999 ** 2000 = 0.865 of it, in narrow bits too. Rounded to nearest they stop below half."""
    target, start = jnp.linspace(1.0, 0.25, 256)[None, :], jnp.zeros((1, 256)).at[0, 0].set(1.0)

    def nearest(x, t):
        scale = x.max(-1, keepdims=True) / 127
        return (x.astype(jnp.bfloat16), None) if moments == "bf16" else (jnp.round(x / scale).astype(jnp.int8), scale)

    def ratio(store):
        def one(carry, t):
            return store(0.999 * accumulators.decode(*carry) + 0.001 * target, t), None
        first = accumulators.encode(start, moments, jnp.int32(0), -1)
        return np.asarray(accumulators.decode(*jax.lax.scan(one, first, jnp.arange(2000))[0]) / target)[0, 1:]
    got = ratio(lambda x, t: accumulators.encode(x, moments, t, -1))
    assert abs(got.mean() - 0.865) < 3 * noise / 16 and got.std() < noise
    assert ratio(nearest).mean() < 0.5


def test_rounding_is_fair_and_exact_where_it_can_be():
    x = jnp.full((64, 1024), 1.001953125)  # a quarter of the way from 1 to the next bf16
    values = x + jnp.arange(64 * 1024, dtype=jnp.float32).reshape(64, 1024) * 1e-8
    stored, scales = accumulators.encode(values, "bf16", jnp.int32(5), -1)
    assert scales is None and set(np.unique(np.asarray(stored, np.float32))) == {1.0, 1.0078125}
    assert abs(np.asarray(stored, np.float64).mean() - np.asarray(values, np.float64).mean()) < 2e-4
    codes = jnp.arange(-127, 128, dtype=jnp.float32)[None] * 0.5
    stored, scales = accumulators.encode(codes, "int8", jnp.int32(1), -1)
    assert np.abs(np.asarray(accumulators.decode(stored, scales) - codes)).max() <= 0.5
    assert (np.asarray(accumulators.encode(jnp.zeros((2, 3)), "int8", jnp.int32(1), -1)[0]) == 0).all()


# ---------------------------------------------------------------- blocks, weights, words

def test_blocks_leave_room_for_devices():
    assert blocks.blocks((4096, 4096), 1, 2**18).k == 32  # 128 rows of 4096 are left, two chunks' worth
    assert blocks.blocks((50257, 768), 1, 2**18).k == 1733  # 29 x 1733: the smallest cut that is small enough
    assert blocks.blocks((768, 12, 64), 12, 2**18).k == 3  # 256 rows
    assert blocks.blocks((768,), 12, 2**18).whole and not blocks.blocks((2**20,), 2, 2**18).whole
    for shape, layers, chunk in (((48, 7), 2, 50), ((5, 3), 1, 4), ((256, 10), 1, 300)):
        cut = blocks.blocks(shape, layers, chunk)
        assert shape[0] % cut.k == 0 and (shape[0] // cut.k) % np.gcd(shape[0], 128) == 0


def test_files(tmp_path):
    weights = untrained("small_fc")
    for name in ("w.npz", "w.json"):
        learned_weights.save(tmp_path / name, weights)
        read = learned_weights.load(tmp_path / name, "small_fc")
        assert all(np.array_equal(read[k], weights[k]) for k in weights) and read.keys() == weights.keys()
    with pytest.raises(InputError, match=r"does not fit rule=celo: .*w0: \(39, 4\), expected \(30, 8\)"):
        learned_weights.load(tmp_path / "w.npz", "celo")
    (tmp_path / "few.json").write_text(json.dumps({"w0": [[1.0]]}))
    with pytest.raises(InputError, match="b0: missing, expected"):
        learned_weights.load(tmp_path / "few.json", "small_fc")
    learned_weights.save(tmp_path / "nan.npz", weights | {"b0": weights["b0"] * np.nan})
    with pytest.raises(InputError, match="b0 is not finite"):
        learned_weights.load(tmp_path / "nan.npz", "small_fc")
    for missing in ("none.npz", "none.json"):
        with pytest.raises(InputError, match="cannot be read"):
            learned_weights.load(tmp_path / missing, "small_fc")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="cannot be read"):
        learned_weights.load(tmp_path / "list.json", "small_fc")


def test_words():
    of = lambda text: Workload.parse(model="decoder-tiny", optimizer=text, batch=1, seq=8)  # noqa: E731
    work = of("learned,rule=small_fc,moments=int8,weights=runs/w.npz")
    assert work.optimizer_text == "learned,moments=int8,rule=small_fc,weights=runs/w.npz" and not work.problems()
    for text, want in (("adamw,moments=int8", "moments=int8: only learned has it; expected f32 or bf16"), ("learned,chunk=0", "chunk=0")):
        with pytest.raises(InputError, match=want):
            of(text)

"""Meta-steps on softmax regression with three features: against a loop written out here, over devices, through ends and checkpoints."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.meta import es, problem, provenance, recipe, tasks, trainer
from jaxmem.optim.learned.meta import run as meta_run
from jaxmem.optim.learned.meta.recipe import Recipe
from jaxmem.optim.learned.small_fc import scale_by_small_fc
from jaxmem.runs import folder as folders
from jaxmem.spec import InputError

QUICK = {"xla_backend_optimization_level": 0}  # compiled in less time, to run a few times


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


RECIPE = Recipe(rule="small_fc", families=("one",), tasks=8, truncation=6, batch=8, lengths=(12, 48), learning_rates=(20.0, 200.0),
                sigma=0.03, iterations=100, outer_lr=0.03, seed=5)


def task(name, seed):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, 3)) * 2

    def rows(count):
        labels = rng.integers(0, 3, count).astype(np.int32)
        return (centres[labels] + rng.normal(size=(count, 3))).astype(np.float32), labels
    return tasks.Task(name=name, train=rows(30), valid=rows(20), test=rows(10), widths=(3, 3))


TASKS = {"one": task("one", 0)}
TWO = TASKS | {"two": task("two", 1)}


@functools.cache
def built(devices, families=1, **change):
    """(compiled meta-step, data, a state to copy) over so many devices."""
    r, own = dataclasses.replace(RECIPE, **change), TASKS if families == 1 else TWO
    mesh = trainer.mesh_of(devices)
    data, state = trainer.data_of(own, mesh), trainer.start(r, own, mesh)
    return trainer.build(r, own, mesh).lower(state, data).compile(compiler_options=QUICK), data, jax.device_get(state)


def state_of(devices, **more):
    step, data, state = built(devices, **more)
    mesh = trainer.mesh_of(devices)
    return step, data, jax.device_put(state, trainer.shardings(state, mesh))


def run(devices, steps, **more):
    step, data, state = state_of(devices, **more)
    out = []
    for _ in range(steps):
        state, numbers = step(state, data)
        out.append(jax.device_get(jax.block_until_ready(numbers)))
    return state, out


def largest(tree):
    return max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))


def test_one_device_and_eight_have_the_same_meta_gradient():
    """After two meta-steps Adam's first moment is 0.09 g1 + 0.1 g2: no other number of the state says more of the gradients."""
    (one, a), (eight, b) = run(1, 2), run(8, 2)
    assert not one.problems["one"].lr.sharding.is_equivalent_to(eight.problems["one"].lr.sharding, 1)
    assert len(eight.problems["one"].position.sharding.device_set) == 8
    moments = [jax.device_get(state.adam[0].mu) for state in (one, eight)]
    assert largest(moments[0]) > 0.01
    for x, y in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * largest(moments[0]))
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)


@pytest.mark.parametrize(("families", "objective"), [(1, "loss"), pytest.param(2, "log_loss", marks=pytest.mark.long)])
def test_a_meta_step_by_hand(families, objective):
    """The second meta-gradient, from inner loops written out with no vmap, scan or mesh: problems are in the middle, or begin anew."""
    step, data, state = state_of(1, **({"families": 2, "objective": objective} if families == 2 else {}))
    tasks_here = TASKS if families == 1 else TWO
    state, _ = step(state, data)
    before = jax.device_get(state)
    after, numbers = step(state, data)
    wanted = jax.tree.map(np.zeros_like, before.theta)
    losses, positions = [], set()
    for family, (name, own) in enumerate(tasks_here.items()):
        keys = trainer.keys_of(RECIPE, family, jnp.int32(1))
        for i in range(RECIPE.tasks):
            p = jax.tree.map(lambda x, i=i: x[i], before.problems[name])
            fresh, noise, rows = jax.random.split(keys[i], 3)
            if p.position == p.length:
                p = jax.device_get(problem.begin(RECIPE, own, before.theta, fresh))
            at = int(p.position)
            positions.add(at)
            eps = es.perturbation(noise, before.theta, RECIPE.sigma)
            a, b = jax.random.split(rows)
            train = jax.random.randint(a, (6, 8), 0, 30)
            valid = jax.random.randint(b, (6, 8), 0, 20)
            found = []
            for copy, sign in enumerate((1, -1)):
                own_weights = {k: before.theta[k] + np.float32(sign) * eps[k] for k in eps}
                params = jax.tree.map(lambda x, copy=copy: jnp.asarray(x[copy]), p.pair.states[0])
                opt_state = jax.tree.map(lambda x, copy=copy: jnp.asarray(x[copy]), p.pair.states[1])
                total = 0.0
                for t in range(6):
                    gradients = jax.grad(own.loss)(params, own.train[0][train[t]], own.train[1][train[t]])
                    u, opt_state = update(own_weights, gradients, opt_state, params)
                    lr = float(p.lr) * 0.5 * (1 + math.cos(math.pi * (at + t) / int(p.length)))
                    params = jax.tree.map(lambda x, y, lr=lr: x - np.float32(lr) * y, params, u)
                    total += float(own.loss(params, own.valid[0][valid[t]], own.valid[1][valid[t]]))
                found.append(total / 6 if objective == "loss" else math.log(total / 6))
            losses.append(sum(found) / 2)
            difference = np.clip(found[0] - found[1], -RECIPE.difference_limit, RECIPE.difference_limit)
            for k in wanted:
                wanted[k] = wanted[k] + difference * (p.pair.drift[k] + np.asarray(eps[k])) / (2 * RECIPE.sigma ** 2) / (8 * families)
    said = np.array(losses) if objective == "loss" else np.exp(losses)
    for i, name in enumerate(tasks_here):
        np.testing.assert_allclose(numbers.losses[name], said[8 * i:8 * i + 8].mean(), rtol=1e-4)
    assert largest(wanted) > 0.01 and positions == {0, 6}
    for k, moment in jax.device_get(after.adam[0].mu).items():
        got = (moment - 0.9 * before.adam[0].mu[k]) / 0.1
        np.testing.assert_allclose(got, wanted[k], rtol=5e-3, atol=5e-3 * largest(wanted))


@functools.partial(jax.jit, compiler_options=QUICK)
def update(weights, gradients, opt_state, params):
    return scale_by_small_fc(weights).update(gradients, opt_state, params)


# ---------------------------------------------------------------- lengths, rates, ends

def test_lengths_and_rates_are_log_uniform():
    r = dataclasses.replace(RECIPE, truncation=50, lengths=(100, 2000), learning_rates=(1e-3, 1e-1))
    found = jax.vmap(lambda key: tuple(vars(problem.draw(r, key)).values()))(jax.random.split(jax.random.key(0), 20_000))
    length, lr = map(np.asarray, found)
    assert (length % 50 == 0).all() and length.min() == 100 and length.max() == 2000
    for values, low, high in ((length, 100, 2000), (lr, 1e-3, 1e-1)):
        place = np.log(values / low) / np.log(high / low)
        assert abs(place.mean() - 0.5) < 0.02 and abs(place.var() - 1 / 12) < 0.01  # whole truncations are a little off
    assert abs(np.corrcoef(np.log(length), np.log(lr))[0, 1]) < 4 / np.sqrt(20_000)


def test_starts_are_desynchronised():
    """First problems have a uniform part of their length; all of them end at other times."""
    r = dataclasses.replace(RECIPE, truncation=50, lengths=(1000, 1000))
    theta = learned_weights.initial("small_fc", jax.random.key(0))
    first = jax.jit(jax.vmap(lambda key: problem.first(r, TASKS["one"], theta, key).length))(jax.random.split(jax.random.key(0), 4000))
    counts = np.bincount(np.asarray(first) // 50, minlength=21)[1:]
    assert counts.sum() == 4000 and len(counts) == 20
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1%


def test_problems_begin_anew_when_they_end():
    """Through several ends: positions, lengths, rates, parameters and what accumulates follow from each other."""
    step, data, state = state_of(1)
    state = jax.device_get(state)
    ends = 0
    for _ in range(8):
        before = jax.device_get(state)
        state, _ = step(jax.device_put(before, trainer.shardings(before, trainer.mesh_of(1))), data)
        for name in TASKS:
            old, new = before.problems[name], jax.device_get(state).problems[name]
            ended = old.position >= old.length
            ends += ended.sum()
            assert (new.position == np.where(ended, 0, old.position) + 6).all()
            assert ((new.length == old.length) | ended).all() and ((new.lr == old.lr) | ended).all()
            assert (new.lr[ended] != old.lr[ended]).all()
            steps = new.pair.states[1].steps
            assert (steps == new.position[:, None]).all()  # the rule's own count begins anew with the problem
            size = np.abs(new.pair.drift["w0"]).mean((1, 2)) / np.sqrt(2 / np.pi) / RECIPE.sigma
            truncations = new.position / 6
            assert np.abs(size / np.sqrt(truncations) - 1).max() < 0.35  # a sum of so many perturbations, of 156 numbers
    assert ends >= 4


def test_a_problem_that_breaks_begins_anew_and_says_nothing_bad():
    step, data, state = state_of(8)
    params = state.problems["one"].pair.states[0]
    broken = jax.tree.map(lambda x: x.at[2].set(jnp.nan), params)
    state.problems["one"] = state.problems["one"]._replace(pair=state.problems["one"].pair._replace(
        states=(broken, state.problems["one"].pair.states[1])))
    state, numbers = step(state, data)
    assert int(numbers.broken) == 1 and all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.theta)))
    assert numbers.losses["one"] > 20 / 8
    state, numbers = step(state, data)
    assert int(numbers.broken) == 0 and int(state.problems["one"].position[2]) == 6


@pytest.mark.long
def test_full_es_runs_whole_problems():
    state, numbers = run(8, 2, estimator="full_es")
    lengths = {int(x) for p in state.problems.values() for x in p.length}
    assert len(lengths) == 1  # none waits for another
    assert all((p.position == p.length).all() and (p.pair.states[1].steps == p.length[:, None]).all() for p in state.problems.values())
    assert all(0.05 < x < 3 for m in numbers for x in m.losses.values())
    assert largest(jax.device_get(state.adam[0].mu)) > 0


# ---------------------------------------------------------------- runs

def meta_train(monkeypatch, path, **more):
    """The run with the meta-step that is compiled already; returns (status, metrics, weights)."""
    compiled = built(8)[0]

    class Ready:
        def __init__(self, *args):
            pass

        def lower(self, *args):
            return self

        def compile(self):
            return compiled
    monkeypatch.setattr(trainer, "build", Ready)
    monkeypatch.setattr(tasks, "find", TASKS.__getitem__)
    monkeypatch.setattr(provenance, "commit", lambda: None)
    folder = folders.open_folder(path, {"steps": 100}, {}, elastic=False)
    status = meta_run.meta_train(RECIPE, folder, **more)
    return status, folders.read_lines(path / "metrics.jsonl"), learned_weights.load(path / "weights.npz", "small_fc")


NUMBERS = ("step", "loss", "grad_norm", "lr", "losses", "broken")


def test_a_stopped_run_goes_on_bit_for_bit(monkeypatch, tmp_path):
    """One run of 100 meta-steps; one stopped after 7, with a line written past its checkpoint as a kill leaves it, and started again."""
    status, whole, wanted = meta_train(monkeypatch, tmp_path / "whole", budget=meta_run.Budget())
    assert status == 0 and [line["step"] for line in whole] == list(range(1, 101))
    out = tmp_path / "parts"
    seen = []

    def stop_after_7(line):
        seen.append(line["step"])
        if line["step"] == 7:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        meta_train(monkeypatch, out, budget=meta_run.Budget(checkpoint_s=0.0), show=stop_after_7)
    assert seen[-1] == 7
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "step": 99, "loss": 1.0}) + '\n{"kind": "tr')
    seen.clear()
    status, parts, got = meta_train(monkeypatch, out, budget=meta_run.Budget(), show=lambda line: seen.append(line["step"]))
    assert seen == list(range(1, 101))  # the curve begins where the run began
    assert status == 0
    events = folders.read_lines(out / "logs" / "events.jsonl")
    assert [e["restored_from"] for e in events if e["kind"] == "start"] == [None, 6]
    assert [[line[n] for n in NUMBERS] for line in parts] == [[line[n] for n in NUMBERS] for line in whole]
    for name in wanted:
        assert (np.asarray(got[name]) == np.asarray(wanted[name])).all()
    assert np.abs(wanted["w0"] - learned_weights.initial("small_fc", jax.random.key(5))["w0"]).max() > 0.02


def test_the_file_to_begin_from_is_read_once(monkeypatch, tmp_path):
    """A run goes on without it, since its checkpoint has the weights; a new run needs it."""
    given = {name: 3.0 + x for name, x in learned_weights.initial("small_fc", jax.random.key(7)).items()}
    learned_weights.save(tmp_path / "given.npz", given)
    one_step = {"budget": meta_run.Budget(minutes=1e-9), "begin_from": tmp_path / "given.npz"}
    _, _, after = meta_train(monkeypatch, tmp_path / "run", **one_step)
    assert all(np.abs(np.asarray(after[name] - given[name])).max() < 0.5 for name in given)  # one step of Adam away, and 3 from untrained
    (tmp_path / "given.npz").unlink()
    status, lines, further = meta_train(monkeypatch, tmp_path / "run", **one_step)
    assert status == 0 and [line["step"] for line in lines] == [1, 2]
    assert all(np.abs(np.asarray(further[name] - given[name])).max() < 0.5 for name in given)
    with pytest.raises(InputError, match="given.npz"):
        meta_train(monkeypatch, tmp_path / "new", **one_step)


def test_minutes_end_a_run_that_can_go_on(monkeypatch, tmp_path):
    status, lines, _ = meta_train(monkeypatch, tmp_path, budget=meta_run.Budget(minutes=1e-9))
    assert status == 0 and [line["step"] for line in lines] == [1]
    status, lines, _ = meta_train(monkeypatch, tmp_path, budget=meta_run.Budget())
    assert len(lines) == 100
    said = json.loads((tmp_path / "weights.json").read_text())
    assert said["iterations"] == 100 and said["recipe"]["seed"] == 5 and set(said["data"]) == {"one"}


def test_meta_training_lowers_the_loss():
    """small_fc before and after, on the same new problems: the first eight stretches of eight problems, the weights held still."""
    step, data, begin = state_of(8)
    mesh = trainer.mesh_of(8)

    def loss(theta):
        state, found = jax.device_put(jax.device_get(begin), trainer.shardings(begin, mesh)), []
        for _ in range(8):
            state, numbers = step(jax.device_put(state._replace(theta=theta), trainer.shardings(state, mesh)), data)
            found.append(float(numbers.losses["one"]))
        return np.mean(found)
    begin = jax.device_get(begin)
    state, _ = run(8, RECIPE.iterations)
    before, after = loss(begin.theta), loss(jax.device_get(state.theta))
    assert before > 1 and after < 0.7 * before, (before, after)


# ---------------------------------------------------------------- recipes

@pytest.mark.parametrize(("change", "devices", "says"), [
    ({"tasks": 6}, 4, "nearest: 8"), ({"lengths": (5, 20)}, 1, "shorter than a truncation of 6"), ({"sigma": 0.0}, 1, "sigma=0"),
    ({"lengths": (30, 20)}, 1, "lengths=30:20"), ({"iterations": 0}, 1, "iterations=0"), ({"families": ()}, 1, "no families"),
    ({"learning_rates": (0.0, 1.0)}, 1, "learning_rates=0:1"), ({"sigma": math.nan}, 1, "sigma=nan")])
def test_recipes_that_cannot_be_run(change, devices, says):
    recipe.check(RECIPE, devices)
    with pytest.raises(InputError, match=says):
        recipe.check(dataclasses.replace(RECIPE, **change), devices)


@pytest.mark.parametrize(("names", "says"), [(("digits", "mnist28"), "mnist28 is held out"), (("digit",), "did you mean digits")])
def test_families_are_known_and_not_held_out(names, says):
    meta_run.check_families(("digits", "mnist8"))
    with pytest.raises(InputError, match=says):
        meta_run.check_families(names)

"""The learner against the same sequence in float64 NumPy, on one device and on eight."""

import jax
import numpy as np
import optax
import pytest

from jaxmem.continual import learner, methods
from jaxmem.continual.memory import Memory
from jaxmem.continual.tasks import class_incremental
from jaxmem.spec import InputError
from tests.continual import plain
from tests.continual.dense import mesh, mlp

MODEL, LR, BATCH, EPOCHS, SEED = mlp((plain.INPUTS, plain.CLASSES)), 0.2, 8, 3, 7
TRAIN, TEST = plain.problem(56, seed=1), plain.problem(40, seed=2)
TASKS = class_incremental(TRAIN, TEST, [(0, 1), (2, 3)])


def learned(text, devices=8):
    return learner.learn(MODEL, TASKS, methods.parse(text), optax.sgd(LR), mesh=mesh(devices), batch=BATCH, epochs=EPOCHS, seed=SEED)


def begin(i):
    """The fresh parameters of task i, as the learner's seed gives them; everything else is worked out here."""
    params = MODEL.init(jax.random.fold_in(jax.random.split(jax.random.key(SEED))[0], i))["layer0"]
    return [np.asarray(params[name], float) for name in ("weight", "bias")]


def batches(rows, i):
    rng = np.random.default_rng([SEED, i, 0])
    for _ in range(EPOCHS):
        order = rng.permutation(len(rows[1]))
        for start in range(0, len(order) // BATCH * BATCH, BATCH):
            yield rows[0][order[start:start + BATCH]], rows[1][order[start:start + BATCH]]


def mean_slopes(theta, x, labels):
    return plain.back(x, plain.entropy_slope(plain.logits(*theta, x), labels) / len(labels))


def descend(theta, gradients):
    return [p - LR * g for p, g in zip(theta, gradients, strict=True)]


def accuracy(theta, rows):
    return float((plain.logits(*theta, rows[0]).argmax(-1) == rows[1]).mean())


def both():
    return np.concatenate([task.train[0] for task in TASKS]), np.concatenate([task.train[1] for task in TASKS])


def incremental():
    theta = begin(0)
    for i, task in enumerate(TASKS):
        for x, labels in batches(task.train, i):
            theta = descend(theta, mean_slopes(theta, x, labels))
        yield theta


def scratch(start="fresh"):
    theta = begin(0)
    for i, rows in enumerate((TASKS[0].train, both())):
        if i and start == "fresh":
            theta = begin(1)
        if i and start == "shrunk":
            theta = [0.4 * a + 0.1 * b for a, b in zip(theta, begin(1), strict=True)]
        for x, labels in batches(rows, i):
            theta = descend(theta, mean_slopes(theta, x, labels))
        yield theta


def ewc(strength, fisher):
    theta = begin(0)
    held, anchor = [0.0, 0.0], theta
    for i, task in enumerate(TASKS):
        for x, labels in batches(task.train, i):
            slopes = mean_slopes(theta, x, labels)
            theta = descend(theta, [g + strength * f * (p - a) for g, f, p, a in zip(slopes, held, theta, anchor, strict=True)])
        yield theta
        held, anchor = fisher(theta, task.train), theta


def replay(r):
    theta = begin(0)
    for i, task in enumerate(TASKS):
        draws = np.random.default_rng([SEED, i, 1])
        for x, labels in batches(task.train, i):
            if i:
                again = draws.integers(len(TASKS[0].train[1]), size=r)
                x, labels = np.concatenate([x, TASKS[0].train[0][again]]), np.concatenate([labels, TASKS[0].train[1][again]])
            theta = descend(theta, mean_slopes(theta, x, labels))
        yield theta


REFERENCE = {
    "incremental": incremental, "scratch": scratch, "warm": lambda: scratch("last"), "shrink-perturb": lambda: scratch("shrunk"),
    "ewc,ewc=20": lambda: ewc(20, lambda theta, rows: plain.fisher(*theta, rows[0])),
    "ewc,ewc=20,fisher=empirical": lambda: ewc(20, lambda theta, rows: plain.empirical_fisher(*theta, *rows)),
    "replay,replay=16": lambda: replay(16),
}


@pytest.mark.parametrize("text", REFERENCE)
def test_each_method_is_its_sequence_in_numpy(text):
    found, after = learned(text), list(REFERENCE[text]())
    for name, wanted in zip(("weight", "bias"), after[-1], strict=True):
        np.testing.assert_allclose(found.params["layer0"][name], wanted, rtol=2e-4, atol=2e-5)
    wanted = [[accuracy(theta, task.test) for task in TASKS] for theta in after]
    np.testing.assert_allclose(found.accuracy, wanted, atol=1e-9)
    np.testing.assert_allclose(found.before, [accuracy(begin(0), task.test) for task in TASKS], atol=1e-9)
    assert found.steps == ((9, 21) if methods.parse(text).rows == "all" else (9, 9)) and found.buffer_bytes == 0


def test_the_methods_differ():
    """What the test above holds apart is not the same path by another name."""
    ends = {text: np.concatenate([np.ravel(x) for x in list(reference())[-1]]) for text, reference in REFERENCE.items()}
    for one in ends:
        for other in ends:
            assert one == other or np.abs(ends[one] - ends[other]).max() > 0.02, (one, other)


@pytest.mark.parametrize("text, every", [
    pytest.param("rehearsal,r=16,buffer=0.6", 1, marks=pytest.mark.long), ("rehearsal,r=8,buffer=0.6,policy=replace,candidates=4", 2),
    ("der++,r=4,buffer=0.9,alpha=0.3,beta=0.7", 2)])
def test_rehearsal_is_its_loss_on_the_rows_that_the_buffer_gives(text, every):
    """The buffer's rows are read from the buffer itself, step by step; loss, gradient and what is stored are worked out in NumPy."""
    method, where = methods.parse(text), mesh(4)
    found = learned(text, devices=4)
    memory = Memory.of(method, TASKS, MODEL.classes, BATCH, where)
    assert memory.rehearsal.every == every
    tree = memory.start(SEED)
    staged, after = jax.jit(memory.staged), jax.jit(memory.after, donate_argnums=0)
    theta, remembered, offered = begin(0), 0, np.zeros(4, int)
    for i, task in enumerate(TASKS):
        for x, labels in batches(task.train, i):
            drawn = jax.device_get(staged(tree))
            given = np.asarray(tree["staged"]["rows"]["inputs"])[:, int(tree["inserts"]) % every].reshape(-1, plain.INPUTS)
            assert sorted(map(tuple, np.concatenate([one["inputs"] for one in drawn]))) == sorted(map(tuple, given))  # each row in one draw
            offered += np.bincount(labels, minlength=4)
            remembered += sum(int(one["weights"].sum()) for one in drawn)
            z = plain.logits(*theta, x)
            rows = {"inputs": x, "labels": labels} | ({"logits": z.astype(np.float32)} if method.distils else {})
            tree = after(tree, jax.device_put(rows, learner.rows_sharding(where)))
            slopes = list(plain.back(x, plain.entropy_slope(z, labels) / len(labels)))
            if method.distils:
                first, second = drawn
                for one, slope in ((first, 0.3 * 2 / 4 * (plain.logits(*theta, first["inputs"]) - first["logits"])),
                                   (second, 0.7 * plain.entropy_slope(plain.logits(*theta, second["inputs"]), second["labels"]))):
                    w = one["weights"][:, None]
                    slopes = [a + b for a, b in zip(slopes, plain.back(one["inputs"], slope * w / max(w.sum(), 1e-9)), strict=True)]
            else:
                [one] = drawn
                w = np.concatenate([np.ones(len(x)), one["weights"]])[:, None]
                x, labels = np.concatenate([x, one["inputs"]]), np.concatenate([labels, one["labels"]])
                slopes = plain.back(x, plain.entropy_slope(plain.logits(*theta, x), labels) * w / w.sum())
            theta = descend(theta, slopes)
    assert remembered > 100  # rows did come back
    for name, wanted in zip(("weight", "bias"), theta, strict=True):
        np.testing.assert_allclose(found.params["layer0"][name], wanted, rtol=5e-4, atol=5e-5)
    kept = jax.device_get(tree["buffer"])
    assert kept["seen"].sum(0).tolist() == offered.tolist() and kept["filled"].min() >= 1
    for worker, kind in np.ndindex(*kept["filled"].shape):  # every stored row is a training row of its class
        for slot in range(kept["filled"][worker, kind]):
            stored = kept["rows"]["inputs"][worker, kind, slot]
            [place] = np.flatnonzero((TRAIN[0] == stored).all(1))
            assert TRAIN[1][place] == kept["rows"]["labels"][worker, kind, slot] == kind


@pytest.mark.long  # each method on eight devices is held against NumPy above
def test_one_device_and_eight_end_alike():
    one, eight = learned("ewc,ewc=20", devices=1), learned("ewc,ewc=20", devices=8)
    np.testing.assert_allclose(one.params["layer0"]["weight"], eight.params["layer0"]["weight"], rtol=1e-4, atol=1e-5)
    assert eight.params["layer0"]["weight"].sharding.is_fully_replicated and len(eight.params["layer0"]["weight"].sharding.device_set) == 8


def test_the_optimizer_lies_where_its_parameters_lie():
    where = mesh(8)
    split = jax.sharding.NamedSharding(where, jax.sharding.PartitionSpec(None, "data"))
    whole = jax.sharding.NamedSharding(where, jax.sharding.PartitionSpec())
    params = jax.eval_shape(mlp((6, 16, 4)).init, jax.random.key(0))
    placed = {"layer0": {"weight": split, "bias": whole}, "layer1": {"weight": whole, "bias": whole}}
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = learner.like_parameters(state, params, placed, whole)
    assert found[0].mu == found[0].nu == placed and found[0].count == whole


def test_accuracy_is_read_from_an_array_that_every_process_has_whole(monkeypatch):
    """Of one that is split over processes, none can read the parts of the others."""
    seen, asarray = [], np.asarray

    def read(x, *more, **options):
        if isinstance(x, jax.Array):
            seen.append(x.sharding.is_fully_replicated)
        return asarray(x, *more, **options)
    params = jax.device_put(MODEL.init(jax.random.key(0)), jax.sharding.NamedSharding(mesh(8), jax.sharding.PartitionSpec()))
    accuracy_of = learner._evaluator(MODEL, mesh(8))
    monkeypatch.setattr(learner.np, "asarray", read)
    accuracy_of(params, TASKS[0].test)
    assert seen and all(seen)


@pytest.mark.parametrize("text, says", [
    ("rehearsal,r=12", "r=12 rows do not split over 8 devices; nearest: 8 or 16"), ("replay,replay=4", "replay=4 rows"),
    ("rehearsal,r=16,buffer=0.2", "less than one row for each of 4 classes on each of 8 devices; smallest: buffer=0.5714"),
])
def test_what_does_not_fit(text, says):
    with pytest.raises(InputError, match=says):
        learned(text)


def test_a_batch_larger_than_a_task():
    with pytest.raises(InputError, match="task 0\\+1 has 28 training rows: fewer than a batch of 32"):
        learner.learn(MODEL, TASKS, methods.parse("incremental"), optax.sgd(LR), mesh=mesh(8), batch=32, epochs=1)

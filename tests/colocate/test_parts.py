"""Topologies cut into equal parts, and that a run on one computes what it computes alone."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmem import step
from jaxmem.colocate import parts
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload


@dataclasses.dataclass(frozen=True)
class Device:
    """A TPU core as far as it matters: its number and the place of its chip."""

    id: int
    coords: tuple[int, int, int]


def tpu(*shape: int, per_chip: int = 1) -> list[Device]:
    """In the order in which libtpu lists them: x fastest, both cores of a chip together."""
    x, y, z = (*shape, 1)[:3]
    places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [Device(id=n, coords=place) for n, place in enumerate(place for place in places for _ in range(per_chip))]


@pytest.mark.parametrize("topology, count, one", [
    ("cpu:8", 4, "cpu:2"), ("v5e-8", 2, "v5e:2x2"), ("v5e-8", 8, "v5e:1x1"), ("v5p-128", 8, "v5p:2x2x2"), ("h100:8", 4, "h100:2"),
    ("h100:4x8", 2, "h100:2x8"), ("h100:4x8", 4, "h100:8"), ("h100:4x8", 8, "h100:4"), ("tpu7x-8", 2, "tpu7x:1x2x1")])
def test_a_part_is_a_compact_box(topology, count, one):
    found = parts.part_of(parse_topology(topology), count)
    assert found.devices * count == parse_topology(topology).devices
    assert found.chip.name + ":" + found.shape_text == (one if one.count("x") or one.startswith("cpu") else "h100:1x" + one.split(":")[1])


@pytest.mark.parametrize("topology, count, words", [
    ("cpu:8", 3, "cannot be cut into 3 equal parts; nearest: 2 or 4"), ("cpu:8", 16, "nearest: 8"), ("h100:3x8", 2, "nearest: 1 or 3"),
    ("2xv5e-16", 2, "2 slices")])
def test_what_cannot_be_cut_is_told(topology, count, words):
    with pytest.raises(InputError, match=words):
        parts.part_of(parse_topology(topology), count)


def test_parts_of_a_slice_are_boxes_of_its_grid():
    found = parts.groups(parse_topology("v5e-16"), 4, tpu(4, 4))
    assert [[one.coords[:2] for one in group] for group in found] == [
        [(x + i, y + j) for j in (0, 1) for i in (0, 1)] for x in (0, 2) for y in (0, 2)]
    cores = parts.groups(parse_topology("tpu7x-8"), 4, tpu(2, 2, 1, per_chip=2))
    assert sorted(sorted(one.id for one in group) for group in cores) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # devices that do not say where they are: both cores of a chip come one after the other
    assert parts.groups(parse_topology("tpu7x-8"), 4, range(8)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_parts_of_hosts_are_neighbours():
    assert parts.groups(parse_topology("h100:2x8"), 4, range(16)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert parts.groups(parse_topology("cpu:6"), 2, range(6)) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(InputError, match="5 devices do not make 2 parts"):
        parts.groups(parse_topology("cpu:6"), 2, range(5))


WORKLOAD = Workload.parse(model="mlp,mlp=32", batch=8)


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"images": rng.uniform(size=(8, 8, 8, 1)).astype(np.float32), "labels": rng.integers(0, 10, 8, dtype=np.int32)}


def trained(built: step.Programs, seed: int, lr: float, steps: int = 3) -> dict:
    """The state after some steps, each waited for."""
    put = jax.tree.map
    init, train = (built[name].lower().compile() for name in ("init", "train"))
    state = init(jax.device_put(np.uint32(seed), built["init"].args[0].sharding))
    hyper = {"lr": np.float32(lr), "clip": np.float32(1.0)}
    hyper = put(lambda x, s: jax.device_put(x, s.sharding), hyper, built["train"].args[2])
    for i in range(steps):
        state, _ = train(state, put(lambda x, s: jax.device_put(x, s.sharding), batch(seed + i), dict(built.batch)), hyper)
    return jax.device_get(state)


def test_a_run_on_a_part_is_the_run_alone_bit_for_bit():
    """Both parts of four devices, two of them each, against two devices that are all there is; in bf16, where order would show."""
    plan = Plan.parse("fsdp=2")
    alone = step.build(WORKLOAD, plan, parse_topology("cpu:2"), jax.devices()[:2])
    found = list(parts.programs(WORKLOAD, plan, parse_topology("cpu:4"), 2, jax.devices()[:4]))
    assert [[d.id for d in built.mesh.devices.flat] for built in found] == [[0, 1], [2, 3]]
    for seed, built in ((5, found[0]), (6, found[1])):
        ours, theirs = trained(built, seed, 0.05), trained(alone, seed, 0.05)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)
    start = jax.device_get(found[1]["init"].lower().compile()(jax.device_put(np.uint32(6), found[1]["init"].args[0].sharding)))
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(ours["params"]), jax.tree.leaves(start["params"]), strict=True)]
    assert min(moved) > 1e-3  # three steps did change every parameter

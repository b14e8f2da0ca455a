"""Mesh axes lie on the torus where jax puts them; times against simulations of messages and against hand-worked examples."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.mesh_utils import create_device_mesh

from jaxmem.cost.collectives import Level, Ring, Route, bytes_sent, device_order, route, seconds, torus_assignment, torus_shape
from jaxmem.hardware import parse_topology

KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}


def described(topology):
    """Stand-ins for jax's devices of one slice, with their coordinates in the order of device ids."""
    x, y, z = torus_shape(topology)[:3]
    return [SimpleNamespace(platform="tpu", device_kind=KINDS[topology.chip.name], coords=(i, j, k), core_on_chip=core)
            for k in range(z) for j in range(y) for i in range(x) for core in range(topology.chip.devices_per_chip)]


MESHES = [
    ("v5p-128", (1, 16, 4)), ("v5p-128", (1, 64, 1)), ("v5p-128", (2, 4, 8)), ("v5p-128", (4, 16, 1)), ("v5p-256", (1, 16, 8)),
    ("v5p-256", (2, 32, 2)), ("v5p-512", (1, 64, 4)), ("v5p-2048", (1, 128, 8)), ("v5p-16", (1, 8, 1)), ("v5p-16", (2, 2, 2)),
    ("v4-8", (1, 4, 1)), ("v4-32", (1, 4, 4)), ("v4-64", (2, 4, 4)), ("v4-128", (1, 16, 4)), ("v4-1024", (2, 64, 4)),
    ("v5e-4", (1, 4, 1)), ("v5e-8", (1, 8, 1)), ("v5e-8", (1, 2, 4)), ("v5e-16", (1, 16, 1)), ("v5e-16", (1, 4, 4)),
    ("v5e-32", (1, 8, 4)), ("v5e-64", (1, 64, 1)), ("v5e-256", (1, 256, 1)),
    ("v5e-256", (1, 16, 16)), ("v5e-256", (1, 32, 8)), ("v5e-256", (2, 64, 2)),
    ("v6e-256", (1, 64, 4)), ("tpu7x-8", (1, 8, 1)), ("tpu7x-16", (1, 8, 2)), ("tpu7x-128", (1, 128, 1)),
    ("tpu7x-128", (1, 32, 4)), ("tpu7x-128", (2, 32, 2)), ("tpu7x-128", (1, 16, 8)),
]


@pytest.mark.parametrize("name, sizes", MESHES)
def test_every_axis_covers_the_chips_that_jax_gives_it(name, sizes):
    """Sizes and strides of the rings of each axis, and of pairs of axes, read off jax's own device mesh."""
    topology = parse_topology(name)
    mesh = create_device_mesh(sizes, described(topology), allow_split_physical_axes=True)
    names = ("data", "fsdp", "tensor")
    for count in (1, 2, 3):
        for axes in itertools.combinations(range(3), count):
            group = mesh[tuple(slice(None) if i in axes else 0 for i in range(3))].reshape(-1)
            values = [sorted({(*d.coords, d.core_on_chip)[dim] for d in group}) for dim in range(4)]
            if math.prod(map(len, values)) != len(group):
                continue  # not a box: only small trays
            levels = route(topology, dict(zip(names, sizes, strict=True)), [names[i] for i in axes]).levels
            expected = {(dim, len(v)) for dim, v in enumerate(values[:3]) if len(v) > 1}
            assert {(ring.dim, ring.size) for ring in levels[1].rings} == expected
            assert levels[0].size == len(values[3])
            for ring in levels[1].rings:
                gaps = np.diff(values[ring.dim])
                assert gaps.min() == ring.stride if count == 1 else ring.stride <= gaps.max()


@given(physical=st.lists(st.sampled_from([1, 2, 4, 8, 12]), min_size=3, max_size=3), data=st.data())
def test_assignment_is_the_rule_of_mesh_utils(physical, data):
    """Over arbitrary tori and meshes, splitting dimensions where it must."""
    total = math.prod(physical)
    tensor = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 16) if total % n == 0]))
    fsdp = data.draw(st.sampled_from([n for n in (1, 2, 4, 8, 12, 16, 32, 64) if total // tensor % n == 0]))
    sizes = (total // tensor // fsdp, fsdp, tensor)
    devices = [SimpleNamespace(platform="tpu", device_kind="TPU v4", coords=coords, core_on_chip=0)
               for coords in np.ndindex(*physical)]
    mesh = create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    for axis, column in enumerate(zip(*torus_assignment(tuple(physical), sizes), strict=True)):
        group = mesh[tuple(slice(None) if i == axis else 0 for i in range(3))]
        assert column == tuple(len({d.coords[dim] for d in group}) for dim in range(3))


@pytest.mark.parametrize("name, sizes", [
    ("v5e-4", (4,)), ("v5e-8", (8,)), ("v6e-8", (8,)), ("v5e-16", (16,)), ("v5p-16", (8,)), ("tpu7x-8", (8,)),
    ("tpu7x-32", (32,)), ("v5e-16", (4, 4)), ("v4-8", (4,)), ("v5p-128", (64,))])
def test_order_of_small_slices_is_that_of_mesh_utils(name, sizes):
    topology = parse_topology(name)
    order = device_order(topology, sizes)
    mesh = create_device_mesh(sizes, described(topology), allow_split_physical_axes=True).reshape(-1)
    if order is not None:
        assert [tuple(c) for c in order] == [(*d.coords, d.core_on_chip)[:len(order[0])] for d in mesh]
    assert (order is None) == (name in ("v4-8", "v5p-128") or sizes == (4, 4))


def test_rings_of_a_published_mesh():
    """v5p-128 is 4 x 4 x 4 with closed rings: tensor 4 gets one dimension and fsdp 16 the other two."""
    topology = parse_topology("v5p-128")
    sizes = {"data": 1, "fsdp": 16, "tensor": 4}
    assert route(topology, sizes, ["tensor"]).levels[1].rings == (Ring(dim=0, size=4, stride=1, closed=True),)
    assert route(topology, sizes, ["fsdp"]).levels[1].rings == (Ring(dim=1, size=4, stride=1, closed=True),
                                                                  Ring(dim=2, size=4, stride=1, closed=True))
    both = route(topology, sizes, ["fsdp", "tensor"])
    assert both.size == 64 and len(both.levels[1].rings) == 3
    gathered = 64e6
    assert seconds("all-gather", gathered, both) == pytest.approx(gathered * 63 / 64 / (6 * 90e9) + 3 * 2 * 1e-6)
    assert seconds("all-reduce", gathered, both) == pytest.approx(2 * seconds("all-gather", gathered, both))


def test_split_dimension_shares_links_and_is_no_ring_inside():
    """fsdp 32 x tensor 8 on 16 x 16: tensor is a line of 8 in one dimension; fsdp has the other, and 2 of that one, 8 apart."""
    sizes = {"data": 1, "fsdp": 32, "tensor": 8}
    topology = parse_topology("v5e-256")
    inner, outer = (route(topology, sizes, [axis]).levels[1].rings for axis in ("tensor", "fsdp"))
    assert [(r.size, r.stride, r.closed) for r in inner] == [(8, 1, False)]
    assert sorted((r.size, r.stride, r.closed) for r in outer) == [(2, 8, True), (16, 1, True)]


# ---------------------------------------------------------------- times

def busiest_link(size, closed):
    """Messages over the busiest directed link when every device of a ring or line sends one message to every other, by the short
    way; equal distances go half each way."""
    load = {}
    for a, b in itertools.permutations(range(size), 2):
        ways = [(1, (b - a) % size), (-1, (a - b) % size)] if closed else [(1 if b > a else -1, abs(b - a))]
        short = min(length for _, length in ways)
        ways = [way for way in ways if way[1] == short]
        for step, length in ways:
            for i in range(length):
                link = ((a + step * i) % size, step)
                load[link] = load.get(link, 0) + 1 / len(ways)
    return max(load.values())


@pytest.mark.parametrize("size, closed", [
    (2, False), (3, False), (4, False), (8, False), (4, True), (5, True), (8, True), (16, True)])
def test_exchange_on_a_ring_against_counted_messages(size, closed):
    ring = Ring(dim=0, size=size, stride=1, closed=closed)
    assert ring.exchange_load == pytest.approx(busiest_link(size, closed) / size)


def rounds_to_gather(size, closed):
    """Rounds until every device has every shard, each link carrying one shard a round in each direction."""
    def way(shard, device):
        return abs(shard - device) if not closed else min((shard - device) % size, (device - shard) % size)

    have = [{i} for i in range(size)]
    rounds = 0
    while any(len(h) < size for h in have):
        sent = [set(h) for h in have]
        for i in range(size):
            for step in (1, -1):
                to = (i + step) % size
                if not closed and abs(to - i) != 1:
                    continue
                fresh = sent[i] - have[to]
                if fresh:  # nearest first: each shard moves on in the round after it came
                    have[to].add(min(fresh, key=lambda shard, device=i: way(shard, device)))
        rounds += 1
    return rounds


@pytest.mark.parametrize("size, closed", [(2, False), (4, False), (8, False), (5, True), (9, True), (17, True)])
def test_gather_against_simulated_rounds(size, closed):
    """A shard a round and link: a line needs size - 1 rounds, a ring of odd size half as many."""
    ring = Ring(dim=0, size=size, stride=1, closed=closed)
    level = Level(medium="ici", size=size, bytes_per_s=1.0, latency_s=0.0, rings=(ring,))
    one_shard_each_second = seconds("all-gather", float(size), Route(levels=(level,), together="in_turn"))
    assert one_shard_each_second == pytest.approx(rounds_to_gather(size, closed))


def test_nvlink_domain_and_network_by_hand():
    topology = parse_topology("h100:8x8")
    sizes = {"data": 1, "fsdp": 64, "tensor": 1}
    path = route(topology, sizes, ["fsdp"])
    assert [(level.medium, level.size) for level in path.levels] == [("NVLink", 8), ("network", 8)]
    nvlink, network = topology.chip.domain.total_bytes_per_s, topology.chip.network.total_bytes_per_s
    size = 8e9
    # every GPU brings 1/8 of the whole into its host through its own network card, and the 8 pass theirs around
    latency = 7 * topology.chip.domain.latency_s + 7 * topology.chip.network.latency_s
    assert seconds("all-gather", size, path) == pytest.approx(max(size * 7 / 8 / nvlink, size / 8 * 7 / 8 / network) + latency)
    assert seconds("all-reduce", size, path) == pytest.approx(2 * seconds("all-gather", size, path))


def test_axes_on_gpus_by_device_order():
    topology = parse_topology("h100:8x8")
    sizes = {"data": 4, "fsdp": 4, "tensor": 4}

    def inside_and_outside(*axes):
        return [level.size for level in route(topology, sizes, axes).levels]
    assert inside_and_outside("tensor") == [4, 1]
    assert inside_and_outside("fsdp") == [2, 2]
    assert inside_and_outside("data") == [1, 4]
    assert inside_and_outside("fsdp", "tensor") == [8, 2]
    assert inside_and_outside("data", "fsdp", "tensor") == [8, 8]


def test_nvl72_is_one_domain_over_hosts():
    topology = parse_topology("gb200:18x4")
    assert [level.size for level in route(topology, {"fsdp": 72}, ["fsdp"]).levels] == [72, 1]
    assert [level.size for level in route(parse_topology("h100:1x4"), {"fsdp": 4}, ["fsdp"]).levels] == [4, 1]


def test_slices_reduce_inside_then_across():
    topology = parse_topology("2xv5e-256")
    sizes = {"data": 2, "fsdp": 256, "tensor": 1}
    across = route(topology, sizes, ["data"])
    assert [(level.medium, level.size) for level in across.levels if level.size > 1] == [("network", 2)]
    chip, size = topology.chip, 1e9
    assert seconds("all-reduce", size, across) == pytest.approx(size / chip.network.bytes_per_s + 2 * chip.network.latency_s)
    both = seconds("all-reduce", size, route(topology, sizes, ["data", "fsdp"]))
    inside = seconds("all-reduce", size, route(topology, sizes, ["fsdp"]))
    assert both == pytest.approx(inside + seconds("all-reduce", size / 256, across))


def test_tpu7x_devices_of_a_chip_use_the_die_link():
    topology = parse_topology("tpu7x-128")
    path = route(topology, {"fsdp": 64, "tensor": 2}, ["tensor"])
    assert [(level.medium, level.size) for level in path.levels if level.size > 1] == [("die to die", 2)]
    assert seconds("all-gather", 1e9, path) < seconds("all-gather", 1e9, route(topology, {"fsdp": 64, "tensor": 2}, ["fsdp"]))


def test_one_device_moves_nothing_and_the_unknown_stays_unknown():
    assert bytes_sent("all-reduce", 1e9, 1) == 0 and bytes_sent("all-reduce", 1e9, 4) == 1.5e9
    assert bytes_sent("collective-permute", 1e9, 4) == 1e9
    topology = parse_topology("v5p-128")
    assert seconds("all-reduce", 1e9, route(topology, {"data": 1, "fsdp": 64, "tensor": 1}, ["tensor"])) == 0
    assert seconds("all-reduce", 1e9, route(parse_topology("cpu:8"), {"fsdp": 8}, ["fsdp"])) is None
    no_links = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, ici=None))
    assert seconds("all-gather", 1e9, route(no_links, {"fsdp": 64}, ["fsdp"])) is None


@pytest.mark.parametrize("name, sizes, expected", [
    ("v5p-128", {"fsdp": 32}, r"fsdp\(32\) = 32 devices, and v5p-128 has 64"),
    ("v5p-128", {"data": 1, "fsdp": 64, "tenser": 1}, r"mesh has axes data, fsdp, tenser, not tensor"),
    ("3xv5e-4", {"data": 4, "fsdp": 3}, r"data\(4\) is the outermost axis and not a multiple of the 3 slices")])
def test_a_mesh_that_does_not_fit_is_refused(name, sizes, expected):
    with pytest.raises(ValueError, match=expected):
        route(parse_topology(name), sizes, ["tensor"] if "tenser" in sizes else ["fsdp"])


@given(size=st.floats(1, 1e12), more=st.floats(1, 10), collective=st.sampled_from(["all-gather", "reduce-scatter", "all-reduce",
                                                                                     "all-to-all", "collective-permute"]),
       name=st.sampled_from(["v5p-128", "v5e-64", "tpu7x-128", "h100:8x8", "2xv5e-16"]))
def test_more_bytes_or_slower_links_never_take_less(size, more, collective, name):
    topology = parse_topology(name)
    path = route(topology, {"data": 2, "fsdp": topology.devices // 2}, ["data", "fsdp"])
    slower = dataclasses.replace(path, levels=tuple(
        dataclasses.replace(level, bytes_per_s=level.bytes_per_s and level.bytes_per_s / more) for level in path.levels))
    time = seconds(collective, size, path)
    assert 0 < time <= seconds(collective, size * more, path) and time <= seconds(collective, size, slower)

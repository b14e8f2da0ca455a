"""Packing against every possible arrangement of small mixes, and the recommendation's reasons."""

import dataclasses
import functools
import itertools
import math
import random

import pytest

from jaxmem.chips import CHIPS
from jaxmem.colocate import packing
from jaxmem.colocate.packing import Arrangement, Program, recommend, shared, sliced
from jaxmem.colocate.slices import Profile, flexible, free, profiles_of, rigid
from jaxmem.spec import InputError

H100 = profiles_of(CHIPS["h100"], {name: chip.hbm_bytes * 3 // 4 for name, chip in CHIPS.items() if chip.parent == "h100"})
GB = 10**9


def by_name(name: str) -> Profile:
    return next(one for one in H100 if one.name == name)


# ---------------------------------------------------------------- MIG slices

def test_slices_are_of_the_users_guide():
    assert {one.name: (one.eighths, one.starts) for one in H100} == {
        "1g.10gb": (1, (0, 1, 2, 3, 4, 5, 6)), "1g.20gb": (2, (0, 2, 4, 6)), "2g.20gb": (2, (0, 2, 4)), "3g.40gb": (4, (0, 4)),
        "4g.40gb": (4, (0,)), "7g.80gb": (8, (0,))}
    assert [one.eighths for one in H100] == sorted(one.eighths for one in H100)
    assert profiles_of(CHIPS["h200"], {}) == []


@pytest.mark.parametrize("mix, gpus", [(["1g.10gb"] * 7, 1), (["1g.10gb"] * 8, 2), (["3g.40gb"] * 2, 1), (["4g.40gb", "3g.40gb"], 1),
                                       (["4g.40gb"] * 2, 2), (["3g.40gb"] + ["1g.10gb"] * 4, 1), (["3g.40gb"] + ["1g.10gb"] * 5, 2)])
def test_what_a_gpu_holds(mix, gpus):
    """The combinations that the user's guide lists: seven small slices or two of 3g, but 4g only once."""
    def fill(places: list, left: list[str]) -> bool:
        return not left or any(free(places, start, by_name(left[0]).eighths)
                               and fill([*places, (0, by_name(left[0]), start)], left[1:]) for start in by_name(left[0]).starts)
    assert fill([], mix) == (gpus == 1)


def placements_are_legal(gpus: list[list[tuple[int, Profile, int]]], sizes: list[int]) -> bool:
    for gpu in gpus:
        taken: set[int] = set()
        for i, profile, start in gpu:
            own = set(range(start, start + profile.eighths))
            if own & taken or start not in profile.starts or max(own) > 7 or profile.usable_bytes < sizes[i]:
                return False
            taken |= own
    return sorted(i for gpu in gpus for i, _, _ in gpu) == list(range(len(sizes)))


@functools.cache
def fits_one(mix: tuple[int, ...]) -> bool:
    """Whether runs of these sizes have slices on one GPU: every profile that holds one, at every place."""
    def fill(taken: frozenset[int], left: tuple[int, ...]) -> bool:
        if not left:
            return True
        for profile in H100:
            for start in profile.starts if profile.usable_bytes >= left[0] else ():
                own = frozenset(range(start, start + profile.eighths))
                if not own & taken and fill(taken | own, left[1:]):
                    return True
        return False
    return fill(frozenset(), mix)


def fewest(sizes: list[int], holds) -> int:
    """The fewest devices over all partitions; `holds(tuple of sizes)` says whether one device takes them."""
    best = len(sizes)

    def split(i: int, groups: list[list[int]]) -> None:
        nonlocal best
        if len(groups) >= best and i < len(sizes):
            return
        if i == len(sizes):
            best = min(best, len(groups))
            return
        for group in groups:
            group.append(sizes[i])
            if holds(tuple(sorted(group, reverse=True))):
                split(i + 1, groups)
            group.pop()
        split(i + 1, [*groups, [sizes[i]]])
    split(0, [])
    return best


def mixes(seed: int, n: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[int(rng.choice([3, 6, 9, 13, 20, 28, 40]) * GB * rng.uniform(0.8, 1.0)) for _ in range(rng.randint(2, 7))] for _ in range(n)]


def test_slices_against_every_arrangement():
    """Largest first needs the fewest GPUs in all but few mixes, and never more than one beyond."""
    more = []
    for sizes in mixes(0):
        found = rigid(sizes, H100)
        assert placements_are_legal(found, sizes)
        more.append(len(found) - fewest(sizes, fits_one))
    assert min(more) >= 0 and max(more) <= 1 and sum(more) <= 2


def test_sharing_against_every_arrangement():
    capacity = 63 * GB
    more = []
    for sizes in mixes(1):
        found = flexible(sizes, capacity)
        assert sorted(itertools.chain(*found)) == list(range(len(sizes)))
        assert all(sum(sizes[i] for i in own) <= capacity for own in found)
        more.append(len(found) - fewest(sizes, lambda own: sum(own) <= capacity))
    assert min(more) >= 0 and max(more) <= 1 and sum(more) <= 2


def test_the_largest_come_first_and_small_slices_lie_last():
    """A 3g slice and four small ones fill a GPU: the large one begins at eighth 4, for beside one at 0 only three small ones have a place.
    Freely shared, 6 + 4 and 6 + 4 fill two devices; beginning with the small ones they would take three."""
    found, = rigid([7 * GB] * 4 + [28 * GB], H100)
    assert {i: (profile.name, start) for i, profile, start in found} == {
        4: ("3g.40gb", 4), **{i: ("1g.10gb", 3 - i) for i in range(4)}}
    assert flexible([4, 4, 6, 6], 10) == [[2, 0], [3, 1]]


def test_slices_waste_what_sharing_uses():
    """Two runs of 9.6 GB: no 1g.10gb holds one (7.85 GB of it are usable), so three 2-eighths slices take what seven runs could share."""
    sizes = [int(9.6 * GB)] * 6
    assert len(rigid(sizes, H100)) == 2 and len(flexible(sizes, 63 * GB)) == 1


@pytest.mark.parametrize("way, words", [(lambda: flexible([5], 4), "5 bytes and a device has 4"),
                                        (lambda: rigid([200 * GB], H100), "the largest slice has 63")])
def test_what_no_device_holds_is_told(way, words):
    with pytest.raises(InputError, match=words):
        way()


# ---------------------------------------------------------------- arrangements

def program(name: str = "a", count: int = 4, first_s: float | None = 1.0, more_s: float | None = 0.25, **more) -> Program:
    return Program(name=name, count=count, fixed_bytes=2, each_bytes=8, first_s=first_s, more_s=more_s, **more)


def test_bytes_and_seconds_are_on_the_line():
    assert [program().bytes(n) for n in (0, 1, 3)] == [0, 10, 26]
    assert [program().seconds(n) for n in (0, 1, 3)] == [0.0, 1.0, 1.5]
    assert program(more_s=None).seconds(1) == 1.0 and program(more_s=None).seconds(2) is None


def test_one_device_holds_them_all_in_one_program():
    found = shared([program()], 1, 40)
    assert (found.how, found.devices, found.round_s, found.used_bytes) == ("vmapped", ((("a", 4),),), 1.75, 34)
    assert found.waste == pytest.approx(1 - 34 / 40)
    assert shared([program()], 1, 33).problem and "0.00 GiB" in shared([program()], 1, 33).problem


def test_runs_have_devices_of_their_own_where_there_are_enough():
    found = shared([program()], 4, 40)
    assert (found.how, found.round_s, len(found.devices)) == ("parts", 1.0, 4)
    control = packing.one_after_another([program()], 4, 40)
    assert control.round_s == 1.0 and packing.one_after_another([program()], 1, 40).round_s == 4.0


def test_the_largest_of_equally_long_runs_is_placed_first():
    """7, 4, 3, 3, 3 into two devices of 10: with the small ones first there is no place for 7."""
    mix = [Program(name=name, count=count, fixed_bytes=0, each_bytes=size, first_s=1.0, more_s=1.0)
           for name, count, size in (("c", 3, 3), ("b", 1, 4), ("a", 1, 7))]
    found = shared(mix, 2, 10)
    assert sorted(found.devices) == [(("a", 1), ("c", 1)), (("b", 1), ("c", 2))] and found.round_s == 3.0


def test_one_after_another_holds_the_largest_of_its_runs():
    """A device in turn holds 10, 10 and 26 bytes, and so uses 26; two devices use what each has at most."""
    mix = [program(count=2), Program(name="b", count=1, fixed_bytes=6, each_bytes=20, first_s=1.0)]
    alone, two = (packing.one_after_another(mix, devices, 40) for devices in (1, 2))
    assert (alone.used_bytes, alone.held_bytes, alone.round_s) == (26, 40, 3.0) and alone.waste == pytest.approx(1 - 26 / 40)
    assert (two.used_bytes, two.held_bytes, two.round_s) == (36, 80, 2.0)


def brute(programs: list[Program], devices: int, usable: int) -> float:
    """The shortest round over every assignment of runs to devices that fits; infinite where none does."""
    runs = [one for one in programs for _ in range(one.count)]
    best = math.inf
    for places in itertools.product(range(devices), repeat=len(runs)):
        loads, room = [0.0] * devices, [usable] * devices
        for one in programs:
            for d in range(devices):
                n = sum(1 for run, at in zip(runs, places, strict=True) if run is one and at == d)
                if n:
                    loads[d] += one.first_s + (n - 1) * one.more_s
                    room[d] -= one.fixed_bytes + n * one.each_bytes
        if min(room) >= 0:
            best = min(best, max(loads))
    return best


def test_sharing_against_every_assignment():
    """The round of the greedy placement is the shortest one in most mixes, and at most 4/3 of it where it places all runs."""
    rng = random.Random(3)
    ratios, missed, total = [], 0, 40
    for _ in range(total):
        devices = rng.randint(1, 3)
        programs = []
        for name in "abc"[:rng.randint(1, 3)]:
            first = rng.uniform(0.5, 2.0)
            programs.append(Program(name=name, count=rng.randint(1, 3), fixed_bytes=rng.randint(0, 5), each_bytes=rng.randint(1, 10),
                                    first_s=first, more_s=first * rng.uniform(0.1, 1.0)))
        usable = rng.randint(15, 60)
        best, found = brute(programs, devices, usable), shared(programs, devices, usable)
        if math.isinf(best):
            assert found.problem
        elif found.problem:
            missed += 1
        else:
            assert sum(n for own in found.devices for _, n in own) == sum(one.count for one in programs)
            ratios.append(found.round_s / best)
    assert len(ratios) > 20 and missed <= 1
    assert min(ratios) >= 1 - 1e-9 and max(ratios) <= 4 / 3 + 1e-9 and sum(one < 1 + 1e-9 for one in ratios) > 0.8 * len(ratios)


def test_slices_run_beside_each_other():
    runs = program(count=7, slices={"1g.10gb": 3.0}, slice_bytes=GB)
    found = sliced([runs], 1, H100, 60 * GB)
    assert (found.how, found.round_s, len(found.devices[0])) == ("mig", 3.0, 7)
    assert found.waste == pytest.approx(1 - 7 / 60)
    assert "need 2 GPUs, and here are 1" in (sliced([dataclasses.replace(runs, count=8)], 1, H100, 60 * GB).problem or "")
    assert "no MIG slices" in (sliced([runs], 1, [], 60 * GB).problem or "")
    assert sliced([dataclasses.replace(runs, slices={})], 1, H100, 60 * GB).round_s is None
    one, other = dataclasses.replace(runs, count=1), program("b", count=1, slice_bytes=GB)  # of whose slice nobody knows the seconds
    assert sliced([one, other], 1, H100, 60 * GB).round_s is None and sliced([one], 1, H100, 60 * GB).round_s == 3.0


# ---------------------------------------------------------------- the recommendation

def ways(**round_s: float | None) -> list[Arrangement]:
    return [Arrangement(how=how, devices=((("a", 1),),), round_s=value, used_bytes=1, held_bytes=2) for how, value in round_s.items()]


def test_the_shortest_round_is_recommended_with_its_reasons():
    advice = recommend([*ways(one_after_another=4.0, vmapped=1.6), Arrangement(how="mig", problem="no MIG slices")])
    assert advice.best is not None and advice.best.how == "vmapped"
    assert "mig: not possible: no MIG slices" in advice.reasons
    assert any("vmapped" in one and "2.50 times the throughput" in one and "50% of the usable memory" in one for one in advice.reasons)


def test_isolation_rules_out_one_program():
    advice = recommend(ways(one_after_another=4.0, vmapped=1.6, mig=3.0), prefer="isolation")
    assert advice.best is not None and advice.best.how == "mig"
    assert any("share its memory and its faults" in one for one in advice.reasons)


def test_unknown_seconds_leave_the_number_of_devices():
    two = dataclasses.replace(ways(vmapped=None)[0], devices=((("a", 1),),) * 2)
    advice = recommend([two, *ways(mig=None)])
    assert advice.best is not None and advice.best.how == "mig" and any("not known" in one for one in advice.reasons)
    known = dataclasses.replace(two, round_s=1.0)  # the seconds of one way alone decide nothing
    advice = recommend([known, *ways(mig=None)])
    assert advice.best is not None and advice.best.how == "mig" and any("not known" in one for one in advice.reasons)
    assert recommend([Arrangement(how="mig", problem="x")]).best is None

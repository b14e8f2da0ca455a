"""Boxes against sets of elements: what is read from where, and what nobody holds."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from jaxmem.checkpoint.nearby_boxes import Box, box_of, inside, overlap, plan_reads, shape_of, share_missing, size, slices, without


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    def bounds(n):
        return st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda pair: (min(pair), max(pair)))
    return st.tuples(*(bounds(n) for n in shape))


@st.composite
def shaped(draw, most_boxes: int = 4, holders: int = 4):
    """Boxes of one array: needed ones, and some for each holder; they may be empty, equal or overlap."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    some = st.lists(boxes(shape), max_size=most_boxes)
    return shape, draw(some), draw(st.lists(some, max_size=holders))


@given(shaped(most_boxes=2, holders=1))
def test_two_boxes(drawn):
    shape, several, _ = drawn
    for a, b in itertools.product(several, several):
        common, rest = overlap(a, b), without(a, b)
        assert elements(a) & elements(b) == (set() if common is None else elements(common))
        if elements(a):
            assert inside(a, b) == (elements(a) <= elements(b))
        assert sum(map(size, rest)) == len(elements(a) - elements(b)) and len(rest) <= max(1, 2 * len(shape))
        assert set().union(*map(elements, rest)) == elements(a) - elements(b)


@given(shaped())
def test_every_needed_element_is_read_once_from_the_first_that_holds_it(drawn):
    _, needed, holders = drawn
    needed = list(dict.fromkeys(needed))
    reads = plan_reads({"w": needed}, [(i, {"w": held, "other": needed}) for i, held in enumerate(holders)])
    assert {read.path for read in reads} <= {"w"}
    for into in needed:
        parts = [read for read in reads if read.into == into]
        assert sum(size(read.box) for read in parts) == size(into)
        assert set().union(*(elements(read.box) for read in parts)) == elements(into)
    for read in reads:
        assert size(read.box) > 0
        holding = [any(inside(read.box, box) for box in held) for held in holders]
        touching = [any(elements(box) & elements(read.box) for box in held) for held in holders]
        if read.source is None:
            assert not any(touching)
        else:
            assert holding[read.source] and not any(touching[:read.source])


@given(shaped(), st.integers(1, 3))
def test_every_missing_element_is_fetched_by_one_process_that_needs_it(drawn, processes):
    _, needed, holders = drawn
    needs = {p: {"w": needed[p::processes] + needed[:1]} for p in range(processes)}  # the first box is needed by all
    fetches = share_missing(needs, [{"w": held} for held in holders], {"w": 4})
    have = set().union(*(elements(box) for held in holders for box in held))
    lists = {p: [e for box in fetches[p].get("w", ()) for e in elements(box)] for p in range(processes)}
    every = [e for found in lists.values() for e in found]
    assert len(every) == len(set(every))
    assert set(every) == set().union(*map(elements, needed)) - have
    for process, found in lists.items():
        assert set(found) <= set().union(*map(elements, needs[process]["w"]))


def test_fetching_is_spread_over_those_that_need_it():
    needs = {p: {f"w{i}": [((0, 10),)] for i in range(8)} for p in range(4)}
    fetches = share_missing(needs, [], {f"w{i}": 4 for i in range(8)})
    assert [sum(size(b) for boxes in fetches[p].values() for b in boxes) for p in range(4)] == [20] * 4


def test_indices_of_shards():
    assert box_of((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
    assert box_of((), ()) == () and size(()) == math.prod(()) == 1 and shape_of(()) == ()
    assert slices(((2, 4), (1, 3)), ((2, 6), (0, 3))) == (slice(0, 2), slice(1, 3), ...)
    assert slices(((2, 4),)) == (slice(2, 4), ...)


def test_a_scalar_is_read_from_whoever_has_it():
    assert [r.source for r in plan_reads({"step": [()]}, [(0, {}), (1, {"step": [()]})])] == [1]
    assert [r.source for r in plan_reads({"step": [()]}, [])] == [None]

"""Thinning, axis ranges and ticks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.report.curves import thin, tick_text, ticks, value_range

VALUES = st.lists(st.floats() | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=200)


@given(VALUES, st.integers(5, 20))
def test_thinned_curves_keep_their_extremes_ends_and_gaps(values, most):
    steps = [7 * i + 3 for i in range(len(values))]
    points = thin(steps, values, most)
    assert len(points) <= most
    by_step = dict(zip(steps, values, strict=True))
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(value == by_step[step] if value is not None else not math.isfinite(by_step[step]) for step, value in points)
    known = [value for value in values if math.isfinite(value)]
    shown = [value for _, value in points if value is not None]
    assert (min(shown), max(shown)) == (min(known), max(known)) if known else shown == []
    assert any(value is None for _, value in points) == (len(known) < len(values))
    if known:
        firsts = [step for step in steps if math.isfinite(by_step[step])]
        there = [step for step, value in points if value is not None]
        assert (there[0], there[-1]) == (firsts[0], firsts[-1])


def test_a_short_curve_is_left_as_it_is():
    assert thin([1, 2, 3], [1.0, math.nan, 3.0]) == [(1, 1.0), (2, None), (3, 3.0)]
    assert thin([], []) == []


def test_one_spike_among_a_hundred_thousand_is_kept():
    values = [1.0] * 100_000
    values[54_321] = 9.0
    points = thin(range(100_000), values)
    assert (54_321, 9.0) in points and len(points) <= 2000


def test_a_range_holds_the_values_but_not_the_far_ones():
    usual = [2.0 + 0.01 * i for i in range(100)]
    plain = value_range(usual)
    assert plain.low < 2.0 and 2.99 < plain.high < 3.2 and (plain.above, plain.below) == (0, 0)
    far = value_range([*usual * 3, 1e6, 2e6, math.inf, math.nan])
    assert far.high < 8 and (far.above, far.below) == (2, 0)
    assert (far.share(1e6), far.share(far.low), far.share(-5)) == (1.0, 0.0, 0.0)
    # A loss that began high is no outlier, however long it has been low since.
    assert value_range([10.0, *usual * 5]).above == 0


def test_ranges_of_few_values():
    assert value_range([]).high > value_range([]).low
    one = value_range([4.9])
    assert one.low < 4.9 < one.high
    zero = value_range([0.0, 0.0], from_zero=True)
    assert zero.low == 0.0 < zero.high
    level = value_range([1.0, 1.1], also=[5.0], from_zero=True)
    assert level.low == 0.0 and level.high > 5.0


@given(st.floats(-1e30, 1e30), st.floats(1e-6, 1e30), st.integers(3, 8))
def test_ticks_are_round_inside_and_few(low, span, most):
    high = low + span
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high, most)
    assert len(found) <= most + 1
    assert all(low - 1e-9 * span <= tick <= high + 1e-9 * span for tick in found)
    assert len({tick_text(tick, found) for tick in found}) == len(found)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0, 10, ["0", "2", "4", "6", "8", "10"]),
        (0, 3e-4, ["0", "5.0e-5", "1.0e-4", "1.5e-4", "2.0e-4", "2.5e-4"]),
        (0, 100_000, ["0", "20,000", "40,000", "60,000", "80,000", "100,000"]),
        (0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-3, 3, ["-3", "-2", "-1", "0", "1", "2", "3"]),
        (1e7, 5e7, ["1e7", "2e7", "3e7", "4e7", "5e7"]),
    ],
)
def test_tick_words(low, high, words):
    found = ticks(low, high)
    assert [tick_text(tick, found) for tick in found] == words

"""Squarified rectangles: areas, tiling, and the example of the paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.report.treemap import Rectangle, squarify


def test_example_of_the_paper():
    """Bruls, Huizing, van Wijk 2000, section 3.1: areas 6 6 4 3 2 2 1 in a 6 x 4 rectangle."""
    got = squarify([6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], Rectangle(0, 0, 6, 4))
    sides = [(round(r.width, 3), round(r.height, 3)) for r in got]
    assert sides[:4] == [(3, 2), (3, 2), (1.714, 2.333), (1.286, 2.333)]


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40), st.floats(1, 500), st.floats(1, 500))
def test_areas_are_proportional_and_tile_the_space(values, width, height):
    values = sorted(values, reverse=True)
    got = squarify(values, Rectangle(10, 20, width, height))
    whole, slack = width * height, 1e-6 * max(width, height)
    for value, r in zip(values, got, strict=True):
        assert r.width * r.height == pytest.approx(whole * value / sum(values), rel=1e-4, abs=1e-9 * whole)
        assert r.x >= 10 - slack and r.y >= 20 - slack and r.x + r.width <= 10 + width + slack and r.y + r.height <= 20 + height + slack
    for i, a in enumerate(got):
        for b in got[:i]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            tall = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(wide, tall) <= slack


def test_cells_are_squarer_than_slices():
    values = [float(40 - i) for i in range(30)]
    worst = max(max(r.width / r.height, r.height / r.width) for r in squarify(values, Rectangle(0, 0, 100, 60)))
    assert worst < 2  # as slices side by side the thinnest would be 52 times as tall as wide

"""Where marks, bars and the line of equality stand in a figure of ratios."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from jaxmem.report import experiment_ratios as ratios
from jaxmem.tabulate import Interval

SVG = "{http://www.w3.org/2000/svg}"


def one(mean: float, half: float | None = None) -> Interval:
    return Interval(mean=mean, half_width=half, seeds=3)


def marks(svg: str) -> dict[str, float]:
    """Title -> x of the mark."""
    return {title.text: float(re.match(r"translate\(([\d.-]+)", group.get("transform"))[1])
            for group in ElementTree.fromstring(svg).iter(f"{SVG}g") for title in group.findall(f"{SVG}title")}


def test_marks_stand_to_scale_and_bars_reach_the_ends_of_intervals():
    drawn = ratios.drawing("t", "axis", [ratios.Row(title="a", marks={"x": one(0.8, 0.1), "y": one(1.2)}),
                                         ratios.Row(title="b", marks={"x": None, "y": one(0.9)})])
    found = marks(drawn)
    assert list(found) == ["a, x: 0.8", "a, y: 1.2", "b, y: 0.9"]
    a, b, c = found.values()
    per_unit = (b - a) / 0.4
    assert c == pytest.approx(a + 0.1 * per_unit, abs=0.2)
    [bar] = [line for line in ElementTree.fromstring(drawn).iter(f"{SVG}line") if line.get("class") == "bar"]
    assert float(bar.get("x1")) == pytest.approx(a - 0.1 * per_unit, abs=0.2)
    assert float(bar.get("x2")) == pytest.approx(a + 0.1 * per_unit, abs=0.2)
    [equal] = [line for line in ElementTree.fromstring(drawn).iter(f"{SVG}line") if line.get("class") == "limit"]
    assert float(equal.get("x1")) == pytest.approx(a + 0.2 * per_unit, abs=0.2)


def test_what_is_too_far_stands_at_the_edge_with_its_number():
    drawn = ratios.drawing("t", "axis", [ratios.Row(title="a", marks={"x": one(3.456, 0.5), "y": one(0.2), "z": one(1.55)})])
    texts = [element.text for element in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert "3.46" in texts and "0.2" in texts and "1.55" not in texts
    found = marks(drawn)
    assert (found["a, x: 3.456"], found["a, y: 0.2"]) == (ratios.WIDTH, 0.0) and 0 < found["a, z: 1.55"] < ratios.WIDTH


def test_titles_are_text_and_a_part_of_a_page_has_none():
    rows = [ratios.Row(title="a < b", marks={"x": one(1.0)})]
    assert "a &lt; b" in ratios.drawing("T & t", "axis", rows) and ">T &amp; t<" in ratios.drawing("T & t", "axis", rows)
    inside = ratios.drawing("T & t", "axis", rows, alone=False)
    assert ">T &amp; t<" not in inside and "prefers-color-scheme" not in inside
    assert ElementTree.fromstring(ratios.drawing("t", "axis", [])) is not None

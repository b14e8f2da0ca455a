"""A figure of one or more numbers against a setting: a line for each, a mark with its interval at each value of the setting.

The values of the setting stand at even distances, whatever numbers they are. An SVG for light and dark pages.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem.report.curves import Range, tick_text, ticks, value_range
from jaxmem.report.experiment_drawing import CHARACTER, ends, mark, middle, stroke, svg
from jaxmem.report.markup import Markup, element
from jaxmem.tabulate import Interval

WIDTH, HEIGHT, LEFT, RIGHT, BELOW = 440.0, 220.0, 62.0, 24.0, 58.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """`values`: one for each value of the setting; None is not drawn, and the line is broken there. `dashed`: it is a reference, for
    the curve whose `colour` (its place among the curves) it has."""

    name: str
    values: Sequence[Interval | float | None]
    dashed: bool = False
    colour: int | None = None


def drawing(title: str, setting: str, places: Sequence[str], head: str, curves: Sequence[Curve], *, alone: bool = True) -> str:
    """The SVG. `setting` is what `places` are values of, `head` what the curves show, with its unit.

    `alone`: a file of its own, with its title and both schemes; otherwise a part of a page, which has them already.
    """
    top = 24.0 + 24 * alone
    parts: list[Markup] = []
    for i, curve in enumerate(curves):
        key = element("line", x1=14, x2=30, y1=top - 4, y2=top - 4, class_="dash", style=_stroke(curve, i)) if curve.dashed else mark(
            i, 22, top - 4)
        parts += [key, element("text", curve.name, x=35, y=top)]
        top += 20
    up = value_range([end for curve in curves for value in curve.values if value is not None for end in ends(value)])
    plot = [*_axes(setting, places, head, up), *(part for i, curve in enumerate(curves) for part in _curve(curve, i, len(places), up))]
    parts.append(element("g", *plot, transform=f"translate({LEFT:g} {top:g})"))
    width = max([LEFT + WIDTH + RIGHT, *(50 + CHARACTER * len(curve.name) for curve in curves)])
    height = top + HEIGHT + BELOW
    return svg(title, width, height, parts, alone=alone, style=".dash{stroke-dasharray:6 4}")


def _axes(setting: str, places: Sequence[str], head: str, up: Range) -> list[Markup]:
    parts, values = [], ticks(up.low, up.high, 5)
    for value in values:
        y = f"{HEIGHT * (1 - up.share(value)):.1f}"
        parts += [element("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid"),
                  element("text", tick_text(value, values), x=-8, y=y, dy="0.35em", text_anchor="end", class_="small")]
    parts += [element("text", place, x=f"{_x(j, len(places)):.1f}", y=HEIGHT + 17, text_anchor="middle", class_="small")
              for j, place in enumerate(places)]
    return [*parts, element("text", setting, x=WIDTH / 2, y=HEIGHT + 37, text_anchor="middle", class_="small"),
            element("text", head, text_anchor="middle", class_="small", transform=f"translate(-46 {HEIGHT / 2}) rotate(-90)")]


def _curve(curve: Curve, i: int, places: int, up: Range) -> list[Markup]:
    colour = _stroke(curve, i)
    at = [(_x(j, places), value) for j, value in enumerate(curve.values)]
    line, parts, pen = "", [], "M"
    for x, value in at:
        if value is None:
            pen = "M"
            continue
        y = HEIGHT * (1 - up.share(middle(value)))
        line += f"{pen}{x:.1f},{y:.1f}"
        pen = "L"
        low, high = (HEIGHT * (1 - up.share(end)) for end in ends(value))
        if low > high:
            parts.append(element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=f"{low:.1f}", y2=f"{high:.1f}", class_="bar", style=colour))
        if not curve.dashed:
            parts.append(mark(i, x, y, element("title", f"{curve.name}: {middle(value):.4g}")))
    if line:
        parts.insert(0, element("path", d=line, style=f"fill:none;{colour}", class_="dash" if curve.dashed else "line"))
    return parts


def _stroke(curve: Curve, i: int) -> str:
    return f"stroke-width:1.5;{stroke(i if curve.colour is None else curve.colour)}"


def _x(j: int, places: int) -> float:
    return WIDTH * (j + 0.5) / places

"""A figure that stands alone: one number against another in small panels, each point with the colour and shape of what it is.

An SVG of fixed size for light and dark pages, from lines alone. In each panel a thin line joins the points that no other beats in
both numbers (lower is better in both); three seeds or more show as bars over their 95% intervals.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxmem.report.curves import Range, tick_text, ticks, value_range
from jaxmem.report.experiment_drawing import CHARACTER, ends, mark, stroke, svg, title_width
from jaxmem.report.experiment_page import NOTHING, Column, Line, axis_unit
from jaxmem.report.markup import Markup, element

PLOT_WIDTH, PLOT_HEIGHT, LEFT, RIGHT, ABOVE, BELOW = 250.0, 170.0, 58.0, 22.0, 52.0, 56.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scatter:
    """`x`, `y`: what is drawn. `mark`: the column that tells points apart. `row`, `panel`: where a line is drawn; a panel is its title
    and a few words on what its numbers are. `limit`: a column with a value of y that must not be passed."""

    title: str
    x: Column
    y: Column
    mark: str
    row: Callable[[Line], str]
    panel: Callable[[Line], tuple[str, str]]
    limit: str | None = None


def drawing(scatter: Scatter, lines: Sequence[Line], *, alone: bool = True) -> str:
    """The SVG. `alone`: a file of its own, with its title and both schemes; otherwise a part of a page, which has them already."""
    rows: dict[str, dict[tuple[str, str], list[Line]]] = {}
    for line in lines:
        rows.setdefault(scatter.row(line), {}).setdefault(scatter.panel(line), []).append(line)
    names = list(dict.fromkeys(str(line[scatter.mark].value) for line in lines))
    width = max([title_width(scatter.title, alone=alone), *(len(panels) * (LEFT + PLOT_WIDTH + RIGHT) for panels in rows.values())])
    keys, top = _legend(names, width, 48.0 if alone else 18.0)
    parts = [*keys]
    for j, panels in enumerate(rows.values()):
        for i, (panel, own) in enumerate(panels.items()):
            x, y = i * (LEFT + PLOT_WIDTH + RIGHT) + LEFT, j * (ABOVE + PLOT_HEIGHT + BELOW) + top + ABOVE
            parts.append(element("g", *_panel(scatter, panel, own, names), transform=f"translate({x:g} {y:g})"))
    height = len(rows) * (ABOVE + PLOT_HEIGHT + BELOW) + top
    return svg(scatter.title, width, height, parts, alone=alone)


def _legend(names: Sequence[str], width: float, y: float) -> tuple[list[Markup], float]:
    """The marks with their names, in as many rows as they need, and where they end."""
    parts, x = [], 22.0
    for i, name in enumerate(names):
        needed = 38 + CHARACTER * len(name)
        if x + needed > width and x > 22:
            x, y = 22.0, y + 22
        parts += [mark(i, x, y - 4), element("text", name, x=x + 13, y=y)]
        x += needed
    return parts, y + 6



def _panel(scatter: Scatter, panel: tuple[str, str], lines: Sequence[Line], names: Sequence[str]) -> list[Markup]:
    parts = [element("text", panel[0], x=0, y=-30, class_="name"), element("text", panel[1], x=0, y=-13, class_="small")]
    drawn = [(line, x, y) for line in lines
             if (x := line.get(scatter.x.name, NOTHING).number) is not None and (y := line.get(scatter.y.name, NOTHING).number) is not None]
    missing = [str(line[scatter.mark].value) for line in lines if line not in [one[0] for one in drawn]]
    if missing:
        parts.append(element("text", f"not drawn: {', '.join(missing)}", x=0, y=PLOT_HEIGHT + 52, class_="small"))
    if not drawn:
        return parts
    limit = next((value for line in lines if scatter.limit and (value := line.get(scatter.limit, NOTHING).number) is not None), None)
    near = limit is not None and limit < 1.6 * max(y for _, _, y in drawn)
    across = value_range([end for line, _, _ in drawn for end in ends(line[scatter.x.name].value)])
    up = value_range([end for line, _, _ in drawn for end in ends(line[scatter.y.name].value)], also=[limit] if near and limit else [])

    def at(x: float, y: float) -> tuple[float, float]:
        return PLOT_WIDTH * across.share(x), PLOT_HEIGHT * (1 - up.share(y))
    parts += _axes(scatter, across, up)
    if near and limit is not None:
        y = at(0, limit)[1]
        parts += [element("line", x1=0, x2=PLOT_WIDTH, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="limit"),
                  element("text", "usable", x=PLOT_WIDTH, y=f"{y - 4:.1f}", text_anchor="end", class_="small")]
    best = front([(x, y) for _, x, y in drawn])
    if len(best) > 1:
        parts.append(element("path", d="M" + "L".join("{:.1f},{:.1f}".format(*at(*one)) for one in best), class_="front"))
    for line, x, y in drawn:
        i = names.index(str(line[scatter.mark].value))
        for cell, horizontal in ((line[scatter.x.name], True), (line[scatter.y.name], False)):
            low, high = ends(cell.value)
            if high > low:
                a, b = (at(low, y), at(high, y)) if horizontal else (at(x, low), at(x, high))
                parts.append(element("line", x1=f"{a[0]:.1f}", y1=f"{a[1]:.1f}", x2=f"{b[0]:.1f}", y2=f"{b[1]:.1f}", class_="bar",
                                     style=stroke(i)))
        parts.append(mark(i, *at(x, y), element("title", f"{names[i]}: {x:.4g}, {y:.4g}")))
    return parts


def _axes(scatter: Scatter, across: Range, up: Range) -> list[Markup]:
    (x_unit, x_size), (y_unit, y_size) = axis_unit(scatter.x.unit, across.high), axis_unit(scatter.y.unit, up.high)
    parts = []
    values = ticks(up.low / y_size, up.high / y_size, 4)
    for value in values:
        y = f"{PLOT_HEIGHT * (1 - up.share(value * y_size)):.1f}"
        parts += [element("line", x1=0, x2=PLOT_WIDTH, y1=y, y2=y, class_="grid"),
                  element("text", tick_text(value, values), x=-8, y=y, dy="0.35em", text_anchor="end", class_="small")]
    values = ticks(across.low / x_size, across.high / x_size, 4)
    for value in values:
        x = f"{PLOT_WIDTH * across.share(value * x_size):.1f}"
        parts += [element("line", x1=x, x2=x, y1=0, y2=PLOT_HEIGHT, class_="grid"),
                  element("text", tick_text(value, values), x=x, y=PLOT_HEIGHT + 17, text_anchor="middle", class_="small")]
    parts.append(element("text", f"{scatter.x.head}, {x_unit}" if x_unit else scatter.x.head, x=PLOT_WIDTH / 2, y=PLOT_HEIGHT + 35,
                         text_anchor="middle", class_="small"))
    parts.append(element("text", f"{scatter.y.head}, {y_unit}" if y_unit else scatter.y.head, text_anchor="middle", class_="small",
                         transform=f"translate(-44 {PLOT_HEIGHT / 2}) rotate(-90)"))
    return parts


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is at least as low as in both numbers and lower in one, by the first number."""
    return sorted({(x, y) for x, y in points if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)})

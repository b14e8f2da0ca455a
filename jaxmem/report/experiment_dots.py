"""A figure of shares by name: a row each, a mark with its interval on one axis from 0 to 1. An SVG for light and dark pages."""

import dataclasses
from collections.abc import Sequence

from jaxmem.report.experiment_drawing import CHARACTER, ends, middle, stroke, svg
from jaxmem.report.markup import Markup, element
from jaxmem.report.units import percent_text
from jaxmem.tabulate import Interval

WIDTH, STEP, RIGHT = 420.0, 22.0, 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dot:
    """`value`: a share, or the interval of several seeds; None is named and not drawn."""

    name: str
    value: Interval | float | None


def dots(title: str, axis: str, rows: Sequence[Dot], *, alone: bool = True) -> str:
    """The SVG. `axis`: what the shares are. `alone`: a file of its own, with its title and both schemes; otherwise a part of a page."""
    left = 28 + CHARACTER * max((len(row.name) for row in rows), default=0)
    top, depth = (48.0 if alone else 14.0), STEP * len(rows)
    plot = [part for i in range(0, 101, 20) for part in _tick(i / 100, depth)]
    plot.append(element("text", axis, x=WIDTH / 2, y=depth + 38, text_anchor="middle", class_="small"))
    for i, row in enumerate(rows):
        plot += _row(row, STEP * (i + 0.5))
    parts = [element("g", *plot, transform=f"translate({left:g} {top:g})")]
    return svg(title, left + WIDTH + RIGHT, top + depth + 52, parts, alone=alone)


def _tick(share: float, depth: float) -> list[Markup]:
    x = f"{WIDTH * share:.1f}"
    return [element("line", x1=x, x2=x, y1=0, y2=depth, class_="grid"),
            element("text", f"{100 * share:.0f}%", x=x, y=depth + 17, text_anchor="middle", class_="small")]


def _row(row: Dot, y: float) -> list[Markup]:
    parts = [element("text", row.name, x=-14, y=y, dy="0.35em", text_anchor="end")]
    if row.value is None:
        return [*parts, element("text", "not known", x=6, y=y, dy="0.35em", class_="small")]
    mean = middle(row.value)
    half = ends(row.value)[1] - mean
    low, high = (WIDTH * min(1.0, max(0.0, end)) for end in ends(row.value))
    said = f"{percent_text(mean)} ± {100 * half:.1f}" if half else percent_text(mean)
    if high > low:
        parts.append(element("line", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=y, y2=y, class_="bar", style=stroke(0)))
    return [*parts, element("circle", cx=f"{WIDTH * mean:.1f}", cy=y, r=4.5, style="fill:var(--mark-0)"),
            element("text", said, x=WIDTH + 10, y=y, dy="0.35em", class_="small")]

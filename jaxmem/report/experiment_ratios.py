"""A figure of ratios to a baseline: a row for each case, a mark with its interval for each contender, a line where they are equal.

An SVG of fixed size for light and dark pages. A mark too far from 1 to be drawn to scale stands at the edge with its number.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem.report.curves import Range, tick_text, ticks
from jaxmem.report.experiment_drawing import CHARACTER, ends, mark, stroke, svg
from jaxmem.report.markup import Markup, element
from jaxmem.tabulate import Interval

WIDTH, STEP, GAP, RIGHT = 460.0, 18.0, 16.0, 60.0  # of the plot; between marks; between rows; margin
NEAREST, FARTHEST = 0.5, 2.0  # ratios that are drawn to scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """`marks`: a contender's name -> its ratio; None is not drawn."""

    title: str
    marks: dict[str, Interval | None]


def drawing(title: str, axis: str, rows: Sequence[Row], *, alone: bool = True) -> str:
    """The SVG. `axis`: what the ratios are of. `alone`: a file of its own; otherwise a part of a page, which has a title already."""
    names = list(dict.fromkeys(name for row in rows for name in row.marks))
    left = 34 + 1.25 * CHARACTER * max((len(row.title) for row in rows), default=0)
    scale = _scale([end for row in rows for ratio in row.marks.values() if ratio for end in ends(ratio)])
    top = 24.0 + 24 * alone
    parts: list[Markup] = []
    for i, name in enumerate(names):
        parts += [mark(i, 22, top - 4), element("text", name, x=35, y=top)]
        top += 20
    depth = STEP * len(names) + GAP
    plot = [_axis(axis, scale, depth * len(rows)), *(_row(row, names, scale, j * depth, left) for j, row in enumerate(rows))]
    parts.append(element("g", *plot, transform=f"translate({left:g} {top:g})"))
    height = top + depth * len(rows) + 50
    return svg(title, left + WIDTH + RIGHT, height, parts, alone=alone)


def _scale(ends: Sequence[float]) -> Range:
    """From the lowest to the highest end, 1 among them and a margin around, within what is drawn to scale."""
    low, high = max(NEAREST, min([1.0, *ends])), min(FARTHEST, max([1.0, *ends]))
    margin = 0.06 * (high - low) or 0.05
    return Range(low=low - margin, high=high + margin, above=0, below=0)


def _axis(axis: str, scale: Range, depth: float) -> Markup:
    parts = []
    values = ticks(scale.low, scale.high, 9)
    for value in values:
        x = f"{WIDTH * scale.share(value):.1f}"
        parts += [element("line", x1=x, x2=x, y1=0, y2=depth, class_="grid"),
                  element("text", tick_text(value, values), x=x, y=depth + 17, text_anchor="middle", class_="small")]
    one = f"{WIDTH * scale.share(1.0):.1f}"
    parts += [element("line", x1=one, x2=one, y1=0, y2=depth, class_="limit"),
              element("text", axis, x=WIDTH / 2, y=depth + 36, text_anchor="middle", class_="small")]
    return element("g", *parts)


def _row(row: Row, names: Sequence[str], scale: Range, y: float, left: float) -> Markup:
    middle = y + GAP / 2 + STEP * len(names) / 2
    parts = [element("line", x1=-left + 14, x2=WIDTH, y1=y, y2=y, class_="grid"),
             element("text", row.title, x=-12, y=middle, dy="0.35em", text_anchor="end", class_="name")]
    for i, name in enumerate(names):
        ratio = row.marks.get(name)
        if ratio is None:
            continue
        at = y + GAP / 2 + STEP * (i + 0.5)
        low, high = (WIDTH * scale.share(end) for end in ends(ratio))
        if high > low:
            parts.append(element("line", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=f"{at:.1f}", y2=f"{at:.1f}", class_="bar",
                                 style=stroke(i)))
        parts.append(mark(i, WIDTH * scale.share(ratio.mean), at, element("title", f"{row.title}, {name}: {ratio.mean:.4g}")))
        if not scale.low <= ratio.mean <= scale.high:
            beyond = ratio.mean > scale.high
            parts.append(element("text", f"{ratio.mean:.3g}", x=WIDTH + 9 if beyond else -9, y=at, dy="0.35em", class_="small",
                                 text_anchor="start" if beyond else "end"))
    return element("g", *parts)

"""A figure of ratios to a baseline: a row for each case, a mark with its interval for each contender, a line where they are equal.

An SVG of fixed size for light and dark pages. A mark too far from 1 to be drawn to scale stands at the edge with its number.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem.report.curves import Range, tick_text, ticks
from jaxmem.report.experiment_figure import BOTH, CHARACTER, COLOURS, DARK, LIGHT, SHAPES, STYLE
from jaxmem.report.markup import Markup, element, text
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
    scale = _scale([end for row in rows for mark in row.marks.values() if mark for end in _ends(mark)])
    width = max(left + WIDTH + RIGHT, 28 + 8.2 * len(title) * alone)
    top = 24.0 + 24 * alone
    parts = [element("text", title, x=14, y=24, class_="title")] if alone else []
    for i, name in enumerate(names):
        parts += [_mark(i, 22, top - 4), element("text", name, x=35, y=top)]
        top += 20
    depth = STEP * len(names) + GAP
    plot = [_axis(axis, scale, depth * len(rows)), *(_row(row, names, scale, j * depth, left) for j, row in enumerate(rows))]
    parts.append(element("g", *plot, transform=f"translate({left:g} {top:g})"))
    height = top + depth * len(rows) + 50
    scheme = f"svg{{{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}" if alone else f".figure{{{BOTH}}}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
            f'class="figure" aria-label="{text(title)}"><style>{scheme}{STYLE}</style>{"".join(parts)}</svg>\n')


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
        mark = row.marks.get(name)
        if mark is None:
            continue
        at = y + GAP / 2 + STEP * (i + 0.5)
        low, high = (WIDTH * scale.share(end) for end in _ends(mark))
        if high > low:
            parts.append(element("line", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=f"{at:.1f}", y2=f"{at:.1f}", class_="bar",
                                 style=f"stroke:var(--mark-{i % len(COLOURS)})"))
        parts.append(_mark(i, WIDTH * scale.share(mark.mean), at, element("title", f"{row.title}, {name}: {mark.mean:.4g}")))
        if not scale.low <= mark.mean <= scale.high:
            beyond = mark.mean > scale.high
            parts.append(element("text", f"{mark.mean:.3g}", x=WIDTH + 9 if beyond else -9, y=at, dy="0.35em", class_="small",
                                 text_anchor="start" if beyond else "end"))
    return element("g", *parts)


def _mark(i: int, x: float, y: float, *inside: Markup) -> Markup:
    return element("g", element("path", d=SHAPES[i % len(SHAPES)], style=f"fill:var(--mark-{i % len(COLOURS)})"), *inside,
                   transform=f"translate({x:.1f} {y:.1f})")


def _ends(mark: Interval) -> tuple[float, float]:
    half = mark.half_width or 0.0
    return mark.mean - half, mark.mean + half

"""The drawings of a run's page: curves over steps with their marks, and the loss curve as a drawing of its own.

Shapes are SVG that stretches with the page; words and marks are HTML placed over it in percent, so that they keep their size.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence

from jaxmem.report.curves import Point, Range, thin, tick_text, ticks, value_range
from jaxmem.report.markup import Markup, element, text
from jaxmem.report.run_events import ROWS, Happening

SIZE = 1000  # of the drawing both ways, stretched to the page
MOST_DOTS = 100
MOST_MARKS = 400  # a row; more than this is a solid line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Values by step. `colour` is CSS; `dots`: every value is marked if they are few."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: str
    dots: bool = False


def chart(
    curves: Sequence[Curve],
    last_step: int,
    *,
    reads: str,
    label: str,
    level: tuple[str, float] | None = None,
    marks: Sequence[Happening] = (),
    from_zero: bool = False,
    tall: bool = False,
) -> Markup:
    """Curves over the steps 0 to `last_step`. `reads`: how the page's script writes values, `number`, `seconds` or `count`.

    `level` is a named value drawn across. `marks` stand in rows under the plot, one a kind.
    """
    last_step = max(last_step, 1)
    shown = [value for curve in curves for value in curve.values]
    range_ = value_range(shown, also=[level[1]] if level else [], from_zero=from_zero)
    points = [thin(curve.steps, curve.values) for curve in curves]
    at = ticks(range_.low, range_.high, 6 if tall else 4)
    lines = [_across(range_.share(tick), "grid") for tick in at]
    words = [element("span", tick_text(tick, at), class_="tick", style=f"bottom:{100 * range_.share(tick):.3f}%") for tick in at]
    for mark in marks:
        if mark.kind in ("kill", "rollback") and mark.step is not None:
            x = _number(SIZE * mark.step / last_step)
            lines.append(element("line", x1=x, x2=x, y1=0, y2=SIZE, class_="event-line", style=f"stroke:{ROWS[mark.kind][1]}"))
    if level:
        lines.append(_across(range_.share(level[1]), "level-line"))
        words.append(element("span", level[0], class_="level-word", style=f"bottom:{100 * range_.share(level[1]):.3f}%"))
    paths = []
    for curve, line in zip(curves, points, strict=True):
        paths.append(element("path", d=_path(line, last_step, range_), class_="curve-line", style=f"stroke:{curve.colour}"))
        if dots := _dots(_marked(curve, line), last_step, range_):
            paths.append(element("path", d=dots, class_="curve-dots", style=f"stroke:{curve.colour}"))
    if range_.above or range_.below:
        which = " and ".join(f"{count:,} {word}" for count, word in ((range_.above, "above"), (range_.below, "below")) if count)
        extreme = (max if range_.above else min)(filter(math.isfinite, shown))
        words.append(element("span", f"{which} this chart, to {extreme:.4g}", class_="outside"))
    svg = element("svg", *lines, *paths, viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", role="img", aria_label=label)
    data = {
        "last": last_step,
        "reads": reads,
        "curves": [
            {"label": curve.label, "colour": curve.colour, "x": [x for x, _ in line], "y": [_short(y) for _, y in line]}
            for curve, line in zip(curves, points, strict=True)
        ],
    }
    steps = ticks(0, last_step, 8 if tall else 4)
    axis = [
        element("span", f"{step:,.0f}", style=f"left:{100 * step / last_step:.3f}%", class_="last" if step > 0.94 * last_step else None)
        for step in steps
        if step == int(step)
    ]
    return element(
        "div",
        element("div", svg, *words, element("span", class_="cursor", hidden=""), class_="plot", tabindex=0),
        element("div", class_="tip", role="status", hidden=""),
        element("div", *_rows(marks, last_step), class_="rows") if marks else None,
        element("div", *axis, class_="steps"),
        Markup(f'<script type="application/json">{_json(data)}</script>'),
        class_="curve tall" if tall else "curve",
        data_low=repr(range_.low),
        data_high=repr(range_.high),
    )


def _across(share: float, class_: str) -> Markup:
    y = _number(SIZE * (1 - share))
    return element("line", x1=0, x2=SIZE, y1=y, y2=y, class_=class_)


def _rows(marks: Sequence[Happening], last_step: int) -> list[Markup]:
    rows = []
    for kind, (name, colour) in ROWS.items():
        own = [mark for mark in marks if mark.kind == kind and mark.step is not None]
        places: dict[int, Happening] = {}  # one mark a place, the last of those that would lie on one another
        for mark in own:
            places[round(MOST_MARKS * min(1.0, (mark.step or 0) / last_step))] = mark
        if places:
            drawn = [
                element(
                    "i",
                    style=f"left:{100 * min(1.0, (mark.step or 0) / last_step):.3f}%;background:{colour}",
                    title=f"step {mark.step:,}: {mark.text}",
                )
                for mark in places.values()
            ]
            rows.append(element("div", element("span", name), *drawn, class_="row", data_kind=kind, data_count=len(own)))
    return rows


def legend(curves: Sequence[Curve], newest: Callable[[Curve], str]) -> Markup:
    """Curves by colour, with their newest value."""
    items = []
    for curve in curves:
        swatch = element("i", class_="swatch", style=f"background:{curve.colour}")
        items.append(element("li", swatch, element("span", curve.label), element("b", newest(curve))))
    return element("ul", *items, class_="legend")


def _path(points: Sequence[Point], last_step: int, range_: Range, width: float = SIZE, height: float = SIZE) -> str:
    """Lines from point to point; a gap breaks them."""
    out, open_ = [], False
    for step, value in points:
        if value is not None:
            out.append(f"{'L' if open_ else 'M'}{_number(width * step / last_step)},{_number(height * (1 - range_.share(value)))}")
        open_ = value is not None
    return "".join(out)


def _marked(curve: Curve, points: Sequence[Point]) -> list[Point]:
    """The points that no line shows, being alone between gaps; all, where the curve asks for it and they are few."""
    if curve.dots and len(points) <= MOST_DOTS:
        return list(points)
    known = [False, *(value is not None for _, value in points), False]
    return [point for i, point in enumerate(points, 1) if known[i] and not known[i - 1] and not known[i + 1]]


def _dots(points: Sequence[Point], last_step: int, range_: Range, width: float = SIZE, height: float = SIZE) -> str:
    """Lines of no length, which round ends make dots."""
    places = [(width * step / last_step, height * (1 - range_.share(value))) for step, value in points if value is not None]
    return "".join(f"M{_number(x)},{_number(y)}h0" for x, y in places)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", chr(92) + "u003c")


# ---------------------------------------------------------------- the loss curve alone

DRAWING_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#57606b}.title{font-weight:600;fill:#14181d}.grid{stroke:#14181d;stroke-opacity:.12}"
    ".line{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}.dots{fill:none;stroke-width:7;stroke-linecap:round}"
    ".train{stroke:#0a62bd}.eval{stroke:#b93012}"
    "@media(prefers-color-scheme:dark){text{fill:#9aa5b1}.title{fill:#e9edf2}.grid{stroke:#e9edf2}.train{stroke:#74c4fd}.eval{stroke:#ff7b72}}"
)


def drawing(train: Curve, evaluated: Curve, title: str) -> str:
    """Training and evaluation loss as one SVG, 860 x 380, for light and dark pages."""
    left, top, width, height = 64.0, 44.0, 776.0, 280.0
    last_step = max([1, *train.steps[-1:], *evaluated.steps[-1:]])
    range_ = value_range([*train.values, *evaluated.values])
    at, steps = ticks(range_.low, range_.high), [step for step in ticks(0, last_step, 8) if step == int(step)]
    parts = [element("text", title, x=left, y=22, class_="title")]
    for tick in at:
        y = _number(top + height * (1 - range_.share(tick)))
        parts.append(element("line", x1=left, x2=left + width, y1=y, y2=y, class_="grid"))
        parts.append(element("text", tick_text(tick, at), x=left - 9, y=y, dy="0.35em", text_anchor="end"))
    for step in steps:
        parts.append(element("text", f"{step:,.0f}", x=_number(left + width * step / last_step), y=top + height + 20, text_anchor="middle"))
    parts.append(element("text", "step", x=left + width / 2, y=top + height + 42, text_anchor="middle"))
    inner = []
    for curve, name in ((train, "train"), (evaluated, "eval")):
        if len(curve.steps):
            points = thin(curve.steps, curve.values)
            inner.append(element("path", d=_path(points, last_step, range_, width, height), class_=f"line {name}"))
            inner.append(element("path", d=_dots(_marked(curve, points), last_step, range_, width, height), class_=f"dots {name}"))
            x = left + width - (230 if name == "train" else 110)
            parts.append(element("path", d=f"M{x},18h18", class_=f"line {name}"))
            parts.append(element("text", curve.label, x=x + 25, y=22))
    parts.append(element("g", *inner, transform=f"translate({left} {top})"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 380" width="860" height="380" role="img" aria-label="{text(title)}">'
        f"<style>{DRAWING_STYLE}</style>" + "".join(parts) + "</svg>\n"
    )

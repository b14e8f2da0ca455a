"""Shares over a course of tasks: a small panel a case, in it a line a task. An SVG for light and dark pages."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence

from jaxmem.report.experiment_drawing import CHARACTER, stroke, svg, title_width
from jaxmem.report.markup import Markup, element

PLOT_WIDTH, PLOT_HEIGHT, LEFT, RIGHT, ABOVE, BELOW, ACROSS = 172.0, 96.0, 44.0, 16.0, 46.0, 38.0, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """`curves`: a task's name -> its share after each task in turn; None is not drawn."""

    title: str
    curves: Mapping[str, Sequence[float | None]]


def panels(title: str, cases: Sequence[Panel], *, alone: bool = True) -> str:
    """The SVG. `alone`: a file of its own, with its title and both schemes; otherwise a part of a page."""
    names = list(dict.fromkeys(name for case in cases for name in case.curves))
    across = min(ACROSS, max(len(cases), 1))
    width = max(across * (LEFT + PLOT_WIDTH + RIGHT), title_width(title, alone=alone))
    parts, top = _legend(names, width, 50.0 if alone else 18.0)
    for i, case in enumerate(cases):
        x, y = (i % across) * (LEFT + PLOT_WIDTH + RIGHT) + LEFT, (i // across) * (ABOVE + PLOT_HEIGHT + BELOW) + top + ABOVE
        parts.append(element("g", *_panel(case, names), transform=f"translate({x:g} {y:g})"))
    height = top + -(-len(cases) // across) * (ABOVE + PLOT_HEIGHT + BELOW)
    return svg(title, width, height, parts, alone=alone, style=".course{fill:none;stroke-width:1.8}")


def _legend(names: Sequence[str], width: float, y: float) -> tuple[list[Markup], float]:
    parts, x = [element("text", "task", x=14, y=y, class_="small")], 52.0
    for i, name in enumerate(names):
        needed = 42 + CHARACTER * len(name)
        if x + needed > width and x > 52:
            x, y = 52.0, y + 20
        parts += [element("line", x1=x, x2=x + 20, y1=y - 4, y2=y - 4, class_="course", style=stroke(i)),
                  element("text", name, x=x + 26, y=y)]
        x += needed
    return parts, y + 4


def _panel(case: Panel, names: Sequence[str]) -> list[Markup]:
    count = max((len(values) for values in case.curves.values()), default=0)
    words = textwrap.wrap(case.title, 26)[:2]
    parts = [element("text", line, x=0, y=-10 - 15 * (len(words) - 1 - i), class_="name small") for i, line in enumerate(words)]
    for share in (0.0, 0.5, 1.0):
        y = f"{PLOT_HEIGHT * (1 - share):.1f}"
        parts += [element("line", x1=0, x2=PLOT_WIDTH, y1=y, y2=y, class_="grid"),
                  element("text", f"{100 * share:.0f}%", x=-6, y=y, dy="0.35em", text_anchor="end", class_="small")]
    for i in range(count):
        parts.append(element("text", str(i + 1), x=f"{_x(i, count):.1f}", y=PLOT_HEIGHT + 15, text_anchor="middle", class_="small"))
    parts.append(element("text", "tasks trained", x=PLOT_WIDTH / 2, y=PLOT_HEIGHT + 29, text_anchor="middle", class_="small"))
    for name, values in case.curves.items():
        style = stroke(names.index(name))
        known = [(_x(i, count), PLOT_HEIGHT * (1 - value)) for i, value in enumerate(values) if value is not None]
        if len(known) > 1:
            parts.append(element("path", d="M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in known), class_="course", style=style))
        parts += [element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.6, style=style.replace("stroke", "fill")) for x, y in known]
    return parts


def _x(i: int, count: int) -> float:
    return PLOT_WIDTH * (i + 0.5) / count

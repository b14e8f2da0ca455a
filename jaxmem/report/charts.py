"""The drawings of the HTML report: memory over the schedule, the treemap of the peak, and bars of stacked parts.

Shapes are SVG that stretches with the page; words are HTML placed over it in percent, so that they keep their size.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem.report.kinds import KINDS, UNATTRIBUTED, kind_of
from jaxmem.report.markup import Markup, element, join
from jaxmem.report.reading import Part
from jaxmem.report.treemap import Rectangle, squarify
from jaxmem.report.units import bytes_text, percent_text

HEIGHT = WIDTH = 1000.0  # of the drawing, stretched to the page


def ticks(top: int) -> list[int]:
    """Byte counts for an axis from 0 to `top`: three to six steps of a power of two."""
    step = 1
    while top > 6 * step:
        step *= 2
    return list(range(0, top + 1, step))


def stack(points: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Bytes at each point by kind, in the order of stacking; what no kind explains is `unattributed`."""
    names = [name for name in KINDS if any(point["by_kind"].get(name) for point in points)]
    rows = {name: [point["by_kind"].get(name, 0) for point in points] for name in names}
    rest = [max(0, point["bytes"] - sum(point["by_kind"].get(name, 0) for name in names)) for point in points]
    return rows | ({UNATTRIBUTED.name: rest} if any(rest) else {})


def schedule(entry: Mapping[str, Any], usable_bytes: int | None, label: str) -> Markup:
    """Stacked areas of live bytes by kind over one program's schedule, with the usable bytes and the peak marked.

    The axis reaches to the usable bytes when they are within three times the peak; a line far above would flatten the curve, so
    there it is named instead.
    """
    points = entry["points"]
    rows = stack(points)
    heights = [sum(values) for values in zip(*rows.values(), strict=True)] if rows else [0] * len(points)
    most = max(heights)
    show_usable = usable_bytes is not None and usable_bytes <= 3 * most
    top = int(1.06 * max(most, usable_bytes if show_usable and usable_bytes else 0)) or 1
    first, last = points[0]["t"], points[-1]["t"]
    if first == last:
        last = first + 1
    xs = [WIDTH * (point["t"] - first) / (last - first) for point in points]
    base, areas = [0] * len(xs), []
    for name, values in rows.items():
        upper = [low + value for low, value in zip(base, values, strict=True)]
        path = _steps(xs, upper, base, top)
        areas.append(element("path", d=path, class_="area", data_kind=name, fill=f"var(--kind-{name})"))
        base = upper
    # The peak as the schedule has it; `peak_t` and the curve can differ by the thinning of the points.
    at = (
        min(range(len(points)), key=lambda i: abs(points[i]["t"] - entry["peak_t"])) if entry["peak_t"] is not None else heights.index(most)
    )
    peak_x, peak_y = 100 * xs[at] / WIDTH, 100 * heights[at] / top
    grid = [
        element("line", x1=0, x2=WIDTH, y1=f"{HEIGHT * (1 - tick / top):.2f}", y2=f"{HEIGHT * (1 - tick / top):.2f}", class_="grid")
        for tick in ticks(top)
    ]
    marks = [element("line", x1=f"{xs[at]:.2f}", x2=f"{xs[at]:.2f}", y1=0, y2=HEIGHT, class_="peak-line")]
    words = [
        element("span", bytes_text(tick).replace(".00", ""), class_="tick", style=f"bottom:{100 * tick / top:.3f}%") for tick in ticks(top)
    ]
    # Where the peak comes near the usable line, the lower of the two words goes below its mark.
    near = bool(show_usable and usable_bytes and abs(heights[at] - usable_bytes) < 0.1 * top)
    peak_under, usable_under = (
        (" under" if near and heights[at] <= (usable_bytes or 0) else ""),
        (" under" if near and heights[at] > (usable_bytes or 0) else ""),
    )
    if show_usable and usable_bytes:
        y = f"{HEIGHT * (1 - usable_bytes / top):.2f}"
        marks.append(element("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="usable-line"))
        words.append(
            element(
                "span",
                f"usable {bytes_text(usable_bytes)}",
                class_=f"usable-word{usable_under}",
                style=f"bottom:{100 * usable_bytes / top:.3f}%",
            )
        )
    elif usable_bytes is not None:
        words.append(
            element("span", f"↑ usable {bytes_text(usable_bytes)}, above this chart", class_="usable-word above", style="bottom:100%")
        )
    words += [
        element("span", class_="peak-dot", style=f"left:{peak_x:.3f}%;bottom:{peak_y:.3f}%"),
        element(
            "span",
            f"peak {bytes_text(heights[at])}",
            class_=f"peak-word{' before' if peak_x > 60 else ''}{peak_under}",
            style=f"left:{peak_x:.3f}%;bottom:{peak_y:.3f}%",
        ),
    ]
    drawing = element(
        "svg",
        *areas,
        *grid,
        *marks,
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    data = {
        "t": [point["t"] for point in points],
        "kinds": [{"name": name, "label": kind_of(name).label, "bytes": values} for name, values in rows.items()],
    }
    return element(
        "div",
        element("div", drawing, *words, element("span", class_="cursor", hidden=""), class_="plot", tabindex=0),
        element("div", class_="tip", role="status", hidden=""),
        element("div", element("span", "start"), element("span", "schedule of the program"), element("span", "end"), class_="x-axis"),
        Markup(f'<script type="application/json">{json.dumps(data, separators=(",", ":")).replace("<", chr(92) + "u003c")}</script>'),
        class_="schedule",
        data_top=str(top),
        data_program=entry["program"],
    )


def _steps(xs: Sequence[float], upper: Sequence[int], lower: Sequence[int], top: int) -> str:
    """The outline between two curves that change at `xs` and nowhere else, as an SVG path: along the upper one and back."""

    def y(value: int) -> str:
        return f"{HEIGHT * (1 - value / top):.1f}"

    there = [f"M{xs[0]:.1f},{y(upper[0])}"]
    for i in range(1, len(xs)):
        if upper[i] != upper[i - 1]:
            there.append(f"H{xs[i]:.1f}V{y(upper[i])}")
    back = [f"H{WIDTH:.1f}V{y(lower[-1])}"]
    for i in range(len(xs) - 1, 0, -1):
        if lower[i] != lower[i - 1]:
            back.append(f"H{xs[i]:.1f}V{y(lower[i - 1])}")
    return "".join([*there, *back, f"H{xs[0]:.1f}Z"])


def legend(sizes: Mapping[str, int]) -> Markup:
    """Kinds by colour, with their bytes."""
    return element(
        "ul",
        *(
            element("li", swatch(name), element("span", kind_of(name).label), element("b", bytes_text(size)))
            for name, size in sizes.items()
        ),
        class_="legend",
    )


def swatch(kind: str | None) -> Markup:
    """A small square in a kind's colour."""
    return element("i", class_="swatch", style=f"background:var(--kind-{kind_of(kind).name})")


def treemap(parts: Sequence[Part], aspect: float, class_: str) -> Markup:
    """Kinds as regions, modules as cells inside them; areas are bytes. `aspect`: width / height for which cells are squarest."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(kind_of(part.kind).name, []).append(part)
    ordered = sorted(
        ((name, [part for part in group if part.bytes]) for name, group in groups.items()),
        key=lambda item: -sum(part.bytes for part in item[1]),
    )
    ordered = [(name, group) for name, group in ordered if group]
    whole = sum(part.bytes for _, group in ordered for part in group)
    space = Rectangle(0.0, 0.0, 100.0 * aspect, 100.0)
    cells = []
    for (name, group), region in zip(
        ordered, squarify([float(sum(part.bytes for part in group)) for _, group in ordered], space), strict=True
    ):
        for part, cell in zip(group, squarify([float(part.bytes) for part in group], region), strict=True):
            words = (kind_of(name).label, part.module or "", bytes_text(part.bytes))
            style = f"left:{cell.x / aspect:.4f}%;top:{cell.y:.4f}%;width:{cell.width / aspect:.4f}%;height:{cell.height:.4f}%"
            title = f"{words[0]}{f', {part.module}' if part.module else ''}: {words[2]} ({percent_text(part.bytes / whole)})"
            inner = element(
                "div",
                element("span", words[0], class_="cell-kind"),
                element("b", words[1] or words[0], class_="cell-module"),
                element("span", words[2], class_="cell-bytes"),
                style=f"background:var(--kind-{name});color:var(--ink-{name})",
                class_="fill" + ("" if part.module else " whole"),
            )
            cells.append(element("div", inner, class_="cell", style=style, title=title, data_bytes=str(part.bytes)))
    return element("div", join(cells), class_=f"treemap {class_}", aria_hidden="true")


def bar(segments: Sequence[tuple[str, float, str, str]], whole: float, class_: str = "") -> Markup:
    """One horizontal bar of (label, size, CSS colour, title) against `whole`; a label shows where it has room."""
    return element(
        "div",
        *(
            element(
                "span",
                element("em", label),
                class_="segment",
                style=f"width:{100 * size / whole:.4f}%;background:{colour}",
                title=title,
            )
            for label, size, colour, title in segments
            if size > 0
        ),
        class_=f"bar {class_}".strip(),
    )

"""Two figures of the checkpoint experiment: goodput against interval, and the loss through failures."""

import math
from collections.abc import Mapping, Sequence

from jaxmem.cost.checkpointing import Costs, expected, optimum
from jaxmem.records import Record
from jaxmem.report.experiment_drawing import ends, mark, stroke, svg
from jaxmem.report.experiment_page import NOTHING, Line
from jaxmem.report.markup import Markup, element
from jaxmem.runs.settings import SNAPSHOTS

WIDTH, HEIGHT, LEFT, RIGHT, ABOVE, BELOW = 300.0, 190.0, 58.0, 26.0, 44.0, 56.0
OWN = (".line{fill:none;stroke-width:1.8}.whole{fill:none;stroke:var(--soft);stroke-opacity:.75;stroke-width:5;stroke-linecap:round}"
       ".kill{stroke:#b93012;stroke-dasharray:2 3;stroke-opacity:.8}")
LEGEND = 690.0  # pixels that it takes


def drawing(lines: Sequence[Line], costs: Mapping[str, Costs], share: float, *, alone: bool) -> str:
    """Goodput against interval, a panel for each failure rate: a curve a mode (estimate) and the measured runs as marks. `share`: of the
    time between checkpoints, that of the steps (the rest waits for data)."""
    title = "Goodput against the checkpoint interval"
    rates = sorted({line["mtbf_s"].value for line in lines})
    top = 70.0 if alone else 34.0
    parts: list[Markup] = []
    for i, mode in enumerate(SNAPSHOTS):
        parts += [mark(i, 26.0 + 76 * i, top - 26), element("text", mode, x=38.0 + 76 * i, y=top - 22)]
    parts.append(element("text", "marks: measure; lines: estimate, with a tick at the best interval",
                         x=26.0 + 76 * len(SNAPSHOTS), y=top - 22, class_="small"))
    for j, rate in enumerate(rates):
        own = [line for line in lines if line["mtbf_s"].value == rate]
        parts.append(element("g", *panel(f"a failure every {rate:g} s", own, costs, rate, share),
                             transform=f"translate({j * (LEFT + WIDTH + RIGHT) + LEFT:g} {top + ABOVE:g})"))
    return svg(title, max(LEGEND, len(rates) * (LEFT + WIDTH + RIGHT)), top + ABOVE + HEIGHT + BELOW, parts, alone=alone, style=OWN)


def panel(name: str, lines: Sequence[Line], costs: Mapping[str, Costs], mtbf_s: float, share: float) -> list[Markup]:
    seen = [number for line in lines if (number := line.get("interval_s", NOTHING).number)]
    bests = [best for one in costs.values() if (best := optimum(one, mtbf_s))]
    if not seen:
        return [element("text", f"{name}: nothing measured", x=0, y=-18, class_="name")]
    low, high = math.log10(min(seen + bests)) - 0.15, math.log10(max(seen + bests)) + 0.15

    def at(seconds: float, goodput: float) -> tuple[float, float]:
        return WIDTH * (math.log10(seconds) - low) / (high - low), HEIGHT * (1 - goodput)
    parts = [element("text", name, x=0, y=-18, class_="name")]
    for percent in range(0, 101, 20):
        y = f"{HEIGHT * (1 - percent / 100):.1f}"
        parts += [element("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid"),
                  element("text", str(percent), x=-8, y=y, dy="0.35em", text_anchor="end", class_="small")]
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = f"{at(10.0**power, 0)[0]:.1f}"
        parts += [element("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_="grid"),
                  element("text", f"{10.0**power:g} s", x=x, y=HEIGHT + 17, text_anchor="middle", class_="small")]
    parts += [element("text", "work between checkpoints (logarithmic)", x=WIDTH / 2, y=HEIGHT + 37, text_anchor="middle", class_="small"),
              element("text", "goodput, %", text_anchor="middle", class_="small", transform=f"translate(-40 {HEIGHT / 2}) rotate(-90)")]
    for i, mode in enumerate(SNAPSHOTS):
        style = stroke(i)
        if mode in costs:
            curve = [10 ** (low + (high - low) * k / 80) for k in range(81)]
            path = "L".join("{:.1f},{:.1f}".format(*at(t, share * expected(costs[mode], t, mtbf_s).goodput)) for t in curve)
            parts.append(element("path", d="M" + path, class_="line", style=style))
            if best := optimum(costs[mode], mtbf_s):
                x, y = at(best, share * expected(costs[mode], best, mtbf_s).goodput)
                parts.append(vertical(x, y - 9, y + 9, style=f"{style};stroke-width:2"))
        for line in lines:
            seconds, cell = line.get("interval_s", NOTHING).number, line.get("goodput", NOTHING)
            if line["snapshot"].value != mode or not seconds or cell.number is None:
                continue
            x, y = at(seconds, cell.number)
            bottom, top = (at(seconds, end)[1] for end in ends(cell.value))
            if top < bottom:
                parts.append(vertical(x, max(0.0, top), min(HEIGHT, bottom), style=f"{style};stroke-width:1.5"))
            parts.append(mark(i, x, y, element("title", f"{mode}, {seconds:.3g} s: {100 * cell.number:.1f}%")))
    return parts


def losses(records: Sequence[Record], *, alone: bool) -> str:
    """The run with most kills over the undisturbed one, against the step and against time; empty without both."""
    done = [one for one in records if one["status"] == "done" and one["values"].get("loss_curve")]
    whole = [one for one in done if not one["settings"]["mtbf_s"]]
    hit = sorted((one for one in done if one["settings"]["mtbf_s"]), key=lambda one: one["values"]["kills"])
    pairs = [(one, base) for one in reversed(hit) for base in whole
             if (one["workload"], one["plan"], one["settings"]["steps"]) == (base["workload"], base["plan"], base["settings"]["steps"])]
    title = "The loss through failures"
    if not pairs:
        y = 24 + 24 * alone
        return svg(title, 300, y + 16, [element("text", "no disturbed run with an undisturbed one beside it", x=14, y=y)], alone=alone)
    disturbed, base = pairs[0]
    curves, plain = disturbed["values"]["loss_curve"], base["values"]["loss_curve"]
    of = disturbed["settings"]
    top = 74.0 if alone else 40.0
    lead = (f"{of['snapshot']}, a checkpoint every {of['every']} steps, a failure every {of['mtbf_s']:g} s: "
            f"{disturbed['values']['kills']} kills; a colour an attempt; wide and grey: undisturbed")
    parts = [element("text", lead, x=14, y=top - 26, class_="small")]
    highest, lowest = max(point[2] for point in plain), min(point[2] for point in plain)
    for j, (column, name, unit) in enumerate(((1, "against the step", "step"), (3, "against time", "seconds since the start"))):
        across = max(point[column] for point in [*curves, *plain])
        parts.append(element("g", *loss_panel(name, unit, curves, plain, column, across, (lowest, highest)),
                             transform=f"translate({j * (LEFT + WIDTH + RIGHT) + LEFT:g} {top + ABOVE:g})"))
    return svg(title, 2 * (LEFT + WIDTH + RIGHT), top + ABOVE + HEIGHT + BELOW, parts, alone=alone, style=OWN)


def loss_panel(name: str, unit: str, curves: Sequence[Sequence[float]], plain: Sequence[Sequence[float]], column: int, across: float,
               span: tuple[float, float]) -> list[Markup]:
    low, high = span[0] - 0.05 * (span[1] - span[0]), span[1] + 0.05 * (span[1] - span[0])

    def path(points: Sequence[Sequence[float]]) -> str:
        return "M" + "L".join(f"{WIDTH * point[column] / across:.1f},{HEIGHT * (high - point[2]) / (high - low):.1f}" for point in points)
    parts = [element("text", name, x=0, y=-18, class_="name"), element("path", d=path(plain), class_="whole")]
    for value in range(math.ceil(low), math.floor(high) + 1):
        y = f"{HEIGHT * (high - value) / (high - low):.1f}"
        parts += [element("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid"),
                  element("text", str(value), x=-8, y=y, dy="0.35em", text_anchor="end", class_="small")]
    for share in (0.0, 0.5, 1.0):
        parts.append(element("text", f"{share * across:,.0f}", x=WIDTH * share, y=HEIGHT + 17, text_anchor="middle", class_="small"))
    parts.append(element("text", unit, x=WIDTH / 2, y=HEIGHT + 37, text_anchor="middle", class_="small"))
    parts.append(element("text", "loss", text_anchor="middle", class_="small", transform=f"translate(-40 {HEIGHT / 2}) rotate(-90)"))
    for attempt in dict.fromkeys(point[0] for point in curves):
        own = [point for point in curves if point[0] == attempt]
        parts.append(element("path", d=path(own), class_="line", style=f"stroke:var(--mark-{int(attempt) % 7})"))
        if own[-1] != curves[-1]:
            parts.append(vertical(WIDTH * own[-1][column] / across, 0, HEIGHT, class_="kill"))
    return parts


def vertical(x: float, y1: float, y2: float, **how: str) -> Markup:
    return element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=f"{y1:.1f}", y2=f"{y2:.1f}", **how)

"""A check as one HTML file that needs nothing else: styles, drawings and a little script are inside, and it loads nothing.

Sections in reading order: the verdict, what to mind and to change, memory over the schedule, composition of the peak, largest
buffers, time by limit and traffic, programs, and how each number was obtained.
"""

from importlib import resources

from jaxmem.report.charts import legend, schedule, swatch, treemap
from jaxmem.report.kinds import KINDS, UNATTRIBUTED, kind_of
from jaxmem.report.markup import Markup, element, join
from jaxmem.report.performance import pair, programs, speed, traffic
from jaxmem.report.pieces import cell, chip, code, number, section, table
from jaxmem.report.provenance import provenance
from jaxmem.report.reading import VERDICT_WORDS, Check, Part, accounted, array_text, headroom, parts, problems, source
from jaxmem.report.units import UNKNOWN, bytes_text, count_text, percent_text, scaled_text, seconds_text

MOST_PARTS = MOST_BUFFERS = 12
SIGNS = {
    "fits": "M4 10.5l4 4 8-9",
    "tight": "M10 4v8M10 15.5v.5",
    "does_not_fit": "M5 5l10 10M15 5L5 15",
    "unknown": "M7 7.5a3 3 0 1 1 4.2 2.7c-.8.4-1.2.9-1.2 1.8M10 15.5v.5",
}


def render(check: Check) -> str:
    """The whole page, as text to be written in UTF-8."""
    title = f"{VERDICT_WORDS[check['verdict']]}: {check['workload'] or 'program'} on {check['topology']}"
    sections = [
        _verdict(check),
        _notes(check),
        _schedule(check),
        _composition(check),
        _buffers(check),
        pair(speed(check), traffic(check)),
        programs(check),
        provenance(check),
    ]
    style = _asset("page.css") + "".join(
        [":root {", *(_colours(kind.name, kind.light, kind.dark) for kind in (*KINDS.values(), UNATTRIBUTED)), "}"]
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:",
        ),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        Markup(f"<style>{style}</style>"),
    )
    top = element("div", element("b", "jaxmem check"), element("button", "Dark", id="theme", type="button", hidden=""), class_="top")
    body = element("body", element("main", top, *sections), Markup(f"<script>{_asset('page.js')}</script>"))
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _asset(name: str) -> str:
    return resources.files("jaxmem.report").joinpath(name).read_text(encoding="utf-8")


def _colours(name: str, light: str, dark: str) -> str:
    return f"--kind-{name}: light-dark({light}, {dark}); --ink-{name}: light-dark({ink_on(light)}, {ink_on(dark)});"


def ink_on(fill: str) -> str:
    """Black or white, whichever has more contrast on the fill: relative luminance by WCAG 2."""
    channels = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _verdict(check: Check) -> Markup:
    verdict = check["verdict"]
    sign = element(
        "svg",
        Markup('<circle cx="10" cy="10" r="9.2" fill="currentColor"/>'),
        element(
            "path",
            d=SIGNS[verdict],
            transform="translate(2.5 2.5) scale(.75)",
            fill="none",
            stroke="var(--sheet)",
            stroke_width="2.6",
            stroke_linecap="round",
        ),
        viewBox="0 0 20 20",
        aria_hidden="true",
    )
    phrase = headroom(check)
    parts_of_it = [
        f"The worst program is {check['worst_program']}." if check["worst_program"] else "",
        f"Usable: {check['usable_note']}." if check["usable_note"] else "",
    ]
    model = f"({scaled_text(check['parameters'])} parameters)" if check["parameters"] else ""
    devices = f"({count_text(check['devices'])} devices)" if check.get("devices") else ""
    asked = element(
        "dl",
        *(
            join([element("dt", name), element("dd", code(value), element("small", note) if note else None)])
            for name, value, note in (
                ("Workload", check["workload"], model),
                ("Plan", check["plan"], ""),
                ("Topology", check["topology"], devices),
            )
        ),
        class_="asked",
    )
    figures = [
        ("Peak on a device", bytes_text(check["peak_bytes"]), "peak_bytes"),
        ("Usable on a device", bytes_text(check["usable_bytes"]), "usable_bytes"),
        ("Host memory", bytes_text(check["host_bytes"]), "host_bytes"),
        ("Step", seconds_text(check["step_s"]), "step_s"),
        ("Tokens a second", count_text(check["tokens_per_s"]), "tokens_per_s"),
        ("MFU", percent_text(check["mfu"]), "mfu"),
    ]
    tiles = element(
        "div",
        *(
            element("div", element("span", name), element("b", value), chip(source(check, key) if value != UNKNOWN else None))
            for name, value, key in figures
        ),
        class_="figures",
    )
    return element(
        "section",
        element("p", sign, VERDICT_WORDS[verdict], class_="state"),
        element("h1", phrase[:1].upper() + phrase[1:]),
        element("p", " ".join(filter(None, parts_of_it)), class_="sub"),
        _gauge(check),
        asked,
        tiles,
        class_=f"sheet verdict {verdict}",
    )


def _gauge(check: Check) -> Markup | None:
    """The peak by kind in the room there is: the capacity, or the peak where that is larger."""
    peak, usable, capacity = check["peak_bytes"], check["usable_bytes"], check["capacity_bytes"]
    if not peak or not usable:
        return None
    full = max(peak, usable, capacity or 0)
    sizes = _by_kind(check)
    scale = peak / max(sum(sizes.values()), 1)
    segments = [
        (kind_of(name).label, size * scale, f"var(--kind-{name})", f"{kind_of(name).label}: {bytes_text(size)}")
        for name, size in sizes.items()
    ] or [("", peak, f"var(--kind-{UNATTRIBUTED.name})", "peak")]
    taken = element(
        "div",
        *(
            element("span", class_="segment", style=f"width:{100 * size / full:.4f}%;background:{colour}", title=title)
            for _, size, colour, title in segments
        ),
        class_="taken",
    )
    over = element("span", class_="over", style=f"left:{100 * usable / full:.4f}%") if peak > usable else None
    limit = element("span", class_="limit", style=f"left:{100 * usable / full:.4f}%") if usable < full else None
    ends = [("peak", peak), ("usable", usable), ("capacity", capacity)]
    words = element(
        "div",
        *(element("span", f"{name} ", element("b", bytes_text(value))) for name, value in ends if value is not None),
        class_="ends",
    )
    return element("div", element("div", taken, over, limit, class_="room"), words, class_="gauge")


def _by_kind(check: Check) -> dict[str, int]:
    """Bytes at the peak by kind, in the order of stacking."""
    sizes = dict.fromkeys((*KINDS, UNATTRIBUTED.name), 0)
    for part in parts(check):
        sizes[kind_of(part.kind).name] += part.bytes
    return {name: size for name, size in sizes.items() if size}


def _notes(check: Check) -> Markup | None:
    items = [
        element("li", element("b", word), element("span", text), class_=word.lower())
        for word, texts in (("Problem", problems(check)), ("Warning", check["warnings"]))
        for text in texts
    ]
    rows = [
        [
            cell(code(item["change"]), "keep"),
            cell(VERDICT_WORDS[item["verdict"]], f"tone-{item['verdict']}"),
            number(bytes_text(item["peak_bytes"])),
            number(seconds_text(item.get("step_s"))),
            cell(chip(item["source"])),
            cell(code(item.get("plan") or item.get("workload") or item.get("topology"))),
        ]
        for item in check["advice"]
    ]
    if not items and not rows:
        return None
    changes = table(["Change", "Then", ">Peak", ">Step", "By", "As given"], rows) if rows else None
    if changes and not items:
        return section("What to change", None, "Single changes, cheapest first.", changes)
    return section("What to mind" + (" and what to change" if changes else ""), None, None, element("ul", items, class_="notes"), changes)


def _schedule(check: Check) -> Markup | None:
    entries = sorted(
        (entry for entry in check["timeline"] if entry["points"]), key=lambda entry: entry["program"] != check["worst_program"]
    )
    if not entries:
        return None
    drawn = []
    for i, entry in enumerate(entries):
        most = max(point["bytes"] for point in entry["points"])
        label = f"Stacked areas: device memory by kind over the schedule of {entry['program']}; the most is {bytes_text(most)}."
        chart = schedule(entry, check["usable_bytes"], label)
        # The first chart's legend is that of the page: kinds that only other programs have are added to it.
        at_peak = max(entry["points"], key=lambda point: point["bytes"])
        sizes = {name: at_peak["by_kind"].get(name, 0) for name in KINDS if any(point["by_kind"].get(name) for point in entry["points"])}
        rest = at_peak["bytes"] - sum(at_peak["by_kind"].values())
        sizes |= {UNATTRIBUTED.name: rest} if rest > 0 else {}
        words = [element("h3", f"{entry['program']}: bytes by kind at its peak"), legend(sizes)]
        drawn.append(
            join([chart, *words])
            if i == 0
            else element("details", element("summary", element("b", entry["program"]), f", peak {bytes_text(most)}"), chart, legend(sizes))
        )
    lead = (
        f"Live bytes on one device while {entries[0]['program']} runs, in the order in which the compiler scheduled its "
        "instructions. Point at the chart, or use the arrow keys, to read it."
    )
    return section("Memory over the schedule", source(check, "timeline"), lead, *drawn)


def _composition(check: Check) -> Markup | None:
    all_parts = parts(check)
    if not all_parts:
        return None
    whole, largest = sum(part.bytes for part in all_parts), max(part.bytes for part in all_parts)

    def row(part: Part) -> list[Markup]:
        name = kind_of(part.kind).name
        meter = element("span", class_="meter", style=f"width:{100 * part.bytes / largest:.3f}%;background:var(--kind-{name})")
        return [
            cell(join([swatch(part.kind), element("span", kind_of(part.kind).label)]), "keep"),
            cell(code(part.module)),
            number(bytes_text(part.bytes)),
            number(percent_text(part.bytes / whole)),
            cell(meter, "meters"),
        ]

    heads = ["Kind", "Module", ">Bytes", ">Share", ""]
    first, rest = all_parts[:MOST_PARTS], all_parts[MOST_PARTS:]
    if len(rest) < 3:
        first, rest = all_parts, []
    more = (
        element(
            "details",
            element("summary", f"{len(rest)} smaller parts, together {bytes_text(sum(part.bytes for part in rest))}"),
            table(heads, [row(part) for part in rest]),
        )
        if rest
        else None
    )
    lead = (
        f"What is live on one device when {check['worst_program'] or 'the program'} takes the most, by what it is for and by the "
        f"module it belongs to. {accounted(check) or ''}"
    )
    return section(
        "Composition of the peak",
        source(check, "composition"),
        lead,
        treemap(all_parts, 2.6, "wide"),
        treemap(all_parts, 0.75, "narrow"),
        table(heads, [row(part) for part in first]),
        more,
        class_="long",
    )


def _buffers(check: Check) -> Markup | None:
    if not check["buffers"]:
        return None
    rows = []
    for b in check["buffers"]:
        lost = f"{bytes_text(b['padding_bytes'])}" + (
            f" ({percent_text(b['padding_bytes'] / b['bytes'])})" if b["padding_bytes"] and b["bytes"] else ""
        )
        kind = join([swatch(b["kind"]), element("span", kind_of(b["kind"]).label)]) if b["kind"] else UNKNOWN
        rows.append(
            [
                cell(element("b", bytes_text(b["bytes"])), "number"),
                number(lost),
                cell(kind, "keep"),
                cell(code(array_text(b)), "keep"),
                cell(code(b["sharding"]), "keep"),
                cell(code(b["module"])),
                cell(code(b["source"] or b.get("path")), "broken"),
            ]
        )
    heads = [">Bytes", ">Padding", "Kind", "Array", "Sharding", "Module", "Source"]
    rest = rows[MOST_BUFFERS:]
    more = element("details", element("summary", f"{len(rest)} more"), table(heads, rest)) if rest else None
    return section(
        "Largest buffers at the peak",
        source(check, "buffers"),
        "Sizes and shapes are those of one device, as the compiler lays the arrays out; padding is what tiling adds.",
        table(heads, rows[:MOST_BUFFERS]),
        more,
        class_="long",
    )

"""A check as one HTML file that needs nothing else: styles, drawings and a little script are inside, and it loads nothing.

Sections in reading order: the verdict, what to mind and to change, memory over the schedule, composition of the peak, largest buffers, time by
limit and traffic, programs, and how each number was obtained.
"""

from importlib import resources

from jaxmem.report.charts import bar, legend, schedule, swatch, treemap
from jaxmem.report.kinds import KINDS, UNATTRIBUTED, kind_of
from jaxmem.report.markup import Child, Markup, element, join
from jaxmem.report.provenance import provenance
from jaxmem.report.reading import STATUS_WORDS, VERDICT_WORDS, Check, accounted, array_text, headroom, limits, parts, program_sum, source
from jaxmem.report.units import UNKNOWN, bytes_text, count_text, duration_text, percent_text, scaled_text, seconds_text

MOST_PARTS = 12
SIGNS = {"fits": "M4 10.5l4 4 8-9", "tight": "M10 4v8M10 15.5v.5", "does_not_fit": "M5 5l10 10M15 5L5 15", "unknown": "M7 7.5a3 3 0 1 1 4.2 2.7c-.8.4-1.2.9-1.2 1.8M10 15.5v.5"}
LIMIT_WORDS = {"math": "arithmetic units", "memory": "device memory bandwidth", "host": "link to the host", "bubble": "waiting: nothing to run"}
# Colours of the limits are those of the kinds they remind of, so that one palette is learned once; several axes take the next ones.
LIMIT_KINDS = {"math": "params", "memory": "saved", "host": "gradients", "bubble": "padding"}
AXIS_KINDS = ("collective", "logits", "recomputed", "opt_state")


def render(check: Check) -> str:
    """The whole page, as text to be written in UTF-8."""
    title = f"{VERDICT_WORDS[check['verdict']]}: {check['workload'] or 'program'} on {check['topology']}"
    sections = [_verdict(check), _notes(check), _schedule(check), _composition(check), _buffers(check), _pair(_speed(check), _traffic(check)), _programs(check), provenance(check)]
    style = _asset("page.css") + "".join([":root {", *(_colours(kind.name, kind.light, kind.dark) for kind in (*KINDS.values(), UNATTRIBUTED)), "}"])
    head = element("head", element("meta", charset="utf-8"), element("meta", name="viewport", content="width=device-width, initial-scale=1"),
                   element("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"),
                   element("link", rel="icon", href="data:,"), element("title", title), Markup(f"<style>{style}</style>"))
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


def _section(heading: str, how: str | None, lead: str | None, *children: Child, class_: str = "") -> Markup:
    header = element("header", element("h2", heading), element("span", how, class_=f"source {how}") if how else None, element("p", lead, class_="lead") if lead else None)
    return element("section", header, *children, class_=f"sheet {class_}".strip())


def _table(heads: list[str], rows: list[list[Markup]]) -> Markup:
    """`heads`: a leading `>` marks a column of numbers. Rows are finished cells."""
    top = element("tr", *(element("th", head.removeprefix(">"), scope="col", class_="number" if head.startswith(">") else None) for head in heads))
    return element("div", element("table", element("thead", top), element("tbody", *(element("tr", row) for row in rows))), class_="scroll")


def _cell(value: Child, class_: str | None = None) -> Markup:
    return element("td", value, class_=class_)


def _number(value: str) -> Markup:
    return _cell(value, "number")


def _code(value: str | None) -> Markup:
    return element("code", value) if value else Markup(UNKNOWN)


def _verdict(check: Check) -> Markup:
    verdict = check["verdict"]
    sign = element("svg", Markup('<circle cx="10" cy="10" r="9.2" fill="currentColor"/>'),
                   element("path", d=SIGNS[verdict], transform="translate(2.5 2.5) scale(.75)", fill="none", stroke="var(--sheet)", stroke_width="2.6", stroke_linecap="round"), viewBox="0 0 20 20", aria_hidden="true")
    phrase = headroom(check)
    parts_of_it = [f"The worst program is {check['worst_program']}." if check["worst_program"] else "", f"Usable: {check['usable_note']}." if check["usable_note"] else ""]
    model = f" ({scaled_text(check['parameters'])} parameters)" if check["parameters"] else ""
    devices = f" ({count_text(check['devices'])} devices)" if check.get("devices") else ""
    asked = element("dl", *(join([element("dt", name), element("dd", _code(value), element("small", note))]) for name, value, note in
                            (("Workload", check["workload"], model), ("Plan", check["plan"], ""), ("Topology", check["topology"], devices))), class_="asked")
    figures = [("Peak on a device", bytes_text(check["peak_bytes"]), "peak_bytes"), ("Usable on a device", bytes_text(check["usable_bytes"]), "usable_bytes"), ("Host memory", bytes_text(check["host_bytes"]), "host_bytes"),
               ("Step", seconds_text(check["step_s"]), "step_s"), ("Tokens a second", count_text(check["tokens_per_s"]), "tokens_per_s"), ("MFU", percent_text(check["mfu"]), "mfu")]
    tiles = element("div", *(element("div", element("span", name), element("b", value), _chip(source(check, key) if value != UNKNOWN else None)) for name, value, key in figures), class_="figures")
    return element("section", element("p", sign, VERDICT_WORDS[verdict], class_="state"), element("h1", phrase[:1].upper() + phrase[1:]), element("p", " ".join(filter(None, parts_of_it)), class_="sub"),
                   _gauge(check), asked, tiles, class_=f"sheet verdict {verdict}")


def _chip(how: str | None) -> Markup | None:
    return element("i", how, class_=f"source {how}", style="font-style:normal") if how else None


def _gauge(check: Check) -> Markup | None:
    """The peak by kind in the room there is: the capacity, or the peak where that is larger."""
    peak, usable, capacity = check["peak_bytes"], check["usable_bytes"], check["capacity_bytes"]
    if not peak or not usable:
        return None
    full = max(peak, usable, capacity or 0)
    sizes = _by_kind(check)
    scale = peak / max(sum(sizes.values()), 1)
    segments = [(kind_of(name).label, size * scale, f"var(--kind-{name})", f"{kind_of(name).label}: {bytes_text(size)}") for name, size in sizes.items()] or [("", peak, f"var(--kind-{UNATTRIBUTED.name})", "peak")]
    taken = element("div", *(element("span", class_="segment", style=f"width:{100 * size / full:.4f}%;background:{colour}", title=title) for _, size, colour, title in segments), class_="taken")
    over = element("span", class_="over", style=f"left:{100 * usable / full:.4f}%") if peak > usable else None
    limit = element("span", class_="limit", style=f"left:{100 * usable / full:.4f}%") if usable < full else None
    ends = [("peak", peak), ("usable", usable), ("capacity", capacity)]
    words = element("div", *(element("span", f"{name} ", element("b", bytes_text(value))) for name, value in ends if value is not None), class_="ends")
    return element("div", element("div", taken, over, limit, class_="room"), words, class_="gauge")


def _by_kind(check: Check) -> dict[str, int]:
    """Bytes at the peak by kind, in the order of stacking."""
    sizes = dict.fromkeys((*KINDS, UNATTRIBUTED.name), 0)
    for part in parts(check):
        sizes[kind_of(part.kind).name] += part.bytes
    return {name: size for name, size in sizes.items() if size}


def _notes(check: Check) -> Markup | None:
    items = [element("li", element("b", word), element("span", text), class_=word.lower()) for word, texts in (("Problem", check["problems"]), ("Warning", check["warnings"])) for text in texts]
    rows = [[_cell(_code(item["change"]), "keep"), _cell(VERDICT_WORDS[item["verdict"]], f"tone-{item['verdict']}"), _number(bytes_text(item["peak_bytes"])), _number(seconds_text(item.get("step_s"))),
             _cell(_chip(item["source"])), _cell(_code(item.get("plan") or item.get("workload") or item.get("topology")))] for item in check["advice"]]
    if not items and not rows:
        return None
    table = _table(["Change", "Then", ">Peak", ">Step", "By", "As given"], rows) if rows else None
    if table and not items:
        return _section("What to change", None, "Single changes, cheapest first.", table)
    return _section("What to mind" + (" and what to change" if table else ""), None, None, element("ul", items, class_="notes"), table)


def _schedule(check: Check) -> Markup | None:
    entries = sorted((entry for entry in check["timeline"] if entry["points"]), key=lambda entry: entry["program"] != check["worst_program"])
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
        drawn.append(join([chart, *words]) if i == 0 else element("details", element("summary", element("b", entry["program"]), f", peak {bytes_text(most)}"), chart, legend(sizes)))
    lead = f"Live bytes on one device while {entries[0]['program']} runs, in the order in which the compiler scheduled its instructions. Point at the chart, or use the arrow keys, to read it."
    return _section("Memory over the schedule", source(check, "timeline"), lead, *drawn)


def _composition(check: Check) -> Markup | None:
    all_parts = parts(check)
    if not all_parts:
        return None
    whole, largest = sum(part.bytes for part in all_parts), max(part.bytes for part in all_parts)

    def row(part) -> list[Markup]:
        name = kind_of(part.kind).name
        meter = element("span", class_="meter", style=f"width:{100 * part.bytes / largest:.3f}%;background:var(--kind-{name})")
        return [_cell(join([swatch(part.kind), element("span", kind_of(part.kind).label)]), "keep"), _cell(_code(part.module)), _number(bytes_text(part.bytes)), _number(percent_text(part.bytes / whole)), _cell(meter, "meters")]

    heads = ["Kind", "Module", ">Bytes", ">Share", ""]
    first, rest = all_parts[:MOST_PARTS], all_parts[MOST_PARTS:]
    if len(rest) < 3:
        first, rest = all_parts, []
    more = element("details", element("summary", f"{len(rest)} smaller parts, together {bytes_text(sum(part.bytes for part in rest))}"), _table(heads, [row(part) for part in rest])) if rest else None
    lead = f"What is live on one device when {check['worst_program'] or 'the program'} takes the most, by what it is for and by the module it belongs to. {accounted(check) or ''}"
    return _section("Composition of the peak", source(check, "composition"), lead, treemap(all_parts, 2.6, "wide"), treemap(all_parts, 0.75, "narrow"), _table(heads, [row(part) for part in first]), more, class_="long")


def _buffers(check: Check) -> Markup | None:
    if not check["buffers"]:
        return None
    rows = []
    for b in check["buffers"]:
        lost = f"{bytes_text(b['padding_bytes'])}" + (f" ({percent_text(b['padding_bytes'] / b['bytes'])})" if b["padding_bytes"] and b["bytes"] else "")
        kind = join([swatch(b["kind"]), element("span", kind_of(b["kind"]).label)]) if b["kind"] else UNKNOWN
        rows.append([_cell(element("b", bytes_text(b["bytes"])), "number"), _number(lost), _cell(kind, "keep"), _cell(_code(array_text(b)), "keep"), _cell(_code(b["sharding"]), "keep"),
                     _cell(_code(b["module"])), _cell(_code(b["source"] or b.get("path")))])
    return _section("Largest buffers at the peak", source(check, "buffers"), "Sizes and shapes are those of one device, as the compiler lays the arrays out; padding is what tiling adds.",
                    _table([">Bytes", ">Padding", "Kind", "Array", "Sharding", "Module", "Source"], rows), class_="long")


def _pair(*sections: Markup | None) -> Markup | None:
    there = [section for section in sections if section]
    return element("div", there, class_="pair") if there else None


def _speed(check: Check) -> Markup | None:
    found = limits(check)
    step = check["step_s"]
    if not found:
        return _section("Time by limit", None, "The step time is not known: nothing here was compiled for it or estimated.")
    axes = [limit.name for limit in found if limit.name not in LIMIT_WORDS]
    colours = {limit.name: f"var(--kind-{LIMIT_KINDS.get(limit.name) or AXIS_KINDS[axes.index(limit.name) % len(AXIS_KINDS)]})" for limit in found}
    exposed = [(limit.name, limit.exposed_s or 0, colours[limit.name], f"{limit.name}: {seconds_text(limit.exposed_s)}") for limit in found]
    hidden = [(limit.name, limit.hidden_s or 0, colours[limit.name], f"{limit.name}, hidden: {seconds_text(limit.hidden_s)}") for limit in found]
    whole = max(sum(size for _, size, _, _ in exposed), sum(size for _, size, _, _ in hidden)) or 1
    bars = [element("span", "in the way"), bar(exposed, whole)] + ([element("span", "hidden"), bar(hidden, whole, "hidden-time")] if any(size for _, size, _, _ in hidden) else [])
    rows = [[_cell(join([element("i", class_="swatch", style=f"background:{colours[limit.name]}"), element("span", limit.name)]), "keep"), _cell(LIMIT_WORDS.get(limit.name, f"collectives over the axis {limit.name}"), "quiet"),
             _number(seconds_text(limit.exposed_s)), _number(percent_text(limit.exposed_s / step if limit.exposed_s is not None and step else None)), _number(seconds_text(limit.hidden_s))] for limit in found]
    return _section("Time by limit", source(check, "seconds_by_limit"), "Seconds of a step: what is in the way adds up to the step, hidden time runs behind it.",
                    element("div", bars, class_="bars"), _table(["Limit", "", ">In the way", ">Share", ">Hidden"], rows))


def _traffic(check: Check) -> Markup | None:
    rows = [[_cell(_code(entry["axis"]), "keep"), _cell(_code(entry["collective"]), "keep"), _number(count_text(entry["count"])), _number(bytes_text(entry["bytes"])), _number(seconds_text(entry["exposed_s"])), _number(seconds_text(entry.get("hidden_s")))]
            for entry in sorted(check["traffic"], key=lambda entry: (-(entry["exposed_s"] or 0), -(entry["bytes"] or 0)))]
    moved = [[_cell(_code(entry["name"]), "keep"), _number(bytes_text(entry["bytes"]))] for entry in check["offload"]]
    if not rows and not moved:
        return None
    return _section("Collectives and transfers", source(check, "traffic"), "What one device sends in a step, loops counted as often as they run.",
                    _table(["Axis", "Collective", ">Count", ">Bytes", ">In the way", ">Hidden"], rows) if rows else None,
                    join([element("h3", "Offloaded to the host"), _table(["Name", ">Bytes that move"], moved)]) if moved else None)


def _programs(check: Check) -> Markup:
    keys = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes")
    rows, said = [], []
    for name, program in check["programs"].items():
        outcome = STATUS_WORDS[program["status"]]
        rows.append([_cell(element("b", name), "keep"), _cell(outcome, "tone-fits" if program["status"] == "ok" else "tone-failed"), _cell(element("b", bytes_text(program["peak_bytes"])), "number"),
                     _number(bytes_text(program_sum(program))), *(_number(bytes_text(program[key])) for key in keys), _number(bytes_text(program["host_bytes"])), _number(duration_text(program["compile_s"]))])
        texts = ([program["reason"] or "no reason given"] if program["status"] != "ok" else []) + program["problems"]
        said += [element("li", element("b", name), element("span", text), class_="problem") for text in texts]
    lead = "Every program of a run, on one device. The peak is the compiler's own; the sum is arguments + outputs - aliased + temporary, which counts donated buffers once and need not equal it."
    table = _table(["Program", "Outcome", ">Peak", ">Sum", ">Arguments", ">Outputs", ">Aliased", ">Temporary", ">Host", ">Compile"], rows) if rows else element("p", "None was compiled.", class_="quiet")
    return _section("Programs", source(check, "programs"), lead, element("ul", said, class_="notes") if said else None, table)

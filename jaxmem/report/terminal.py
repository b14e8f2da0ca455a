"""A check as one screen of text: the verdict, where the memory goes, what limits the speed, and where each figure came from."""

import os
import sys

from jaxmem.report.cells import Column, Line, beside, cells, clip, paint, shorten, table, wrap
from jaxmem.report.kinds import KINDS, kind_of
from jaxmem.report.reading import (
    VERDICT_WORDS,
    Check,
    accounted,
    array_text,
    flat_text,
    headroom,
    limits,
    parts,
    problems,
    program_notes,
    program_sum,
    source,
)
from jaxmem.report.units import (
    UNKNOWN,
    byte_unit,
    bytes_in,
    bytes_text,
    count_text,
    duration_text,
    percent_text,
    scaled_text,
    seconds_text,
)

VERDICT_STYLES = {"fits": "green", "tight": "yellow", "does_not_fit": "red", "unknown": "magenta"}
MOST_PARTS, MOST_BUFFERS, MOST_TRAFFIC, MOST_TEXTS = 7, 8, 6, 5
FOLLOWS = ("verdict", "headroom_bytes", "unattributed_bytes")  # from figures whose source is listed


def render(check: Check, width: int = 100, color: bool | None = None) -> str:
    """The report, every line at most `width` cells (at least 60).

    `color` None: ANSI colours if standard output is a terminal and NO_COLOR is not set (https://no-color.org).
    """
    width = max(width, 60)
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    lines = [*_head(check, width), [], *_programs(check, width)]
    for block in (_composition(check, width), _buffers(check, width), _speed_and_traffic(check, width), _texts(check, width)):
        lines += [[], *block] if block else []
    lines += [[], *_footer(check, width)]
    return paint([clip(line, width) for line in lines], color)


def _rule(title: str, note: str | None, width: int) -> Line:
    """A section's heading: title, rule, and the source of its figures at the right."""
    tail = f" {note}" if note else ""
    return [(title, "bold"), (" ", ""), ("─" * (width - cells(title) - 1 - cells(tail)), "dim"), (tail, "dim")]


def _head(check: Check, width: int) -> list[Line]:
    verdict = check["verdict"]
    words = f" {VERDICT_WORDS[verdict].upper()} "
    worst = f" · worst program: {flat_text(check['worst_program'])}" if check["worst_program"] else ""
    peak = "" if verdict == "unknown" else f" · peak {bytes_text(check['peak_bytes'])}"
    lines: list[Line] = [[(words, f"bold reverse {VERDICT_STYLES[verdict]}"), (" ", ""), (f"{headroom(check)}{peak}{worst}", "bold")]]
    lines += _gauge(check, width)
    devices = f"  ({count_text(check['devices'])} devices)" if check.get("devices") else ""
    model = f"  ({scaled_text(check['parameters'])} parameters)" if check["parameters"] else ""
    for name, text, note in (
        ("workload", check["workload"], model),
        ("plan", check["plan"], ""),
        ("topology", check["topology"], devices),
    ):
        lines.append([(f"{name:<9} ", "dim"), (shorten(flat_text(text or UNKNOWN), width - 10 - cells(note), "middle"), ""), (note, "dim")])
    return lines


def _gauge(check: Check, width: int) -> list[Line]:
    """The peak by kind against the usable bytes, as one bar across the screen; none where either is unknown."""
    peak, usable = check["peak_bytes"], check["usable_bytes"]
    if not peak or not usable:
        return []
    full = max(peak, usable)
    filled, limit = max(1, round(width * peak / full)), round(width * usable / full)
    by_kind: dict[str, int] = {}
    for part in parts(check):
        by_kind[part.kind or ""] = by_kind.get(part.kind or "", 0) + part.bytes
    names = [*(name for name in KINDS if name in by_kind), *(name for name in by_kind if name not in KINDS)]
    total, line, used, summed = max(sum(by_kind.values()), 1), [], 0, 0
    for name in names:
        summed += by_kind[name]
        end = round(filled * summed / total)
        line.append(("█" * (end - used), kind_of(name).ansi))
        used = end
    line.append(("█" * (filled - used), "dim"))
    if peak > usable:
        caption = f"▲ usable {bytes_text(usable)}"
        at = min(max(limit - 1, 0), width - cells(caption))
        return [line, [(" " * at, ""), (caption, "red")]]
    return [[*line, ("░" * (width - filled), "dim")]]


def _programs(check: Check, width: int) -> list[Line]:
    keys = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes")
    programs = check["programs"]
    if not programs:
        return [_rule("Programs", None, width), [("none was compiled", "dim")]]
    unit, size = byte_unit([program[key] for program in programs.values() for key in (*keys, "peak_bytes", "host_bytes")])
    heads = ("peak", "sum", "arguments", "outputs", "aliased", "temporary", "host", "compile")
    columns = [
        Column(head="program", keep="middle"),
        Column(head="outcome", keep="start"),
        *(Column(head=head, align="right") for head in heads),
    ]
    rows = []
    for name, program in programs.items():
        mark = "bold" if name == check["worst_program"] else ""
        figures = [
            bytes_in(value, size)
            for value in (program["peak_bytes"], program_sum(program), *(program[key] for key in keys), program["host_bytes"])
        ]
        rows.append(
            [
                (flat_text(name), mark),
                (program["status"], "green" if program["status"] == "ok" else "red"),
                (figures[0], "bold"),
                *((figure, "") for figure in figures[1:]),
                (duration_text(program["compile_s"]), "dim"),
            ]
        )
    lines = [_rule(f"Programs, {unit} a device", source(check, "programs"), width), *table(columns, rows, width)]
    for name in programs:
        for text in program_notes(check, name):
            lines += _note(f"{flat_text(name)}: {text}", width, "red")
    return lines


def _composition(check: Check, width: int) -> list[Line]:
    all_parts = parts(check)
    if not all_parts:
        return []
    named = [part for part in all_parts if part.kind]
    shown, rest = named[:MOST_PARTS], named[MOST_PARTS:]
    whole = max(sum(part.bytes for part in all_parts), check["peak_bytes"] or 0, 1)
    entries = [(kind_of(part.kind).label, flat_text(part.module or UNKNOWN), part.bytes, kind_of(part.kind).ansi) for part in shown]
    if rest:
        entries.append((f"{len(rest)} more", "", sum(part.bytes for part in rest), "dim"))
    entries += [("unattributed", "", part.bytes, "dim") for part in all_parts if not part.kind]
    bar = max(12, width - 70)
    largest = max(size for _, _, size, _ in entries)
    rows = [
        [
            (label, ""),
            (module, ""),
            (bytes_text(size), ""),
            (percent_text(size / whole), "dim"),
            ("█" * round(bar * size / largest) or "▏", style),
        ]
        for label, module, size, style in entries
    ]
    columns = [
        Column(head="kind"),
        Column(head="module", keep="middle"),
        Column(head="bytes", align="right"),
        Column(head="share", align="right"),
        Column(head=""),
    ]
    worst = f" of {flat_text(check['worst_program'])}" if check["worst_program"] else ""
    heading = _rule(shorten(f"Composition of the peak{worst}", width - 12), source(check, "composition"), width)
    # The bars keep their room: the other columns are laid out in what is left of it.
    text = table(columns[:4], [row[:4] for row in rows], width - bar - 2)
    used = max(sum(cells(part) for part, _ in line) for line in text)
    lines = [
        heading,
        *(
            [*line, (" " * (used - sum(cells(part) for part, _ in line) + 2), ""), row[4]]
            for line, row in zip(text, [[("", "")] * 5, *rows], strict=True)
        ),
    ]
    remark = accounted(check)
    return lines + (_note(remark, width, "dim") if remark else [])


def _buffers(check: Check, width: int) -> list[Line]:
    buffers = check["buffers"][:MOST_BUFFERS]
    if not buffers:
        return []
    columns = [
        Column(head="bytes", align="right"),
        Column(head="padding", align="right"),
        Column(head="kind"),
        Column(head="array", keep="start", least=22),
        Column(head="sharding", keep="middle", least=13),
        Column(head="module", keep="end", least=9),
        Column(head="source", keep="end", least=14),
    ]
    rows = [
        [
            (bytes_text(b["bytes"]), ""),
            (bytes_text(b["padding_bytes"]), "yellow" if b["padding_bytes"] else "dim"),
            (flat_text(b["kind"] or UNKNOWN), kind_of(b["kind"]).ansi),
            (flat_text(array_text(b)), ""),
            (_sharding(b["sharding"]), ""),
            (flat_text(b["module"] or UNKNOWN), ""),
            (flat_text(b["source"] or b.get("path") or UNKNOWN), "dim"),
        ]
        for b in buffers
    ]
    more = len(check["buffers"]) - len(buffers)
    return [
        _rule(f"Largest buffers at the peak{f' ({more} more in the JSON)' if more > 0 else ''}", source(check, "buffers"), width),
        *table(columns, rows, width),
    ]


def _sharding(text: str | None) -> str:
    """`P(None, 'fsdp')` -> `P(-,fsdp)`: the short form of a narrow column."""
    return flat_text(text).replace("'", "").replace("None", "-").replace(", ", ",") if text else UNKNOWN


def _speed_and_traffic(check: Check, width: int) -> list[Line]:
    if width < 96:
        speed, traffic = _speed(check, width), _traffic(check, width)
        return [*speed, *([[]] if speed and traffic else []), *traffic]
    speed, traffic = _speed(check, width // 2 - 2), _traffic(check, width - width // 2 - 1)
    return beside(speed, traffic, width // 2 - 2, 3) if speed and traffic else _speed(check, width) or _traffic(check, width)


def _speed(check: Check, width: int) -> list[Line]:
    step, rate, mfu = check["step_s"], check["tokens_per_s"], check["mfu"]
    lines = [
        _rule("Speed", source(check, "step_s"), width),
        [
            ("step ", "dim"),
            (seconds_text(step), "bold"),
            ("  tokens/s ", "dim"),
            (count_text(rate), "bold"),
            ("  MFU ", "dim"),
            (percent_text(mfu), "bold"),
        ],
    ]
    rows = []
    for limit in limits(check):
        share = limit.exposed_s / step if limit.exposed_s is not None and step else None
        bar = "" if share is None else "█" * round(min(share, 1) * max(4, width - 38))
        rows.append(
            [
                (flat_text(limit.name), ""),
                (seconds_text(limit.exposed_s), ""),
                (seconds_text(limit.hidden_s) if limit.hidden_s is not None else "", "dim"),
                (percent_text(share), "dim"),
                (bar, "blue"),
            ]
        )
    columns = [
        Column(head="limit", keep="middle"),
        Column(head="exposed", align="right"),
        Column(head="hidden", align="right"),
        Column(head="share", align="right"),
        Column(head="", keep="start", least=0),
    ]
    return lines + (table(columns, rows, width) if rows else [])


def _traffic(check: Check, width: int) -> list[Line]:
    traffic = sorted(check["traffic"], key=lambda entry: (-(entry["exposed_s"] or 0), -(entry["bytes"] or 0)))
    rows = [
        [
            (flat_text(entry["axis"] or UNKNOWN), ""),
            (flat_text(entry["collective"]), ""),
            (count_text(entry["count"]), ""),
            (bytes_text(entry["bytes"]), ""),
            (seconds_text(entry["exposed_s"]), ""),
        ]
        for entry in traffic[:MOST_TRAFFIC]
    ]
    if not rows and not check["offload"]:
        return []
    columns = [
        Column(head="axis", keep="middle"),
        Column(head="collective", keep="end", least=10),
        Column(head="count", align="right"),
        Column(head="bytes", align="right"),
        Column(head="exposed", align="right"),
    ]
    more = len(traffic) - MOST_TRAFFIC
    lines = [
        _rule("Traffic of a device in a step", source(check, "traffic"), width),
        *(table(columns, rows, width) if rows else []),
    ]
    if more > 0:
        lines.append([(f"{more} more in the JSON", "dim")])
    for entry in check["offload"]:
        lines += _note(f"to the host: {bytes_text(entry['bytes'])} of {entry['name']}", width, "dim")
    return lines


def _texts(check: Check, width: int) -> list[Line]:
    lines: list[Line] = []
    for title, texts, style in (("problem", problems(check), "red"), ("warning", check["warnings"], "yellow")):
        for text in texts[:MOST_TEXTS]:
            lines += _note(f"{title}: {text}", width, style)
        if len(texts) > MOST_TEXTS:
            lines.append([(f"{len(texts) - MOST_TEXTS} more {title}s in the JSON", "dim")])
    if check["advice"]:
        columns = [
            Column(head="change", keep="middle", least=12),
            Column(head="then", keep="start"),
            Column(head="peak", align="right"),
            Column(head="step", align="right"),
            Column(head="by"),
        ]
        rows = [
            [
                (flat_text(item["change"]), "bold"),
                (VERDICT_WORDS[item["verdict"]].lower(), VERDICT_STYLES[item["verdict"]]),
                (bytes_text(item["peak_bytes"]), ""),
                (seconds_text(item.get("step_s")), ""),
                (item["source"], "dim"),
            ]
            for item in check["advice"][:MOST_TEXTS]
        ]
        lines += [*([[]] if lines else []), _rule("What to change", None, width), *table(columns, rows, width)]
    return lines


def _note(text: str, width: int, style: str) -> list[Line]:
    """Wrapped text with a hanging indent, the part up to the first colon in `style`, at most four lines."""
    rows = wrap(flat_text(text), width - 2)
    if len(rows) > 4:
        rows = [*rows[:3], shorten(" ".join(rows[3:]), width - 2)]
    head, colon, rest = rows[0].partition(": ")
    first: Line = [(head + colon, style), (rest, "")] if colon else [(rows[0], style)]
    return [first, *([("  " + row, "")] for row in rows[1:])]


def _footer(check: Check, width: int) -> list[Line]:
    by_source: dict[str, list[str]] = {}
    for key, kind in check["sources"].items():
        if key not in FOLLOWS:
            by_source.setdefault(kind, []).append(flat_text(key.removesuffix("_bytes")))
    versions = ", ".join(f"{name} {version or UNKNOWN}" for name, version in check["versions"].items())
    took = ("; cached" if check["cached"] else "") + (
        f"; checked in {duration_text(check['wall_s'])}" if check["wall_s"] is not None else ""
    )
    flags = f"; {len(check['flags'])} compiler flag{'s' if len(check['flags']) != 1 else ''}" if check["flags"] else ""
    lines = [_rule("How each number was obtained", None, width)]
    for kind in ("measure", "compile", "estimate"):
        lines += _note(f"{kind}: {', '.join(by_source[kind])}", width, "bold") if kind in by_source else []
    usable = f"usable: {check['usable_note']}" if check["usable_note"] else ""
    return [
        *lines,
        *(_note(usable, width, "bold") if usable else []),
        *_note(f"backend: {check['backend'] or UNKNOWN}; {versions or UNKNOWN}{took}{flags}", width, "bold"),
    ]

"""`jaxmem diff a.json b.json`: what changed between two checks, in what was asked and in what was found."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from jaxmem.report.cells import Column, Line, cells, clip, paint, shorten, table, wrap
from jaxmem.report.kinds import kind_of
from jaxmem.report.reading import VERDICT_WORDS, Check, flat_text, limits, parts
from jaxmem.report.units import UNKNOWN, bytes_text, count_text, percent_text, seconds_text
from jaxmem.spec import InputError

SCHEMA = 1
FIGURES = ("peak_bytes", "usable_bytes", "headroom_bytes", "host_bytes", "step_s", "tokens_per_s", "mfu")
MOST_ROWS = 16


def diff(a: Check, b: Check) -> dict[str, Any]:
    """What differs, from a to b; what is equal is left out.

    `warnings` are sentences. `verdict` is {a, b}; `strings` has {name, field, a, b}. The other lists have {a, b, change} in every
    entry, change = b - a, each null where unknown: `figures` by name, `programs` by program and name, `composition` by kind and
    module, `seconds` by limit and part (these two with the largest change first), `traffic` by axis, collective and name.
    InputError if the schema numbers differ or are not known.
    """
    numbers = (a.get("schema"), b.get("schema"))
    if numbers != (SCHEMA, SCHEMA):
        raise InputError(f"schema {numbers[0]} and schema {numbers[1]}: this jaxmem compares checks of schema {SCHEMA} only; check again")
    return {
        "schema": SCHEMA,
        "warnings": _warnings(a, b),
        "strings": [entry for name in ("workload", "plan", "topology") for entry in _strings(name, a[name], b[name])],
        "verdict": {"a": a["verdict"], "b": b["verdict"]},
        "figures": _changed([{"name": name} | _pair(a[name], b[name]) for name in FIGURES]),
        "programs": _programs(a, b),
        "composition": _largest([{"kind": kind, "module": module} | pair for (kind, module), pair in _pairs(_parts(a), _parts(b))]),
        "seconds": _largest([{"limit": limit, "part": part} | pair for (limit, part), pair in _pairs(_seconds(a), _seconds(b))]),
        "traffic": _changed(
            [
                {"axis": axis, "collective": collective, "name": name} | pair
                for (axis, collective, name), pair in _pairs(_traffic(a), _traffic(b))
            ]
        ),
    }


def _pair(a: Any, b: Any) -> dict[str, Any]:
    return {"a": a, "b": b, "change": None if a is None or b is None else b - a}


def _pairs(a: Mapping[Any, Any] | None, b: Mapping[Any, Any] | None) -> list[tuple[Any, dict[str, Any]]]:
    """Two tables by key. A key that a known table lacks is 0 there; a table that is None is unknown throughout."""
    keys = dict.fromkeys([*(a or {}), *(b or {})])
    return [(key, _pair(None if a is None else a.get(key, 0), None if b is None else b.get(key, 0))) for key in keys]


def _changed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["a"] != entry["b"]]


def _largest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(
        _changed(entries),
        key=lambda entry: -abs(entry["change"] if entry["change"] is not None else max(entry["a"] or 0, entry["b"] or 0)),
    )


def _parts(check: Check) -> dict[tuple[str | None, str | None], int] | None:
    return {(part.kind, part.module): part.bytes for part in parts(check)} if check["composition"] else None


def _seconds(check: Check) -> dict[tuple[str, str], float | None] | None:
    found = [
        (limit.name, part, value) for limit in limits(check) for part, value in (("exposed", limit.exposed_s), ("hidden", limit.hidden_s))
    ]
    return {(name, part): value for name, part, value in found if value is not None or part == "exposed"} or None


def _traffic(check: Check) -> dict[tuple[str | None, str, str], float | None] | None:
    found = {
        (entry["axis"], entry["collective"], name): entry[name] for entry in check["traffic"] for name in ("count", "bytes", "exposed_s")
    }
    return found if found or check["step_s"] is not None else None


def _strings(name: str, a: str | None, b: str | None) -> list[dict[str, Any]]:
    """Field by field; an item without `=` (a preset's name, a topology) has field None."""
    fields_a, fields_b = (
        {(item.partition("=")[0] if "=" in item else None): item.partition("=")[2] if "=" in item else item for item in text.split(",")}
        if text
        else {}
        for text in (a, b)
    )
    return [
        {"name": name, "field": field, "a": fields_a.get(field), "b": fields_b.get(field)}
        for field in dict.fromkeys([*fields_a, *fields_b])
        if fields_a.get(field) != fields_b.get(field)
    ]


def _programs(a: Check, b: Check) -> list[dict[str, Any]]:
    out = []
    for program in dict.fromkeys([*a["programs"], *b["programs"]]):
        one, two = a["programs"].get(program, {}), b["programs"].get(program, {})
        out.append({"program": program, "name": "status", "a": one.get("status"), "b": two.get("status"), "change": None})
        out += [
            {"program": program, "name": name} | _pair(one.get(name), two.get(name))
            for name in ("peak_bytes", "argument_bytes", "temp_bytes", "host_bytes")
        ]
    return _changed(out)


def _warnings(a: Check, b: Check) -> list[str]:
    """What makes the two less comparable than they look."""
    out = []
    if a["backend"] != b["backend"]:
        out.append(f"the backends differ: {a['backend'] or UNKNOWN} and {b['backend'] or UNKNOWN}")
    for package in dict.fromkeys([*a["versions"], *b["versions"]]):
        one, two = a["versions"].get(package), b["versions"].get(package)
        if one != two:
            out.append(f"the versions of {package} differ: {one or UNKNOWN} and {two or UNKNOWN}")
    if a["flags"] != b["flags"]:
        only = [
            (side, [flag for flag in one if flag not in two])
            for side, one, two in (("a", a["flags"], b["flags"]), ("b", b["flags"], a["flags"]))
        ]
        out.append("the compiler flags differ" + "".join(f"; only {side}: {' '.join(flags)}" for side, flags in only if flags))
    for key in sorted(a["sources"].keys() & b["sources"].keys()):
        if a["sources"][key] != b["sources"][key]:
            out.append(f"{key} is by {a['sources'][key]} in a and by {b['sources'][key]} in b")
    return out


def render(difference: Mapping[str, Any], width: int = 100, color: bool | None = None) -> str:
    """`diff`'s result as text, every line at most `width` cells (at least 60); `color` as for the terminal report of a check."""
    width = max(width, 60)
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    one, two = (VERDICT_WORDS[difference["verdict"][side]] for side in ("a", "b"))
    lines: list[Line] = [[("Verdict: ", "dim"), (one if one == two else f"{one} → {two}", "bold")]]
    for warning in difference["warnings"]:
        rows = wrap(flat_text(f"warning: {warning}"), width - 2)
        lines += [[("  " * (i > 0) + row, "yellow")] for i, row in enumerate(rows[:4])]
    lines += _block(
        "What was asked",
        [((f"{e['name']} {e['field'] or ''}".strip(), e["a"] or UNKNOWN, e["b"] or UNKNOWN, ""), None) for e in difference["strings"]],
        width,
    )
    lines += _block("Figures", [(_row(e["name"], e["name"], e), _better(e["name"], e["change"])) for e in difference["figures"]], width)
    lines += _block(
        "Programs",
        [(_row(f"{e['program']} {e['name']}", e["name"], e), _better(e["name"], e["change"])) for e in difference["programs"]],
        width,
    )
    lines += _block(
        "Composition of the peak",
        [
            (_row(f"{kind_of(e['kind']).label} {e['module'] or ''}".strip(), "bytes", e), _better("bytes", e["change"]))
            for e in difference["composition"]
        ],
        width,
    )
    lines += _block(
        "Time by limit",
        [
            (_row(f"{e['limit']} {e['part']}", "_s", e), _better("_s", e["change"]) if e["part"] == "exposed" else None)
            for e in difference["seconds"]
        ],
        width,
    )
    lines += _block(
        "Traffic of a device in a step",
        [(_row(f"{e['axis'] or UNKNOWN} {e['collective']} {e['name']}", e["name"], e), None) for e in difference["traffic"]],
        width,
    )
    if len(lines) == 1:
        lines.append([("nothing differs", "dim")])
    return paint([clip(line, width) for line in lines], color)


def _number(name: str, value: Any) -> str:
    if name == "mfu":
        return percent_text(value)
    return (
        seconds_text(value)
        if name.endswith("_s") and name != "tokens_per_s"
        else bytes_text(value)
        if name.endswith("bytes")
        else count_text(value)
    )


def _row(label: str, name: str, entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Label, a, b, and the change with its sign and, where a is not 0, in percent."""
    a, b, change = entry["a"], entry["b"], entry["change"]
    if isinstance(a, str) or isinstance(b, str):
        return label, a or UNKNOWN, b or UNKNOWN, ""
    if change is None:
        return label, _number(name, a), _number(name, b), UNKNOWN
    if name == "mfu":
        return label, percent_text(a), percent_text(b), f"{100 * change:+.1f} points"
    share = f" ({'+' if change > 0 else '-'}{percent_text(abs(change / a))})" if a else ""
    return label, _number(name, a), _number(name, b), f"{'+' if change > 0 else '-'}{_number(name, abs(change))}{share}"


def _better(name: str, change: float | None) -> bool | None:
    """Whether a change is for the better, where that can be said."""
    if not change or name in ("usable_bytes", "status"):
        return None
    return (change > 0) == (name in ("headroom_bytes", "tokens_per_s", "mfu"))


def _block(title: str, rows: list[tuple[tuple[str, str, str, str], bool | None]], width: int) -> list[Line]:
    if not rows:
        return []
    styles = {True: "green", False: "red", None: ""}
    columns = [
        Column(head="", keep="middle", least=16),
        Column(head="a", align="right", keep="middle"),
        Column(head="b", align="right", keep="middle"),
        Column(head="change" if any(row[0][3] for row in rows) else "", align="right"),
    ]
    body = [
        [(flat_text(label), ""), (flat_text(a), ""), (flat_text(b), ""), (change, styles[better])]
        for (label, a, b, change), better in rows[:MOST_ROWS]
    ]
    more: list[Line] = [[(f"and {len(rows) - MOST_ROWS} more", "dim")]] if len(rows) > MOST_ROWS else []
    heading: Line = [(shorten(title, width), "bold"), (" ", ""), ("─" * (width - cells(title) - 1), "dim")]
    return [[], heading, *table(columns, body, width), *more]

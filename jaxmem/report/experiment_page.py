"""An experiment's page, tables and text, from its records alone.

A *line* is a point with its seeds taken together: column -> `Cell`. The experiment adds cells of its own (a ratio to a baseline, say)
and says which columns a table shows. The drawing is in `experiment_figure.py`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxmem import spec
from jaxmem.records import Record
from jaxmem.report import pieces
from jaxmem.report.markup import Markup, element
from jaxmem.report.page import page
from jaxmem.report.units import UNKNOWN, byte_unit, bytes_text, count_text, percent_text, seconds_text
from jaxmem.tabulate import Interval, interval, row, to_csv

Unit = Literal["bytes", "seconds", "flops", "count", "percent", "times", "loss", "words"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A number, the `Interval` of several seeds, or words; None is unknown."""

    value: Any
    source: str | None = None

    @property
    def number(self) -> float | None:
        value = self.value.mean if isinstance(self.value, Interval) else self.value
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


Line = dict[str, Cell]
NOTHING = Cell(value=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    head: str
    unit: Unit = "words"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    lead: str
    columns: Sequence[Column]
    lines: Sequence[Line]

    def source(self, column: Column) -> str | None:
        """The source that all known numbers of a column share."""
        found = {cell.source for line in self.lines if (cell := line.get(column.name, NOTHING)).value is not None}
        return found.pop() if len(found) == 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """`draw(alone=...)`: the SVG, as a file of its own or as a part of the page. `file`: its name as a file; None: on the page alone."""

    heading: str
    lead: str
    draw: Callable[..., str]
    file: str | None = None


def lines(records: Sequence[Record]) -> list[Line]:
    """A line for each point that has numbers, its seeds as intervals; points without numbers have none."""
    groups: dict[str, list[Record]] = {}
    for one in records:
        if one["status"] == "done":
            same = json.dumps([one["workload"], one["topology"], one["plan"], one["settings"]], sort_keys=True)
            groups.setdefault(same, []).append(one)
    return [_line(group) for group in groups.values()]


def _line(group: Sequence[Record]) -> Line:
    out = {name: Cell(value=value) for name, value in row(group[0]).items()}
    for name in dict.fromkeys(name for one in group for name in one["values"]):
        known = [value for one in group if (value := one["values"].get(name)) is not None and not isinstance(value, list)]
        source = next((one["sources"].get(name) for one in group if name in one["sources"]), None)
        if known and all(isinstance(value, (int, float)) for value in known):
            value = interval(known) if len(known) > 1 else known[0]
        else:
            value = ", ".join(dict.fromkeys(map(spec.show, known))) or None
        out[name] = Cell(value=value, source=source)
    return out


# ---------------------------------------------------------------- cells as text

def number_text(value: float | None, unit: Unit) -> str:
    if value is None:
        return UNKNOWN
    if unit == "bytes":
        return bytes_text(round(value))
    if unit == "times":
        return f"{value:.2f}x"
    if unit == "loss":
        return f"{value:.3f}"
    if unit == "flops" and value:
        name, size = axis_unit(unit, abs(value))
        return f"{value / size:.3g} {name}"
    return {"seconds": seconds_text, "flops": count_text, "count": count_text, "percent": percent_text}[unit](value)


def cell_text(cell: Cell, unit: Unit) -> str:
    """`12.3 ms`, with two seeds `12.3 (12.1 to 12.5) ms`, with more `12.3 ± 0.4 ms`."""
    if cell.value is None:
        return UNKNOWN
    if cell.number is None or unit == "words":
        return spec.show(cell.value.mean if isinstance(cell.value, Interval) else cell.value)
    half, span = (cell.value.half_width, cell.value.span) if isinstance(cell.value, Interval) else (None, None)
    if not half and not (span and span[0] < span[1]):
        return number_text(cell.number, unit)
    name, size = axis_unit(unit, abs(cell.number))
    if span:
        return f"{cell.number / size:.4g} ({span[0] / size:.3g} to {span[1] / size:.3g}) {name}".rstrip()
    assert half
    return f"{cell.number / size:.4g} ± {half / size:.2g} {name}".rstrip()


def axis_unit(unit: Unit, largest: float) -> tuple[str, float]:
    """The unit in which numbers up to `largest` are shown together, and its size in SI units."""
    if unit == "bytes":
        return byte_unit([round(largest)])
    if unit == "seconds":
        return next(((name, size) for name, size in (("s", 1.0), ("ms", 1e-3)) if largest >= size), ("µs", 1e-6))
    if unit == "flops":
        power = max(0, min(6, int(math.log10(max(largest, 1.0)) // 3)))
        return ("", "K", "M", "G", "T", "P", "E")[power] + "FLOP", 10.0 ** (3 * power)
    return ("%", 0.01) if unit == "percent" else ("x", 1.0) if unit == "times" else ("", 1.0)


def markdown(table: Table) -> str:
    """The table as Markdown, a column's source under its head."""
    heads = [f"{column.head}<br>*{source}*" if (source := table.source(column)) else column.head for column in table.columns]
    rules = ["---" if column.unit == "words" else "---:" for column in table.columns]
    rows = [[_told(table, column, line) for column in table.columns] for line in table.lines]
    return "".join(f"| {' | '.join(one)} |\n" for one in (heads, rules, *rows))


def _told(table: Table, column: Column, line: Line) -> str:
    cell = line.get(column.name, NOTHING)
    own = f" *{cell.source}*" if cell.source and table.source(column) is None else ""
    return cell_text(cell, column.unit).replace("|", "\\|") + own


def files(title: str, doc: str, figures: Sequence[Figure], tables: Sequence[Table], records: Sequence[Record]) -> dict[str, str]:
    """What an experiment writes, by file: the page, its figures, the tables as Markdown (with the first figure) and all records as CSV."""
    first = next((one.file for one in figures if one.file), None)
    return {"index.html": render(title, doc, [(one.heading, one.lead, one.draw(alone=False)) for one in figures], tables, records),
            **{one.file: one.draw(alone=True) for one in figures if one.file},
            "table.md": markdown_page(title, doc, tables, records, first), "results.csv": to_csv([row(one) for one in records])}


def markdown_page(title: str, doc: str, tables: Sequence[Table], records: Sequence[Record], figure: str | None) -> str:
    """Tables and figure as one Markdown text."""
    question, _, rest = doc.strip().partition("\n")
    parts = [f"# {title}\n", f"{question}\n", *(f"{paragraph}\n" for paragraph in paragraphs(rest))]
    parts += [f"![{title}]({figure})\n"] if figure else []
    for table in tables:
        parts += [f"## {table.title}\n", f"{table.lead}\n", markdown(table)]
    parts += [f"{versions_text(records)}\n"]
    return "\n".join(parts)


# ---------------------------------------------------------------- the page

def render(title: str, doc: str, figures: Sequence[tuple[str, str, str]], tables: Sequence[Table], records: Sequence[Record]) -> str:
    """`doc`: an experiment's docstring (question, then the rest). `figures`: (heading, sentence, SVG). The whole page as text."""
    question, _, rest = doc.strip().partition("\n")
    done = sum(one["status"] == "done" for one in records)
    counts = f"{done} of {len(records)} points have numbers." if done < len(records) else f"{done} points."
    head = element("section", element("p", title, class_="state"), element("h1", question),
                   element("p", f"{counts} {versions_text(records)}", class_="sub"), class_="sheet verdict unknown")
    drawn = [pieces.section(heading, None, lead, Markup(f'<div class="scroll">{svg}</div>')) for heading, lead, svg in figures]
    shown = [pieces.section(table.title, None, table.lead, _table(table), class_="long") for table in tables]
    about = pieces.section("How this was made", None, None, *(element("p", paragraph, class_="lead") for paragraph in paragraphs(rest)))
    return page(title, "jaxmem experiment", [head, *drawn, *shown, without_numbers(records), about], styles=["page.css"],
                scripts=["page.js"])


def paragraphs(doc: str) -> list[str]:
    """A docstring's text as it is read: a blank line, or a word that begins `Word:`, begins a new paragraph."""
    out: list[str] = [""]
    for line in doc.splitlines():
        if not line.strip() or re.match(r"[A-Z]\w*:\s", line):
            out.append("")
        out[-1] = f"{out[-1]} {line.strip()}".strip()
    return [" ".join(paragraph.split()) for paragraph in out if paragraph]


def _table(table: Table) -> Markup:
    heads = [element("th", column.head, element("br"), pieces.chip(table.source(column)), scope="col",
                     class_=None if column.unit == "words" else "number") for column in table.columns]
    body = [element("tr", [_cell(table, column, line) for column in table.columns]) for line in table.lines]
    return element("div", element("table", element("thead", element("tr", heads)), element("tbody", *body)), class_="scroll")


def _cell(table: Table, column: Column, line: Line) -> Markup:
    cell = line.get(column.name, NOTHING)
    how = pieces.chip(cell.source) if table.source(column) is None else None
    return element("td", cell_text(cell, column.unit), how, class_="keep" if column.unit == "words" else "number")


def without_numbers(records: Sequence[Record]) -> Markup | None:
    """Points that were refused or failed, with their reasons."""
    rest = [one for one in records if one["status"] != "done"]
    if not rest:
        return None
    rows = [[pieces.cell(one["workload"]), pieces.cell(one["topology"]), pieces.cell(one["plan"]), pieces.cell(one["status"]),
             pieces.cell(one["reason"] or UNKNOWN)] for one in rest]
    return pieces.section("Points without numbers", None, None, pieces.table(["workload", "topology", "plan", "status", "reason"], rows))


def versions_text(records: Sequence[Record]) -> str:
    """`With cpu; tpu v5e; jax 0.12.0.1, libtpu 0.0.50.1.`; every version that occurs, where records are of several."""
    backends = list(dict.fromkeys(one["backend"] for one in records if one.get("backend")))
    found: dict[str, list[str]] = {}
    for one in records:
        for name, version in one.get("versions", {}).items():
            if version and name in ("jaxmem", "jax", "jaxlib", "libtpu", "cuda_plugin") and version not in found.setdefault(name, []):
                found[name].append(version)
    said = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in found.items())
    return f"Backends: {', '.join(backends) or 'unknown'}; {said or 'versions unknown'}."


def baseline(of: Sequence[Line], same: Sequence[str], where: Mapping[str, Any], name: str) -> list[float | None]:
    """For each line, the number `name` of the line that agrees with it in the columns `same` and has the values `where`."""
    def values(line: Line) -> list[Any]:
        return [line.get(column, NOTHING).value for column in same]
    bases = [line for line in of if all(line.get(column, NOTHING).value == value for column, value in where.items())]
    return [next((base.get(name, NOTHING).number for base in bases if values(base) == values(line)), None) for line in of]


def over(own: Cell, base: float | None) -> Cell:
    """A number in proportion to a `baseline`; unknown where one of them is."""
    return NOTHING if own.number is None or not base else Cell(value=own.number / base, source=own.source)

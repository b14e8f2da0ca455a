"""The recurring pieces of the HTML report: sections, tables, cells, and the tag that names a figure's source."""

from jaxmem.report.markup import Child, Markup, element
from jaxmem.report.units import UNKNOWN


def section(heading: str, how: str | None, lead: str | None, *children: Child, class_: str = "") -> Markup:
    """A sheet of the page with its heading, the source of its figures, and a sentence on what it shows."""
    header = element("header", element("h2", heading), element("span", how, class_=f"source {how}") if how else None)
    return element("section", header, element("p", lead, class_="lead") if lead else None, *children, class_=f"sheet {class_}".strip())


def table(heads: list[str], rows: list[list[Markup]]) -> Markup:
    """`heads`: a leading `>` marks a column of numbers. Rows are finished cells."""
    top = element(
        "tr",
        *(element("th", head.removeprefix(">"), scope="col", class_="number" if head.startswith(">") else None) for head in heads),
    )
    return element("div", element("table", element("thead", top), element("tbody", *(element("tr", row) for row in rows))), class_="scroll")


def cell(value: Child, class_: str | None = None) -> Markup:
    """One cell."""
    return element("td", value, class_=class_)


def number(value: str) -> Markup:
    """One cell with a number."""
    return cell(value, "number")


def code(value: str | None) -> Markup:
    """A name as code; a dash for none."""
    return element("code", value) if value else Markup(UNKNOWN)


def chip(how: str | None) -> Markup | None:
    """The tag that says how a figure was obtained."""
    return element("i", how, class_=f"source {how}", style="font-style:normal") if how else None

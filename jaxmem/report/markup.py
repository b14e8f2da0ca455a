"""HTML that escapes by default: plain text becomes text, and only what `element` made is taken as markup."""

import html

from jaxmem.report.reading import printable


class Markup(str):
    """A piece of finished HTML."""


Child = str | Markup | None | list["Markup"]
EMPTY = frozenset({"meta", "link", "line", "path"})  # of HTML and of SVG; the slash is needed in SVG and allowed in HTML


def text(value: str) -> Markup:
    """Any text, for content and for attribute values."""
    return Markup(html.escape(printable(value), quote=True))


def join(children: list[Markup]) -> Markup:
    """Pieces one after the other."""
    return Markup("".join(children))


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """`element("td", "a < b", class_="number")`: an underscore at the end is dropped, inside it is a hyphen; None leaves out."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    head = "".join(f' {names[name]}="{text(str(value))}"' for name, value in attributes.items() if value is not None)
    body = "".join(
        child if isinstance(child, Markup) else "".join(child) if isinstance(child, list) else text(child)
        for child in children
        if child is not None
    )
    return Markup(f"<{tag}{head}/>" if tag in EMPTY else f"<{tag}{head}>{body}</{tag}>")

"""The frame of an HTML report: one file that needs nothing else, with its styles and its script inside."""

from collections.abc import Sequence
from importlib import resources

from jaxmem.report.kinds import KINDS, UNATTRIBUTED
from jaxmem.report.markup import Markup, element

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, name: str, sections: Sequence[Markup | None], *, styles: Sequence[str], scripts: Sequence[str]) -> str:
    """`name` stands at the top of the page; `styles` and `scripts` are files of this package."""
    colours = "".join(f"--kind-{kind.name}: light-dark({kind.light}, {kind.dark});" for kind in (*KINDS.values(), UNATTRIBUTED))
    style = "".join(map(_asset, styles)) + f":root {{{colours}}}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        Markup(f"<style>{style}</style>"),
    )
    top = element("div", element("b", name), element("button", "Dark", id="theme", type="button", hidden=""), class_="top")
    body = element("body", element("main", top, *sections), *(Markup(f"<script>{_asset(script)}</script>") for script in scripts))
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _asset(name: str) -> str:
    return resources.files("jaxmem.report").joinpath(name).read_text(encoding="utf-8")

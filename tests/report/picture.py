"""Pictures of the reports of a check, for the documentation:

  PYTHONPATH=.:tests python -m report.picture check.json docs/images

writes report-light.png, report-dark.png (the page down to the composition of the peak) and terminal.png.
"""

import html
import json
import pathlib
import re
import sys
import tempfile

from report.browser import Browser

from jaxmem.report import html as page
from jaxmem.report import terminal

STYLES = {1: "font-weight:bold", 2: "opacity:.6", 7: "background:#444c56", 31: "color:#ff7b72", 32: "color:#4cc38a", 33: "color:#e8b44c"}
STYLES |= {34: "color:#6ea8fe", 35: "color:#c39bf5", 36: "color:#6fd3e8", 37: "color:#aab2bb"}
SHEET = "margin:0;padding:22px 26px;background:#14181f;color:#e6e9ed;font:14px/1.3 'DejaVu Sans Mono',monospace;width:max-content"


def terminal_page(check: dict) -> str:
    """The terminal report in colour, as HTML."""

    def styled(found: re.Match[str]) -> str:
        return f'<span style="{";".join(STYLES[int(code)] for code in found[1].split(";"))}">{found[2]}</span>'

    text = html.escape(terminal.render(check, color=True))
    return (
        f'<meta charset="utf-8"><body style="margin:0"><pre style="{SHEET}">'
        + re.sub(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", styled, text)
        + "</pre>"
    )


def main(source: str, target: str) -> None:
    check = json.loads(pathlib.Path(source).read_text(encoding="utf-8"))
    out = pathlib.Path(target)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report, screen = pathlib.Path(folder) / "report.html", pathlib.Path(folder) / "terminal.html"
        report.write_text(page.render(check), encoding="utf-8")
        screen.write_text(terminal_page(check), encoding="utf-8")
        browser = Browser(pathlib.Path(folder) / "profile")
        for scheme in ("light", "dark"):
            browser.open(report, width=1100, scheme=scheme)
            end = browser.value(
                "(document.querySelector('.treemap') || document.querySelector('main')).getBoundingClientRect().bottom + 20"
            )
            (out / f"report-{scheme}.png").write_bytes(browser.screenshot(height=end))
        browser.open(screen)
        width, height = browser.value("(({width, height}) => [width, height])(document.querySelector('pre').getBoundingClientRect())")
        (out / "terminal.png").write_bytes(browser.screenshot(width=width, height=height))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

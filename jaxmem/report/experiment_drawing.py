"""What all figures of experiments share: colours, shapes, styles, the frame of the SVG, the ends of an interval."""

from collections.abc import Sequence

from jaxmem.report.markup import Markup, element, text
from jaxmem.tabulate import Interval

COLOURS = (("#0a62bd", "#74c4fd"), ("#b93012", "#ff8a6b"), ("#1a7f37", "#5fd07a"), ("#8250df", "#c9a5ff"), ("#9a6700", "#e3b341"),
           ("#c2187a", "#ff8ac4"), ("#0b7285", "#5bd3e3"), ("#57606b", "#b4bdc8"))
SHAPES = ("M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z", "M-4.6,-4.6h9.2v9.2h-9.2z", "M0,-5.8L5.4,4H-5.4z", "M0,-6L6,0L0,6L-6,0z",
          "M0,5.8L5.4,-4H-5.4z", "M-2,-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z", "M-6,-2.5h12v5h-12z", "M-2.5,-6h5v12h-5z")
CHARACTER = 7.0  # pixels that one takes at 13 px, about
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:var(--soft)}.title,.name{font-weight:600;fill:var(--ink)}.title{font-size:15px}"
    ".small{font-size:12px}.grid{stroke:var(--ink);stroke-opacity:.13}"
    ".front{fill:none;stroke:var(--soft);stroke-opacity:.6;stroke-dasharray:3 3}"
    ".limit{stroke:#b93012;stroke-dasharray:7 4;stroke-width:1.5}.bar{stroke-width:1.5}"
)
LIGHT = "--soft:#57606b;--ink:#14181d;" + "".join(f"--mark-{i}:{light};" for i, (light, _) in enumerate(COLOURS))
DARK = "--soft:#9aa5b1;--ink:#e9edf2;" + "".join(f"--mark-{i}:{dark};" for i, (_, dark) in enumerate(COLOURS))
BOTH = "".join(f"--mark-{i}:light-dark({light},{dark});" for i, (light, dark) in enumerate(COLOURS))


def svg(title: str, width: float, height: float, parts: Sequence[Markup], *, alone: bool, style: str = "") -> str:
    """The SVG, at least as wide as its title. `alone`: a file of its own, with its title and both schemes; otherwise a part of a page,
    which has them already."""
    if alone:
        parts = [element("text", title, x=14, y=24, class_="title"), *parts]
    width = max(width, title_width(title, alone=alone))
    scheme = f"svg{{{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}" if alone else f".figure{{{BOTH}}}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
            f'class="figure" aria-label="{text(title)}"><style>{scheme}{STYLE}{style}</style>{"".join(parts)}</svg>\n')


def title_width(title: str, *, alone: bool) -> float:
    """Pixels that the title needs in a figure that has one."""
    return 28 + 8.2 * len(title) * alone


def mark(i: int, x: float, y: float, *inside: Markup) -> Markup:
    """The shape of the i-th thing, in its colour."""
    return element("g", element("path", d=SHAPES[i % len(SHAPES)], style=f"fill:var(--mark-{i % len(COLOURS)})"), *inside,
                   transform=f"translate({x:.1f} {y:.1f})")


def stroke(i: int) -> str:
    """The colour of the i-th thing, for its lines."""
    return f"stroke:var(--mark-{i % len(COLOURS)})"


def middle(value: Interval | float) -> float:
    """A number, or the mean of several."""
    return value.mean if isinstance(value, Interval) else value


def ends(value: Interval | float) -> tuple[float, float]:
    """A number twice, or the ends of its interval."""
    half = (value.half_width or 0.0) if isinstance(value, Interval) else 0.0
    return middle(value) - half, middle(value) + half

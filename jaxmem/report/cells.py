"""Text in a terminal: lines of styled spans, measured in cells, laid out in tables and columns.

A line is a list of (text, style) spans and knows nothing of escape codes until `paint`, so that widths are those of what is seen.
"""

import dataclasses
import unicodedata
from collections.abc import Sequence
from typing import Literal

Line = list[tuple[str, str]]
CODES = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
    "white": 37,
    "reverse": 7,
}


def cells(text: str) -> int:
    """Columns that `text` takes: wide characters two, combining ones none."""
    return sum(0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int, keep: Literal["start", "middle", "end"] = "start") -> str:
    """`text` in at most `width` cells, with an ellipsis for what is left out. `keep`: which side stays; middle is both."""
    if cells(text) <= width:
        return text
    if width <= 1:
        return "…" * width
    head = {"start": width - 1, "middle": width // 2, "end": 0}[keep]
    return _take(text, head) + "…" + _take(text[::-1], width - 1 - head)[::-1]


def _take(text: str, width: int) -> str:
    out, used = "", 0
    for c in text:
        used += cells(c)
        if used > width:
            break
        out += c
    return out


def wrap(text: str, width: int) -> list[str]:
    """Words on lines of at most `width` cells; longer words are cut."""
    lines, current = [], ""
    for word in text.split():
        if current and cells(current) + 1 + cells(word) <= width:
            current += " " + word
            continue
        if current:
            lines.append(current)
        while cells(word) > width:
            piece = _take(word, width) or word[0]
            lines.append(piece)
            word = word[len(piece) :]
        current = word
    return [*lines, current] if current else lines


def line_cells(line: Line) -> int:
    """Columns that a line takes."""
    return sum(cells(text) for text, _ in line)


def clip(line: Line, width: int) -> Line:
    """The line in at most `width` cells."""
    out: Line = []
    for text, style in line:
        left = width - line_cells(out)
        if left <= 0:
            break
        out.append((shorten(text, left), style))
    return out


def beside(left: list[Line], right: list[Line], left_width: int, gap: int) -> list[Line]:
    """Two blocks next to each other."""
    out = []
    for i in range(max(len(left), len(right))):
        a = clip(left[i], left_width) if i < len(left) else []
        b = right[i] if i < len(right) else []
        out.append([*a, (" " * (left_width - line_cells(a) + gap), ""), *b] if b else a)
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """`keep` None: never shortened. Otherwise the side that survives when the table is too wide; not below `least` cells."""

    head: str
    align: Literal["left", "right"] = "left"
    keep: Literal["start", "middle", "end"] | None = None
    least: int = 6


def table(columns: Sequence[Column], rows: Sequence[Sequence[tuple[str, str]]], width: int, *, gap: int = 2) -> list[Line]:
    """A header and `rows` in at most `width` cells: the widest of the columns that may be shortened gives way first."""
    widths = [max([cells(column.head), *(cells(row[i][0]) for row in rows)]) for i, column in enumerate(columns)]
    while sum(widths) + gap * (len(columns) - 1) > width:
        soft = [i for i, column in enumerate(columns) if column.keep and widths[i] > column.least]
        if not soft:
            break
        widths[max(soft, key=lambda i: widths[i])] -= 1

    def laid(row: Sequence[tuple[str, str]]) -> Line:
        line: Line = []
        for i, (column, (text, style)) in enumerate(zip(columns, row, strict=True)):
            text = shorten(text, widths[i], column.keep or "start")
            space = " " * (widths[i] - cells(text))
            between = " " * gap if i else ""
            last = i == len(columns) - 1
            line += (
                [(between + space, ""), (text, style)]
                if column.align == "right"
                else [(between, ""), (text, style), ("" if last else space, "")]
            )
        return clip(line, width)

    return [laid([(column.head, "dim") for column in columns]), *map(laid, rows)]


def paint(lines: list[Line], color: bool) -> str:
    """The lines as text, with ANSI styles when `color`; no trailing spaces."""
    out = []
    for line in lines:
        while line and not line[-1][0].strip() and "reverse" not in line[-1][1]:
            line = line[:-1]
        text = ""
        for i, (part, style) in enumerate(line):
            part = part.rstrip() if i == len(line) - 1 and "reverse" not in style else part
            codes = ";".join(str(CODES[word]) for word in style.split())
            text += f"\x1b[{codes}m{part}\x1b[0m" if color and codes and part else part
        out.append(text)
    return "\n".join(out) + "\n"

"""Tables of the listing verbs: plain text that fits 100 columns, header dimmed on a terminal."""

import os
import sys
from collections.abc import Sequence

from jaxmem.report.cells import Column, paint, table

WIDTH = 100


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under the columns' heads; colours as https://no-color.org asks."""
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    sys.stdout.write(paint(table(columns, [[(text, "") for text in row] for row in rows], WIDTH), color))

"""Rectangles whose areas are proportional to values, as square as they get.

M. Bruls, K. Huizing, J. J. van Wijk, "Squarified Treemaps", VisSym 2000: rows are filled along the shorter side for as long as
that improves the worst aspect ratio.
"""

from typing import NamedTuple


class Rectangle(NamedTuple):
    """Left, top, width and height, in the units of the space given."""

    x: float
    y: float
    width: float
    height: float


def squarify(values: list[float], space: Rectangle) -> list[Rectangle]:
    """One rectangle for each of `values` (positive, largest first), filling `space` without gaps or overlaps."""
    out: list[Rectangle] = []
    left = list(values)
    while left:
        scale = space.width * space.height / sum(left)
        side = min(space.width, space.height)
        count = 1
        while count < len(left) and _worst(left[: count + 1], scale, side) <= _worst(left[:count], scale, side):
            count += 1
        row, left = left[:count], left[count:]
        thick = sum(row) * scale / side if left else max(space.width, space.height)
        along = 0.0
        for value in row:
            length = side * value / sum(row)
            out.append(
                Rectangle(space.x, space.y + along, thick, length)
                if space.width >= space.height
                else Rectangle(space.x + along, space.y, length, thick)
            )
            along += length
        space = (
            Rectangle(space.x + thick, space.y, space.width - thick, space.height)
            if space.width >= space.height
            else Rectangle(space.x, space.y + thick, space.width, space.height - thick)
        )
    return out


def _worst(row: list[float], scale: float, side: float) -> float:
    """The worst aspect ratio of a row along a side of that length."""
    thick = sum(row) * scale / side
    return max(max(thick * thick / (value * scale), value * scale / (thick * thick)) for value in row)

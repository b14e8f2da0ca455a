"""Curves over steps: thinned with their extremes kept, the range of an axis, and its ticks. Numbers in, numbers out."""

import dataclasses
import math
from collections.abc import Sequence

MOST_POINTS = 2000
FAR, KEPT = 20, 4  # in widths of the range of 98% of the values: farther out is left out of a chart, which then reaches so far
Point = tuple[int, float | None]  # (step, value); None is a gap: the value is not known or not finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The values an axis shows, and how many finite values lie outside of it."""

    low: float
    high: float
    above: int
    below: int

    def share(self, value: float) -> float:
        """Where a value stands: 0 at the bottom, 1 at the top; what is outside stands on the edge."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def thin(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` (>= 5) points in order. Of every stretch of steps its first, last, lowest and highest value stay, and one gap."""
    count = len(steps)
    if count <= most:
        return [(step, value if math.isfinite(value) else None) for step, value in zip(steps, values, strict=True)]
    stretches = most // 5
    out: list[Point] = []
    for stretch in range(stretches):
        first, end = stretch * count // stretches, (stretch + 1) * count // stretches
        known = [i for i in range(first, end) if math.isfinite(values[i])]
        keep = {known[0], known[-1], min(known, key=values.__getitem__), max(known, key=values.__getitem__)} if known else set()
        if len(known) < end - first:
            keep.add(next(i for i in range(first, end) if not math.isfinite(values[i])))
        out += [(steps[i], values[i] if math.isfinite(values[i]) else None) for i in sorted(keep)]
    return out


def value_range(values: Sequence[float], *, also: Sequence[float] = (), from_zero: bool = False) -> Range:
    """The range of the finite values, and of `also`. Values far outside of the rest would flatten it: they are left out."""
    known = sorted(value for value in values if math.isfinite(value))
    low, high = (known[0], known[-1]) if known else (0.0, 1.0)
    if len(known) >= 20:
        margin = len(known) // 100 or 1
        common_low, common_high = known[margin], known[-1 - margin]
        usual = common_high - common_low or abs(common_high) or 1.0
        low = max(low, common_low - KEPT * usual) if common_low - low > FAR * usual else low
        high = min(high, common_high + KEPT * usual) if high - common_high > FAR * usual else high
    low, high = min([low, *also]), max([high, *also])
    if from_zero:
        low = min(low, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # flat
        room = abs(high) / 2 or 1.0
        low, high = (low if from_zero and low == 0 else low - room), high + room
    else:
        low, high = (low if low == 0 else low - 0.04 * (high - low)), high + 0.06 * (high - low)
    return Range(low=low, high=high, above=sum(value > high for value in known), below=sum(value < low for value in known))


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers in a range: multiples of 1, 2 or 5 times a power of ten, at least two where that is possible."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    unit = 10.0 ** math.floor(math.log10(span / most))
    step = next((unit * factor for factor in (1, 2, 5) if span / (unit * factor) <= most), 10 * unit)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def tick_text(value: float, values: Sequence[float]) -> str:
    """A tick with the digits that tell it from its neighbours."""
    step = abs(values[1] - values[0]) if len(values) > 1 else abs(value) or 1.0
    largest = max(map(abs, values))
    if largest and not 1e-3 <= largest < 1e6:
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
        return f"{value:.{digits}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e") if value else "0"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"

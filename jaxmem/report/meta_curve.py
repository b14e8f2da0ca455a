"""The live curve of a meta-training run: OUT/curve.svg, rewritten while it goes, and a line with a sparkline on a terminal.

One meta-step's loss says little, for its problems are at other places of their lengths than the last one's. Curves are means over
stretches of meta-steps.
"""

import html
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

BARS = "▁▂▃▄▅▆▇█"
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 56, 150, 16, 36
EVERY_S = 10.0


def stretches(values: Sequence[float], most: int) -> list[float | None]:
    """Means over at most `most` stretches of equal length (the last may be shorter); None where no value is finite."""
    size = max(1, -(-len(values) // most))
    out: list[float | None] = []
    for i in range(0, len(values), size):
        known = [v for v in values[i:i + size] if math.isfinite(v)]
        out.append(sum(known) / len(known) if known else None)
    return out


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Low to high in eight heights, of means over stretches; a space where nothing is known."""
    means = stretches(values, width)
    known = [v for v in means if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    return "".join(" " if v is None else BARS[round((v - low) / (high - low) * 7) if high > low else 0] for v in means)


def drawing(losses: Mapping[str, Sequence[float]], iterations: int, points: int = 150) -> str:
    """An SVG of each family's loss over meta-steps, on a logarithmic axis. `losses[family][i]` is of meta-step i + 1."""
    curves = {name: stretches(values, points) for name, values in losses.items()}
    known = [v for curve in curves.values() for v in curve if v is not None and v > 0]
    low, high = (min(known) / 1.1, max(known) * 1.1) if known else (0.1, 1.0)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / iterations

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * math.log(high / min(max(loss, low), high)) / math.log(high / low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="12" '
           'role="img" aria-label="validation loss of each family over meta-steps">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for tick in _ticks(low, high):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#444">{tick:g}</text>')
    for part in range(5):
        step = iterations * part // 4
        out.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#444">{step}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle" fill="#444">meta-steps; mean validation loss '
               'over an unroll, nats (measured)</text>')
    for i, (name, curve) in enumerate(curves.items()):
        size, colour = max(1, -(-len(losses[name]) // points)), COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x(min((k + 0.5) * size, len(losses[name]))):.1f},{y(v):.1f}" for k, v in enumerate(curve) if v is not None)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 12 + 16 * i}" fill="{colour}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [t for d in decades for m in (1, 2, 5) if low <= (t := m * 10.0 ** d) <= high]


class Live:
    """`show` takes the lines of metrics.jsonl as they come; every ten seconds the curve is written and a line printed to `out`."""

    def __init__(self, folder: pathlib.Path, iterations: int, out: TextIO) -> None:
        self._folder, self._iterations, self._out = folder, iterations, out
        self._losses: dict[str, list[float]] = {}
        self._all: list[float] = []
        self._seconds: list[float] = []
        self._last = time.monotonic()

    def show(self, line: Mapping[str, Any]) -> None:
        for name, loss in line["losses"].items():
            self._losses.setdefault(name, []).append(loss)
        self._all.append(line["loss"])
        self._seconds = [*self._seconds[-19:], line["step_s"]]
        if time.monotonic() - self._last >= EVERY_S:
            self._last = time.monotonic()
            self._say(line)

    def _say(self, line: Mapping[str, Any]) -> None:
        recent, step_s = self._all[-50:], sum(self._seconds) / len(self._seconds)
        rate = f"{1 / step_s:.1f}/s" if step_s < 1 else f"{60 / step_s:.1f}/min"
        print(f"meta-step {line['step']}/{self._iterations}  loss {sum(recent) / len(recent):.4f}  {sparkline(self._all)}  {rate}  "
              f"about {(self._iterations - line['step']) * step_s / 60:.0f} min left"
              + (f"  {line['broken']} broken" if line["broken"] else ""), file=self._out, flush=True)
        self.write()

    def write(self) -> None:
        if not self._all:
            return
        fresh = self._folder / "curve.svg.new"
        try:
            fresh.write_text(drawing(self._losses, self._iterations), encoding="utf-8")
            fresh.replace(self._folder / "curve.svg")
        except OSError:  # a run is not lost over a picture
            pass

    def close(self) -> None:
        self.write()

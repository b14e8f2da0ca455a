"""Runs as text: a list, a comparison, and where a run's time went."""

import os
import sys
from collections.abc import Callable, Sequence

from jaxmem.report.cells import Column, Line, cells, clip, paint, shorten, table, wrap
from jaxmem.report.reading import flat_text
from jaxmem.report.units import UNKNOWN, bytes_text, count_text, percent_text, seconds_text
from jaxmem.runs.compare import Comparison
from jaxmem.runs.goodput import Goodput
from jaxmem.runs.summary import Summary

MOST_CELLS = 16  # of a value in a column of the comparison
STATUS_STYLES = {"running": "cyan", "done": "green", "killed": "red", "failed": "red", "stopped": "yellow"}
GOODPUT_WORDS = {
    "productive": "steps that count",
    "compile": "compiling",
    "restore": "restoring, or making the state",
    "data": "waiting for data",
    "checkpoint": "waiting for checkpoints",
    "eval": "evaluation",
    "waits": "other waits",
    "lost_work": "work thrown away",
    "down": "not running",
    "unaccounted": "unaccounted",
}


def colored() -> bool:
    """As https://no-color.org asks."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def age_text(seconds: float | None) -> str:
    """Coarse: `3 d`, `5 h`, `12 min`, `40 s`."""
    if seconds is None:
        return UNKNOWN
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def loss_text(value: float | None, digits: int = 4) -> str:
    """A loss, or a dash; far from 1, in powers of ten."""
    if value is None:
        return UNKNOWN
    return f"{value:.{digits}f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.{digits}g}"


def style_of(status: str | None) -> str:
    return STATUS_STYLES.get((status or "").partition(" ")[0], "")


def render_list(runs: Sequence[Summary], width: int = 100, color: bool | None = None) -> str:
    """Two lines a run: its figures, and dimmed what it computes. Damaged folders follow with the reason."""
    heads = ("steps", "loss", "eval", "tokens/s", "MFU", "goodput", "age")
    columns = [Column(head="run", keep="middle", least=10), Column(head="status", keep="start")]
    columns += [Column(head=head, align="right") for head in heads]
    sound = [run for run in runs if run.damaged is None]
    rows = []
    for run in sound:
        steps = f"{UNKNOWN if run.step is None else f'{run.step:,}'}/{UNKNOWN if run.steps is None else f'{run.steps:,}'}"
        figures = (steps, loss_text(run.loss), loss_text(run.eval_loss), count_text(run.tokens_per_s), percent_text(run.mfu),
                   percent_text(run.goodput.fraction), age_text(run.age_s))
        rows.append([(flat_text(run.name), "bold"), (run.status or UNKNOWN, style_of(run.status)), *((figure, "") for figure in figures)])
    lines: list[Line] = []
    if sound:
        head, *laid = table(columns, rows, width)
        lines.append(head)
        for run, line in zip(sound, laid, strict=True):
            lines += [line, _asked(run, width)]
            lines += _problems(run, width)
    for run in runs:
        if run.damaged is not None:
            name = flat_text(run.folder)
            lines.append([(shorten(name, width - 16, "middle"), "bold"), ("  cannot be read", "red")])
            lines += _problems(run, width) or [[("  ! ", "yellow"), (flat_text(run.damaged), "dim")]]
    return paint(lines, colored() if color is None else color)


def _problems(run: Summary, width: int) -> list[Line]:
    return [clip([("  ! ", "yellow"), (flat_text(problem), "dim")], width) for problem in run.problems]


def _asked(run: Summary, width: int) -> Line:
    texts = [flat_text(text) for text in (run.workload or run.model or UNKNOWN, run.plan or UNKNOWN, run.topology or UNKNOWN)]
    room = width - 2 - cells(texts[2]) - 4
    if cells(texts[0]) + cells(texts[1]) > room:
        half = max(room // 2, room - cells(texts[1]))
        texts[0] = shorten(texts[0], max(half, 1), "middle")
        texts[1] = shorten(texts[1], max(room - cells(texts[0]), 1), "middle")
    return clip([("  " + "  ".join(texts), "dim")], width)


def render_comparison(found: Comparison, width: int = 100, color: bool | None = None) -> str:
    """A row a figure, a column a run."""
    names = [flat_text(run.name) for run in found.runs]
    if len(set(names)) < len(names):
        names = [flat_text(run.folder) for run in found.runs]
    columns = [Column(head="", keep="start", least=12), *(Column(head=name, align="right", keep="middle") for name in names)]

    def block(title: str, rows: dict[str, list[str]]) -> list[Line]:
        if not rows:
            return []
        laid = table(columns, [[(head, ""), *((flat_text(text), "") for text in texts)] for head, texts in rows.items()], width)
        return [[(title, "bold")], *laid, []]

    figures = {
        "status": [run.status or UNKNOWN for run in found.runs],
        "step": [UNKNOWN if run.step is None else f"{run.step:,}" for run in found.runs],
        "last loss": [loss_text(run.loss, 6) for run in found.runs],
        "last eval loss": [loss_text(run.eval_loss, 6) for run in found.runs],
        **({"last eval accuracy": [percent_text(run.eval_accuracy) for run in found.runs]}
           if any(run.eval_accuracy is not None for run in found.runs) else {}),
        "step time (measure)": [seconds_text(run.step_s) for run in found.runs],
        "step time (estimate)": [seconds_text(run.predicted_step_s) for run in found.runs],
        "tokens/s (measure)": [count_text(run.tokens_per_s) for run in found.runs],
        "MFU (measure)": [percent_text(run.mfu) for run in found.runs],
        "memory (measure)": [bytes_text(run.measured_bytes) for run in found.runs],
        "memory (compile)": [bytes_text(run.predicted_bytes) for run in found.runs],
        "backend": [run.backend or UNKNOWN for run in found.runs],
        "starts": [str(run.goodput.starts) for run in found.runs],
        "goodput": [percent_text(run.goodput.fraction) for run in found.runs],
    }
    spent = {
        words: [seconds_text(run.goodput.parts()[name]) if (run.goodput.parts()[name] or 0) >= 0 else "<0 s" for run in found.runs]
        for name, words in GOODPUT_WORDS.items()
        if any(run.goodput.parts()[name] for run in found.runs)
    }
    lines = [
        *_config(found, names, block),
        *block("Figures", figures),
        *block("Training loss at the same steps", _losses(found.losses)),
        *block("Evaluation loss at the same steps", _losses(found.eval_losses)),
        *block("Time", spent | {"total": [seconds_text(run.goodput.total_s) for run in found.runs]}),
    ]
    for note in found.notes:
        first, *rest = wrap(flat_text(note), width - 6)
        lines += [[("note: ", "yellow"), (first, "")], *([("      " + line, "")] for line in rest)]
    for run, name in zip(found.runs, names, strict=True):
        lines += [clip([(f"{name}: ", "yellow"), (flat_text(problem), "")], width) for problem in run.problems]
    while lines and not lines[-1]:
        lines.pop()
    return paint([clip(line, width) for line in lines], colored() if color is None else color)


def _config(found: Comparison, names: list[str], block: Callable[[str, dict[str, list[str]]], list[Line]]) -> list[Line]:
    """Short values in columns; long ones, which a column would cut, on lines of their own."""
    if not found.config:
        return [[("Configuration", "bold"), (": the same", "")], []]
    rows = {name: [UNKNOWN if value is None else value for value in values] for name, values in found.config.items()}
    long = {name: values for name, values in rows.items() if max(map(cells, values)) > MOST_CELLS}
    lines: list[Line] = []
    for name, values in long.items():
        lines.append([(f"{name} differs", "bold")])
        lines += [[(f"  {run}  ", ""), (flat_text(value), "")] for run, value in zip(names, values, strict=True)] + [[]]
    return lines + block("Configuration, where it differs", {name: values for name, values in rows.items() if name not in long})


def _losses(rows: dict[int, list[float | None]]) -> dict[str, list[str]]:
    return {f"{step:,}": [loss_text(value, 6) for value in values] for step, values in rows.items()}


def render_goodput(found: Goodput, color: bool | None = None) -> str:
    """Where a run's time went: `goodput 87.1% of 12 min 5 s`, then its parts by share."""
    starts = f"{found.starts} {'start' if found.starts == 1 else 'starts'}"
    head = f"goodput {percent_text(found.fraction)} of {seconds_text(found.total_s)} in {starts}"
    parts = sorted(((value, name) for name, value in found.parts().items() if value and found.total_s), reverse=True)
    rows = [
        [(GOODPUT_WORDS[name], ""), (seconds_text(value) if value >= 0 else "<0 s", ""), (percent_text(value / (found.total_s or 1)), "")]
        for value, name in parts
    ]
    columns = [Column(head=""), Column(head="seconds", align="right"), Column(head="share", align="right")]
    return paint([[(head, "bold")], *(table(columns, rows, 100)[1:] if rows else [])], colored() if color is None else color)

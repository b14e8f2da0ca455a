"""A run as one HTML file that needs nothing else, made from the run's files alone, also while it goes on.

Sections in reading order: what became of it, loss with what happened, the other curves, memory and step time against what was
predicted, goodput, checkpoints, what happened, and what was asked with which versions.
"""

import os
import pathlib
import time
from collections.abc import Sequence

from jaxmem.report.html import SIGNS
from jaxmem.report.markup import Markup, element, join
from jaxmem.report.page import page
from jaxmem.report.performance import pair
from jaxmem.report.pieces import chip, code, section
from jaxmem.report.run_charts import Curve, chart, drawing, legend
from jaxmem.report.run_events import Happening, counted, happenings, time_text
from jaxmem.report.run_sections import asked, checkpoints, goodput, happened, predicted, skipped
from jaxmem.report.run_terminal import loss_text
from jaxmem.report.units import UNKNOWN, bytes_text, count_text, percent_text, seconds_text
from jaxmem.runs.reading import Run, finite, read_run
from jaxmem.runs.summary import Summary, summarize

TONES = {"running": "unknown", "done": "fits", "stopped": "tight", "killed": "does_not_fit", "failed": "does_not_fit"}

def render(folder: str | os.PathLike[str]) -> str:
    """The whole page, as text to be written in UTF-8."""
    run, now = read_run(folder), time.time()
    summary = summarize(run, now)
    marks = happenings(run)
    sections = [
        _head(run, summary, now),
        _notes(run),
        _loss(run, marks),
        pair(_curve(run, "grad_norm", "Gradient norm", "number"), _curve(run, "lr", "Learning rate", "number")),
        pair(_step_time(run, summary), _curve(run, "tokens_per_s", "Tokens a second", "count")),
        predicted(run),
        goodput(summary.goodput),
        checkpoints(run),
        happened(marks),
        skipped(run),
        asked(run),
    ]
    title = f"{summary.name}: {summary.status}"
    return page(title, "jaxmem run", sections, styles=["page.css", "run_page.css"], scripts=["page.js", "run_page.js"])


def render_svg_curve(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write the loss curve alone as an SVG drawing."""
    run = read_run(folder)
    title = f"Loss of {', '.join(filter(None, (summarize(run).model, run.asked('data')))) or run.folder.resolve().name}"
    train, evaluated = _losses(run)
    pathlib.Path(path).write_text(drawing(train, evaluated, title), encoding="utf-8")


def _losses(run: Run) -> list[Curve]:
    train, evaluated = run.metrics.train, run.metrics.eval
    return [
        Curve(label="training loss", steps=train.steps, values=train.column("loss"), colour="var(--curve-train)"),
        Curve(label="evaluation loss", steps=evaluated.steps, values=evaluated.column("loss"), colour="var(--curve-eval)", dots=True),
    ]


def _last_step(run: Run) -> int:
    return max([1, *run.metrics.train.steps[-1:], *run.metrics.eval.steps[-1:]])


def _head(run: Run, summary: Summary, now: float) -> Markup:
    tone = TONES.get((summary.status or "").partition(" ")[0], "unknown")
    sign = element(
        "svg",
        Markup('<circle cx="10" cy="10" r="9.2" fill="currentColor"/>'),
        element(
            "path",
            d=SIGNS[tone],
            transform="translate(2.5 2.5) scale(.75)",
            fill="none",
            stroke="var(--sheet)",
            stroke_width="2.6",
            stroke_linecap="round",
        ),
        viewBox="0 0 20 20",
        aria_hidden="true",
    )
    of = f" of {summary.steps:,}" if summary.steps is not None else ""
    loss = f", loss {loss_text(summary.loss)}" if summary.loss is not None else ""
    headline = f"Step {summary.step:,}{of}{loss}" if summary.step is not None else "No step yet"
    start = next((event for event in reversed(run.events) if event["kind"] == "start"), {})
    counts = counted(start)
    said = [
        f"Measured on {', '.join([summary.backend, *counts])}." if summary.backend else "",
        f"{summary.goodput.starts} starts." if summary.goodput.starts > 1 else "",
        f"The last record is of {time_text(now - summary.age_s)} UTC." if summary.age_s is not None else "",
        f"This page was made at {time_text(now)} UTC{', while the run went on' if summary.status == 'running' else ''}.",
    ]
    strings = [("Workload", summary.workload), ("Plan", summary.plan), ("Topology", summary.topology), ("Data", run.asked("data"))]
    figures = [
        ("Loss", loss_text(summary.loss), "measure"),
        ("Evaluation loss", loss_text(summary.eval_loss), "measure"),
        *([("Evaluation accuracy", percent_text(summary.eval_accuracy), "measure")] if summary.eval_accuracy is not None else []),
        ("Step", seconds_text(summary.step_s), "measure"),
        ("Tokens a second", count_text(summary.tokens_per_s), "measure"),
        ("MFU", percent_text(summary.mfu), "measure"),
        ("Device memory", bytes_text(summary.measured_bytes), "measure"),
        ("Goodput", percent_text(summary.goodput.fraction), "measure"),
    ]
    return element(
        "section",
        element("p", sign, f"{summary.name}: {summary.status}", class_="state"),
        element("h1", headline),
        element("p", " ".join(filter(None, said)), class_="sub"),
        element("dl", *(join([element("dt", name), element("dd", code(value))]) for name, value in strings if value), class_="asked"),
        element(
            "div",
            *(
                element("div", element("span", name), element("b", value), chip(how if value != UNKNOWN else None))
                for name, value, how in figures
            ),
            class_="figures",
        ),
        class_=f"sheet verdict {tone}",
    )


def _notes(run: Run) -> Markup | None:
    if not run.problems:
        return None
    items = [element("li", element("b", "Warning"), element("span", problem), class_="warning") for problem in run.problems]
    return section("What could not be read", None, None, element("ul", items, class_="notes"))


def _loss(run: Run, marks: Sequence[Happening]) -> Markup:
    curves = [curve for curve in _losses(run) if len(curve.steps)]
    if not curves:
        return section("Loss", None, "No step is done yet.")
    drawn = chart(curves, _last_step(run), reads="number", label="Loss over steps", marks=marks, tall=True)
    words = legend(curves, lambda curve: loss_text(finite(curve.values[-1])))
    lead = "By step, of the steps that count; below it what happened. Point at the chart, or use the arrow keys, to read it."
    if bad := [mark.step for mark in marks if mark.kind == "not_finite"]:
        lead += f" The loss is not finite at {len(bad):,} {'step' if len(bad) == 1 else 'steps'}, the first is {bad[0]:,}."
    return section("Loss", "measure", lead, drawn, words)


def _curve(run: Run, name: str, heading: str, reads: str) -> Markup | None:
    train = run.metrics.train
    curve = Curve(label=heading.lower(), steps=train.steps, values=train.column(name), colour="var(--curve-train)")
    if all(value != value for value in curve.values):
        return None
    return section(heading, "measure", None, chart([curve], _last_step(run), reads=reads, label=f"{heading} over steps", from_zero=True))


def _step_time(run: Run, summary: Summary) -> Markup | None:
    train = run.metrics.train
    curve = Curve(label="step time", steps=train.steps, values=train.column("step_s"), colour="var(--curve-train)")
    if all(value != value for value in curve.values):
        return None
    estimate = summary.predicted_step_s
    level = (f"estimate {seconds_text(estimate)}", estimate) if estimate is not None else None
    drawn = chart([curve], _last_step(run), reads="seconds", label="Seconds a step, over steps", level=level, from_zero=True)
    return section("Seconds a step", "measure", None, drawn)

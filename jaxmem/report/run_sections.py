"""The sections of a run's page below its curves: predicted against measured, goodput, checkpoints, what happened, what was asked."""

from collections.abc import Sequence

from jaxmem.report.charts import bar
from jaxmem.report.markup import Markup, element, join
from jaxmem.report.pieces import cell, chip, code, number, section, table
from jaxmem.report.run_events import BAD, ROUTINE, WORDS, Happening, skips, time_text
from jaxmem.report.run_terminal import GOODPUT_WORDS
from jaxmem.report.units import UNKNOWN, bytes_text, percent_text, seconds_text
from jaxmem.runs.goodput import Goodput
from jaxmem.runs.reading import Run, finite

MOST_ROWS = 100  # of the table of happenings, at either end
GOODPUT_KINDS = {
    "productive": "gradients",
    "compile": "params",
    "restore": "opt_state",
    "data": "collective",
    "checkpoint": "saved",
    "eval": "recomputed",
    "waits": "logits",
    "lost_work": "activations",
    "down": "workspace",
    "unaccounted": "padding",
}


def predicted(run: Run) -> Markup:
    """A row for each thing that was both predicted and measured, on each backend and attempt that said so."""
    rows, seen = [], set()
    for event in run.events:
        if event["kind"] not in ("memory", "step_time"):
            continue
        memory = event["kind"] == "memory"
        names = ("predicted_bytes", "measured_bytes") if memory else ("predicted_s", "measured_s")
        predicted, measured = (finite(event.get(name)) for name in names)
        key = (event["kind"], predicted, measured, str(event.get("backend")))
        if key in seen:
            continue
        seen.add(key)
        shown = [bytes_text(None if v is None else int(v)) if memory else seconds_text(v) for v in (predicted, measured)]
        how = "compile" if memory else "estimate"
        rows.append(
            [
                cell("peak memory of a device" if memory else "a step"),
                number(shown[0]),
                cell(chip(how) if predicted is not None else UNKNOWN),
                number(shown[1]),
                cell(chip("measure") if measured is not None else UNKNOWN),
                number(f"{measured / predicted:.2f}" if predicted and measured is not None else UNKNOWN),
                cell(code(str(event["backend"])) if event.get("backend") else UNKNOWN, "keep"),
                number(str(event.get("attempt", UNKNOWN))),
            ]
        )
    heads = ["", ">Predicted", "By", ">Measured", "By", ">Measured / predicted", "Backend", ">Attempt"]
    lead = "What the check says of the same program, and what the devices reported after warm-up. A dash is unknown."
    if not rows:
        return section("Predicted and measured", None, "Nothing was recorded: the run has not got past its warm-up.")
    return section("Predicted and measured", None, lead, table(heads, rows))


def goodput(found: Goodput) -> Markup:
    lead = "Of all the time from the first sign of life to the last, what went to steps that count. Every second is in one row."
    if not found.total_s:
        return section("Goodput", None, "Not known: the run has left no record of its time.")
    parts = {name: value for name, value in found.parts().items() if value}
    colours = {name: f"var(--kind-{kind})" for name, kind in GOODPUT_KINDS.items()}
    whole = max(found.total_s, sum(value for value in parts.values() if value > 0))
    named = [(GOODPUT_WORDS[name], value, colours[name]) for name, value in parts.items() if value > 0]
    drawn = bar([(words, value, colour, f"{words}: {seconds_text(value)}") for words, value, colour in named], whole)
    rows = [
        [
            cell(join([element("i", class_="swatch", style=f"background:{colours[name]}"), element("span", GOODPUT_WORDS[name])]), "keep"),
            number(_signed(value)),
            number(percent_text(value / found.total_s)),
        ]
        for name, value in parts.items()
    ]
    rows.append([cell(element("b", "total")), cell(element("b", seconds_text(found.total_s)), "number"), number(percent_text(1.0))])
    notes = [
        "The parts are more than the total: what the loop measured overlaps." if (found.unaccounted_s or 0) < -0.01 * found.total_s else "",
        f"The clock was set back by {seconds_text(found.set_back_s)} meanwhile; that is no time here." if found.set_back_s else "",
    ]
    return section(
        f"Goodput {percent_text(found.fraction)}",
        "measure",
        lead,
        element("div", drawn, class_="whole"),
        table(["", ">Time", ">Share"], rows),
        *(element("p", note, class_="quiet") for note in notes if note),
    )


def checkpoints(run: Run) -> Markup | None:
    of = {kind: [event for event in run.events if event["kind"] == kind] for kind in ("checkpoint", "commit", "commit_failed", "corrupt")}
    if not any(of.values()):
        return None

    def row(name: str, values: list[float | None]) -> list[Markup]:
        known = sorted(value for value in values if value is not None)
        middle = known[len(known) // 2] if known else None
        return [cell(name), number(f"{len(values):,}"), number(seconds_text(middle)), number(seconds_text(known[-1] if known else None))]

    ways = dict.fromkeys(str(event.get("snapshot") or "unknown") for event in of["checkpoint"])
    rows = [
        row(f"stall of the loop, {way}", [finite(e.get("stall_s")) for e in of["checkpoint"] if str(e.get("snapshot") or "unknown") == way])
        for way in ways
    ]
    if of["commit"]:
        rows.append(row("from the start of a save to its commit", [finite(event.get("seconds")) for event in of["commit"]]))
    newest = of["commit"][-1] if of["commit"] else {}
    size = finite(newest.get("bytes"))
    newest_text = f"step {newest['step']:,}, " if isinstance(newest.get("step"), int) else ""
    said = [
        f"The newest is of {newest_text}{bytes_text(None if size is None else int(size))}." if newest else "",
        f"{len(of['commit_failed'])} could not be saved." if of["commit_failed"] else "",
        f"{len(of['corrupt'])} {'was' if len(of['corrupt']) == 1 else 'were'} found damaged and not used." if of["corrupt"] else "",
    ]
    heads = ["", ">Times", ">Median", ">Longest"]
    return section("Checkpoints", "measure", " ".join(filter(None, said)) or None, table(heads, rows) if rows else None)


def happened(marks: Sequence[Happening]) -> Markup | None:
    notable = [mark for mark in marks if mark.kind not in ROUTINE]
    if not notable:
        return None
    first = next((mark.time for mark in notable if mark.time is not None), None)

    def row(mark: Happening) -> list[Markup]:
        since = None if mark.time is None or first is None else mark.time - first
        return [
            cell(time_text(mark.time), "keep"),
            number(UNKNOWN if since is None else _signed(since)),
            number(UNKNOWN if mark.attempt is None else str(mark.attempt)),
            number(UNKNOWN if mark.step is None else f"{mark.step:,}"),
            cell(WORDS.get(mark.kind, mark.kind.replace("_", " ")), "tone-failed" if mark.kind in BAD else "keep"),
            cell(mark.text or UNKNOWN),
        ]

    left_out = max(0, len(notable) - 2 * MOST_ROWS)
    rows = [row(mark) for mark in (notable[:MOST_ROWS] + notable[-MOST_ROWS:] if left_out else notable)]
    heads = ["UTC", ">After", ">Attempt", ">Step", "What", ""]
    note = element("p", f"{left_out:,} in the middle are left out here; logs/events.jsonl has all.", class_="quiet") if left_out else None
    return section("What happened", None, None, table(heads, rows), note, class_="long")


def skipped(run: Run) -> Markup | None:
    rows = [
        [
            number(f"{event['skip'][0]:,}"),
            number(f"{event['skip'][1]:,}"),
            number(f"{event['skip'][1] - event['skip'][0] + 1:,}"),
            number(str(event.get("step", UNKNOWN))),
            cell(str(event.get("reason") or UNKNOWN)),
        ]
        for event in skips(run)
    ]
    if not rows:
        return None
    lead = "Ranges of global batches that were left out after a rollback, both ends included."
    return section("Skipped batches", None, lead, table([">First", ">Last", ">Batches", ">Bad step", "Why"], rows))


def asked(run: Run) -> Markup:
    rows = [[cell(code(name), "keep"), cell(code(str(value)), "wide")] for name, value in run.config.items()]
    versions = [element("li", element("span", name), element("b", str(version or UNKNOWN))) for name, version in run.versions.items()]
    ways = "measure: observed on the backend named above. compile: what the compiler allocates for the same program. "
    ways += "estimate: a model's figure from the compiled schedule. Step, tokens a second and MFU at the top are medians of the last 100 "
    ways += "steps. A dash is unknown, never zero."
    return section(
        "What was asked, and with what",
        None,
        ways,
        table(["config.json", ""], rows) if rows else element("p", "There is no config.json.", class_="quiet"),
        element("h3", "Versions"),
        element("ul", versions, class_="legend") if versions else element("p", UNKNOWN),
        class_="long",
    )


def _signed(seconds: float) -> str:
    return f"-{seconds_text(-seconds)}" if seconds < 0 else seconds_text(seconds)

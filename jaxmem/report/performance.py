"""The sections of the HTML report on time, traffic and the programs."""

from jaxmem.report.charts import bar
from jaxmem.report.markup import Markup, element, join
from jaxmem.report.pieces import cell, code, number, section, table
from jaxmem.report.reading import STATUS_WORDS, Check, limits, program_notes, program_sum, source
from jaxmem.report.units import bytes_text, count_text, duration_text, percent_text, seconds_text

LIMIT_WORDS = {
    "overhead": "starting what runs",
    "math": "arithmetic units",
    "memory": "device memory bandwidth",
    "host": "link to the host",
    "bubble": "waiting: nothing to run",
}
# Limits take the colours of kinds, so that one palette is learned; several axes take the next ones.
LIMIT_KINDS = {"math": "params", "memory": "saved", "host": "gradients", "overhead": "other", "bubble": "padding"}
AXIS_KINDS = ("collective", "logits", "recomputed", "opt_state")


def pair(*sections: Markup | None) -> Markup | None:
    """Side by side where there is room."""
    there = [section for section in sections if section]
    return element("div", there, class_="pair") if there else None


def speed(check: Check) -> Markup:
    """Seconds of a step by limit, in the way and hidden."""
    found = limits(check)
    step = check["step_s"]
    if not found:
        return section("Time by limit", None, "The step time is not known: nothing here was compiled for it or estimated.")
    axes = [limit.name for limit in found if limit.name not in LIMIT_WORDS]
    colours = {
        limit.name: f"var(--kind-{LIMIT_KINDS.get(limit.name) or AXIS_KINDS[axes.index(limit.name) % len(AXIS_KINDS)]})" for limit in found
    }
    exposed = [(limit.name, limit.exposed_s or 0, colours[limit.name], f"{limit.name}: {seconds_text(limit.exposed_s)}") for limit in found]
    hidden = [
        (limit.name, limit.hidden_s or 0, colours[limit.name], f"{limit.name}, hidden: {seconds_text(limit.hidden_s)}") for limit in found
    ]
    whole = max(sum(size for _, size, _, _ in exposed), sum(size for _, size, _, _ in hidden)) or 1
    bars = [element("span", "in the way"), bar(exposed, whole)] + (
        [element("span", "hidden"), bar(hidden, whole, "hidden-time")] if any(size for _, size, _, _ in hidden) else []
    )
    rows = [
        [
            cell(
                join([element("i", class_="swatch", style=f"background:{colours[limit.name]}"), element("span", limit.name)]),
                "keep",
            ),
            cell(LIMIT_WORDS.get(limit.name, f"collectives over the axis {limit.name}"), "quiet"),
            number(seconds_text(limit.exposed_s)),
            number(percent_text(limit.exposed_s / step if limit.exposed_s is not None and step else None)),
            number(seconds_text(limit.hidden_s)),
        ]
        for limit in found
    ]
    return section(
        "Time by limit",
        source(check, "seconds_by_limit"),
        "Seconds of a step: what is in the way adds up to the step, hidden time runs behind it.",
        element("div", bars, class_="bars"),
        table(["Limit", "", ">In the way", ">Share", ">Hidden"], rows),
    )


def traffic(check: Check) -> Markup | None:
    """Collectives by mesh axis, and what is offloaded."""
    rows = [
        [
            cell(code(entry["axis"]), "keep"),
            cell(code(entry["collective"]), "keep"),
            number(count_text(entry["count"])),
            number(bytes_text(entry["bytes"])),
            number(seconds_text(entry["exposed_s"])),
            number(seconds_text(entry.get("hidden_s"))),
        ]
        for entry in sorted(check["traffic"], key=lambda entry: (-(entry["exposed_s"] or 0), -(entry["bytes"] or 0)))
    ]
    moved = [[cell(code(entry["name"]), "keep"), number(bytes_text(entry["bytes"]))] for entry in check["offload"]]
    if not rows and not moved:
        return None
    return section(
        "Collectives and transfers",
        source(check, "traffic"),
        "What one device sends in a step, loops counted as often as they run.",
        table(["Axis", "Collective", ">Count", ">Bytes", ">In the way", ">Hidden"], rows) if rows else None,
        join([element("h3", "Offloaded to the host"), table(["Name", ">Bytes that move"], moved)]) if moved else None,
    )


def programs(check: Check) -> Markup:
    """What the compiler said of each program."""
    keys = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes")
    rows, said = [], []
    for name, program in check["programs"].items():
        outcome = STATUS_WORDS[program["status"]]
        rows.append(
            [
                cell(element("b", name), "keep"),
                cell(outcome, "tone-fits" if program["status"] == "ok" else "tone-failed"),
                cell(element("b", bytes_text(program["peak_bytes"])), "number"),
                number(bytes_text(program_sum(program))),
                *(number(bytes_text(program[key])) for key in keys),
                number(bytes_text(program["host_bytes"])),
                number(duration_text(program["compile_s"])),
            ]
        )
        texts = program_notes(check, name)
        said += [element("li", element("b", name), element("span", text), class_="problem") for text in texts]
    lead = (
        "Every program of a run, on one device. The peak decides the verdict. The sum is arguments + outputs - aliased + "
        "temporary, with donated buffers counted once; what stays on the device beside a program is in the peak alone."
    )
    listed = (
        table(["Program", "Outcome", ">Peak", ">Sum", ">Arguments", ">Outputs", ">Aliased", ">Temporary", ">Host", ">Compile"], rows)
        if rows
        else element("p", "None was compiled.", class_="quiet")
    )
    return section("Programs", source(check, "programs"), lead, element("ul", said, class_="notes") if said else None, listed)

"""The answer of `jaxmem interval` as text for a terminal."""

import math
from typing import Any

from jaxmem.report.cells import Column, paint, table, wrap
from jaxmem.report.units import UNKNOWN, bytes_text, seconds_text

WIDTH = 100
LIMIT = {"commit": "the interval is the commit time: a checkpoint must be written before the next one begins\n",
         "step": "one step is longer than the best interval\n"}
PART = {"stalls": "training waits for checkpoints", "lost": "work that failures undo", "restarts": "starting again after a failure"}


def render(answer: dict[str, Any]) -> str:
    """Plain text, at most 100 columns."""
    written = "--bandwidth=...GB/s is not given" if answer["write_s"] is None else f"{seconds_text(answer['write_s'])} at {rates(answer)}"
    if answer["stall_s"] is not None:
        written += (f"; measured for {answer['snapshot']}: a stall of {seconds_text(answer['stall_s'])}, committed after "
                    f"{seconds_text(answer['commit_s'])}")
    rows = [("checkpoint", f"{bytes_text(answer['total_bytes'])} in all, {bytes_text(answer['host_bytes'])} a host, "
             f"{bytes_text(answer['device_bytes'])} a device"),
            ("writing", written), ("failures", failures(answer)), ("restart", restart(answer)),
            ("step", f"{seconds_text(answer['step_s'])}, {answer['step_source']}" if answer["step_s"] else
             "not known: --step_s, or --batch to have it predicted"),
            ("numbers", f"estimate, but for what is given or measured; {versions(answer)}")]
    head = (f"{answer['model']}, {answer['optimizer']}, plan {answer['plan'] or 'default'}, {answer['topology']} "
            f"({answer['devices']} devices, {answer['hosts']} host{'s' if answer['hosts'] > 1 else ''})\n")
    lines = [f"{name if not i else '':<12}{part}\n" for name, value in rows for i, part in enumerate(wrap(value, WIDTH - 12))]
    return head + "".join(lines) + "\n" + (modes(answer) if answer["modes"] else grid(answer))


def versions(answer: dict[str, Any]) -> str:
    """Closed forms depend on jaxmem alone, a predicted step on its compilers too."""
    known = {name: version for name, version in answer["versions"].items() if version}
    return ", ".join(f"{name} {known[name]}" for name in (known if answer["sources"].get("step_s") == "estimate" else ["jaxmem"]))


def rates(answer: dict[str, Any]) -> str:
    known = [(answer["bytes_per_s"], ""), (answer["host_bytes_per_s"], " a host")]
    return " and ".join(f"{rate_text(value)}{word}" for value, word in known if value)


def rate_text(value: float) -> str:
    size, unit = next(((size, unit) for size, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")) if value >= size), (1.0, "B/s"))
    return f"{value / size:.3g} {unit}"


def failures(answer: dict[str, Any]) -> str:
    if answer["mtbf_s"] is None:
        return "no published rate for this chip: --mtbf_hours or --device_mtbf_hours"
    text = f"one in {hours_text(answer['mtbf_s'])}"
    if answer["device_hours"]:
        text += f": one in {answer['device_hours']:,.0f} hours of a device"
    return text + (f" ({answer['mtbf_source']})" if answer["mtbf_source"] else "")


def restart(answer: dict[str, Any]) -> str:
    reading = f"{seconds_text(answer['read_s'])} to read the checkpoint" if answer["read_s"] is not None else "reading not known"
    if answer["start_s"] is not None:
        reading = f"{seconds_text(answer['start_s'])} from a start to the first step, measured"
    if answer["restart_s"] is None:
        return f"{reading}; the rest is not known (--restart_s), so goodputs are upper bounds"
    return f"{seconds_text(answer['restart_s'])} (--restart_s), and {reading}"


def hours_text(seconds: float) -> str:
    hours = seconds / 3600
    return seconds_text(seconds) if hours < 1 else f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"


def share_text(share: float | None) -> str:
    """Percent with two digits of what it differs from 0 or 1 by: `99.986%`, `0.014%`, `92.0%`."""
    if share is None:
        return UNKNOWN
    small = min(share, 1 - share)
    digits = 1 if small >= 0.0095 else min(6, 1 - math.floor(math.log10(100 * small))) if small > 1e-9 else 0
    return f"{100 * share:.{digits}f}%"


def modes(answer: dict[str, Any]) -> str:
    """A line a mode, the recommendation, and the curve around it."""
    at_most = "at most " if answer["restart_s"] is None else ""
    columns = [Column(head="mode"), *(Column(head=name, align="right") for name in (
        "stall", "committed", "interval", "steps", "goodput", "stalls", "lost work", "restarts", "Young's"))]
    rows = []
    for mode, one in answer["modes"].items():
        if one is None:
            rows.append([mode, *[UNKNOWN] * 9])
            continue
        account = one["account"]
        rows.append([mode, seconds_text(one["stall_s"]), seconds_text(one["commit_s"]), seconds_text(one["interval_s"]),
                     UNKNOWN if one["steps"] is None else f"{one['steps']:,}",
                     *(share_text(account[name]) for name in ("goodput", "stalls", "lost", "restarts")), seconds_text(one["young_s"])])
    out = paint(table(columns, [[(cell, "") for cell in row] for row in rows], WIDTH), False)
    best = answer["modes"][answer["snapshot"]]
    if best is None:
        why = "needs a step time: --step_s" if answer["snapshot"] == "lazy" and answer["step_s"] is None else (
            "cannot be estimated: this chip's link to the host is not known; --stall_s and --commit_s give what a run measured")
        return f"{out}\n--snapshot={answer['snapshot']} {why}\n"
    account = best["account"]
    worst = max((name for name in PART if account[name] is not None), key=lambda name: account[name])
    every = f"--checkpoint_every={best['steps']} " if best["steps"] else f"a checkpoint every {seconds_text(best['interval_s'])}, "
    out += (f"\n{every}--snapshot={answer['snapshot']}: goodput {at_most}{share_text(account['goodput'])} (estimate)\n"
            f"most of the rest: {PART[worst]}, {share_text(account[worst])}\n"
            f"up to {interval_text(best, 'longest')} it is within 0.1 points of that, and writes less\n")
    out += LIMIT.get(best["limit"], "")
    around = ", ".join(f"{share_text(one['goodput'])} at {seconds_text(one['interval_s'])}" for one in best["around"])
    return out + "\n".join(wrap(f"goodput around it: {around}", WIDTH)) + "\n"


def grid(answer: dict[str, Any]) -> str:
    """Interval and goodput over bandwidths and failure rates."""
    heads = [hours_text(cell["mtbf_s"]) for cell in answer["table"][0]["cells"]]
    columns = [Column(head="bandwidth", align="right"), *(Column(head=f"a failure in {head}", align="right") for head in heads)]
    rows = []
    for line in answer["table"]:
        cells = [cell["best"] for cell in line["cells"]]
        host = answer["host_bytes_per_s"]
        name = rate_text(line["bytes_per_s"]) if line["bytes_per_s"] else f"{rate_text(host)} a host" if host else "measured"
        rows.append([name, *(UNKNOWN if one is None else f"{interval_text(one)}, "
                             f"{share_text(one['account']['goodput'])}" for one in cells)])
    return (paint(table(columns, [[(cell, "") for cell in row] for row in rows], WIDTH), False) +
            f"\n--snapshot={answer['snapshot']}: best interval and its goodput (estimate)\n")


def interval_text(one: dict[str, Any], which: str = "") -> str:
    """Whole steps where a step's time is known."""
    steps, seconds = (one["longest_steps"], one["longest_s"]) if which == "longest" else (one["steps"], one["interval_s"])
    return f"{steps:,} step{'s' if steps > 1 else ''}" if steps else seconds_text(seconds)

"""What every report derives from the check: the headline, the account of the peak, the limits of a step, a figure's source."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem.report.units import UNKNOWN, bytes_text, percent_text

Check = Mapping[str, Any]
VERDICT_WORDS = {"fits": "Fits", "tight": "Tight", "does_not_fit": "Does not fit", "unknown": "Unknown"}
STATUS_WORDS = {"ok": "ok", "oom": "out of memory", "refused": "refused", "abort": "compiler aborted", "timeout": "timed out"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """`bytes` at the peak of one kind and module; `kind` None is what has neither."""

    kind: str | None
    module: str | None
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """Seconds of a step that one resource takes: on the critical path, and hidden behind other work. None is unknown."""

    name: str
    exposed_s: float | None
    hidden_s: float | None


def source(check: Check, key: str) -> str | None:
    """estimate|compile|measure of a figure by its path in the check: the longest prefix that `sources` names."""
    while key:
        if key in check["sources"]:
            return check["sources"][key]
        key = key.rpartition(".")[0]
    return None


def headroom(check: Check) -> str:
    """The verdict in figures, as one phrase."""
    left, usable, peak = check["headroom_bytes"], check["usable_bytes"], check["peak_bytes"]
    if check["verdict"] == "unknown":
        failed = [f"{STATUS_WORDS[program['status']]} ({name})" for name, program in check["programs"].items() if program["status"] != "ok"]
        if failed or peak is None:
            return ", ".join(failed) or "the peak is not known"
    if left is None:
        return f"peak {bytes_text(peak)} of {bytes_text(usable)} usable"
    if left < 0:
        return f"{bytes_text(-left)} more than the {bytes_text(usable)} usable"
    share = f" ({percent_text(left / usable)})" if usable else ""
    return f"{bytes_text(left)}{share} left of {bytes_text(usable)} usable"


def program_sum(program: Mapping[str, Any]) -> int | None:
    """argument + output - alias + temp: donated buffers count once. The peak can have more: what stays beside it."""
    terms = [program["argument_bytes"], program["output_bytes"], program["alias_bytes"], program["temp_bytes"]]
    return None if None in terms else terms[0] + terms[1] - terms[2] + terms[3]


def program_notes(check: Check, name: str) -> list[str]:
    """What a program's outcome was, if not ok, and what is not covered in it."""
    program = check["programs"][name]
    said = [] if program["status"] == "ok" else [f"{STATUS_WORDS[program['status']]}: {program['reason'] or 'no reason given'}"]
    return said + program["problems"]


def problems(check: Check) -> list[str]:
    """The problems of the whole check; what a program's own notes say already is left out."""
    told = {f"{name}: {text}" for name, program in check["programs"].items() for text in program["problems"]}
    told |= {f"{name}: {program['status']}: {program['reason']}" for name, program in check["programs"].items()}
    return [text for text in check["problems"] if text not in told]


def parts(check: Check) -> list[Part]:
    """The composition of the peak, largest first, equal (kind, module) merged, the unattributed remainder last."""
    total: dict[tuple[str | None, str | None], int] = {}
    for entry in check["composition"]:
        key = (entry["kind"], entry["module"])
        total[key] = total.get(key, 0) + entry["bytes"]
    out = [Part(kind=kind, module=module, bytes=size) for (kind, module), size in sorted(total.items(), key=lambda item: -item[1])]
    if check["unattributed_bytes"]:
        out.append(Part(kind=None, module=None, bytes=check["unattributed_bytes"]))
    return out


def accounted(check: Check) -> str | None:
    """How the account of the peak compares with the compiler's figure, where both are known and differ by 0.1% or more."""
    total, peak = sum(part.bytes for part in parts(check)), check["peak_bytes"]
    if not total or not peak or abs(total - peak) < 0.001 * peak:
        return None
    apart = f"{percent_text(abs(total - peak) / peak)} {'above' if total > peak else 'below'}"
    return f"The parts sum to {bytes_text(total)}, {apart} the peak of {bytes_text(peak)}."


def limits(check: Check) -> list[Limit]:
    """Math and memory first, then what is exposed or hidden (the mesh axes) by its exposed time, then the rest."""
    seconds = check["seconds_by_limit"]
    axes = dict.fromkeys(key.rpartition("_")[0] for key in seconds if key.endswith(("_exposed", "_hidden")))
    axes = dict.fromkeys(sorted(axes, key=lambda axis: -(seconds.get(f"{axis}_exposed") or 0)))
    names = dict.fromkeys(
        [*(n for n in ("math", "memory") if n in seconds), *axes, *(n for n in ("host", "overhead", "bubble") if n in seconds)]
    )
    return [
        Limit(name=name, exposed_s=seconds.get(name, seconds.get(f"{name}_exposed")), hidden_s=seconds.get(f"{name}_hidden"))
        for name in names
    ]


def array_text(buffer: Mapping[str, Any]) -> str:
    """`bf16[32,1,8192,4096]`."""
    dims = UNKNOWN if buffer["shape"] is None else "[" + ",".join(map(str, buffer["shape"])) + "]"
    return (buffer["dtype"] or "") + dims if buffer["dtype"] or buffer["shape"] is not None else UNKNOWN


def flat_text(text: str) -> str:
    """One line: every run of white space is one space."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """White space is spaces; other control characters and lone surrogates are shown as a replacement."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)

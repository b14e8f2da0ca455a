"""Records as rows: filtered, arranged with intervals over seeds, written as CSV. No jax."""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxmem import spec
from jaxmem.plan import Plan
from jaxmem.records import PLAN, STRINGS, WORKLOAD, Record
from jaxmem.spec import InputError

Row = dict[str, Any]
_CONDITION = re.compile(r"\s*([\w.]+)\s*(<=|>=|!=|=|<|>|~)\s*(.*)", re.DOTALL)
# two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the normal's, 1.5% too narrow at most
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
        2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def row(one: Record) -> Row:
    """A record as one flat row: the parts of its workload and plan, its settings and its values are columns."""
    out: Row = {name: one.get(name) for name in ("experiment", *STRINGS)} | _workload(one["workload"]) | _plan(one["plan"])
    out |= {name: one.get(name) for name in ("seed", "status", "reason", "backend", "wall_s", "time", "key")}
    out["settings"] = ",".join(f"{name}={spec.show(value)}" for name, value in sorted(one["settings"].items()))
    return out | dict(one["settings"]) | {name: value for name, value in one["values"].items() if not isinstance(value, list)}


def _workload(text: str) -> Row:
    """`model=gpt2,layers=2,batch=8,...` -> its four parts, also where the model is no preset any more."""
    out: Row = {}
    part = ""
    for item in spec.split(text):
        name, _, value = item.partition("=")
        if name in WORKLOAD:
            part, out[name] = name, int(value) if name in ("batch", "seq") and value.isdigit() else value
        elif part:
            out[part] = f"{out[part]},{item}"
    return out


def _plan(text: str) -> Row:
    """Every field of the plan, given or default; only what is given where another version's plan has fields that are gone."""
    try:
        plan = Plan.parse(text)
    except InputError:
        return dict(item.split("=", 1) for item in spec.split(text) if "=" in item)
    return {name: getattr(plan, name) for name in PLAN}


def columns(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for one in rows for name in one))


# ---------------------------------------------------------------- choosing, arranging

def matching(rows: Sequence[Row], conditions: Iterable[str]) -> list[Row]:
    """Rows for which all of `conditions` hold: `remat=none|dots`, `batch!=8`, `peak_bytes<1e9`, `model~gpt2` (contains).

    Several may stand in one text, by comma. An unknown value meets no condition but `!=`. Raises InputError for unknown columns.
    """
    known = columns(rows)
    for text in (item for condition in conditions for item in spec.split(condition)):
        found = _CONDITION.fullmatch(text)
        if not found:
            raise InputError(f"filter {text!r}: expected COLUMN=VALUE, or one of != < <= > >= ~ in place of =")
        name, sign, wanted = found.groups()
        if rows and name not in known:
            raise InputError(f"filter: unknown column {name!r}{spec.nearest(name, known)}")
        test = _test(name, sign, wanted.strip())
        rows = [one for one in rows if test(one.get(name))]
    return list(rows)


def _test(name: str, sign: str, wanted: str) -> Callable[[Any], bool]:
    choices = [choice.strip() for choice in wanted.split("|")]
    if sign in ("=", "!="):
        return lambda value: any(_same(value, choice) for choice in choices) == (sign == "=")
    if sign == "~":
        return lambda value: value is not None and any(choice in spec.show(value) for choice in choices)
    try:
        limit = float(wanted)
    except ValueError:
        raise InputError(f"filter {name}{sign}{wanted}: expected a number") from None

    def test(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return {"<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit}[sign]
    return test


def _same(value: Any, text: str) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return spec.show(value) == text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """The mean over seeds, and half the width of its 95% confidence interval (Student's t); None below three seeds.

    With two, t is 12.7: the interval says nothing, and `span` has the (lower, higher) of both.
    """

    mean: float
    half_width: float | None
    seeds: int
    span: tuple[float, float] | None = None


def interval(values: Sequence[float]) -> Interval:
    """Raises ValueError for no values."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 3:
        return Interval(mean=mean, half_width=None, seeds=n, span=(min(values), max(values)) if n == 2 else None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Interval(mean=mean, half_width=(_T95[n - 2] if n - 2 < len(_T95) else 1.96) * deviation / math.sqrt(n), seeds=n)


def pivot(rows: Sequence[Row], down: Sequence[str], across: str, value: str) -> tuple[list[str], list[list[Any]]]:
    """(heads, lines): a line for each combination of the columns `down`, then a cell for each value of `across`.

    A cell is None, words, or the `Interval` over seeds. Raises InputError where rows of one cell differ in more than their seed.
    """
    for name in (*down, across, value):
        if name not in (known := columns(rows)):
            raise InputError(f"pivot: unknown column {name!r}{spec.nearest(name, known)}")
    heads = list(dict.fromkeys(spec.show(one.get(across)) for one in rows))
    cells: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for one in rows:
        line = cells.setdefault(tuple(spec.show(one.get(name)) for name in down), {})
        line.setdefault(spec.show(one.get(across)), []).append(one)
    return [*down, *heads], [[*names, *(_cell(line.get(head, []), value) for head in heads)] for names, line in cells.items()]


def _cell(rows: Sequence[Row], value: str) -> Any:
    for name in ("experiment", *WORKLOAD, "topology", *PLAN, "settings"):
        found = list(dict.fromkeys(spec.show(one.get(name)) for one in rows))
        if len(found) > 1 and name != value:
            raise InputError(f"pivot: one cell holds {len(rows)} records that differ in {name} ({', '.join(found[:4])}); "
                             f"filter by it, or add it to the rows as in {name}+...")
    known = [one[value] for one in rows if one.get(value) is not None]
    if not known:
        return None
    return interval(known) if all(isinstance(one, (int, float)) for one in known) else ", ".join(dict.fromkeys(map(spec.show, known)))


def to_csv(rows: Sequence[Row]) -> str:
    """All columns, an unknown value as an empty cell."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: value for name, value in one.items() if value is not None} for one in rows)
    return out.getvalue()

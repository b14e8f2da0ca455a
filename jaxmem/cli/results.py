"""records of experiments: list, filter, arrange, export as CSV.

  jaxmem results                                         every record under runs/
  jaxmem results runs/remat --filter="remat=none|block,batch=8"
  jaxmem results runs/remat --pivot=model+batch+remat,topology,peak_bytes
  jaxmem results runs/remat --columns=remat,topology,step_s
  jaxmem results runs/remat --csv=results.csv

A filter's conditions are COLUMN=VALUE|VALUE, or with != < <= > >= or ~ (contains). Columns are
the parts of the workload (model optimizer batch seq) and of the plan (fsdp remat ...), topology,
seed, status, the settings and the values. A pivot is ROWS,COLUMN,VALUE: rows joined by +, the
value as the mean over seeds with its 95% interval (with two seeds, the two values). Of points that
several versions tried, the latest counts (--csv writes all).
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem import spec
from jaxmem.cli.tables import print_table
from jaxmem.records import find, newest, read
from jaxmem.report.cells import Column
from jaxmem.report.experiment_page import Cell, Unit, cell_text
from jaxmem.report.units import UNKNOWN
from jaxmem.spec import InputError
from jaxmem.tabulate import Row, columns, matching, pivot, row, to_csv

DEFAULT = "runs"
SHOWN = ("experiment", "model", "batch", "topology", "plan", "seed", "status", "peak_bytes", "step_s")
UNITS: dict[str, Unit] = {"_bytes": "bytes", "_s": "seconds", "_flops": "flops"}  # by the end of a column's name


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_multi_string("filter", [], "conditions that a record must meet; may be given again", flag_values=flags)
    absl_flags.DEFINE_string("columns", "", "which columns to list, by comma; all: every one", flag_values=flags)
    absl_flags.DEFINE_string("pivot", "", "ROW+ROW,COLUMN,VALUE", flag_values=flags)
    absl_flags.DEFINE_string("csv", "", "write the records there as CSV; - is stdout", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    for word in words:
        if not pathlib.Path(word).exists():
            raise InputError(f"{word}: no such folder or file")
    records = read(*dict.fromkeys(path for word in words or [DEFAULT] for path in find(pathlib.Path(word))))
    if not records:
        print(f"no records under {', '.join(words) or DEFAULT}; python -m experiments.remat_policies --out={DEFAULT}/remat makes some")
        return 0
    rows = matching([row(one) for one in (records if flags.csv else newest(records))], flags.filter)
    if flags.csv:
        return _export(rows, flags.csv)
    if not rows:
        print(f"none of {len(records)} records meets {' and '.join(flags.filter)}")
    elif flags.pivot:
        parts = [part.strip() for part in flags.pivot.split(",")]
        if len(parts) != 3 or not all(parts):
            raise InputError(f"--pivot={flags.pivot}: expected ROW+ROW,COLUMN,VALUE, as in remat+batch,topology,peak_bytes")
        down = parts[0].split("+")
        heads, lines = pivot(rows, down, parts[1], parts[2])
        numbers = range(len(down), len(heads))
        print_table([Column(head=head, align="right" if i in numbers else "left") for i, head in enumerate(heads)],
                    [[value if i not in numbers else _pivoted(value, parts[2]) for i, value in enumerate(line)] for line in lines])
        print(f"{parts[2]}: mean over seeds, with its 95% interval where there are three or more, and both values of two")
    else:
        _list(rows, flags.columns)
    return 0


def _list(rows: Sequence[Row], asked: str) -> None:
    known = columns(rows)
    names = known if asked == "all" else [name.strip() for name in asked.split(",")] if asked else [n for n in SHOWN if n in known]
    for name in names:
        if name not in known:
            raise InputError(f"--columns: unknown column {name!r}{spec.nearest(name, known)}")
    print_table([Column(head=name, keep="middle" if name in ("plan", "reason", "workload", "settings") else None) for name in names],
                [[_shown(one.get(name), name) for name in names] for one in rows])
    print(f"{len(rows)} records; columns: {', '.join(name for name in known if name not in names)}")


def _shown(value: Any, name: str) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for end, unit in UNITS.items():
            if name.endswith(end):
                return cell_text(Cell(value=value), unit)
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    return spec.show(value)


def _pivoted(value: Any, name: str) -> str:
    if value is None or isinstance(value, str):
        return value or UNKNOWN
    for end, unit in UNITS.items():
        if name.endswith(end):
            return cell_text(Cell(value=value), unit)
    span = f" ({value.span[0]:.6g} to {value.span[1]:.6g})" if value.span and value.span[0] < value.span[1] else ""
    return f"{value.mean:.6g}" + (f" ± {value.half_width:.2g}" if value.half_width else span)


def _export(rows: Sequence[Row], where: str) -> int:
    text = to_csv(rows)
    if where == "-":
        sys.stdout.write(text)
        return 0
    try:
        pathlib.Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--csv={where}: {error.strerror or error}") from None
    print(f"wrote {len(rows)} records to {where}", file=sys.stderr)
    return 0

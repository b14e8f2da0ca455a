"""does it fit a topology, where does the memory go, how fast is a step, what to change.

  jaxmem check --model=llama3-8b --plan=fsdp=64,remat=block --topology=v5p-128 --batch=64 --seq=8192
  jaxmem check --program=my_file.py:build --topology=h100:8

Every program of the workload (init, train, eval, save) is compiled for the real target, which need
not be here. The answer goes to stdout and, as a page, to --report; progress goes to stderr. A
program of your own is a function build(mesh_for) that returns (fn, args, jit_kwargs), with
abstract arguments.

Exit status: 0 fits or tight, 2 bad input, 3 does not fit, 4 unknown.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import sys
from typing import Any

from absl import flags as absl_flags

from jaxmem.cli import arguments
from jaxmem.hardware import Topology, parse_topology
from jaxmem.models.configs import MODELS, seq_for
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal, shards_of
from jaxmem.spec import InputError, nearest, parse_preset
from jaxmem.workload import Workload

PROGRAMS = ("init", "train", "eval", "save")
STATUS = {"fits": 0, "tight": 0, "does_not_fit": 3, "unknown": 4}
_OF_WORKLOADS = ("model", "plan", "optimizer", "batch", "seq", "programs", "rehearsal")
_KEPT = "programs that finished compiling are kept, and the same command goes on from there"


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    absl_flags.DEFINE_string("model", None, "preset and changes, as in llama3-8b,layers=4; jaxmem models lists them", **f)
    absl_flags.DEFINE_string("topology", None, "v5p-128, v5p:4x4x4, 2xv5e-256, h100:16x8, ...; jaxmem topologies lists them", **f)
    absl_flags.DEFINE_string("plan", "fsdp=*", "how it is split and what is recomputed, as in fsdp=16,tensor=4,remat=block; "
                             "one axis may be * and takes the devices that are left", **f)
    absl_flags.DEFINE_string("optimizer", "adamw", "preset and changes, as in adamw,b2=0.95", **f)
    absl_flags.DEFINE_integer("batch", None, "sequences a step, over all devices (default: one a device)", lower_bound=1, **f)
    absl_flags.DEFINE_integer("seq", None, "tokens a sequence (default: 4096, or all positions that the model has, or patches of an image)",
                              lower_bound=1, **f)
    absl_flags.DEFINE_string("rehearsal", "", "a rehearsal buffer beside the batch, as train has it: r=16,capacity=4096", **f)
    absl_flags.DEFINE_string("program", None, "FILE:build, a program of your own instead of a model", **f)
    absl_flags.DEFINE_string("programs", ",".join(PROGRAMS), "which programs to check", **f)
    absl_flags.DEFINE_float("mem_fraction", 0.75,
                            "part of a GPU's memory that JAX may take, as XLA_PYTHON_CLIENT_MEM_FRACTION", **f)
    absl_flags.DEFINE_string("compiler_flags", "",
                             "further compiler flags, separated by spaces; they add to the plan's flags=", **f)
    absl_flags.DEFINE_boolean("advise", False,
                              "when it does not fit, compile the cheapest single changes and say which of them do", **f)
    absl_flags.DEFINE_boolean("json", False, "print one JSON object on stdout and nothing else", **f)
    absl_flags.DEFINE_string("report", None, "where to write the HTML report (default: a file named from the command, "
                             "in this folder; none for no report)", **f)
    absl_flags.DEFINE_float("timeout", 1800.0, "seconds that one program may take to compile", **f)
    absl_flags.DEFINE_integer("jobs", None, "programs compiled at once (default: by the number of cores)", lower_bound=1, **f)
    absl_flags.DEFINE_boolean("no_cache", False, "compile again what is in the cache", **f)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    arguments.no_words(words, "check")
    if flags.timeout <= 0:
        raise InputError(f"--timeout={flags.timeout:g}: seconds, above 0")
    if flags.program is None and flags.model is None:
        raise InputError("what to check? --model=NAME (jaxmem models lists them) or --program=FILE:build")
    if flags.topology is None:
        raise InputError("which topology? --topology=NAME, as in v5p-128 or h100:8 (jaxmem topologies lists them)")
    topology = parse_topology(flags.topology)
    options: dict[str, Any] = {
        "mem_fraction": flags.mem_fraction, "compiler_flags": flags.compiler_flags, "timeout_s": flags.timeout,
        "jobs": flags.jobs, "use_cache": not flags.no_cache,
    }
    try:
        check = _own_program(flags, topology, options) if flags.program is not None else _workload(flags, topology, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_KEPT) from None
    _print(check, as_json=flags.json, report=flags.report)
    return STATUS[check["verdict"]]


def _workload(flags: absl_flags.FlagValues, topology: Topology, options: dict[str, Any]) -> dict[str, Any]:
    programs = _programs(flags.programs)
    batch, seq = flags.batch, flags.seq
    if batch is None or seq is None:
        config = parse_preset(MODELS, flags.model, what="model")
        batch = topology.devices if batch is None else batch
        seq = seq_for(config, 4096) if seq is None else seq
        print(f"taking --batch={batch} --seq={seq}", file=sys.stderr)
    workload = Workload.parse(model=flags.model, optimizer=flags.optimizer, batch=batch, seq=seq)
    plan = Plan.parse(flags.plan, devices=topology.devices)
    rehearsal = Rehearsal.parse(flags.rehearsal) if flags.rehearsal else None
    if rehearsal:
        if problems := rehearsal.problems(batch=workload.batch, shards=shards_of(plan)):
            raise InputError("\n".join(problems))
        workload = dataclasses.replace(workload, batch=workload.batch + rehearsal.r)
    from jaxmem import verdict

    return verdict.check_workload(workload, plan, topology, programs=programs, advise=flags.advise, rehearsal=rehearsal, **options)


def _own_program(flags: absl_flags.FlagValues, topology: Topology, options: dict[str, Any]) -> dict[str, Any]:
    if given := [name for name in (*_OF_WORKLOADS, "advise") if flags[name].present]:
        raise InputError(f"--program brings its own step, so {', '.join('--' + name for name in given)} has no meaning beside it")
    path, colon, function = flags.program.rpartition(":")
    if not colon or not function.isidentifier():
        raise InputError(f"--program={flags.program}: expected FILE:FUNCTION, as in my_file.py:build")
    if not pathlib.Path(path).is_file():
        near = nearest(path, map(str, pathlib.Path(path).parent.glob("*.py"))) if pathlib.Path(path).parent.is_dir() else ""
        raise InputError(f"--program={flags.program}: no file {path}{near}")
    from jaxmem import verdict

    return verdict.check_program(path, function, topology, **options)


def _programs(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in PROGRAMS:
            raise InputError(f"--programs={text}: unknown program {name!r}{nearest(name, PROGRAMS)}")
    if not names:
        raise InputError(f"--programs={text}: at least one of {', '.join(PROGRAMS)}")
    return names


def _print(check: dict[str, Any], *, as_json: bool, report: str | None) -> None:
    """The page first, so that the answer is the last thing on the screen."""
    if report != "none":
        from jaxmem.report import html

        path = pathlib.Path(report or report_name(check))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(html.render(check), encoding="utf-8")
        except OSError as error:  # an answer that took minutes is not lost over a folder
            print(f"no report: {path}: {error.strerror or error}", file=sys.stderr)
        else:
            print(f"report: {path}", file=sys.stderr)
    if as_json:
        print(json.dumps(check))
    else:
        from jaxmem.report import terminal

        print(terminal.render(check), end="")


def report_name(check: dict[str, Any]) -> str:
    """`jaxmem-llama3-8b-...html`: from the three strings, in letters that every file system and shell takes."""
    strings = "-".join(str(check.get(part) or "") for part in ("workload", "plan", "topology"))
    name = re.sub(r"[^A-Za-z0-9.=,+]+", "-", re.sub(r"(model|optimizer)=", "", strings)).strip("-")
    if len(name) > 120:
        name = f"{name[:110]}-{hashlib.sha256(strings.encode()).hexdigest()[:8]}"
    return f"jaxmem-{name}.html"

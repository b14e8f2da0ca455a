"""how small runs share devices: one program for many, parts, MIG slices; how many fit.

  jaxmem pack --topology=h100:1 "8*model=gpt2,batch=4,seq=1024" "2*model=gpt2,batch=8,seq=512"
  jaxmem pack --topology=v5e-8 "32*model=decoder-tiny,batch=8,seq=128"
  jaxmem pack --topology=h100:1 --largest "model=decoder-tiny,batch=8,seq=128"

Runs of one workload may differ in seed, learning rate, clip and data. Each workload's train step is
compiled for the topology with one run and with two (--plan is of one run), and for the smallest MIG
slice that may hold it; programs that are recommended with more runs on a device are compiled with
as many, and arranged again where they take more than the first two say. Bytes are the compiler's,
seconds are predicted from its schedule; programs on one device are taken to take turns. --largest
says instead how many runs of one workload fit in one program.

Exit status: 0 there is a way, 2 bad input, 3 none fits, or the best one could not be verified,
4 unknown: a program did not compile, for another reason than memory.
"""

import dataclasses
import json
import sys
from typing import Any

from absl import flags as absl_flags

from jaxmem import environment
from jaxmem.cli.tables import print_table
from jaxmem.colocate import packing
from jaxmem.hardware import Topology, parse_topology
from jaxmem.plan import Plan
from jaxmem.report.cells import Column
from jaxmem.report.experiment_page import number_text
from jaxmem.report.units import UNKNOWN, bytes_text, percent_text
from jaxmem.spec import InputError, nearest

NOT_FITTING, UNKNOWABLE = 3, 4


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    absl_flags.DEFINE_string("topology", "h100:1", "devices to share, as in v5e-8 or h100:1", **f)
    absl_flags.DEFINE_string("plan", "", "how one run is split; its devices are one part of the topology", **f)
    absl_flags.DEFINE_string("prefer", "throughput", "throughput, or isolation: a run has its memory and faults to itself", **f)
    absl_flags.DEFINE_boolean("largest", False, "how many runs of one workload fit in one program", **f)
    absl_flags.DEFINE_float("mem_fraction", 0.75, "part of a GPU's memory that JAX takes", **f)
    absl_flags.DEFINE_float("timeout", 1800.0, "seconds that compiling one program may take", lower_bound=1.0, **f)
    absl_flags.DEFINE_boolean("json", False, "print one JSON object", **f)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    from jaxmem.colocate import fitting, mix

    if flags.prefer not in packing.PREFER:
        raise InputError(f"--prefer={flags.prefer}: throughput or isolation{nearest(flags.prefer, packing.PREFER)}")
    if not words:
        raise InputError('which runs? as in jaxmem pack --topology=h100:1 "8*model=gpt2,batch=4,seq=1024"')
    topology = parse_topology(flags.topology)
    plan = Plan.parse(flags.plan)
    runs = [mix.Runs.parse(word) for word in words]
    try:
        return (largest if flags.largest else recommend)(flags, runs, plan, topology)
    except fitting.Unknown as error:
        print(f"jaxmem pack: unknown, because a program did not compile: {error}", file=sys.stderr)
        return UNKNOWABLE


def recommend(flags: absl_flags.FlagValues, runs: list[Any], plan: Plan, topology: Topology) -> int:
    from jaxmem.colocate import mix
    from jaxmem.verdict import usable_source

    found = mix.compiled(runs, plan, topology, mem_fraction=flags.mem_fraction, timeout_s=flags.timeout, progress=to_stderr)
    checked = mix.recommended(found, runs, plan, topology, prefer=flags.prefer, mem_fraction=flags.mem_fraction, timeout_s=flags.timeout,
                              progress=to_stderr)
    found, ways, advice = checked.mix, checked.ways, checked.advice
    if flags.json:
        print(json.dumps({"topology": topology.text, "plan": str(plan), "backend": found.backend, "usable_bytes": found.usable_bytes,
                          "recommended": advice.best.how if advice.best else None, "verified": checked.verified,
                          "problem": checked.problem, "reasons": advice.reasons,
                          "programs": [dataclasses.asdict(one) | {"slices": dict(one.slices)} for one in found.programs],
                          "arrangements": [dataclasses.asdict(one) | {"waste": one.waste} for one in ways],
                          "versions": environment.versions(),
                          "sources": {"bytes": "compile", "seconds": "estimate", "usable_bytes": usable_source(topology)}}))
    else:
        show(checked, topology.text, usable_source(topology))
    return 0 if advice.best else NOT_FITTING


def show(checked: Any, topology: str, usable_source: str) -> None:
    found, ways, advice = checked.mix, checked.ways, checked.advice
    right = ["runs", "first run", "each further", "step", "each further "]
    print_table([Column(head="program"), *(Column(head=head, align="right") for head in right)],
                [[one.name, str(one.count), bytes_text(one.bytes(1)), bytes_text(one.each_bytes), number_text(one.first_s, "seconds"),
                  number_text(one.more_s, "seconds")] for one in found.programs])
    print(f"memory: compile, for {found.backend}; seconds: estimate; {bytes_text(found.usable_bytes)} usable a device ({usable_source})\n"
          f"{environment.versions_text()}\n")
    print_table([Column(head="way"), Column(head="devices", align="right"), Column(head="a step of every run", align="right"),
                 Column(head="unused", align="right"), Column(head="on the first device")],
                [[one.how, str(len(one.devices)) if one.devices else UNKNOWN, number_text(one.round_s, "seconds"),
                  percent_text(one.waste) if one.waste is not None else UNKNOWN,
                  ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counted(one.devices[0])) if one.devices else "not possible"]
                 for one in ways])
    print(f"\nRecommended on {topology}: {advice.best.how if advice.best else 'none of these'}"
          f"{', verified by compiling it' if checked.verified else ', not verified by compiling it' if advice.best else ''}")
    for reason in advice.reasons:
        print(f"  {reason}")


def counted(device: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """Equal entries together: slices are listed one by one."""
    out: dict[str, int] = {}
    for name, n in device:
        out[name] = out.get(name, 0) + n
    return list(out.items())


def largest(flags: absl_flags.FlagValues, runs: list[Any], plan: Plan, topology: Topology) -> int:
    from jaxmem.colocate import fitting
    from jaxmem.colocate.parts import parts_for
    from jaxmem.verdict import usable_source

    if len(runs) != 1:
        raise InputError(f"--largest takes one workload, not {len(runs)}")
    groups = parts_for(plan, topology)
    found = fitting.largest(lambda n: fitting.try_runs(runs[0].workload, plan, topology, n, mem_fraction=flags.mem_fraction,
                                                       timeout_s=flags.timeout, progress=to_stderr), step=groups)
    if flags.json:
        print(json.dumps({"topology": topology.text, "plan": str(plan), **dataclasses.asdict(found), "versions": environment.versions(),
                          "sources": {"runs": "compile", "peak_bytes": "compile", "step_s": "estimate",
                                      "usable_bytes": usable_source(topology)}}))
    else:
        print_table([Column(head="runs", align="right"), Column(head="memory a device", align="right"), Column(head="fits")],
                    [[str(one.runs), number_text(one.peak_bytes, "bytes"), "yes" if one.fits else "no"] for one in found.tried])
        print(f"{found.runs} runs of {runs[0].workload} fit {topology} in one program ({bytes_text(found.usable_bytes)} usable a device, "
              f"{usable_source(topology)}; {found.runs + groups} {'were tried and do not' if found.certain else 'were not tried'})\n"
              f"memory: compile, for {found.tried[0].backend}; {environment.versions_text()}")
    return 0 if found.runs else NOT_FITTING


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

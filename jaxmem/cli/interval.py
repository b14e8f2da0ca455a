"""how often to write a checkpoint: from its size, the storage, the failure rate.

  jaxmem interval --model=llama3-8b --topology=h100:16x8 --bandwidth=20GB/s --step_s=1.5
  jaxmem interval --model=llama3-70b --topology=v5p-512 --bandwidth=50GB/s --mtbf_hours=24
  jaxmem interval --run=runs/first --mtbf_hours=24

Bytes are exact from shapes. All else is an estimate in closed form: the interval of the largest
expected goodput for failures that come at a constant rate, with each mode's own stall and commit
time. What is not known is not made up: without --bandwidth or a failure rate the answer is a
table over them. A rate is published for few chips (jaxmem takes that of Llama 3 for h100).
With --run everything is as in that run, and stall, commit time, step and start are what it
measured; --stall_s and --commit_s give measured ones by hand. Either is of the mode --snapshot.
"""

import json
import math
import re
import sys
from typing import Any

from absl import flags as absl_flags

from jaxmem import environment
from jaxmem.cli import arguments
from jaxmem.cost import checkpoint_time, checkpointing
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.report import interval as report
from jaxmem.runs.checkpoint_costs import run_costs
from jaxmem.runs.reading import read_run
from jaxmem.runs.settings import SNAPSHOTS
from jaxmem.runs.summary import require_run
from jaxmem.spec import InputError, nearest
from jaxmem.workload import Workload

BANDWIDTHS = (1e9, 5e9, 20e9, 100e9, 500e9)  # where it is not given
MTBF_HOURS = (1.0, 6.0, 24.0, 168.0)
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
NEARLY = 0.001  # of the goodput: what the longest interval may lose that is said to do as well
_RATE = re.compile(r"([\d.]+(?:e[+-]?\d+)?)\s*([kMGTP]?)(i?)B(?:/s|ps)?", re.IGNORECASE)


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text, number = absl_flags.DEFINE_string, absl_flags.DEFINE_float
    text("run", None, "a run of jaxmem train: its model, plan and topology, and what it measured", **f)
    text("model", None, "preset and changes, as in llama3-8b,layers=4", **f)
    text("topology", None, "v5p-128, h100:16x8, ...", **f)
    text("plan", "fsdp=*", "how it is split, as in data=2,fsdp=64", **f)
    text("optimizer", "adamw", "preset and changes; its state is a part of the checkpoint", **f)
    text("bandwidth", None, "what all hosts together write to storage, as in 20GB/s", **f)
    text("host_bandwidth", None, "what one host writes at most, as in 2GB/s", **f)
    number("mtbf_hours", None, "mean hours between failures of the whole job", **f)
    number("device_mtbf_hours", None, "or hours between failures of one device; the job's is that over the devices", **f)
    number("restart_s", None, "seconds from a failure to the start of reading: noticing it, new machines, start, compiling", **f)
    number("step_s", None, "seconds a step; --batch instead has it predicted, by compiling as jaxmem check does", **f)
    absl_flags.DEFINE_integer("batch", None, "sequences a step", lower_bound=1, **f)
    absl_flags.DEFINE_integer("seq", None, "tokens a sequence (default: as of jaxmem check)", lower_bound=1, **f)
    number("stall_s", None, "seconds that a checkpoint keeps training waiting, measured", **f)
    number("commit_s", None, "seconds from the begin of a checkpoint to its commit, measured", **f)
    text("snapshot", "async", "the mode that is recommended for: sync, async or lazy, as of jaxmem train", **f)
    absl_flags.DEFINE_boolean("json", False, "print one JSON object on stdout and nothing else", **f)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    arguments.no_words(words, "interval")
    found = answer(flags)
    print(json.dumps(found) if flags.json else report.render(found), end="\n" if flags.json else "")
    return 0


def answer(flags: absl_flags.FlagValues) -> dict[str, Any]:
    """Everything that is printed, as one dict: seconds, bytes, shares of 1; None is unknown. Raises InputError."""
    start_s = None
    if flags.run is not None:
        start_s = take_run(flags)
    for name, example in (("model", "llama3-8b"), ("topology", "h100:16x8")):
        if flags[name].value is None:
            raise InputError(f"which {name}? --{name}=NAME, as in --{name}={example}")
    if flags.snapshot not in SNAPSHOTS:
        raise InputError(f"--snapshot={flags.snapshot}: expected {', '.join(SNAPSHOTS)}{nearest(flags.snapshot, SNAPSHOTS)}")
    for name in ("mtbf_hours", "device_mtbf_hours", "step_s"):
        if (value := flags[name].value) is not None and not 0 < value < math.inf:
            raise InputError(f"--{name}={value:g}: expected a number above 0")
    for name in ("restart_s", "stall_s", "commit_s"):
        if (value := flags[name].value) is not None and not 0 <= value < math.inf:
            raise InputError(f"--{name}={value:g}: expected seconds, 0 or more")
    if (flags.stall_s is None) != (flags.commit_s is None):
        raise InputError("--stall_s and --commit_s go together: the one says what a checkpoint costs, the other when it is of use")
    if flags.mtbf_hours is not None and flags.device_mtbf_hours is not None:
        raise InputError("--mtbf_hours is of the whole job and --device_mtbf_hours of one device: give one of them")
    topology = parse_topology(flags.topology)
    plan = Plan.parse(flags.plan, devices=topology.devices)
    if flags.snapshot == "lazy" and plan.step != "split":
        raise InputError(f"plan {plan}: lazy snapshots need step=split")
    workload = Workload.parse(model=flags.model, optimizer=flags.optimizer, batch=flags.batch or topology.devices, seq=flags.seq,
                              usual_seq=4096)
    taken = [name for name in ("stall_s", "commit_s", "step_s") if flags.run is not None and not flags[name].present]
    sources = dict.fromkeys(["start_s", *taken], "measure")  # what the user gives has none
    step_s, source = flags.step_s, "measured" if "step_s" in taken else "--step_s"
    if step_s is None and flags.batch:
        step_s, source = predicted_step_s(workload, plan, topology), "predicted from the compiled step"
        sources["step_s"] = "estimate"
    size = checkpoint_time.checkpoint_bytes(workload, plan, topology)
    rates = {"bytes_per_s": rate("bandwidth", flags.bandwidth), "host_bytes_per_s": rate("host_bandwidth", flags.host_bandwidth)}
    mtbf_s = flags.mtbf_hours * 3600 if flags.mtbf_hours else checkpointing.job_mtbf_s(topology, flags.device_mtbf_hours)
    published = checkpointing.DEVICE_HOURS.get(topology.chip.name) if flags.mtbf_hours is None and flags.device_mtbf_hours is None else None
    out: dict[str, Any] = {
        "model": workload.model_text, "optimizer": workload.optimizer_text, "plan": str(plan), "topology": str(topology),
        "devices": topology.devices, "hosts": topology.hosts, "snapshot": flags.snapshot, "total_bytes": size.total,
        "host_bytes": size.host, "device_bytes": size.device, "resident_bytes": size.resident, **rates,
        "write_s": checkpoint_time.write_s(size, **rates), "start_s": start_s,
        "read_s": checkpoint_time.read_s(size, topology, **rates) if start_s is None else None,
        "restart_s": flags.restart_s, "stall_s": flags.stall_s, "commit_s": flags.commit_s, "mtbf_s": mtbf_s,
        "device_hours": published[0] if published else flags.device_mtbf_hours,
        "mtbf_source": f"{published[1]} ({published[2]})" if published else None,
        "step_s": step_s, "step_source": source if step_s is not None else None, "source": "estimate",
        "versions": environment.versions()}
    out["sources"] = {name: how for name, how in sources.items() if out[name] is not None}

    def of(mode: str, bytes_per_s: float | None, failures_s: float) -> dict[str, Any] | None:
        own = {"bytes_per_s": bytes_per_s, "host_bytes_per_s": rates["host_bytes_per_s"]}
        writing = checkpoint_time.write_s(size, **own)
        reading = checkpoint_time.read_s(size, topology, **own) if start_s is None else start_s
        restart_s = (flags.restart_s or 0.0) + (reading or 0.0)  # what is not known is left out, and the goodput is an upper bound
        costs = None
        if flags.stall_s is not None and mode == flags.snapshot:
            costs = checkpointing.Costs(stall_s=flags.stall_s, commit_s=flags.commit_s, restart_s=restart_s)
        elif writing is not None:
            costs = checkpoint_time.mode_costs(mode, size, topology, write_s=writing, restart_s=restart_s, step_s=step_s)
        if costs is None:
            return None
        found = recommended(costs, failures_s, step_s)
        if flags.restart_s is None and reading is None:
            for account in [found["account"], *found["around"]]:
                account["restarts"] = None
        return found
    if mtbf_s is not None and (out["write_s"] is not None or flags.stall_s is not None):
        out["modes"] = {mode: of(mode, rates["bytes_per_s"], mtbf_s) for mode in SNAPSHOTS}
        return out | {"table": None}
    bandwidths = [rates["bytes_per_s"]] if out["write_s"] is not None or flags.stall_s is not None else list(BANDWIDTHS)
    failures = [mtbf_s] if mtbf_s is not None else [hours * 3600 for hours in MTBF_HOURS]
    return out | {"modes": None, "table": [{"bytes_per_s": one, "cells": [{"mtbf_s": two, "best": of(flags.snapshot, one, two)}
                                                                         for two in failures]} for one in bandwidths]}


def take_run(flags: absl_flags.FlagValues) -> float | None:
    """Set the flags that were not given to what the run has; returns the seconds from a start to the first step. Raises InputError."""
    run = read_run(require_run(flags.run))
    if (text := run.asked("workload")) is None or (topology := run.asked("topology")) is None:
        raise InputError(f"--run={flags.run}: its config.json does not say what was trained")
    workload, costs = Workload.parse_line(text), run_costs(run)
    if costs.stall_s is None or costs.commit_s is None:
        raise InputError(f"--run={flags.run}: it committed no checkpoint before its last; one with a smaller --checkpoint_every says more")
    values = {"model": workload.model_text, "optimizer": workload.optimizer_text, "plan": run.asked("plan"), "topology": topology,
              "snapshot": run.asked("snapshot"), "step_s": costs.step_s, "stall_s": costs.stall_s,
              "commit_s": max(costs.stall_s, costs.commit_s)}
    changed = [name for name in ("model", "optimizer", "plan", "topology", "snapshot") if flags[name].present]
    if changed:
        raise InputError(f"--run={flags.run} measured its own {', '.join(changed)}: leave --{changed[0]} out")
    for name, value in values.items():
        if value is not None and not flags[name].present:
            flags[name].value = value
    return costs.start_s


def recommended(costs: checkpointing.Costs, mtbf_s: float, step_s: float | None) -> dict[str, Any]:
    """The best interval with its account, in whole steps where a step's time is known, and what a quarter to four times of it would do."""
    best = checkpointing.optimum(costs, mtbf_s)
    limit = "commit" if best is not None and math.isclose(best, costs.commit_s - costs.stall_s) else None
    steps = None
    if best is not None and step_s is not None and best < step_s:
        limit = "step"
    if step_s is not None:
        low = max(1, math.floor((best or 0.0) / step_s))
        steps = max((low, low + 1), key=lambda k: checkpointing.expected(costs, k * step_s, mtbf_s).goodput)
        best = steps * step_s
    if best is None:  # neither stall nor commit takes time, and no step says what the shortest interval is
        raise InputError("a checkpoint that costs nothing is best written after every step; give --step_s, or the commit's real seconds")

    def account(interval_s: float) -> dict[str, float | None]:
        found = checkpointing.expected(costs, interval_s, mtbf_s)
        return {"interval_s": interval_s, "goodput": found.goodput, "stalls": found.stalls, "lost": found.lost, "restarts": found.restarts}
    around = [best * factor for factor in AROUND]
    if steps is not None and step_s is not None:
        around = [k * step_s for k in sorted({max(1, round(steps * factor)) for factor in AROUND})]
    longest_s = longest(costs, mtbf_s, best)
    return {"stall_s": costs.stall_s, "commit_s": costs.commit_s, "interval_s": best, "steps": steps, "account": account(best),
            "young_s": checkpointing.young(costs.stall_s, mtbf_s), "daly_s": checkpointing.daly(costs.stall_s, mtbf_s),
            "limit": limit, "longest_s": longest_s,
            "longest_steps": max(steps, math.floor(longest_s / step_s)) if steps and step_s else None,
            "around": [account(interval_s) for interval_s in around]}


def longest(costs: checkpointing.Costs, mtbf_s: float, best_s: float) -> float:
    """The longest interval whose goodput is at most `NEARLY` below the best: beyond the optimum it only falls."""
    wanted = checkpointing.expected(costs, best_s, mtbf_s).goodput - NEARLY
    low, high = best_s, best_s
    while checkpointing.expected(costs, high, mtbf_s).goodput >= wanted and high < 100 * mtbf_s:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if checkpointing.expected(costs, middle, mtbf_s).goodput >= wanted else (low, middle)
    return low


def rate(flag: str, text: str | None) -> float | None:
    """`20GB/s`, `1.5GiB/s`, `2e10B/s` -> bytes a second."""
    if text is None:
        return None
    found = _RATE.fullmatch(text.strip())
    if found is None or "b" in text:
        raise InputError(f"--{flag}={text}: expected bytes a second, as in 20GB/s or 500MB/s (a network's 200Gbit/s are 25GB/s)")
    power = "KMGTP".find(found[2].upper()) + 1 if found[2] else 0
    try:
        value = float(found[1]) * (1024 if found[3] else 1000) ** power
    except ValueError:
        raise InputError(f"--{flag}={text}: {found[1]} is no number") from None
    if not 0 < value < math.inf:
        raise InputError(f"--{flag}={text}: expected more than 0")
    return value


def predicted_step_s(workload: Workload, plan: Plan, topology: Any) -> float | None:
    """As `jaxmem check` predicts it; what was compiled before is taken from its cache."""
    from jaxmem import verdict

    print("the step's time: compiling, or from the cache of jaxmem check; --step_s gives a measured one", file=sys.stderr)
    check = verdict.check_workload(workload, plan, topology, programs=("train",))
    if check["step_s"] is None:
        print(f"no step time: the check says {check['verdict']}", file=sys.stderr)
    return check["step_s"]

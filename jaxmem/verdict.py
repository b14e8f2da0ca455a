"""Does it fit, where does the memory go, how fast is it: one dict (`check.schema.json`) from compiled programs.

`check_workload` for the three strings, `check` for any jittable function, `check_program` for a file. The verdict comes from the
compiler's outcome against what is usable on the device; nothing that is unknown ever counts as fitting.
"""

import dataclasses
import hashlib
import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem import analysis
from jaxmem.cost import flops as model_flops_module
from jaxmem.environment import versions
from jaxmem.hardware import CHIPS, CLOUD_SHAPES, Topology, parse_topology
from jaxmem.models.configs import blocks
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal
from jaxmem.resident import name_rehearsal, rehearsal_bytes, resident_bytes
from jaxmem.spec import InputError
from jaxmem.targets.compile import Artifact, Progress, Request, backend_name, compile_programs
from jaxmem.targets.flags import flags_for
from jaxmem.workload import Workload

SCHEMA = 1
TIGHT = 0.04  # less than this part of the usable bytes left
WORDS = ("fits", "tight", "does_not_fit", "unknown")
STEP_PROGRAMS = ("train", "gradients", "update")


def step_programs(plan: Plan) -> tuple[str, ...]:
    return ("gradients", "update") if plan.step == "split" else ("train",)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def usable(topology: Topology, mem_fraction: float) -> tuple[int | None, str | None]:
    """Bytes a program may take on one device, and how that number comes about."""
    chip = topology.chip
    if chip.kind == "tpu" and chip.usable_bytes and chip.hbm_bytes:
        return chip.usable_bytes, f"the compiler's own limit for {chip.name}, of {gib(chip.hbm_bytes)}"
    if chip.kind == "gpu" and chip.hbm_bytes:
        reserve = chip.runtime_reserve_bytes or 0
        pool = int(chip.hbm_bytes * mem_fraction)
        left = min(pool, chip.hbm_bytes - reserve)
        return left, (f"the smaller of {gib(chip.hbm_bytes)} x {mem_fraction:g} (JAX's pool) and {gib(chip.hbm_bytes)} less {gib(reserve)} "
                      "(CUDA context and NCCL, outside the pool, an estimate)")
    return None, None


def usable_source(topology: Topology) -> str:
    """Where `usable` is from: a TPU's is its compiler's own, a GPU's follows from its pool and a reserve that is not measured."""
    return "compile" if topology.chip.kind == "tpu" else "estimate"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def check_fraction(mem_fraction: float) -> None:
    if not 0 < mem_fraction <= 1:
        raise InputError(f"mem_fraction={mem_fraction:g}: a fraction above 0 and at most 1, as in 0.75")


# ---------------------------------------------------------------- entry points

def check_workload(workload: Workload, plan: Plan, topology: Topology, *, programs: tuple[str, ...] = ("init", "train", "eval", "save"),
                   mem_fraction: float = 0.75, compiler_flags: str = "", timeout_s: float = 1800, jobs: int | None = None,
                   use_cache: bool = True, advise: bool = False, rehearsal: Rehearsal | None = None,
                   progress: Progress = to_stderr) -> dict[str, Any]:
    """The check of the three strings. Raises InputError with every problem of the plan. `rehearsal`: a buffer whose `r` rows are part
    of the workload's batch."""
    check_fraction(mem_fraction)
    if problems := plan.problems(workload, topology):
        raise InputError("\n".join(problems))
    start = time.monotonic()
    flags = flags_for(plan.flags, topology, compiler_flags)
    left_out = [name for name in ("init", "train", "eval", "save") if name not in programs]
    programs = tuple(x for p in programs for x in (step_programs(plan) if p == "train" else (p,)))
    request = Request(spec={"kind": "workload", "workload": str(workload), "plan": str(plan)}, programs=programs, topology=topology,
                      flags=flags)
    artifacts = compile_programs(request, timeout_s=timeout_s, jobs=jobs, use_cache=use_cache, progress=progress)
    artifacts = dict(artifacts)
    resident = {name: resident_bytes(workload, plan, name) + rehearsal_bytes(rehearsal, workload, plan) for name in artifacts}
    flops = model_flops_module.model_flops(workload)
    check = assemble(artifacts, topology, mem_fraction=mem_fraction, flags=flags, resident=resident, model_flops=flops)
    explain_refusal(check, request, topology, resident, timeout_s=timeout_s, use_cache=use_cache, progress=progress)
    if rehearsal:
        name_rehearsal(check, rehearsal, workload, plan, topology)
    step_s = check["step_s"]
    check |= {"workload": str(workload), "plan": str(plan), "parameters": workload.model.parameters, "model_flops": flops,
              "tokens_per_s": workload.tokens / step_s if step_s else None,
              "mfu": model_flops_module.mfu(workload, topology, step_s, dtype=plan.compute) if step_s else None}
    if check["mfu"] is not None and check["mfu"] > 1:
        check["warnings"].append(f"predicted {step_s:.4g} s a step would be {100 * check['mfu']:.0f}% MFU at the {plan.compute} peak, "
                                 "which is impossible; the prediction is withheld")
        check |= {"step_s": None, "tokens_per_s": None, "mfu": None, "seconds_by_limit": {}}
        check["sources"] = {k: v for k, v in check["sources"].items() if k not in ("step_s", "seconds_by_limit")}
    stack = blocks(workload.model)
    if stack is not None and stack.window and stack.window_pattern > 1:
        check["warnings"].append("windowed and global layers alternate behind a conditional, and every layer is costed as a global one: "
                                 "the step time is an upper estimate")
    if left_out:
        check["warnings"].append(f"not checked: {', '.join(left_out)}; the verdict is of the other programs alone")
    check["sources"] |= {"parameters": "estimate", "model_flops": "estimate"}
    check["sources"] |= {k: "estimate" for k in ("tokens_per_s", "mfu") if check[k] is not None}
    from jaxmem import advice, offloaded
    check["offload"], notes, errors = offloaded.report(workload, plan, artifacts)
    if errors:
        check["problems"] += errors
        check["verdict"] = "unknown" if check["verdict"] in ("fits", "tight") else check["verdict"]
    if check["offload"]:
        check["sources"]["offload"] = "compile"
    check["warnings"] += notes
    if check["verdict"] == "does_not_fit" or (check["verdict"] == "tight" and advise):
        failing = tuple(n for n in artifacts if check["programs"][n]["status"] != "ok" or n == check["worst_program"] or n in STEP_PROGRAMS)

        def again(changed: tuple[Workload, Plan]) -> dict[str, Any]:
            """The programs that failed, and the step: a change that mends one may break the other."""
            new_workload, new_plan = changed
            names = tuple(dict.fromkeys(n for p in failing for n in (step_programs(new_plan) if p in STEP_PROGRAMS else (p,))))
            changed_request = dataclasses.replace(request, spec={"kind": "workload", "workload": str(new_workload), "plan": str(new_plan)},
                                                  programs=names, flags=flags_for(new_plan.flags, topology, compiler_flags))
            compiled = compile_programs(changed_request, timeout_s=timeout_s, jobs=jobs, use_cache=use_cache, progress=progress)
            kept = rehearsal_bytes(rehearsal, new_workload, new_plan)
            beside = {name: resident_bytes(new_workload, new_plan, name) + kept for name in compiled}
            return assemble(compiled, topology, mem_fraction=mem_fraction, flags=changed_request.flags, resident=beside,
                            model_flops=model_flops_module.model_flops(new_workload))
        check["advice"] = advice.advise(workload, plan, topology, check, verify=again if advise else None, progress=progress)
    check["wall_s"] = time.monotonic() - start
    return check


def check(fn: Callable, *args: Any, topology: str | Topology, donate_argnums: int | tuple[int, ...] = (),
          static_argnums: int | tuple[int, ...] = (), jit_kwargs: Mapping[str, Any] | None = None, mem_fraction: float = 0.75,
          compiler_flags: str = "", flags: str = "default", timeout_s: float = 1800, use_cache: bool = True,
          progress: Progress = to_stderr, **kwargs: Any) -> dict[str, Any]:
    """Checks any jittable function (NNX, Linen or plain) on a topology that need not be here.

    `args` and `kwargs` are trees of `jax.ShapeDtypeStruct`s with `NamedSharding`s on `jaxmem.mesh(topology, axes)`; on one device
    they need none. `donate_argnums` as for `jax.jit`. Returns the dict of `check.schema.json`. Raises InputError for concrete
    arrays, missing shardings, and meshes that do not match the topology.
    """
    from jaxmem.targets import foreign
    check_fraction(mem_fraction)
    topology = topology if isinstance(topology, Topology) else parse_topology(topology)
    as_tuple = lambda x: (x,) if isinstance(x, int) else tuple(x)  # noqa: E731
    name = getattr(fn, "__name__", type(fn).__name__)
    start = time.monotonic()
    try:
        blob, description = foreign.export(fn, args, kwargs, topology, donate_argnums=as_tuple(donate_argnums),
                                           static_argnums=as_tuple(static_argnums), jit_kwargs=dict(jit_kwargs or {}))
    except foreign.NotCovered as error:
        return not_covered(name, topology, str(error))
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as folder:
        path = pathlib.Path(folder) / "program.export"
        path.write_bytes(blob)
        spec = {"kind": "export", "description": description, "export": str(path)}
        salt = hashlib.sha256(blob).hexdigest()
        return _check_foreign(spec, name, topology, salt=salt, mem_fraction=mem_fraction, flags=flags, compiler_flags=compiler_flags,
                              timeout_s=timeout_s, use_cache=use_cache, progress=progress, start=start)


def check_program(path: str, function: str, topology: Topology, *, mem_fraction: float = 0.75, compiler_flags: str = "",
                  timeout_s: float = 1800, jobs: int | None = None, use_cache: bool = True,
                  progress: Progress = to_stderr) -> dict[str, Any]:
    """`--program=FILE:FUNCTION`: the function runs in the compile child; see `foreign.load_file`."""
    check_fraction(mem_fraction)
    spec = {"kind": "file", "file": str(pathlib.Path(path).resolve()), "function": function}
    salt = None  # what the file imports is unknown, so only the lowered text can be a key
    return _check_foreign(spec, f"{pathlib.Path(path).name}:{function}", topology, salt=salt, mem_fraction=mem_fraction, flags="default",
                          compiler_flags=compiler_flags, timeout_s=timeout_s, use_cache=use_cache, progress=progress,
                          start=time.monotonic())


def _check_foreign(spec: dict, name: str, topology: Topology, *, salt: str | None, mem_fraction: float, flags: str, compiler_flags: str,
                   timeout_s: float, use_cache: bool, progress: Progress, start: float) -> dict[str, Any]:
    all_flags = flags_for(flags, topology, compiler_flags)
    request = Request(spec=spec, programs=("program",), topology=topology, flags=all_flags, salt=salt)
    artifacts = compile_programs(request, timeout_s=timeout_s, use_cache=use_cache, progress=progress)
    out = assemble(artifacts, topology, mem_fraction=mem_fraction, flags=all_flags, resident={}, model_flops=None)
    explain_refusal(out, request, topology, {}, timeout_s=timeout_s, use_cache=use_cache, progress=progress)
    out |= {"workload": name, "wall_s": time.monotonic() - start}
    return out


def roomier(topology: Topology) -> Topology | None:
    """A TPU slice of as many devices with more memory on each, or None."""
    chip = topology.chip
    for name in ("v5p", "v6e"):
        shape = next((s for s in CLOUD_SHAPES[name].values() if math.prod(s) == topology.chips_per_slice), None)
        other = CHIPS[name]
        if chip.kind == "tpu" and chip.devices_per_chip == 1 and shape and (other.usable_bytes or 0) > 1.5 * (chip.usable_bytes or 0):
            return Topology(chip=other, shape=shape, slices=topology.slices)
    return None


def explain_refusal(check: dict[str, Any], request: Request, topology: Topology, resident: Mapping[str, int], *, timeout_s: float,
                    use_cache: bool, progress: Progress) -> None:
    """A TPU compiler that refuses a program gives no schedule. Where its memory would go is read from the same program compiled for a
    chip that has room for it, and said so."""
    worst = check["worst_program"]
    if check["verdict"] != "does_not_fit" or check["programs"][worst]["status"] != "oom" or (where := roomier(topology)) is None:
        return
    progress(f"{worst}: refused; compiling it for {where} to see where the memory goes")
    again = dataclasses.replace(request, programs=(worst,), topology=where, flags=flags_for("default", where))
    artifact = compile_programs(again, timeout_s=timeout_s, use_cache=use_cache, progress=progress)[worst]
    found = analysis.memory(artifact, where)
    if found is None:
        return
    check |= analysis.peak_composition(found, resident.get(worst, 0), reported=None)
    check["timeline"].append({"program": worst, **analysis.thinned(found, resident.get(worst, 0))})
    check["sources"] |= {"composition": "compile", "buffers": "compile", "timeline": "compile"}
    check["warnings"].append(f"composition, buffers and timeline of {worst} are of the same program compiled for {where}, which has room "
                             f"for it; the compiler of {topology} gave none when it refused")


def not_covered(name: str, topology: Topology, reason: str) -> dict[str, Any]:
    out = empty(topology, (), backend_name(topology))
    return out | {"workload": name, "problems": [f"not covered: {reason}"], "versions": versions()}


# ---------------------------------------------------------------- from artifacts to the dict

def empty(topology: Topology, flags: tuple[str, ...], backend: str) -> dict[str, Any]:
    """A check that knows nothing yet."""
    return {"schema": SCHEMA, "workload": None, "topology": topology.text, "plan": None, "devices": topology.devices, "verdict": "unknown",
            "usable_bytes": None, "usable_note": None, "capacity_bytes": topology.chip.hbm_bytes, "peak_bytes": None,
            "headroom_bytes": None, "host_bytes": None, "worst_program": None, "programs": {}, "composition": [],
            "unattributed_bytes": None, "buffers": [], "timeline": [], "parameters": None, "model_flops": None, "step_s": None,
            "tokens_per_s": None, "mfu": None, "seconds_by_limit": {}, "traffic": [], "offload": [], "problems": [], "warnings": [],
            "advice": [], "sources": {}, "backend": backend, "versions": {}, "flags": list(flags), "cached": False, "wall_s": None}


def assemble(artifacts: Mapping[str, Artifact], topology: Topology, *, mem_fraction: float, flags: tuple[str, ...],
             resident: Mapping[str, int], model_flops: float | None) -> dict[str, Any]:
    """The dict of `check.schema.json` but for the strings and what follows from them."""
    first = next(iter(artifacts.values()))
    out = empty(topology, flags, first.result["backend"])
    out["versions"], out["cached"] = first.result["versions"], all(a.cached for a in artifacts.values())
    limit, note = usable(topology, mem_fraction)
    if topology.chip.kind == "tpu" and (said := [a.result["limit_bytes"] for a in artifacts.values() if a.result.get("limit_bytes")]):
        limit, note = said[0], "the compiler's own limit, from its refusal"
    out["usable_bytes"], out["usable_note"] = limit, note
    rows = {name: program_row(artifact, topology, limit, resident.get(name, 0)) for name, artifact in artifacts.items()}
    out["programs"] = {name: row.shown for name, row in rows.items()}
    out["verdict"] = max((row.verdict for row in rows.values()), key=("fits", "tight", "unknown", "does_not_fit").index)
    worst = worst_of(rows)
    out["worst_program"] = worst
    peak = rows[worst].peak
    out["peak_bytes"] = peak
    out["headroom_bytes"] = limit - peak if limit is not None and peak is not None else None
    hosts = [row.shown["host_bytes"] for row in rows.values() if row.shown["host_bytes"] is not None]
    out["host_bytes"] = max(hosts) * topology.devices_per_host if hosts else None
    for name, row in rows.items():
        out["problems"] += [f"{name}: {p}" for p in row.shown["problems"]]
        if row.reason:
            out["problems"].append(f"{name}: {row.shown['status']}: {row.reason}")
    if topology.chip.kind == "cpu":
        out["warnings"].append("CPU emulation: its peak is not that of any accelerator, so the verdict is unknown; memory figures are the "
                               "CPU backend's")
    timelines = {}
    for name, artifact in artifacts.items():
        try:
            found = analysis.memory(artifact, topology)
        except Exception as error:  # the verdict stands without the reader
            out["warnings"].append(f"{name}: its schedule could not be read ({type(error).__name__}: {error}); composition unknown")
            continue
        if found is None:
            continue
        timelines[name] = found
        out["timeline"].append({"program": name, **analysis.thinned(found, resident.get(name, 0))})
    if worst in timelines:
        out |= analysis.peak_composition(timelines[worst], resident.get(worst, 0), reported=rows[worst].peak)
    elif worst in rows and rows[worst].shown["status"] == "oom":
        out |= analysis.from_refusal(artifacts[worst].result)
    speed = None
    try:
        speed = analysis.speed({n: a for n, a in artifacts.items() if n in (*STEP_PROGRAMS, "program")}, topology, model_flops)
    except Exception as error:
        out["warnings"].append(f"the step's speed could not be predicted ({type(error).__name__}: {error})")
    if speed:
        out |= {"step_s": speed["step_s"], "seconds_by_limit": speed["seconds_by_limit"] or {}, "traffic": speed["traffic"]}
        out["warnings"] += speed["warnings"]
    for name, beside in resident.items():
        if beside and rows[name].peak is not None:
            out["warnings"].append(f"{name}: the peak counts {gib(beside)} of state that stay on the device though this program does not "
                                   "take them")
    for name, artifact in artifacts.items():
        total, held = summed_peak(artifact.result["memory"]), device_peak(artifact.result["memory"], topology.chip.kind)
        if total and held and total > 1.05 * held and total - held > 0.01 * (limit or 0):
            out["warnings"].append(f"{name}: argument + output - alias + temp is {gib(total)}, but the compiler allocates {gib(held)}: its "
                                   "temp counts some values of loop bodies more than once; the verdict uses what is allocated")
    for key in ("peak_bytes", "headroom_bytes", "host_bytes", "programs", "composition", "buffers", "timeline", "traffic"):
        if out[key] not in (None, [], {}):
            out["sources"][key] = "compile"
    if out["composition"]:
        out["sources"]["unattributed_bytes"] = "compile"
    if out["traffic"]:  # counts and bytes are the compiler's, seconds a model's
        out["sources"] |= {"traffic.exposed_s": "estimate", "traffic.hidden_s": "estimate"}
    # the schedule is the compiler's, the seconds are a model's
    out["sources"] |= {key: "estimate" for key in ("step_s", "seconds_by_limit", "capacity_bytes") if out[key] not in (None, {})}
    if out["verdict"] != "unknown":
        out["sources"]["verdict"] = "compile"
    if limit is not None:
        out["sources"]["usable_bytes"] = usable_source(topology)
    if any(resident.values()):
        out["sources"]["resident"] = "estimate"
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    shown: dict[str, Any]
    verdict: str
    peak: int | None
    reason: str | None


def summed_peak(memory: Mapping[str, int] | None) -> int | None:
    """argument + output - alias + temp: a donated buffer counts once (AXLearn 1036 counted it twice)."""
    if memory is None:
        return None
    return memory["argument_bytes"] + memory["output_bytes"] - (memory["alias_bytes"] or 0) + memory["temp_bytes"]


def device_peak(memory: Mapping[str, int] | None, kind: str) -> int | None:
    """What the program holds against the device's capacity.

    On TPU that is the compiler's `total_allocation_bytes` (arguments, results and the packed heap): libtpu's temp counts some values of
    loop bodies more than once, so the sum is an upper bound, seen 40% too high. Elsewhere, and where it is missing, the sum.
    """
    if memory is None:
        return None
    allocated = memory.get("allocated_bytes")
    total = summed_peak(memory)
    return allocated if kind == "tpu" and allocated and allocated > 0 else total


def program_row(artifact: Artifact, topology: Topology, limit: int | None, resident: int) -> Row:
    r = artifact.result
    m = r["memory"] or {}
    status = r["status"]
    problems = []
    peak = device_peak(r["memory"], topology.chip.kind)
    if status == "oom":
        peak = r.get("oom_bytes")
    elif peak is not None:
        peak += resident
    if topology.chip.kind == "cpu":
        peak = None  # the CPU backend's figure is nobody's HBM
    if r["callbacks"]:
        problems.append("not covered: host callbacks run inside; their memory and time are outside of what the compiler sees")
    if status == "ok" and r["memory"] is None:
        problems.append("the compiler gave no memory figures")
    host = [m.get(k) for k in ("host_argument_bytes", "host_output_bytes", "host_alias_bytes", "host_temp_bytes")]
    host_bytes = None if not m or host[0] is None else (host[0] or 0) + (host[1] or 0) - (host[2] or 0) + (host[3] or 0)
    room = topology.chip.host_ram_bytes
    on_host = (host_bytes or 0) * topology.devices_per_host
    beyond_host = room is not None and on_host > room
    if beyond_host and room is not None:
        problems.append(f"host memory: {gib(on_host)} a host are needed, a typical {topology.chip.name} host has {gib(room)}")
    if status == "oom" or beyond_host:
        verdict = "does_not_fit"
    elif status != "ok" or peak is None or limit is None or r["callbacks"]:
        verdict = "unknown"
    elif peak > limit:
        verdict = "does_not_fit"
    else:
        verdict = "tight" if limit - peak < TIGHT * limit else "fits"
    shown = {"status": status, "reason": r["reason"], "argument_bytes": m.get("argument_bytes"), "output_bytes": m.get("output_bytes"),
             "alias_bytes": m.get("alias_bytes"), "temp_bytes": m.get("temp_bytes"), "peak_bytes": peak, "host_bytes": host_bytes,
             "compile_s": (r["lower_s"] or 0) + r["compile_s"] if r["compile_s"] is not None else None, "problems": problems,
             "generated_code_bytes": m.get("generated_code_bytes"), "limit_bytes": r.get("limit_bytes"), "cached": artifact.cached}
    return Row(shown=shown, verdict=verdict, peak=peak, reason=r["reason"] if status != "ok" else None)


def worst_of(rows: Mapping[str, Row]) -> str:
    """What does not fit before what is unknown before the largest peak."""
    order = {"does_not_fit": 2, "unknown": 1, "tight": 0, "fits": 0}
    return max(rows, key=lambda n: (order[rows[n].verdict], rows[n].peak or 0, n in STEP_PROGRAMS))

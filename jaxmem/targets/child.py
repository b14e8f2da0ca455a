"""The compile child: `python -m jaxmem.targets.child REQUEST.json`. Compilers abort and hang; here they take nobody else with them.

Builds the requested programs, compiles each for its target, and leaves one artifact folder a program (see DESIGN.md). What it does is
told on standard output as JSON lines `{"program", "phase", ...}`; everything the compiler prints goes to standard error.
"""

import gzip
import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

from jaxmem.spec import InputError
from jaxmem.targets import cache
from jaxmem.targets.callbacks import has_callbacks

SCHEMA = 2


def die_with_parent() -> None:
    """A command that was killed outright leaves no compiler running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


_channel: Any = None


def own_channel() -> None:
    """What a user's program prints goes to standard error; only `tell` writes to the pipe that the parent reads."""
    global _channel
    _channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def main(request_path: str) -> None:
    own_channel()
    die_with_parent()
    request = json.loads(pathlib.Path(request_path).read_text())
    try:
        for name, program in build_programs(request):
            tell(program=name, phase="lower")
            compile_one(request, name, program)
    except InputError as error:
        tell(error=str(error), kind="input")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {first_lines(str(error))}"
        if request["kind"] == "file":  # the user's code, not the compiler: a compiler's refusal is caught where it compiles
            tell(error=f"--program: {place(error, request['file'])}: {what}", kind="input")
        else:
            tell(error=what, kind="failure")


def place(error: BaseException, file: str) -> str:
    """`mine.py:12 in build`: the innermost line of the user's file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{pathlib.Path(error.filename).name}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if pathlib.Path(f.filename).resolve() == pathlib.Path(file).resolve()]
    return f"{pathlib.Path(file).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else pathlib.Path(file).name


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True, file=_channel)


def build_programs(request: dict) -> list[tuple[str, Any]]:
    """`[(name, Program)]` in the order asked for."""
    from jaxmem.hardware import parse_topology
    from jaxmem.targets.devices import described_devices
    topology = parse_topology(request["topology"])
    tell(phase="describe")
    devices = described_devices(topology)
    if request["kind"] == "workload":
        from jaxmem import step
        from jaxmem.colocate import vmapped
        from jaxmem.plan import Plan
        from jaxmem.workload import Workload
        workload, plan = Workload.parse_line(request["workload"]), Plan.parse(request["plan"])
        built = (vmapped.build(workload, plan, topology, devices, runs=request["runs"]) if "runs" in request else
                 step.build(workload, plan, topology, devices))
        return [(name, built[name]) for name in request["programs"]]
    from jaxmem.targets import foreign
    return [("program", foreign.load(request, topology, devices))]


def compile_one(request: dict, name: str, program: Any) -> None:
    """Lowers and compiles; writes the artifact under its key in the cache, or finds it there."""
    import jax
    start = time.perf_counter()
    traced = program.traced()
    callbacks = has_callbacks(traced)
    lowered = program.lower(traced)
    text = lowered.as_text()
    lower_s = time.perf_counter() - start
    arguments = describe_arguments(lowered, program)
    key = hashlib.sha256("\n".join([text, json.dumps(arguments), request["key_salt"], str(SCHEMA)]).encode()).hexdigest()[:32]
    folder = pathlib.Path(request["artifacts"]) / key
    if request["use_cache"] and cache.whole(folder):
        tell(program=name, phase="done", key=key, cached=True)
        return
    tell(program=name, phase="compile", lower_s=lower_s)
    result: dict[str, Any] = {
        "schema": SCHEMA, "program": name, "status": "ok", "reason": None, "lower_s": lower_s, "compile_s": None, "memory": None,
        "limit_bytes": None, "callbacks": callbacks, "arguments": arguments, "outputs": list(program.output_labels),
        "topology": request["topology"], "backend": request["backend"], "versions": request["versions"], "flags": request["flags"],
        "mesh": describe_mesh(program.mesh), "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    files: dict[str, str] = {}
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
        result["compile_s"] = time.perf_counter() - start
        result["memory"] = memory_of(compiled)
        kept = getattr(getattr(compiled, "_executable", None), "_kept_var_idx", None)
        if kept is not None:  # unused arguments are not parameters of the compiled program
            result["arguments"] = [a for i, a in enumerate(arguments) if i in kept]
        files["hlo.txt"] = compiled.as_text() or ""
        buffers = dumped_buffers(request.get("dump_dir"), name, lowered)
        if buffers:
            files["buffers.txt"] = buffers
    except jax.errors.JaxRuntimeError as error:
        result["compile_s"] = time.perf_counter() - start
        result |= refusal(str(error), argument_bytes=sum(a["bytes"] for a in arguments))
    write_artifact(folder, result, files)
    tell(program=name, phase="done", key=key, cached=False, status=result["status"])


def write_artifact(folder: pathlib.Path, result: dict, files: dict[str, str]) -> None:
    """Whole or not at all: written beside its place, then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    for file, text in files.items():
        with gzip.open(temporary / f"{file}.gz", "wt", compresslevel=3) as out:
            out.write(text)
    (temporary / "result.json").write_text(json.dumps(result, indent=1))
    if folder.exists():
        for old in folder.iterdir():
            old.unlink()
        folder.rmdir()
    try:
        temporary.rename(folder)
    except OSError:  # another process was first with the same key: its artifact is this one
        for written in temporary.iterdir():
            written.unlink()
        temporary.rmdir()


def describe_arguments(lowered: Any, program: Any) -> list[dict[str, Any]]:
    """One entry a flattened argument: what it is, and its bytes on one device."""
    import jax
    import numpy as np
    out = []
    leaves = jax.tree.leaves(program.args)
    for leaf, label in zip(leaves, program.labels, strict=True):
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
        dtype = leaf.dtype
        itemsize = 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize
        out.append({**label, "shape": list(leaf.shape), "dtype": str(dtype), "sharding": sharding_text(sharding),
                    "shard_shape": list(shape), "bytes": int(np.prod(shape, dtype=np.int64)) * itemsize})
    return out


def sharding_text(sharding: Any) -> str | None:
    """`P(None, 'fsdp')`, with the memory kind where it is not the device's."""
    if sharding is None:
        return None
    spec = getattr(sharding, "spec", None)
    text = re.sub(r"^PartitionSpec", "P", str(spec)) if spec is not None else str(sharding)
    kind = getattr(sharding, "memory_kind", None)
    return f"{text} on {kind}" if kind not in (None, "device") else text


def describe_mesh(mesh: Any) -> dict[str, Any]:
    """Axes in mesh order, and for each device in that order where it sits: `[x, y, z, core, slice, process]` as far as known."""
    def place(device: Any) -> list[int]:
        coords = list(getattr(device, "coords", None) or (device.id, 0, 0))
        return [*coords, getattr(device, "core_on_chip", 0) or 0, getattr(device, "slice_index", 0) or 0, device.process_index]
    if mesh is None or not hasattr(mesh, "devices"):
        return {"axes": dict(mesh.shape) if mesh is not None else {}, "places": None, "ids": None}
    return {"axes": {k: int(v) for k, v in mesh.shape.items()}, "places": [place(d) for d in mesh.devices.flat],
            "ids": [int(d.id) for d in mesh.devices.flat]}


def memory_of(compiled: Any) -> dict[str, int] | None:
    """The compiler's own figures in bytes; None where it gives none, or nothing but zeros and negative numbers."""
    try:
        analysis = compiled.memory_analysis()
    except Exception:
        return None
    if analysis is None:
        return None
    names = {"argument_bytes": "argument_size_in_bytes", "output_bytes": "output_size_in_bytes", "alias_bytes": "alias_size_in_bytes",
             "temp_bytes": "temp_size_in_bytes", "generated_code_bytes": "generated_code_size_in_bytes",
             "peak_bytes": "peak_memory_in_bytes", "host_argument_bytes": "host_argument_size_in_bytes",
             "allocated_bytes": "total_allocation_bytes", "unpadded_heap_bytes": "peak_unpadded_heap_bytes",
             "host_output_bytes": "host_output_size_in_bytes", "host_alias_bytes": "host_alias_size_in_bytes",
             "host_temp_bytes": "host_temp_size_in_bytes"}
    return usable_analysis({ours: getattr(analysis, theirs, None) for ours, theirs in names.items()})


def usable_analysis(values: dict[str, Any]) -> dict[str, int] | None:
    needed = [values.get(k) for k in ("argument_bytes", "output_bytes", "temp_bytes")]
    if any(v is None or v < 0 for v in needed) or not any(needed):
        return None
    return values


SIZE = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def parse_size(text: str) -> int:
    """`15.75G` -> bytes."""
    number, unit = re.fullmatch(r"([\d.]+)([KMGT]?)i?B?", text.strip()).groups()  # type: ignore[union-attr]
    return round(float(number) * SIZE[unit])


def refusal(message: str, *, argument_bytes: int = 0) -> dict[str, Any]:
    """What a failed compile says: out of HBM with its numbers, or refused for another reason and what to change.

    The compiler stops early when the temporaries alone exceed the capacity, and says only their size: the arguments come on top.
    """
    hbm = re.search(r"\(([\d.]+[KMGT]?)B?\) exceeds available HBM \(([\d.]+[KMGT]?)B?\)", message) or \
        re.search(r"Used ([\d.]+[KMGT]?)B? of ([\d.]+[KMGT]?)B? hbm", message)
    if "Hbm" in message and "RESOURCE_EXHAUSTED" in message or hbm:
        needed, limit = (parse_size(x) for x in hbm.groups()) if hbm else (None, None)
        if needed is not None and "HLO temporaries" in message:
            needed += argument_bytes
        return {"status": "oom", "reason": first_lines(message), "oom_bytes": needed, "limit_bytes": limit, "message": message[:200_000]}
    return {"status": "refused", "reason": explain(message), "message": message[:200_000]}


def explain(message: str) -> str:
    """The compiler's reason in one line, with what to change where that is known."""
    first = first_lines(message)
    if "Vmem" in message or "vmem" in message:
        return (f"out of VMEM, not out of HBM: {first} Smaller attention blocks, or --compiler_flags=--xla_tpu_scoped_vmem_limit_kib=N, "
                "change this.")
    if "memory space" in message.lower() and ("host" in message or "pinned" in message):
        return f"{first} Values on the host must be moved into device memory with jax.device_put inside the jitted function before use."
    return first


def first_lines(message: str, limit: int = 400) -> str:
    line = " ".join(message.split())
    return line if len(line) <= limit else line[:limit] + " ..."


def dumped_buffers(dump_dir: str | None, name: str, lowered: Any) -> str | None:
    """XLA's buffer assignment and live ranges of the largest module dumped since the last one was taken; the dump is cleared."""
    if not dump_dir:
        return None
    found = sorted(pathlib.Path(dump_dir).glob("*buffer-assignment.txt"), key=lambda p: p.stat().st_size)
    text = None
    if found:
        ranges = found[-1].with_name(found[-1].name.replace("buffer-assignment", "live-range"))
        text = found[-1].read_text() + (ranges.read_text() if ranges.exists() else "")
    for file in pathlib.Path(dump_dir).iterdir():
        if file.is_file():
            file.unlink()
    return text


if __name__ == "__main__":
    sys.path[:0] = [p for p in os.environ.get("JAXMEM_CHILD_PATH", "").split(os.pathsep) if p]
    main(sys.argv[1])

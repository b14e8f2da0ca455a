"""What an artifact's text says: the memory timeline, the peak's composition, speed. Joins the readers of `hlo` to compiled programs.

Reading a large program's text takes seconds, so results are kept beside the artifact, under the hash of the code that made them.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxmem.hardware import Topology
from jaxmem.hlo import gpu_buffers, liveness
from jaxmem.hlo import speed as speed_module
from jaxmem.hlo.parse import Module, parse
from jaxmem.hlo.timeline import Timeline
from jaxmem.targets import cache
from jaxmem.targets.child import parse_size
from jaxmem.targets.compile import Artifact

POINTS = 400
BUFFERS = 40


def memory(artifact: Artifact, topology: Topology) -> dict[str, Any] | None:
    """The timeline as plain data, or None where there is no text to read (CPU emulation included: its peak is nobody's)."""
    if artifact.result["status"] != "ok" or topology.chip.kind == "cpu":
        return None

    def read() -> dict[str, Any] | None:
        text = artifact.text("hlo")
        if not text:
            return None
        module = parse(text)
        if topology.chip.kind == "gpu":
            buffers = artifact.text("buffers")
            found = gpu_buffers.timeline(buffers, module, artifact.result) if buffers else None
        else:
            found = liveness.timeline(module, artifact.result)
        return plain(found) if found else None
    return kept(artifact, "memory", read)


def plain(t: Timeline) -> dict[str, Any]:
    return {"points": thin([(p.index, p.bytes, dict(p.by_kind)) for p in t.points], t.peak_index), "peak_index": t.peak_index,
            "peak_bytes": t.peak_bytes, "composition": [dataclasses.asdict(s) for s in t.composition],
            "unattributed_bytes": t.unattributed_bytes, "host_peak_bytes": t.host_peak_bytes,
            "buffers": [{"bytes": b.bytes, "padding_bytes": b.padding_bytes, "shape": list(b.shape) if b.shape is not None else None,
                         "dtype": b.dtype, "sharding": b.sharding, "kind": b.kind, "module": b.module, "source": b.source, "name": b.name,
                         "op_name": b.op_name, "path": b.path} for b in t.buffers[:BUFFERS]]}


def thin(points: list[tuple[int, int, dict]], peak: int) -> list[tuple[int, int, dict]]:
    """At most POINTS of them: of each stretch the highest, so that no peak is lost."""
    if len(points) <= POINTS:
        return points
    size = -(-len(points) // POINTS)
    stretches = [points[i:i + size] for i in range(0, len(points), size)]
    return [next((p for p in s if p[0] == peak), max(s, key=lambda p: p[1])) for s in stretches]


def kept(artifact: Artifact, name: str, make: Any) -> Any:
    path = artifact.folder / f"{name}-{cache.source_hash()}.json" if artifact.folder else None
    if path and path.exists():
        return json.loads(path.read_text())
    value = make()
    if path:
        for old in artifact.folder.glob(f"{name}-*.json"):  # type: ignore[union-attr]
            old.unlink(missing_ok=True)
        path.write_text(json.dumps(value))
    return value


def thinned(found: Mapping[str, Any], resident: int) -> dict[str, Any]:
    """A program's entry of `timeline`; resident state lies under all of it."""
    def point(p: Any) -> dict[str, Any]:
        kinds = dict(p[2])
        if resident:
            kinds["opt_state"] = kinds.get("opt_state", 0) + resident
        return {"t": p[0], "bytes": p[1] + resident, "by_kind": kinds}
    return {"points": [point(p) for p in found["points"]], "peak_t": found["peak_index"]}


def peak_composition(found: Mapping[str, Any], resident: int, *, reported: int | None) -> dict[str, Any]:
    """`composition`, `buffers` and `unattributed_bytes` of the worst program. What the compiler reports beyond the live buffers that
    the schedule explains (alignment, holes between buffers) is unattributed, never spread over the others."""
    composition = [dict(s) for s in found["composition"]]
    if resident:
        composition.append({"kind": "opt_state", "module": "optimizer (resident)", "bytes": resident})
    unexplained = max(0, reported - resident - found["peak_bytes"]) if reported is not None else 0
    return {"composition": sorted(composition, key=lambda s: -s["bytes"]), "buffers": found["buffers"],
            "unattributed_bytes": found["unattributed_bytes"] + unexplained}


def from_refusal(result: Mapping[str, Any]) -> dict[str, Any]:
    """The largest allocations that an out-of-memory message of the TPU compiler lists."""
    message = result.get("message") or ""
    buffers = []
    pattern = (r"Size: ([\d.]+[KMGT]?)\s*(?:Operator: op_(?:type=\S+ op_)?name=\"([^\"]*)\"[^\n]*)?\s*(?:\n\s*)?"
               r"Shape: (\w+)\[([\d,]*)\]"
               r"[^\n]*\n\s*Unpadded size: ([\d.]+[KMGT]?)")
    from jaxmem.hlo.attribute import classify
    for size, op_name, dtype, dims, unpadded in re.findall(pattern, message):
        kind, module = classify(op_name or None)
        total = parse_size(size)
        buffers.append({"bytes": total, "padding_bytes": max(0, total - parse_size(unpadded)), "dtype": dtype, "kind": kind,
                        "module": module, "shape": [int(d) for d in dims.split(",") if d], "sharding": None, "source": None, "name": None,
                        "op_name": op_name or None, "path": None})
    return {"buffers": buffers[:BUFFERS], "composition": [], "unattributed_bytes": None}


def speed(artifacts: Mapping[str, Artifact], topology: Topology, model_flops: float | None) -> dict[str, Any] | None:
    """A step's seconds: of `train`, or of `gradients` and `update` one after the other. None where nothing can be said."""
    ready = {n: a for n, a in artifacts.items() if a.result["status"] == "ok" and a.text("hlo")}
    if not ready or len(ready) != len(artifacts) or topology.chip.kind == "cpu":
        return None
    total: dict[str, Any] = {"step_s": 0.0, "seconds_by_limit": {}, "traffic": [], "warnings": []}
    for name, artifact in ready.items():
        whole = model_flops if name in ("train", "gradients") else None

        def read(artifact: Artifact = artifact, whole: float | None = whole) -> dict[str, Any]:
            s = speed_module.predict(parsed(artifact), topology, artifact.result["mesh"], model_flops=whole)
            traffic = [dataclasses.asdict(t) | {"count": round(t.count), "bytes": round(t.bytes)} for t in s.traffic]
            return {"step_s": s.step_s, "seconds_by_limit": dict(s.seconds_by_limit) if s.seconds_by_limit else None,
                    "traffic": traffic, "warnings": list(s.warnings)}
        one = kept(artifact, f"speed-{whole}", read)
        total["warnings"] += one["warnings"]
        total["traffic"] += one["traffic"]
        total["step_s"] = None if total["step_s"] is None or one["step_s"] is None else total["step_s"] + one["step_s"]
        for limit, seconds in (one["seconds_by_limit"] or {}).items():
            total["seconds_by_limit"][limit] = total["seconds_by_limit"].get(limit, 0) + seconds
    if total["step_s"] is None:
        total["seconds_by_limit"] = None
    return total


def parsed(artifact: Artifact) -> Module:
    text = artifact.text("hlo")
    assert text is not None
    return parse(text)

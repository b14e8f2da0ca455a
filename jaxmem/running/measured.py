"""What the devices really did, beside what the compiler said: memory and step time after warm-up.

Predictions have source `compile`, readings source `measure`; what a backend does not report is None.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxmem import environment
from jaxmem.cost.flops import mfu, model_flops
from jaxmem.hardware import Topology
from jaxmem.hlo import speed
from jaxmem.hlo.parse import parse
from jaxmem.runs.log import Log
from jaxmem.runs.settings import Settings
from jaxmem.targets.child import describe_mesh, memory_of


def backend() -> str:
    """`cpu`, or the platform and the device's own name: `cuda NVIDIA H200`."""
    device = jax.devices()[0]
    return device.platform if device.platform == "cpu" else f"{device.platform} {device.device_kind}"


def versions() -> dict[str, str | None]:
    return environment.versions()


def memory(compiled: Mapping[str, jax.stages.Compiled]) -> dict[str, Any]:
    """`predicted_bytes`: the largest argument + output - alias + temp of the programs; `measured_bytes`: the fullest local device's peak.
    CPU reports no peak, and its compiler's sizes are nobody's HBM."""
    if jax.default_backend() == "cpu":
        return {"predicted_bytes": None, "measured_bytes": None, "backend": backend()}
    sizes = [memory_of(program) for program in compiled.values()]
    known = [m["argument_bytes"] + m["output_bytes"] - m["alias_bytes"] + m["temp_bytes"] for m in sizes if m]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    read = [peak for peak in peaks if peak is not None]
    return {"predicted_bytes": max(known) if len(known) == len(sizes) and known else None, "measured_bytes": max(read, default=None),
            "backend": backend()}


def predicted_step_s(compiled: Mapping[str, jax.stages.Compiled], topology: Topology, mesh: jax.sharding.Mesh,
                     model_flops: float) -> float | None:
    """Seconds of the step's programs by the speed model, from their compiled text; None on CPU or where a program is not understood."""
    if topology.chip.kind == "cpu":
        return None
    total = 0.0
    for name in ("train", "gradients", "update"):
        if name in compiled:
            text = compiled[name].as_text()
            whole = model_flops if name != "update" else None
            found = speed.predict(parse(text), topology, describe_mesh(mesh), model_flops=whole).step_s if text else None
            if found is None:
                return None
            total += found
    return total


def honest_mfu(s: Settings, step_s: float, log: Log) -> float | None:
    """None where the peak is unknown, and for a time that no device can have taken: then the clock is wrong, not the device fast."""
    found = mfu(s.program_workload, s.topology, step_s, dtype=s.plan.compute) if step_s else None
    if found is not None and found > 1:
        log.event("impossible", step_s=step_s, mfu=found)
        return None
    return found


def compare_with_prediction(s: Settings, compiled: Mapping[str, jax.stages.Compiled], mesh: jax.sharding.Mesh, step_s: float,
                            log: Log) -> None:
    """After warm-up: what the compiler and the speed model said beside what the devices did."""
    found = memory(compiled)
    predicted_s = predicted_step_s(compiled, s.topology, mesh, model_flops(s.program_workload))
    log.event("memory", **found)
    log.event("step_time", predicted_s=predicted_s, measured_s=step_s, backend=found["backend"])
    if found["measured_bytes"] is not None and found["predicted_bytes"] is not None:
        log.say(f"memory a device: {found['predicted_bytes'] / 2**30:.2f} GiB predicted (compile), "
                f"{found['measured_bytes'] / 2**30:.2f} GiB at the peak (measure, {found['backend']})")
    if predicted_s is not None:
        log.say(f"step: {predicted_s:.4f} s predicted (compile), {step_s:.4f} s (measure, {found['backend']})")

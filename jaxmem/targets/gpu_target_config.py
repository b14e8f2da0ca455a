"""The description of a GPU that XLA compiles for when none is there: a text-format `GpuTargetConfigProto`.

    get_topology_desc("", platform="cuda", target_config=target_config("h100"), topology="1x1x8")

The figures are those of https://github.com/openxla/xla, xla/backends/gpu/target_config/specs (2026-12), and of `chips.py`;
a MIG slice is its GPU with its own SMs, memory, bandwidth and L2. Nothing here imports jax.
"""

import dataclasses
from typing import Literal

from jaxmem.chips import CHIPS
from jaxmem.spec import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Operations a clock of a unit in XLA's cost model, by element type; matrix units run at `matrix_clock` of the SM clock."""

    scalar_f16: int
    matrix_clock: float
    matrix_8bit: int
    matrix_f16: int
    matrix_f32: int
    matrix_f64: int
    matrix_f4: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """What every GPU of one compute capability shares; bytes of shared memory, threads of an SM."""

    major: int
    minor: int
    extension: Literal["NONE", "ACCELERATED_FEATURES"]
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_optin: int
    rates: Rates | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What one product adds: its name for the driver, its boost clock, NVLink links and host link as the driver reports it."""

    architecture: Architecture
    description: str
    clock_ghz: float
    links: int
    pcie_bytes_per_s: int


_HOPPER_RATES = Rates(scalar_f16=2, matrix_clock=0.924, matrix_8bit=1024, matrix_f16=512, matrix_f32=256, matrix_f64=32,
                      matrix_f4=None)
_BLACKWELL_RATES = Rates(scalar_f16=1, matrix_clock=0.934, matrix_8bit=2048, matrix_f16=1024, matrix_f32=512, matrix_f64=16,
                         matrix_f4=4096)

_VOLTA = Architecture(major=7, minor=0, extension="NONE", fpus_per_core=64, threads_per_core=2048,
                      shared_memory_per_core=98_304, shared_memory_optin=98_304)
_AMPERE = Architecture(major=8, minor=0, extension="NONE", fpus_per_core=64, threads_per_core=2048,
                       shared_memory_per_core=167_936, shared_memory_optin=166_912)
_GA102 = Architecture(major=8, minor=6, extension="NONE", fpus_per_core=128, threads_per_core=1536,
                      shared_memory_per_core=102_400, shared_memory_optin=101_376)
_HOPPER = Architecture(major=9, minor=0, extension="ACCELERATED_FEATURES", fpus_per_core=128, threads_per_core=2048,
                       shared_memory_per_core=233_472, shared_memory_optin=232_448, rates=_HOPPER_RATES)
_BLACKWELL = dataclasses.replace(_HOPPER, major=10, minor=0, rates=_BLACKWELL_RATES)
_BLACKWELL_ULTRA = dataclasses.replace(_BLACKWELL, minor=3)
_GB202 = Architecture(major=12, minor=0, extension="NONE", fpus_per_core=128, threads_per_core=1536,
                      shared_memory_per_core=131_072, shared_memory_optin=101_376)

_GEN3, _GEN4, _GEN5 = 16 * 2**30, 32 * 2**30, 64 * 2**30  # as the driver's figures read: lanes x rate, in GiB/s

DEVICES: dict[str, Device] = {
    "v100": Device(architecture=_VOLTA, description="Tesla V100-SXM2-16GB", clock_ghz=1.53, links=6, pcie_bytes_per_s=_GEN3),
    "a100-40gb": Device(architecture=_AMPERE, description="NVIDIA A100-SXM4-40GB", clock_ghz=1.41, links=12,
                        pcie_bytes_per_s=_GEN4),
    "a100-80gb": Device(architecture=_AMPERE, description="NVIDIA A100-SXM4-80GB", clock_ghz=1.41, links=12,
                        pcie_bytes_per_s=_GEN4),
    "a100-80gb-pcie": Device(architecture=_AMPERE, description="NVIDIA A100 80GB PCIe", clock_ghz=1.41, links=0,
                             pcie_bytes_per_s=_GEN4),
    "a6000": Device(architecture=_GA102, description="NVIDIA RTX A6000", clock_ghz=1.8, links=0, pcie_bytes_per_s=_GEN4),
    "h100": Device(architecture=_HOPPER, description="NVIDIA H100 80GB HBM3", clock_ghz=1.98, links=18, pcie_bytes_per_s=_GEN4),
    "h100-pcie": Device(architecture=_HOPPER, description="NVIDIA H100 PCIe", clock_ghz=1.755, links=0, pcie_bytes_per_s=_GEN4),
    "h200": Device(architecture=_HOPPER, description="NVIDIA H200 141GB HBM3e", clock_ghz=1.98, links=18, pcie_bytes_per_s=_GEN4),
    "b200": Device(architecture=_BLACKWELL, description="NVIDIA B200", clock_ghz=1.965, links=18, pcie_bytes_per_s=_GEN5),
    "b300": Device(architecture=_BLACKWELL_ULTRA, description="NVIDIA B300", clock_ghz=1.965, links=18, pcie_bytes_per_s=_GEN5),
    "gb200": Device(architecture=_BLACKWELL, description="NVIDIA GB200", clock_ghz=2.062, links=18, pcie_bytes_per_s=_GEN5),
    "gb300": Device(architecture=_BLACKWELL_ULTRA, description="NVIDIA GB300", clock_ghz=2.07, links=18, pcie_bytes_per_s=_GEN5),
    "rtx-pro-6000": Device(architecture=_GB202, description="NVIDIA RTX PRO 6000 Blackwell", clock_ghz=2.6, links=0,
                           pcie_bytes_per_s=_GEN5),
}

# Chips that the CUDA 13 plugin cannot compile for, and why; the tables still describe them.
REFUSED = {"v100": "CUDA 13 compiles for compute capability 7.5 and later, a V100 has 7.0"}

# The versions that XLA's newest descriptions name; they choose no algorithm without a device, but the text must have them.
_DRIVER, _RUNTIME, _CUDNN = "13.0.0", "12.8.0", (9, 10, 0)

# XLA PrimitiveType numbers.
_S32, _U32, _F16, _F32, _F64, _BF16, _F4 = 4, 8, 10, 11, 12, 16, 32
_EIGHT_BIT = (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)  # s8, u8 and the f8 formats


def target_config(name: str) -> str:
    """Text of the proto for the GPU or MIG slice of `chips.CHIPS` called `name`. `InputError` for a chip that is not a GPU."""
    chip = CHIPS[name]
    if chip.kind != "gpu":
        raise InputError(f"{chip.name} is not a GPU: there is no GPU target config for it")
    parent = CHIPS[chip.parent] if chip.parent else chip
    device = DEVICES[parent.name]
    architecture = device.architecture
    description = device.description + (f" MIG {chip.name.rpartition('-')[2]}" if chip.parent else "")
    assert chip.sm_count and chip.hbm_bytes and chip.hbm_bytes_per_s and chip.l2_bytes
    info: list[tuple[str, object]] = [
        ("threads_per_block_limit", 1024), ("threads_per_warp", 32), ("shared_memory_per_block", 49_152),
        ("shared_memory_per_core", architecture.shared_memory_per_core),
        ("shared_memory_per_block_optin", architecture.shared_memory_optin),
        ("threads_per_core_limit", architecture.threads_per_core), ("core_count", chip.sm_count),
        ("fpus_per_core", architecture.fpus_per_core),
        ("block_dim_limit_x", 2**31 - 1), ("block_dim_limit_y", 65_535), ("block_dim_limit_z", 65_535),
        ("thread_dim_limit_x", 1024), ("thread_dim_limit_y", 1024), ("thread_dim_limit_z", 64),
        ("memory_bandwidth", int(chip.hbm_bytes_per_s)), ("l2_cache_size", chip.l2_bytes), ("clock_rate_ghz", device.clock_ghz),
        ("device_memory_size", chip.hbm_bytes),
        ("cuda_compute_capability", [("major", architecture.major), ("minor", architecture.minor),
                                     ("feature_extension", _Word(architecture.extension))]),
        ("registers_per_core_limit", 65_536), ("registers_per_block_limit", 65_536),
        *_rates(architecture.rates, device.clock_ghz, architecture.fpus_per_core),
        ("device_vendor", "NVIDIA Corporation"), ("device_address_bits", 64), ("pcie_bandwidth", device.pcie_bytes_per_s),
        ("ecc_enabled", _Word("true")), ("name", description), ("driver_version", _DRIVER), ("runtime_version", _RUNTIME),
        ("compile_time_toolkit_version", _RUNTIME), ("dnn_version", ".".join(map(str, _CUDNN))),
    ]
    if device.links and not chip.parent:
        info.append(("device_interconnect_info", [("active_links", device.links)]))
    major, minor, patch = _CUDNN
    return _text([("gpu_device_info", info), ("platform_name", "CUDA"),
                  ("dnn_version_info", [("major", major), ("minor", minor), ("patch", patch)]),
                  ("device_description_str", description)])


class _Word(str):
    """An enum or boolean value: printed without quotes."""


def _rates(rates: Rates | None, clock_ghz: float, fpus: int) -> list[tuple[str, object]]:
    if rates is None:
        return []
    matrix_ghz = round(clock_ghz * rates.matrix_clock, 6)

    def entry(key: int, clock: float, units: int, ops: int) -> tuple[str, object]:
        value = [("clock_rate_ghz", clock), ("units_per_core", units), ("ops_per_clock", ops)]
        return ("rate_infos", [("key", key), ("value", value)])

    half = rates.scalar_f16
    scalar = [entry(key, clock_ghz, units, ops) for key, units, ops in
              [(_S32, 64, 1), (_U32, 64, 1), (_F16, fpus, half), (_F32, fpus, 1), (_F64, 64, 1), (_BF16, fpus, half)]]
    by_key = dict.fromkeys(_EIGHT_BIT, rates.matrix_8bit)
    by_key |= {_F16: rates.matrix_f16, _BF16: rates.matrix_f16, _F32: rates.matrix_f32}
    if rates.matrix_f4:
        by_key[_F4] = rates.matrix_f4
    matrix = [entry(key, matrix_ghz, 4, ops) for key, ops in sorted(by_key.items())]
    matrix.append(entry(_F64, clock_ghz, 4, rates.matrix_f64))
    return [("scalar_unit_description", scalar), ("matrix_unit_description", matrix)]


def _text(fields: list[tuple[str, object]], indent: str = "") -> str:
    lines = []
    for name, value in fields:
        if isinstance(value, list):
            lines.append(f"{indent}{name} {{\n{_text(value, indent + '  ')}{indent}}}\n")
        else:
            shown = f'"{value}"' if isinstance(value, str) and not isinstance(value, _Word) else value
            lines.append(f"{indent}{name}: {shown}\n")
    return "".join(lines)

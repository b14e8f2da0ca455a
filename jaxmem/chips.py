"""Chips: what one JAX device can compute, hold and move, and who says so.

Everything a cost model divides by is per JAX device and per direction, in SI units. A device is a chip, half a chip on tpu7x
(two devices a chip), or a MIG slice. A figure that nobody publishes is None; `Chip.source` says where the others are from.
Nothing here imports jax.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

GB, GiB, MiB, T = 10**9, 2**30, 2**20, 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """`links` equal links of `bytes_per_s` each, one direction; `latency_s` of a hop (torus) or a message (switch, network)."""

    bytes_per_s: float
    latency_s: float
    links: int = 1

    @property
    def total_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.links


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Figures of one JAX device, one direction, unless the name says chip or host.

    `peak_flops`: dense FLOP/s by dtype (a multiply and an add are two); a dtype that the hardware lacks, or whose rate is not
    published, is absent. `usable_bytes`: the compiler's own limit on TPU, None elsewhere (GPU: capacity x fraction, see the
    verdict). `runtime_reserve_bytes`: GPU memory that the CUDA context and NCCL take outside the allocator's pool.
    `clock_hz`: the clock at which the matrix units reach `peak_flops`; on TPU also the clock of the compiler's estimated cycles.
    `ici`: one torus link of `links` (4 in 2-D, 6 in 3-D); on tpu7x a device has half of each of its chip's links.
    `domain`: the fast link among `domain_size` devices, `domain_kind` says which. `network`: between hosts, or between slices.
    `host_ram_bytes` is typical of a host of `chips_per_host` chips. `pod_shape`: the largest slice. `parent`: a MIG slice's GPU.
    """

    name: str
    kind: Literal["tpu", "gpu", "cpu"]
    devices_per_chip: int = 1
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    hbm_bytes: int | None = None
    usable_bytes: int | None = None
    runtime_reserve_bytes: int | None = None
    hbm_bytes_per_s: float | None = None
    clock_hz: float | None = None
    vmem_bytes: int | None = None
    l2_bytes: int | None = None
    sm_count: int | None = None
    host_link_bytes_per_s: float | None = None
    host_ram_bytes: int | None = None
    chips_per_host: int = 1
    tdp_w: float | None = None
    ici: Link | None = None
    domain: Link | None = None
    domain_kind: Literal["NVLink", "PCIe", "die to die"] | None = None
    domain_size: int = 1
    network: Link | None = None
    pod_shape: tuple[int, ...] = ()
    parent: str | None = None

    def source(self, field: str) -> tuple[str, str] | None:
        """(where the figure is from, date); `"peak_flops.bf16"` asks for one dtype. None for a field that is None or empty."""
        table = SOURCES.get(self.name, {})
        return table.get(field) or table.get(field.partition(".")[0])


# --- Where figures are from -------------------------------------------------------------------------------------------
# (where, date): of publication for a document, of reading for a page, a repository or our own work.

Source = tuple[str, str]

ESTIMATE: Source = ("estimate: typical of the generation, no published figure", "2026-12")
COMPILE: Source = ("compile, libtpu 0.0.50.1: the largest program of one donated argument that compiles (16 KiB)", "2026-12")
SCALING_BOOK: Source = ("https://jax-ml.github.io/scaling-book/tpus/", "2025-08")
JAX_TPU_INFO: Source = ("https://github.com/jax-ml/jax jax/_src/tpu_info.py, jax 0.12", "2026-12")
XLA_SPECS: Source = ("https://github.com/openxla/xla xla/backends/gpu/target_config/specs", "2026-12")
MIG_GUIDE = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html"


def cloud(page: str) -> Source:
    return (f"https://docs.cloud.google.com/tpu/docs/{page}", "2026-12")


def _sources(*groups: tuple[Source, str]) -> dict[str, Source]:
    """`(source, "field field ...")` -> field -> source; a later group overrides an earlier one."""
    return {field: source for source, fields in groups for field in fields.split()}


# --- TPU --------------------------------------------------------------------------------------------------------------

_HOP_S, _SLICE_MESSAGE_S = 1e-6, 2e-5
_TPU_COMMON = "host_link_bytes_per_s ici network"


def _tpu(name: str, *, ici_bytes_per_s: float, network_bytes_per_s: float, **fields: object) -> Chip:
    pod_shape = fields["pod_shape"]
    assert isinstance(pod_shape, tuple)
    return Chip(name=name, kind="tpu", chips_per_host=4,
                ici=Link(bytes_per_s=ici_bytes_per_s, latency_s=_HOP_S, links=2 * len(pod_shape)),
                network=Link(bytes_per_s=network_bytes_per_s, latency_s=_SLICE_MESSAGE_S), **fields)  # type: ignore[arg-type]


_TPUS: list[tuple[Chip, dict[str, Source]]] = [
    (_tpu("v4", peak_flops={"bf16": 275 * T, "int8": 275 * T}, hbm_bytes=32 * GiB, usable_bytes=33_014_285_312,
          hbm_bytes_per_s=1228 * GB, clock_hz=1.05e9, vmem_bytes=32 * MiB, ici_bytes_per_s=45e9, network_bytes_per_s=6.25e9,
          host_link_bytes_per_s=16e9, host_ram_bytes=407 * GB, tdp_w=192, pod_shape=(12, 16, 16)),
     _sources((SCALING_BOOK, _TPU_COMMON), (COMPILE, "usable_bytes"), (JAX_TPU_INFO, "vmem_bytes"),
              (cloud("v4"), "peak_flops hbm_bytes hbm_bytes_per_s chips_per_host pod_shape host_ram_bytes"),
              (("Jouppi et al., TPU v4, https://arxiv.org/abs/2304.01433", "2023-04"), "tdp_w clock_hz"))),
    (_tpu("v5e", peak_flops={"bf16": 197 * T, "int8": 393 * T}, hbm_bytes=16 * GiB, usable_bytes=16_909_206_528,
          hbm_bytes_per_s=819 * GB, clock_hz=1.503e9, vmem_bytes=128 * MiB, ici_bytes_per_s=45e9, network_bytes_per_s=3.125e9,
          host_link_bytes_per_s=16e9, host_ram_bytes=192 * GB, pod_shape=(16, 16)),
     _sources((SCALING_BOOK, _TPU_COMMON), (COMPILE, "usable_bytes"), (JAX_TPU_INFO, "vmem_bytes"),
              (cloud("v5e"), "peak_flops hbm_bytes hbm_bytes_per_s chips_per_host pod_shape host_ram_bytes"),
              (("derived: peak / (4 matrix units x 128 x 128 x 2)", "2026-12"), "clock_hz"))),
    # Cloud publishes 95 GiB, what is left to a program; the chip has six stacks of 16 GiB and the compiler hands out 95.73 GiB.
    (_tpu("v5p", peak_flops={"bf16": 459 * T, "int8": 918 * T}, hbm_bytes=96 * GiB, usable_bytes=102_786_532_352,
          hbm_bytes_per_s=2765 * GB, clock_hz=1.75e9, vmem_bytes=128 * MiB, ici_bytes_per_s=90e9, network_bytes_per_s=6.25e9,
          host_link_bytes_per_s=16e9, host_ram_bytes=448 * GB, pod_shape=(16, 16, 24)),
     _sources((SCALING_BOOK, _TPU_COMMON + " hbm_bytes"), (COMPILE, "usable_bytes"), (JAX_TPU_INFO, "vmem_bytes peak_flops.int8"),
              (cloud("v5p"), "peak_flops hbm_bytes_per_s chips_per_host pod_shape host_ram_bytes"),
              (("derived: peak / (8 matrix units x 128 x 128 x 2)", "2026-12"), "clock_hz"))),
    (_tpu("v6e", peak_flops={"bf16": 918 * T, "fp8": 918 * T, "int8": 1836 * T}, hbm_bytes=32 * GiB, usable_bytes=33_545_913_344,
          hbm_bytes_per_s=1638 * GB, clock_hz=1.75e9, vmem_bytes=128 * MiB, ici_bytes_per_s=90e9, network_bytes_per_s=12.5e9,
          host_link_bytes_per_s=32e9, host_ram_bytes=720 * GB, pod_shape=(16, 16)),
     _sources((SCALING_BOOK, _TPU_COMMON), (COMPILE, "usable_bytes"), (JAX_TPU_INFO, "vmem_bytes"),
              (cloud("v6e"), "peak_flops hbm_bytes hbm_bytes_per_s chips_per_host pod_shape host_ram_bytes"),
              # Cloud says 2 units; the compiler's cycles for a matmul (369,231 FLOP/cycle) are possible with 4 x 256 x 256 only.
              (("derived: peak / (4 x 256 x 256 x 2), as the compiler's cycles count", "2026-12"), "clock_hz"))),
    # Per device, half a chip. A chip's two dies are joined by a link of 6 x one ICI link (the page of the chip).
    (_tpu("tpu7x", devices_per_chip=2, peak_flops={"bf16": 1153.5 * T, "fp8": 2307 * T}, hbm_bytes=96 * GiB,
          usable_bytes=101_724_324_864, hbm_bytes_per_s=3690 * GB, clock_hz=2.2e9, vmem_bytes=64 * MiB, ici_bytes_per_s=45e9,
          network_bytes_per_s=6.25e9, host_link_bytes_per_s=16e9, host_ram_bytes=960 * GB, pod_shape=(16, 16, 36),
          domain=Link(bytes_per_s=540e9, latency_s=1e-6), domain_kind="die to die", domain_size=2),
     _sources((ESTIMATE, "host_link_bytes_per_s"), (COMPILE, "usable_bytes"), (JAX_TPU_INFO, "vmem_bytes"),
              (cloud("tpu7x"), "peak_flops hbm_bytes hbm_bytes_per_s chips_per_host pod_shape host_ram_bytes network domain"),
              (("derived: half of a chip's link, at the 90% of the published 100 GB/s that v5p and v6e links reach", "2026-12"),
              "ici"),
              (("derived: peak / (4 x 256 x 256 x 2), as the compiler's cycles count", "2026-12"), "clock_hz"))),
]

# --- GPU --------------------------------------------------------------------------------------------------------------

_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9  # x16, one direction
_NVLINK_MESSAGE_S, _PCIE_MESSAGE_S, _NETWORK_MESSAGE_S = 3e-6, 5e-6, 1e-5
_GPU_FROM_XLA = "hbm_bytes hbm_bytes_per_s l2_bytes sm_count"


class _Nvlink(NamedTuple):
    links: int
    bytes_per_s: float
    domain_size: int = 8


def _gpu(name: str, datasheet: Source, *, nvlink: _Nvlink | None, network_bytes_per_s: float, host_link_bytes_per_s: float,
         system: Source = ESTIMATE, overrides: Mapping[str, Source] | None = None, chips_per_host: int = 8,
         **fields: object) -> tuple[Chip, dict[str, Source]]:
    """`system`: the document of the machine around the GPU: host RAM, network, GPUs a host."""
    if nvlink:
        domain = Link(bytes_per_s=nvlink.bytes_per_s, latency_s=_NVLINK_MESSAGE_S, links=nvlink.links)
    else:
        domain = Link(bytes_per_s=host_link_bytes_per_s, latency_s=_PCIE_MESSAGE_S)
    chip = Chip(name=name, kind="gpu", domain=domain, domain_kind="NVLink" if nvlink else "PCIe",
                domain_size=nvlink.domain_size if nvlink else chips_per_host, chips_per_host=chips_per_host,
                network=Link(bytes_per_s=network_bytes_per_s, latency_s=_NETWORK_MESSAGE_S), runtime_reserve_bytes=GiB,
                host_link_bytes_per_s=host_link_bytes_per_s, **fields)  # type: ignore[arg-type]
    return chip, _sources((datasheet, "peak_flops tdp_w clock_hz domain host_link_bytes_per_s"), (XLA_SPECS, _GPU_FROM_XLA),
                          (system, "host_ram_bytes network chips_per_host"),
                          (ESTIMATE, "runtime_reserve_bytes")) | dict(overrides or {})


_V100 = ("NVIDIA V100 Tensor Core GPU datasheet", "2020-01")
_A100 = ("NVIDIA A100 Tensor Core GPU datasheet", "2022-05")
_A6000 = ("NVIDIA Ampere GA102 GPU architecture whitepaper v2.0, appendix C", "2021-01")
_H100 = ("NVIDIA H100 Tensor Core GPU architecture whitepaper v1.04", "2023-06")
_H200 = ("https://www.nvidia.com/en-us/data-center/h200/", "2024-11")
_HGX = ("https://www.nvidia.com/en-us/data-center/hgx/", "2025-11")
_GB200 = ("https://www.nvidia.com/en-us/data-center/gb200-nvl72/", "2025-11")
_GB300 = ("https://www.nvidia.com/en-us/data-center/gb300-nvl72/", "2025-11")
_B300_INT8 = ("https://verda.com/blog/gb300-nvl72-architecture", "2025-11")
_RTX_PRO = ("NVIDIA RTX Blackwell PRO GPU architecture whitepaper v1.0", "2025-03")

_CLOCK = ("derived: bf16 peak / (SMs x 8192 FLOP a clock)", "2026-12")


def _dgx(model: str, date: str) -> Source:
    return (f"NVIDIA DGX {model} datasheet", date)


_HOPPER_SXM = {"f32": 67 * T, "tf32": 494.7 * T, "bf16": 989.4 * T, "f16": 989.4 * T, "fp8": 1978.9 * T, "int8": 1978.9 * T}
_AMPERE = {"f32": 19.5 * T, "tf32": 156 * T, "bf16": 312 * T, "f16": 312 * T, "int8": 624 * T}
_GB202 = {"f32": 126 * T, "tf32": 251.9 * T, "bf16": 503.8 * T, "f16": 503.8 * T, "fp8": 1007.6 * T, "int8": 1007.6 * T}

_GPUS: list[tuple[Chip, dict[str, Source]]] = [
    _gpu("v100", _V100, peak_flops={"f32": 15.7 * T, "f16": 125 * T},
         hbm_bytes=16_935_682_048, hbm_bytes_per_s=898.048e9, clock_hz=1.53e9, l2_bytes=6 * MiB, sm_count=80, tdp_w=300,
         host_link_bytes_per_s=_PCIE3, nvlink=_Nvlink(6, 25e9), network_bytes_per_s=6.25e9,
         host_ram_bytes=512 * GB, system=_dgx("-1 (V100)", "2019-02")),
    _gpu("a100-40gb", _A100, peak_flops=_AMPERE,
         hbm_bytes=42_331_013_120, hbm_bytes_per_s=1555.2e9, clock_hz=1.41e9, l2_bytes=40 * MiB, sm_count=108, tdp_w=400,
         host_link_bytes_per_s=_PCIE4, nvlink=_Nvlink(12, 25e9), network_bytes_per_s=25e9,
         host_ram_bytes=1000 * GB, system=_dgx("A100", "2021-05")),
    _gpu("a100-80gb", _A100, peak_flops=_AMPERE,
         hbm_bytes=85_100_068_864, hbm_bytes_per_s=2039.04e9, clock_hz=1.41e9, l2_bytes=40 * MiB, sm_count=108, tdp_w=400,
         host_link_bytes_per_s=_PCIE4, nvlink=_Nvlink(12, 25e9), network_bytes_per_s=25e9,
         host_ram_bytes=2000 * GB, system=_dgx("A100", "2021-05")),
    # XLA's file has 79,050,250,240 B, which no driver reports; cards report 85,094,825,984 B or a little more.
    _gpu("a100-80gb-pcie", _A100, peak_flops=_AMPERE,
         hbm_bytes=85_094_825_984, hbm_bytes_per_s=1935e9, clock_hz=1.41e9, l2_bytes=40 * MiB, sm_count=108, tdp_w=300,
         host_link_bytes_per_s=_PCIE4, nvlink=None, network_bytes_per_s=12.5e9, host_ram_bytes=1000 * GB,
         overrides={"hbm_bytes": ("total memory that the driver reports", "2026-12"), "hbm_bytes_per_s": _A100}),
    _gpu("a6000", _A6000,
         peak_flops={"f32": 38.7 * T, "tf32": 77.4 * T, "bf16": 154.8 * T, "f16": 154.8 * T, "int8": 309.7 * T},
         hbm_bytes=51_041_271_808, hbm_bytes_per_s=768.096e9, clock_hz=1.8e9, l2_bytes=6 * MiB, sm_count=84, tdp_w=300,
         host_link_bytes_per_s=_PCIE4, nvlink=None, network_bytes_per_s=3.125e9, host_ram_bytes=512 * GB),
    _gpu("h100", _H100, peak_flops=_HOPPER_SXM,
         hbm_bytes=84_942_979_072, hbm_bytes_per_s=3352.32e9, clock_hz=1.83e9, l2_bytes=50 * MiB, sm_count=132, tdp_w=700,
         host_link_bytes_per_s=_PCIE5, nvlink=_Nvlink(18, 25e9), network_bytes_per_s=50e9,
         host_ram_bytes=2000 * GB, system=_dgx("H100", "2023-03")),
    _gpu("h100-pcie", _H100,
         peak_flops={"f32": 51.2 * T, "tf32": 378 * T, "bf16": 756 * T, "f16": 756 * T, "fp8": 1513 * T, "int8": 1513 * T},
         hbm_bytes=84_942_979_072, hbm_bytes_per_s=2039.04e9, clock_hz=1.62e9, l2_bytes=50 * MiB, sm_count=114, tdp_w=350,
         host_link_bytes_per_s=_PCIE5, nvlink=None, network_bytes_per_s=25e9, host_ram_bytes=1000 * GB),
    _gpu("h200", _H200, peak_flops=_HOPPER_SXM,
         hbm_bytes=151_397_597_184, hbm_bytes_per_s=4800e9, clock_hz=1.83e9, l2_bytes=50 * MiB, sm_count=132, tdp_w=700,
         host_link_bytes_per_s=_PCIE5, nvlink=_Nvlink(18, 25e9), network_bytes_per_s=50e9,
         host_ram_bytes=2000 * GB, system=_dgx("H200", "2024-05")),
    _gpu("b200", _HGX,
         peak_flops={"f32": 75 * T, "tf32": 1125 * T, "bf16": 2250 * T, "f16": 2250 * T, "fp8": 4500 * T, "int8": 4500 * T},
         hbm_bytes=191_514_411_008, hbm_bytes_per_s=7672.32e9, clock_hz=1.856e9, l2_bytes=132_644_864, sm_count=148, tdp_w=1000,
         host_link_bytes_per_s=_PCIE5, nvlink=_Nvlink(18, 50e9), network_bytes_per_s=50e9,
         host_ram_bytes=2000 * GB, system=_dgx("B200", "2024-11"),
         overrides={"clock_hz": _CLOCK}),
    # XLA's file says 158 SMs, which gives 1.74 GHz for the published peak.
    _gpu("b300", _HGX,
         peak_flops={"f32": 75 * T, "tf32": 1125 * T, "bf16": 2250 * T, "f16": 2250 * T, "fp8": 4500 * T, "int8": 150 * T},
         hbm_bytes=297_021_865_984, hbm_bytes_per_s=7936e9, clock_hz=1.738e9, l2_bytes=135_528_448, sm_count=158, tdp_w=1100,
         host_link_bytes_per_s=_PCIE5, nvlink=_Nvlink(18, 50e9), network_bytes_per_s=100e9,
         host_ram_bytes=2000 * GB, system=_dgx("B300", "2025-08"),
         overrides={"clock_hz": _CLOCK, "peak_flops.int8": _B300_INT8, "tdp_w": _B300_INT8}),
    # A compute tray has two Grace CPUs of 480 GB and four GPUs; the 900 GB/s (both directions) of a Grace are shared by two GPUs.
    _gpu("gb200", _GB200,
         peak_flops={"f32": 80 * T, "tf32": 1250 * T, "bf16": 2500 * T, "f16": 2500 * T, "fp8": 5000 * T, "int8": 5000 * T},
         hbm_bytes=197_897_748_480, hbm_bytes_per_s=7928.064e9, clock_hz=2.008e9, l2_bytes=135_528_448, sm_count=152, tdp_w=1200,
         host_link_bytes_per_s=225e9, nvlink=_Nvlink(18, 50e9, 72), network_bytes_per_s=50e9,
         host_ram_bytes=960 * GB, chips_per_host=4, system=_GB200,
         overrides={"clock_hz": _CLOCK, "tdp_w": _B300_INT8}),
    _gpu("gb300", _GB300,
         peak_flops={"f32": 80 * T, "tf32": 1250 * T, "bf16": 2500 * T, "f16": 2500 * T, "fp8": 5000 * T, "int8": 165 * T},
         hbm_bytes=297_021_079_552, hbm_bytes_per_s=7928.064e9, clock_hz=2.008e9, l2_bytes=135_528_448, sm_count=152, tdp_w=1400,
         host_link_bytes_per_s=225e9, nvlink=_Nvlink(18, 50e9, 72), network_bytes_per_s=100e9,
         host_ram_bytes=960 * GB, chips_per_host=4, system=_GB300,
         overrides={"clock_hz": _CLOCK, "peak_flops.int8": _B300_INT8, "tdp_w": _B300_INT8, "peak_flops.f32": _B300_INT8}),
    # XLA's file has the nominal 96 GiB; the driver hands out 97,343 MiB.
    _gpu("rtx-pro-6000", _RTX_PRO, peak_flops=_GB202,
         hbm_bytes=97_343 * MiB, hbm_bytes_per_s=1792e9, clock_hz=2.617e9, l2_bytes=128 * MiB, sm_count=188, tdp_w=600,
         host_link_bytes_per_s=_PCIE5, nvlink=None, network_bytes_per_s=25e9, host_ram_bytes=1000 * GB,
         overrides={"hbm_bytes": ("total memory that the driver reports", "2026-12")}),
]


# --- MIG slices -------------------------------------------------------------------------------------------------------


class _Profile(NamedTuple):
    """One row of `nvidia-smi mig -lgip`: `gib` of memory and `sms`, None where that listing was not found."""

    name: str
    memory_eighths: int
    l2_eighths: int
    gib: float | None
    sms: int | None


# 7g of a listing is at most the whole GPU. A100 in MIG mode has 98 of its 108 SMs.
_A100_40 = [_Profile("1g.5gb", 1, 1, 4.75, 14), _Profile("1g.10gb", 2, 1, 9.62, 14), _Profile("2g.10gb", 2, 2, 9.62, 28),
            _Profile("3g.20gb", 4, 4, 19.5, 42), _Profile("4g.20gb", 4, 4, 19.5, 56), _Profile("7g.40gb", 8, 8, 39.25, 98)]
_A100_80 = [_Profile("1g.10gb", 1, 1, 9.5, 14), _Profile("1g.20gb", 2, 1, 19.5, 14), _Profile("2g.20gb", 2, 2, 19.5, 28),
            _Profile("3g.40gb", 4, 4, 39.25, 42), _Profile("4g.40gb", 4, 4, 39.25, 56), _Profile("7g.80gb", 8, 8, 78.75, 98)]
_H100_80 = [_Profile("1g.10gb", 1, 1, 9.75, 16), _Profile("1g.20gb", 2, 1, 19.62, 26), _Profile("2g.20gb", 2, 2, 19.62, 32),
            _Profile("3g.40gb", 4, 4, 39.5, 60), _Profile("4g.40gb", 4, 4, 39.5, 64), _Profile("7g.80gb", 8, 8, 79.25, 132)]
# Only the SM counts differ: SXM's are of 132 SMs. Slices sevenths of 114, rounded down.
_H100_PCIE = [profile._replace(sms=None) for profile in _H100_80]

_MIG: dict[str, list[_Profile]] = {"a100-40gb": _A100_40, "a100-80gb": _A100_80, "a100-80gb-pcie": _A100_80, "h100": _H100_80,
                                   "h100-pcie": _H100_PCIE}
# The one slice with a published device description.
_PUBLISHED_MIG_BYTES = {"h100-mig-1g.10gb": 10_468_982_784}


def _mig_slice(parent: Chip, profile: _Profile) -> tuple[Chip, dict[str, Source]]:
    """Peaks by SM fraction, bandwidth by eighths of memory,
    L2 by its eighths. A slice has no NVLink and no peer-to-peer copies."""
    assert parent.sm_count and parent.hbm_bytes and parent.hbm_bytes_per_s and parent.l2_bytes and parent.host_ram_bytes
    name = f"{parent.name}-mig-{profile.name}"
    sms = profile.sms or parent.sm_count * int(profile.name[0]) // 7
    listed = round(profile.gib * GiB) if profile.gib else parent.hbm_bytes * profile.memory_eighths // 8
    chip = dataclasses.replace(
        parent, name=name, parent=parent.name, chips_per_host=1, domain=None, domain_kind=None, domain_size=1, tdp_w=None,
        sm_count=sms, peak_flops={dtype: flops * sms / parent.sm_count for dtype, flops in parent.peak_flops.items()},
        hbm_bytes=_PUBLISHED_MIG_BYTES.get(name, min(listed, parent.hbm_bytes)), runtime_reserve_bytes=GiB // 2,
        hbm_bytes_per_s=parent.hbm_bytes_per_s * profile.memory_eighths / 8, l2_bytes=parent.l2_bytes * profile.l2_eighths // 8,
        host_ram_bytes=parent.host_ram_bytes // parent.chips_per_host * profile.memory_eighths // 8)

    def derived(rule: str) -> Source:
        return (f"derived from {parent.name}: {rule}", "2026-12")

    sources = {"peak_flops": derived("SMs of the slice / SMs of the GPU"), "clock_hz": derived("the same clock"),
               "hbm_bytes_per_s": derived(f"memory slices, {profile.memory_eighths}/8; fractions of {MIG_GUIDE}"),
               "l2_bytes": derived(f"L2 slices, {profile.l2_eighths}/8; fractions of {MIG_GUIDE}"),
               "hbm_bytes": derived("memory slice as `nvidia-smi mig -lgip` lists it, at most the GPU's"),
               "sm_count": derived("as `nvidia-smi mig -lgip` lists" if profile.sms else "SM fraction, sevenths rounded down"),
               "host_ram_bytes": derived("a GPU's share of the host, by memory slices"), "runtime_reserve_bytes": ESTIMATE,
               "host_link_bytes_per_s": derived("the GPU's link, shared with its other slices"),
               "network": derived("the GPU's share, shared with its other slices"),
               "chips_per_host": derived("a CUDA process sees one MIG slice")}
    if name in _PUBLISHED_MIG_BYTES:
        sources |= {field: XLA_SPECS for field in _GPU_FROM_XLA.split()}
    return chip, sources


_MIGS = [_mig_slice(parent, profile) for parent, _ in _GPUS for profile in _MIG.get(parent.name, [])]

# Emulated devices: no accelerator, so no peak, no bandwidth and no HBM.
_CPU = [(Chip(name="cpu", kind="cpu"), dict[str, Source]())]

_ALL = [*_TPUS, *_GPUS, *_MIGS, *_CPU]
CHIPS: dict[str, Chip] = {chip.name: chip for chip, _ in _ALL}
SOURCES: dict[str, dict[str, Source]] = {chip.name: sources for chip, sources in _ALL}

"""Chips: what one JAX device can compute, hold and move.

Everything a cost model divides by is per JAX device and per direction, in SI units. A device is a chip, half a chip on tpu7x
(two devices a chip), or a MIG slice. A figure that nobody publishes is None, and `Chip.source` says where the others are from.
"""

import dataclasses
from typing import Literal

GB = 10**9
GiB = 2**30
MiB = 2**20
T = 1e12

Dtype = Literal["f32", "tf32", "bf16", "f16", "fp8", "int8", "fp4"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """`links` equal links of `bytes_per_s` each, one direction; `latency_s` of one hop or message."""

    bytes_per_s: float
    latency_s: float
    links: int = 1

    @property
    def total_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.links


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Figures per JAX device, one direction, unless the name says chip or host.

    `peak_flops`: dense FLOP/s by dtype (multiply and add are two); a dtype the hardware lacks is absent.
    `usable_bytes`: the compiler's own limit on TPU; None elsewhere (GPU: capacity x fraction, see the verdict).
    `runtime_reserve_bytes`: GPU memory that the CUDA context and NCCL take outside the allocator's pool (estimate).
    `ici`: one torus link, `links` of them a chip. `domain`: the fast link among `domain_size` devices (NVLink; PCIe where there is none).
    `network`: between hosts, or between slices. `pod_shape`: the largest slice. `parent`: the whole GPU of a MIG slice.
    `host_ram_bytes` is typical for a host of `chips_per_host` chips.
    """

    name: str
    kind: Literal["tpu", "gpu", "cpu"]
    devices_per_chip: int = 1
    peak_flops: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)
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
    domain_kind: Literal["NVLink", "PCIe"] | None = None
    domain_size: int = 1
    network: Link | None = None
    pod_shape: tuple[int, ...] = ()
    parent: str | None = None

    def source(self, field: str) -> tuple[str, str] | None:
        """(where the figure is from, date) of a field, or of one peak as in `"peak_flops.bf16"`; None for what is None."""
        table = SOURCES.get(self.name, {})
        return table.get(field) or table.get(field.partition(".")[0])


_ICI_LATENCY_S = 1e-6
_TPU_NETWORK_LATENCY_S = 2e-5


def _v(name: str, **fields: object) -> Chip:
    return Chip(name=name, kind="tpu", chips_per_host=4, **fields)  # type: ignore[arg-type]


def _g(name: str, **fields: object) -> Chip:
    defaults: dict[str, object] = dict(chips_per_host=8, domain_size=8, domain_kind="NVLink", runtime_reserve_bytes=GiB)
    return Chip(name=name, kind="gpu", **(defaults | fields))  # type: ignore[arg-type]


_CHIPS = [
    _v("v4", peak_flops={"bf16": 275 * T, "int8": 275 * T}, hbm_bytes=32 * GiB, hbm_bytes_per_s=1228 * GB, clock_hz=1.05e9,
       host_link_bytes_per_s=16 * GB, host_ram_bytes=407 * GB, tdp_w=192, pod_shape=(8, 16, 16),
       ici=Link(bytes_per_s=45e9, latency_s=_ICI_LATENCY_S, links=6), network=Link(bytes_per_s=6.25e9, latency_s=_TPU_NETWORK_LATENCY_S)),
    _v("v5e", peak_flops={"bf16": 197 * T, "int8": 393 * T}, hbm_bytes=16 * GiB, hbm_bytes_per_s=819 * GB, clock_hz=1.503e9,
       vmem_bytes=128 * MiB, host_link_bytes_per_s=16 * GB, host_ram_bytes=192 * GB, pod_shape=(16, 16),
       ici=Link(bytes_per_s=45e9, latency_s=_ICI_LATENCY_S, links=4), network=Link(bytes_per_s=3.125e9, latency_s=_TPU_NETWORK_LATENCY_S)),
    _v("v5p", peak_flops={"bf16": 459 * T, "int8": 918 * T}, hbm_bytes=95 * GiB, hbm_bytes_per_s=2765 * GB, clock_hz=1.75e9,
       host_link_bytes_per_s=16 * GB, host_ram_bytes=448 * GB, pod_shape=(16, 16, 24),
       ici=Link(bytes_per_s=90e9, latency_s=_ICI_LATENCY_S, links=6), network=Link(bytes_per_s=6.25e9, latency_s=_TPU_NETWORK_LATENCY_S)),
    _v("v6e", peak_flops={"bf16": 918 * T, "fp8": 918 * T, "int8": 1836 * T}, hbm_bytes=32 * GiB, hbm_bytes_per_s=1640 * GB,
       clock_hz=1.75e9, vmem_bytes=128 * MiB, host_link_bytes_per_s=32 * GB, host_ram_bytes=720 * GB, pod_shape=(16, 16),
       ici=Link(bytes_per_s=90e9, latency_s=_ICI_LATENCY_S, links=4), network=Link(bytes_per_s=12.5e9, latency_s=_TPU_NETWORK_LATENCY_S)),
    _v("tpu7x", devices_per_chip=2, peak_flops={"bf16": 1153.5 * T, "fp8": 2307 * T}, hbm_bytes=96 * GiB, hbm_bytes_per_s=3690 * GB,
       host_link_bytes_per_s=32 * GB, host_ram_bytes=960 * GB, pod_shape=(16, 16, 36),
       ici=Link(bytes_per_s=90e9, latency_s=_ICI_LATENCY_S, links=6), network=Link(bytes_per_s=6.25e9, latency_s=_TPU_NETWORK_LATENCY_S)),
    _g("h100", peak_flops={"f32": 67 * T, "tf32": 494.7 * T, "bf16": 989.4 * T, "f16": 989.4 * T, "fp8": 1978.9 * T, "int8": 1978.9 * T},
       hbm_bytes=84_942_979_072, hbm_bytes_per_s=3.35e12, clock_hz=1.83e9, l2_bytes=50 * MiB, sm_count=132, host_link_bytes_per_s=64e9,
       host_ram_bytes=2 * 10**12, tdp_w=700, domain=Link(bytes_per_s=25e9, latency_s=3e-6, links=18),
       network=Link(bytes_per_s=50e9, latency_s=5e-6)),
    Chip(name="cpu", kind="cpu"),
]

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}
SOURCES: dict[str, dict[str, tuple[str, str]]] = {}

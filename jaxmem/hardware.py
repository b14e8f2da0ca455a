"""Topologies: which chips, how many, in which shape; `"v5p-128"`, `"2xv5e-256"`, `"h100:16x8"` <-> `Topology`.

The figures of the chips themselves are in `chips.py`. Nothing here imports jax.
"""

import dataclasses
import difflib
import math
import re
from typing import Literal

from jaxmem.chips import CHIPS, SOURCES, Chip, Link
from jaxmem.spec import DASHES, InputError, nearest

__all__ = ["CHIPS", "CLOUD_SHAPES", "SOURCES", "Chip", "Link", "Topology", "parse_topology", "topologies"]

# Names that people and clouds use for a chip of the tables.
ALIASES = {
    "v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e", "trillium": "v6e", "v7x": "tpu7x", "ironwood": "tpu7x", "v5": "v5p",
    "h100-sxm": "h100", "h100-80gb": "h100", "a100-40gb-sxm": "a100-40gb", "a100-80gb-sxm": "a100-80gb", "v100-16gb": "v100",
    "rtx-a6000": "a6000", "rtxpro6000": "rtx-pro-6000", "h200-sxm": "h200", "h200-141gb": "h200",
}

# Above any machine that was built: a slip of the finger is refused before something allocates a list of it.
MOST_DEVICES = 2**20
MOST_EMULATED = 1024

_SHAPES_3D = ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12", "4x8x8", "4x8x12", "8x8x8", "8x8x12", "8x8x16",
              "8x12x16", "8x16x16", "12x16x16", "16x16x16", "16x16x24"]
_SHAPES_2D = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _by_count(shapes: list[str], counted_per_chip: int, largest: int) -> dict[int, tuple[int, ...]]:
    """Cloud name's number -> chips by shape. v4, v5p and tpu7x names count two TensorCores a chip, v5e and v6e names chips."""
    table = {math.prod(_shape(text)) * counted_per_chip: _shape(text) for text in shapes}
    return {count: shape for count, shape in table.items() if math.prod(shape) <= largest}


# https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e, /tpu7x: the tables of supported configurations (2026-12).
CLOUD_SHAPES: dict[str, dict[int, tuple[int, ...]]] = {
    "v4": _by_count(_SHAPES_3D, 2, 3072),
    "v5e": _by_count(_SHAPES_2D, 1, 256),
    "v5p": _by_count(_SHAPES_3D, 2, 6144),
    "v6e": _by_count(_SHAPES_2D, 1, 256),
    "tpu7x": _by_count([*_SHAPES_3D, "16x16x36"], 2, 9216),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Chips in a shape.

    `shape` is chips: the 2-D or 3-D grid of one of `slices` slices on TPU, `(hosts, chips a host)` on GPU, `(devices,)` on CPU.
    `hosts` and `devices` count over all slices; a JAX device is half a chip on tpu7x and a chip (or MIG slice) elsewhere.
    `wrap[i]` says whether dimension i of the torus is a ring; it is False for every dimension where there is no torus.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chips_per_slice(self) -> int:
        return math.prod(self.shape)

    @property
    def chips(self) -> int:
        return self.chips_per_slice * self.slices

    @property
    def devices_per_slice(self) -> int:
        return self.chips_per_slice * self.chip.devices_per_chip

    @property
    def devices(self) -> int:
        return self.devices_per_slice * self.slices

    @property
    def hosts(self) -> int:
        if self.chip.kind == "gpu":
            return self.shape[0]
        if self.chip.kind == "cpu":
            return 1
        return self.slices * max(1, self.chips_per_slice // self.chip.chips_per_host)

    @property
    def devices_per_host(self) -> int:
        return self.devices // self.hosts

    @property
    def wrap(self) -> tuple[bool, ...]:
        """3-D: all rings close when every dimension is a multiple of 4 (whole cubes,
        optical switches); 2-D: a dimension of 16."""
        if self.chip.kind != "tpu":
            return (False,) * len(self.shape)
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(size == 16 for size in self.shape)

    @property
    def libtpu_name(self) -> str:
        """`topology_name` for `jax.experimental.topologies.get_topology_desc(platform="tpu", ...)`."""
        if self.chip.kind != "tpu":
            raise InputError(f"topology {self}: {self.chip.name} is not a TPU, libtpu has no name for it")
        return f"{self.chip.name}:{self.shape_text}"

    @property
    def libtpu_kwargs(self) -> dict[str, str | int]:
        """Further keyword arguments of that call: v4 as one device a chip, and the number of slices."""
        kwargs: dict[str, str | int] = {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}
        return kwargs | ({"num_slices": self.slices} if self.slices > 1 else {})

    @property
    def gpu_shape(self) -> str:
        """`topology` for `get_topology_desc("", platform="cuda", ...)`: partitions x hosts x devices a host."""
        if self.chip.kind != "gpu":
            raise InputError(f"topology {self}: {self.chip.name} is not a GPU, it has no shape of hosts and GPUs")
        return f"1x{self.shape_text}"

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def text(self) -> str:
        """The one spelling of this topology: the cloud's name where there is one, the shape elsewhere."""
        name = self.chip.name
        if self.chip.kind == "tpu":
            count = next((count for count, shape in CLOUD_SHAPES[name].items() if shape == self.shape), None)
            one = f"{name}:{self.shape_text}" if count is None else f"{name}-{count}"
            return one if self.slices == 1 else f"{self.slices}x{one}"
        if self.chip.kind == "gpu" and self.shape[0] == 1:
            return name if self.chip.parent and self.shape[1] == 1 else f"{name}:{self.shape[1]}"
        return f"{name}:{self.shape_text}"

    def __str__(self) -> str:
        return self.text


def topologies(kind: Literal["tpu", "gpu", "cpu"] | None = None) -> list[str]:
    """Names for the listing; shapes and host counts between and beyond them are accepted too."""
    names: list[str] = []
    for chip in CHIPS.values():
        if kind not in (None, chip.kind):
            continue
        if chip.kind == "tpu":
            names += [f"{chip.name}-{count}" for count in CLOUD_SHAPES[chip.name]]
        elif chip.kind == "cpu":
            names += [f"{chip.name}:{count}" for count in (1, 8)]
        elif chip.parent:
            names.append(chip.name)
        else:
            hosts = (1, 2, 8, 16)
            names += [f"{chip.name}:1"] + [f"{chip.name}:{f'{n}x' if n > 1 else ''}{chip.chips_per_host}" for n in hosts]
    return names


def parse_topology(text: str) -> Topology:
    """`"v5p-128"`, `"v5p:4x4x4"`, `"2xv5e-256"`, `"h100:8"`, `"h100:16x8"`, `"h100-mig-1g.10gb"`, `"cpu:8"` -> `Topology`.

    Raises `InputError` with the nearest names that exist: an unknown chip or size, a shape that hosts of 2x2 chips do not divide,
    a slice larger than a pod, more GPUs than a host holds, a number that is zero or negative.
    """
    plain = re.sub(r"\s+", "", text.translate(DASHES).replace("×", "x")).lower()
    if not plain:
        raise InputError("topology is empty: give a name as in v5p-128, v5p:4x4x4, 2xv5e-256, h100:16x8 or cpu:8")
    slices, rest = 1, plain
    if match := re.fullmatch(r"(-?[0-9]{1,18})x([a-z].*)", plain):
        slices, rest = int(match[1]), match[2]
    name, colon, size = rest.partition(":")
    chip = _chip(name)
    if colon:
        sizes = _sizes(size, text, chip)
    elif (not chip and (match := re.fullmatch(r"(.+?)-(-?[\w.]*)", name))
          and (found := _chip(match[1])) and found.kind == "tpu"):
        chip, sizes = found, _cloud_sizes(found, match[2], text)
    elif chip is not None and chip.parent:
        sizes = (1,)
    elif chip is not None:
        raise InputError(f"topology {text!r}: {chip.name} needs a size, as in {_examples(chip)}")
    if chip is None:
        raise InputError(f"unknown topology {text!r}{_nearest_topology(name, size)}")
    if slices < 1:
        raise InputError(f"topology {text!r}: {slices} slices; at least 1 is needed, as in 2xv5e-256")
    if chip.kind != "tpu" and slices > 1:
        raise InputError(f"topology {text!r}: slices are of TPUs; hosts of {chip.name} are written {chip.name}:HOSTSxGPUS"
                         if chip.kind == "gpu" else f"topology {text!r}: slices are of TPUs; emulated devices are written cpu:8")
    if min(sizes) < 1:
        raise InputError(f"topology {text!r}: every size must be at least 1, as in {_examples(chip)}")
    topology = Topology(chip=chip, shape=_checked_shape(chip, sizes, text), slices=slices)
    if topology.devices > MOST_DEVICES:
        raise InputError(f"topology {text!r}: {topology.devices:,} devices; the most is {MOST_DEVICES:,}")
    return topology


def _chip(name: str) -> Chip | None:
    return CHIPS.get(ALIASES.get(name, name))


def _sizes(size: str, text: str, chip: Chip | None) -> tuple[int, ...]:
    if not re.fullmatch(r"-?[0-9]{1,18}(x-?[0-9]{1,18})*", size):
        raise InputError(f"topology {text!r}: {size!r} is not a size or a shape{f', as in {_examples(chip)}' if chip else ''}")
    return _shape(size)


def _cloud_sizes(chip: Chip, count: str, text: str) -> tuple[int, ...]:
    table = CLOUD_SHAPES[chip.name]
    if not re.fullmatch(r"-?[0-9]{1,18}", count):
        raise InputError(f"topology {text!r}: {count!r} is not a number; {chip.name} has {_examples(chip)}")
    if int(count) in table:
        return table[int(count)]
    below = [n for n in table if n < int(count)][-1:]
    above = [n for n in table if n > int(count)][:1]
    counted = "chips" if chip.name in ("v5e", "v6e") else "TensorCores, two a chip"
    near = " or ".join(f"{chip.name}-{n}" for n in below + above)
    raise InputError(f"topology {text!r} does not exist: did you mean {near}? (the number counts {counted}; "
                     f"other shapes are written {chip.name}:{'x'.join('AB' if chip.name in ('v5e', 'v6e') else 'ABC')} in chips)")


def _examples(chip: Chip) -> str:
    if chip.kind == "tpu":
        names = [f"{chip.name}-{count}" for count in CLOUD_SHAPES[chip.name]]
        shape = next(iter(reversed(CLOUD_SHAPES[chip.name].values())))
        return f"{', '.join(names[:4])} or by shape {chip.name}:{'x'.join(map(str, shape))}"
    if chip.kind == "cpu":
        return "cpu:8"
    if chip.parent:
        return chip.name
    return f"{chip.name}:1, {chip.name}:{chip.chips_per_host} or {chip.name}:2x{chip.chips_per_host}"


def _nearest_topology(name: str, size: str) -> str:
    """Chips whose names are nearest, each with the size that was asked for where the chip has it."""
    spelled = {**{chip: chip for chip in CHIPS}, **ALIASES}
    if (match := re.fullmatch(r"(.+)-([0-9]{1,18})", name)) and match[1] in spelled:  # h100-8, a cloud's way of writing it
        name, size = match[1], match[2]
    begin_so = [chip for chip in CHIPS if chip.startswith(name) and not CHIPS[chip].parent] if name else []
    close = begin_so or [spelled[found] for found in difflib.get_close_matches(name, spelled, n=4, cutoff=0.6)]
    if not close:
        return nearest(name, [chip.name for chip in CHIPS.values() if not chip.parent])
    return f"; did you mean {' or '.join(_with_size(CHIPS[chip], size) for chip in list(dict.fromkeys(close))[:3])}?"


def _with_size(chip: Chip, size: str) -> str:
    if chip.kind == "tpu" and re.fullmatch(r"[0-9]{1,18}", size) and int(size) in CLOUD_SHAPES[chip.name]:
        return f"{chip.name}-{int(size)}"
    if re.fullmatch(r"[1-9][0-9]{0,17}(x[1-9][0-9]{0,17})*", size):
        try:
            return Topology(chip=chip, shape=_checked_shape(chip, _shape(size), size)).text
        except InputError:
            return topologies_of(chip)[0]
    return topologies_of(chip)[0]


def _checked_shape(chip: Chip, sizes: tuple[int, ...], text: str) -> tuple[int, ...]:
    return {"tpu": _tpu_shape, "gpu": _gpu_shape, "cpu": _cpu_shape}[chip.kind](chip, sizes, text)


def topologies_of(chip: Chip) -> list[str]:
    """The listed names of one chip."""
    return [name for name in topologies(chip.kind) if re.split(r":|-(?=\d+$)", name)[0] == chip.name]


def _tpu_shape(chip: Chip, sizes: tuple[int, ...], text: str) -> tuple[int, ...]:
    dims = len(chip.pod_shape)
    if len(sizes) != dims:
        raise InputError(f"topology {text!r}: a {chip.name} slice has {dims} dimensions, not {len(sizes)}; "
                         f"as in {_examples(chip)}")
    host = (2, 2, 1)[:dims]
    on_one_host = all(size <= limit for size, limit in zip(sizes, host, strict=True))
    if not on_one_host and any(size % limit for size, limit in zip(sizes, host, strict=True)):
        near = {tuple(max(limit, pick(size / limit) * limit) for size, limit in zip(sizes, host, strict=True))
                for pick in (math.floor, math.ceil)}
        names = " or ".join(f"{chip.name}:{'x'.join(map(str, shape))}" for shape in sorted(near))
        raise InputError(f"topology {text!r}: hosts of {'x'.join(map(str, host))} chips do not divide the shape "
                         f"{'x'.join(map(str, sizes))}; did you mean {names}?")
    largest = chip.pod_shape
    if any(size > limit for size, limit in zip(sorted(sizes), sorted(largest), strict=True)):
        name = topologies_of(chip)[-1]
        raise InputError(f"topology {text!r}: larger than the largest {chip.name} slice, {'x'.join(map(str, largest))} "
                         f"({name}); several slices are written 2x{name}")
    return sizes


def _gpu_shape(chip: Chip, sizes: tuple[int, ...], text: str) -> tuple[int, ...]:
    if len(sizes) > 2:
        raise InputError(f"topology {text!r}: GPUs are written GPUS or HOSTSxGPUS, as in {_examples(chip)}")
    hosts, gpus = sizes if len(sizes) == 2 else (1, sizes[0])
    limit = chip.chips_per_host
    if gpus > limit:
        if chip.parent:
            raise InputError(f"topology {text!r}: a CUDA process sees one MIG slice, so {chip.name} is a topology of one device")
        full = math.ceil(hosts * gpus / limit)
        raise InputError(f"topology {text!r}: a host holds {limit} {chip.name}, not {gpus}; "
                         f"did you mean {chip.name}:{full}x{limit}?")
    return hosts, gpus


def _cpu_shape(chip: Chip, sizes: tuple[int, ...], text: str) -> tuple[int, ...]:
    if len(sizes) != 1:
        raise InputError(f"topology {text!r}: emulated devices are a plain number, as in cpu:8")
    if sizes[0] > MOST_EMULATED:
        raise InputError(f"topology {text!r}: at most {MOST_EMULATED} devices are emulated, as in cpu:8")
    return sizes

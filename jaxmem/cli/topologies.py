"""chips and topology names, with figures and their sources.

  jaxmem topologies                every chip, and how its topologies are written
  jaxmem topologies v5p            one chip: every figure with its source and date, and its names
  jaxmem topologies 2xv5e-256      one topology: chips, devices, hosts, torus

Figures are per JAX device and per direction unless they say otherwise; a dash is a figure that
nobody publishes.
"""

import dataclasses
import json

from absl import flags as absl_flags

from jaxmem.chips import CHIPS, Chip, Link
from jaxmem.cli.tables import WIDTH, print_table
from jaxmem.hardware import ALIASES, Topology, parse_topology, topologies, topologies_of
from jaxmem.report.cells import Column, wrap
from jaxmem.report.units import UNKNOWN, bytes_text
from jaxmem.spec import DASHES


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_boolean("json", False, "print one JSON object: figures, sources and names", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    names = [ALIASES.get(word.translate(DASHES).lower(), word.translate(DASHES).lower()) for word in words]
    chips = [CHIPS[name] for name in names if name in CHIPS] if names else list(CHIPS.values())
    chosen = [parse_topology(word) for word, name in zip(words, names, strict=True) if name not in CHIPS]
    if flags.json:
        print(json.dumps({"chips": {chip.name: _chip_json(chip) for chip in chips},
                          "topologies": {str(t): _topology_json(t) for t in chosen} if words
                          else {name: _topology_json(parse_topology(name)) for name in topologies()}}, indent=1))
        return 0
    if not words:
        _all(chips)
        return 0
    for i, one in enumerate((*chips, *chosen)):
        if i:
            print()
        if isinstance(one, Topology):
            _one_topology(one)
        elif isinstance(one, Chip):
            _one_chip(one)
    return 0


def _all(chips: list[Chip]) -> None:
    columns = [Column(head="chip"), *(Column(head=head, align="right") for head in
               ("HBM", "HBM /s", "bf16 FLOP/s", "torus or NVLink /s", "network /s")), Column(head="sizes", keep="end")]
    print_table(columns, [[chip.name, bytes_text(chip.hbm_bytes), _rate(chip.hbm_bytes_per_s),
                           _rate(chip.peak_flops.get("bf16"), "FLOP/s"), _links(chip.ici or chip.domain), _links(chip.network),
                           _sizes(chip)] for chip in chips if not chip.parent])
    slices = ", ".join(chip.name for chip in chips if chip.parent)
    print("\n" + "\n".join(wrap(f"MIG slices: {slices}", WIDTH)))
    print("\nNames: v5p-128 (as the cloud sells it), v5p:4x4x8 (chips), 4xv5e-256 (slices), h100:8,\n"
          "h100:16x8 (hosts x GPUs), cpu:8. jaxmem topologies CHIP: every figure with its source, and names.")


def _sizes(chip: Chip) -> str:
    """`-8 ... -12288`: what follows the chip's name in its smallest and largest listed topology."""
    names = [name.removeprefix(chip.name) for name in topologies_of(chip)]
    return " ... ".join([names[0], names[-1]][:len(names)])


def _one_chip(chip: Chip) -> None:
    parent = f", a slice of {chip.parent}" if chip.parent else ""
    devices = f"{chip.devices_per_chip} JAX device{'s' if chip.devices_per_chip > 1 else ''} a chip"
    print(f"{chip.name} ({chip.kind}{parent}), {devices}")
    rows, notes = [], list[str]()
    for name, value in _figures(chip).items():
        where = chip.source(name)
        note = f"{where[0]} ({where[1]})" if where else None
        if note is not None and note not in notes:
            notes.append(note)
        rows.append([name, value, UNKNOWN if note is None else f"[{notes.index(note) + 1}]"])
    print_table([Column(head="figure"), Column(head="value", align="right"), Column(head="source")], rows)
    for i, note in enumerate(notes, 1):
        first, *rest = wrap(note, WIDTH - 6)
        print("\n".join([f"{f'[{i}]':>5} {first}", *(f"{'':6}{line}" for line in rest)]))
    print("\n".join(wrap("topologies: " + ", ".join(topologies_of(chip)), WIDTH)))


def _one_topology(topology: Topology) -> None:
    for name, value in _topology_json(topology).items():
        print(f"{name:<18}{UNKNOWN if value is None else value}")


def _figures(chip: Chip) -> dict[str, str]:
    """Field -> figure as text; fields that do not apply to the chip's kind are left out, unknown ones are a dash."""
    out = {f"peak_flops.{dtype}": _rate(peak, "FLOP/s") for dtype, peak in chip.peak_flops.items()}
    skipped = {"name", "kind", "peak_flops", "devices_per_chip", "parent", "domain_kind",
               *(("ici", "vmem_bytes", "pod_shape") if chip.kind != "tpu" else ("domain", "domain_size", "l2_bytes", "sm_count"))}
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if field.name in skipped or (value is None and field.name in ("usable_bytes", "runtime_reserve_bytes")):
            continue
        out[field.name] = _figure(field.name, value)
    return out


def _figure(name: str, value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, Link):
        return f"{value.links} x {_rate(value.bytes_per_s)}, {value.latency_s * 1e6:g} µs"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if name.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    if isinstance(value, (int, float)):
        for suffix, unit in (("_bytes_per_s", "B/s"), ("_hz", "Hz")):
            if name.endswith(suffix):
                return _rate(value, unit)
        return f"{value:g} W" if name.endswith("_w") else f"{value:g}"
    return str(value)


def _rate(value: float | None, unit: str = "B/s") -> str:
    """In powers of a thousand: `2.76 TB/s`, `459 TFLOP/s`."""
    if value is None:
        return UNKNOWN
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _links(link: Link | None) -> str:
    if link is None:
        return UNKNOWN
    return f"{link.links} x {_rate(link.bytes_per_s)}" if link.links > 1 else _rate(link.bytes_per_s)


def _chip_json(chip: Chip) -> dict[str, object]:
    fields = dataclasses.asdict(chip)
    sources = {name: list(where) for name in _figures(chip) if (where := chip.source(name))}
    return fields | {"sources": sources}


def _topology_json(topology: Topology) -> dict[str, object]:
    return {"topology": str(topology), "chip": topology.chip.name, "shape": topology.shape_text, "slices": topology.slices,
            "chips": topology.chips, "devices": topology.devices, "hosts": topology.hosts,
            "torus": " x ".join("ring" if ring else "line" for ring in topology.wrap) if topology.chip.kind == "tpu" else None,
            "hbm_bytes_device": topology.chip.hbm_bytes}

"""Topology names against the cloud's tables written out by hand, and figures of chips against what follows from others."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given, strategies

from jaxmem.hardware import CHIPS, CLOUD_SHAPES, Topology, parse_topology, topologies
from jaxmem.spec import InputError
from jaxmem.targets.gpu_target_config import DEVICES, REFUSED, target_config

GiB, MiB = 2**30, 2**20


# --- Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", topologies())
def test_listed_names_parse_and_print_themselves(text):
    topology = parse_topology(text)
    assert str(topology) == text
    assert parse_topology(str(topology)) == topology


@given(chip=strategies.sampled_from([chip for chip in CHIPS.values() if chip.kind == "tpu"]), slices=strategies.integers(1, 5),
       halves=strategies.lists(strategies.integers(1, 8), min_size=3, max_size=3))
def test_every_tpu_shape_prints_a_name_that_reads_back(chip, slices, halves):
    shape = (2 * halves[0], 2 * halves[1], halves[2])[:len(chip.pod_shape)]
    if any(size > limit for size, limit in zip(sorted(shape), sorted(chip.pod_shape), strict=True)):
        return
    topology = parse_topology(f"{slices}x{chip.name}:{'x'.join(map(str, shape))}")
    assert (topology.shape, topology.slices) == (shape, slices)
    assert topology.devices == slices * math.prod(shape) * (2 if chip.name == "tpu7x" else 1)
    assert parse_topology(str(topology)) == topology


@given(strategies.text(alphabet="v5pe4x-:2h10b8 cu×‑0", max_size=12))
def test_any_text_is_a_topology_or_an_input_error(text):
    try:
        topology = parse_topology(text)
    except InputError as error:
        assert str(error)
    else:
        assert topology.devices >= 1 and parse_topology(str(topology)) == topology


# name, shape in chips, JAX devices, hosts: from the contract and the clouds' tables.
COUNTS = [
    ("v4-8", (2, 2, 1), 4, 1), ("v4-128", (4, 4, 4), 64, 16), ("v4-4096", (8, 16, 16), 2048, 512),
    ("v5p-8", (2, 2, 1), 4, 1), ("v5p-64", (2, 4, 4), 32, 8), ("v5p-128", (4, 4, 4), 64, 16), ("v5p-256", (4, 4, 8), 128, 32),
    ("v5p-512", (4, 8, 8), 256, 64), ("v5p-1024", (8, 8, 8), 512, 128), ("v5p-2048", (8, 8, 16), 1024, 256),
    ("v5p-8192", (16, 16, 16), 4096, 1024), ("v5p-12288", (16, 16, 24), 6144, 1536),
    ("v5e-1", (1, 1), 1, 1), ("v5e-4", (2, 2), 4, 1), ("v5e-8", (2, 4), 8, 2), ("v5e-16", (4, 4), 16, 4),
    ("v5e-32", (4, 8), 32, 8), ("v5e-64", (8, 8), 64, 16), ("v5e-128", (8, 16), 128, 32), ("v5e-256", (16, 16), 256, 64),
    ("v6e-256", (16, 16), 256, 64),
    ("tpu7x-8", (2, 2, 1), 8, 1), ("tpu7x-128", (4, 4, 4), 128, 16), ("tpu7x-18432", (16, 16, 36), 18432, 2304),
    ("2xv5e-256", (16, 16), 512, 128), ("4xtpu7x-128", (4, 4, 4), 512, 64),
    ("h100:8", (1, 8), 8, 1), ("h100:16x8", (16, 8), 128, 16), ("gb200:18x4", (18, 4), 72, 18),
    ("h100-mig-1g.10gb", (1, 1), 1, 1), ("cpu:8", (8,), 8, 1),
]


@pytest.mark.parametrize("text, shape, devices, hosts", COUNTS)
def test_counts(text, shape, devices, hosts):
    topology = parse_topology(text)
    assert (topology.shape, topology.devices, topology.hosts) == (shape, devices, hosts)
    assert topology.devices_per_slice * topology.slices == devices
    assert topology.devices_per_host * hosts == devices


@pytest.mark.parametrize("text, same", [
    ("v5p:4x4x4", "v5p-128"), ("2x v5e-256", "2xv5e-256"), ("v5litepod-16", "v5e-16"), ("V5P‑128", "v5p-128"),
    ("h100:1x8", "h100:8"), ("1xv5e-4", "v5e-4"), ("h100-mig-1g.10gb:1", "h100-mig-1g.10gb"), ("v5p:4×4×8", "v5p-256"),
    ("v7x-8", "tpu7x-8"), ("v5p:4x4x6", "v5p:4x4x6"),
])
def test_other_spellings(text, same):
    assert str(parse_topology(text)) == same


@pytest.mark.parametrize("text, wrap", [
    ("v5p:4x4x4", (True, True, True)), ("v5p:4x4x8", (True, True, True)), ("v4:2x4x4", (False, False, False)),
    ("v5p:4x4x6", (False, False, False)), ("v5p:2x2x1", (False, False, False)), ("tpu7x:8x8x12", (True, True, True)),
    ("v5e:16x16", (True, True)), ("v5e:8x16", (False, True)), ("v6e:16x8", (True, False)), ("v6e:8x8", (False, False)),
    ("h100:8", (False, False)), ("cpu:8", (False,)),
])
def test_rings_close_where_the_slice_allows(text, wrap):
    assert parse_topology(text).wrap == wrap


@pytest.mark.parametrize("text, message", [
    ("v5p-100", "v5p-64 or v5p-128"), ("v6e-512", "did you mean v6e-256?"), ("tpu7x-100", "tpu7x-64 or tpu7x-128"),
    ("v5e:3x3", "v5e:2x2 or v5e:4x4"), ("v5p:3x4x4", "v5p:2x4x4 or v5p:4x4x4"), ("v5p:4x4", "3 dimensions, not 2"),
    ("v5e:32x32", "larger than the largest v5e slice, 16x16 (v5e-256)"), ("v5p:2x2x32", "16x16x24"),
    ("h100:9", "did you mean h100:2x8?"), ("gb200:72", "did you mean gb200:18x4?"), ("h100:8x", "'8x' is not a size"),
    ("h100:2x2x2", "HOSTSxGPUS"), ("h100", "h100:8"), ("h100:0", "at least 1"), ("h100:-8", "at least 1"),
    ("v5e:0x2", "at least 1"), ("0xv5e-4", "at least 1"), ("v5p-0", "did you mean v5p-8?"), ("cpu:0", "at least 1"),
    ("cpu:2x4", "as in cpu:8"), ("2xh100:8", "h100:HOSTSxGPUS"), ("2xcpu:8", "are written cpu:8"), ("h100-8", "h100:8"),
    ("a100:8", "a100-40gb:8 or a100-80gb:8"), ("h800:8", "h200:8 or h100:8"), ("h100-mig-5g.10gb", "h100-mig-1g.10gb"),
    ("h100-mig-1g.10gb:7", "one MIG slice"), ("", "empty"), ("h100:" + "9" * 5000, "not a size"),
    ("99999999999xv5e-4", "the most is 1,048,576"), ("cpu:100000", "at most 1024"),
])
def test_errors_name_the_nearest(text, message):
    with pytest.raises(InputError) as caught:
        parse_topology(text)
    assert message in str(caught.value)


def test_cloud_numbers_count_what_the_cloud_counts():
    for name, table in CLOUD_SHAPES.items():
        counted_per_chip = {"v4": 2, "v5p": 2, "tpu7x": 2, "v5e": 1, "v6e": 1}[name]
        assert all(count == counted_per_chip * math.prod(shape) for count, shape in table.items())
        assert list(table) == sorted(table)
        assert [sorted(shape) for shape in table.values()][-1] == sorted(CHIPS[name].pod_shape)


def test_names_for_the_compilers():
    assert parse_topology("v5p-128").libtpu_name == "v5p:4x4x4" and parse_topology("v5p-128").libtpu_kwargs == {}
    assert parse_topology("2xv4-128").libtpu_kwargs == {"chip_config_name": "megacore", "num_slices": 2}
    assert parse_topology("h100:16x8").gpu_shape == "1x16x8" and parse_topology("h100-mig-2g.20gb").gpu_shape == "1x1x1"
    with pytest.raises(InputError, match="not a TPU"):
        parse_topology("h100:8").libtpu_name  # noqa: B018
    with pytest.raises(InputError, match="not a GPU"):
        parse_topology("v5e-4").gpu_shape  # noqa: B018


# --- Figures ----------------------------------------------------------------------------------------------------------

# matrix multiply-accumulates a clock of a device: TPU units x side x side, GPU SMs x (dense bf16 or f16) FMAs of an SM.
MACS_A_CLOCK = {
    "v4": 8 * 128 * 128, "v5e": 4 * 128 * 128, "v5p": 8 * 128 * 128, "v6e": 4 * 256 * 256, "tpu7x": 4 * 256 * 256,
    "v100": 80 * 512, "a100-40gb": 108 * 1024, "a100-80gb": 108 * 1024, "a100-80gb-pcie": 108 * 1024, "a6000": 84 * 512,
    "h100": 132 * 2048, "h100-pcie": 114 * 2048, "h200": 132 * 2048, "b200": 148 * 4096, "b300": 158 * 4096, "gb200": 152 * 4096,
    "gb300": 152 * 4096, "rtx-pro-6000": 188 * 512,
}


@pytest.mark.parametrize("name", MACS_A_CLOCK)
def test_peak_is_units_times_clock(name):
    chip = CHIPS[name]
    peak = chip.peak_flops.get("bf16") or chip.peak_flops["f16"]
    assert peak == pytest.approx(2 * MACS_A_CLOCK[name] * chip.clock_hz, rel=0.005)
    assert peak == chip.peak_flops.get("f16", peak)


def test_every_whole_gpu_and_tpu_is_in_the_table_above():
    assert {chip.name for chip in CHIPS.values() if chip.kind != "cpu" and not chip.parent} == set(MACS_A_CLOCK)


@pytest.mark.parametrize("name", MACS_A_CLOCK)
def test_rates_of_dtypes_are_ordered(name):
    peaks = CHIPS[name].peak_flops
    order = [peaks[dtype] for dtype in ("f32", "tf32", "bf16", "fp8") if dtype in peaks]
    assert order == sorted(order)
    if CHIPS[name].kind == "gpu" and "tf32" in peaks:
        assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.001)
    absent = {"v100": {"bf16", "tf32", "fp8", "int8"}, "a100-40gb": {"fp8"}, "a6000": {"fp8"}, "v4": {"fp8", "f16"},
              "tpu7x": {"int8", "f32"}}.get(name, set())
    assert not absent & set(peaks)


# The compiler's "available HBM" as its out-of-memory message prints it, GiB with two digits (libtpu 0.0.50.1).
@pytest.mark.parametrize("name, available_gib", [("v4", 30.75), ("v5e", 15.75), ("v5p", 95.73), ("v6e", 31.24), ("tpu7x", 94.74)])
def test_usable_is_the_compilers_limit(name, available_gib):
    chip = CHIPS[name]
    assert chip.usable_bytes / GiB == pytest.approx(available_gib, abs=0.01)
    assert 0 < chip.hbm_bytes - chip.usable_bytes < 1.5 * GiB
    assert chip.source("usable_bytes")[0].startswith("compile, libtpu")


@pytest.mark.parametrize("name, chip_gb_per_s", [("v4", 300), ("v5e", 200), ("v5p", 600), ("v6e", 400), ("tpu7x", 600)])
def test_links_reach_ninety_percent_of_the_published_interconnect(name, chip_gb_per_s):
    """Published per chip, half of both directions together: links x devices x one direction."""
    chip = CHIPS[name]
    assert chip.ici.links == 2 * len(chip.pod_shape)
    assert chip.ici.total_bytes_per_s * chip.devices_per_chip == pytest.approx(0.9 * chip_gb_per_s * 1e9, rel=1e-9)


@pytest.mark.parametrize("name, gb_per_s, size", [
    ("v100", 150, 8), ("a100-40gb", 300, 8), ("a100-80gb", 300, 8), ("h100", 450, 8), ("h200", 450, 8), ("b200", 900, 8),
    ("b300", 900, 8), ("gb200", 900, 72), ("gb300", 900, 72)])
def test_nvlink_domains(name, gb_per_s, size):
    chip = CHIPS[name]
    assert (chip.domain_kind, chip.domain.total_bytes_per_s, chip.domain_size) == ("NVLink", gb_per_s * 1e9, size)
    assert DEVICES[name].links == chip.domain.links


def test_every_figure_has_a_source_and_a_date():
    structural = {"name", "kind", "devices_per_chip", "domain_kind", "domain_size", "parent"}
    for chip in CHIPS.values():
        if chip.kind == "cpu":
            continue
        for field in dataclasses.fields(chip):
            if field.name in structural or getattr(chip, field.name) in (None, {}, ()):
                continue
            where, date = chip.source(field.name)
            assert len(where) > 8 and date[:2] == "20", (chip.name, field.name)
            if chip.parent and (chip.name, field.name) not in PUBLISHED_OF_MIG:
                assert where.startswith(("derived from " + chip.parent, "estimate")), (chip.name, field.name)


PUBLISHED_OF_MIG = {("h100-mig-1g.10gb", field) for field in ("hbm_bytes", "hbm_bytes_per_s", "l2_bytes", "sm_count")}


def test_cpu_knows_no_figures():
    cpu = parse_topology("cpu:8").chip
    assert cpu.kind == "cpu" and cpu.peak_flops == {} and cpu.hbm_bytes is None and cpu.hbm_bytes_per_s is None
    assert cpu.source("hbm_bytes") is None


def test_chips_and_topologies_are_values():
    assert hash(parse_topology("v5p-128")) == hash(parse_topology("v5p:4x4x4"))
    assert parse_topology("v5p-128") != parse_topology("2xv5p-128")
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_topology("v5p-128").slices = 2


# --- MIG --------------------------------------------------------------------------------------------------------------

H100_PROFILES = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]
A100_40_PROFILES = ["1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"]


@pytest.mark.parametrize("parent, profiles", [("h100", H100_PROFILES), ("h100-pcie", H100_PROFILES), ("a100-80gb", H100_PROFILES),
                                              ("a100-80gb-pcie", H100_PROFILES), ("a100-40gb", A100_40_PROFILES)])
def test_every_profile_of_the_mig_guide(parent, profiles):
    whole = CHIPS[parent]
    for profile in profiles:
        slice_ = CHIPS[f"{parent}-mig-{profile}"]
        sevenths, nominal_gb = int(profile[0]), int(profile.split(".")[1][:-2])
        assert slice_.sm_count <= whole.sm_count and slice_.sm_count >= sevenths * whole.sm_count * 0.84 / 7
        assert slice_.peak_flops["bf16"] / whole.peak_flops["bf16"] == pytest.approx(slice_.sm_count / whole.sm_count)
        assert 0.9 * nominal_gb * 1e9 < slice_.hbm_bytes <= min(1.07 * nominal_gb * 1e9, whole.hbm_bytes)
        eighths = round(8 * nominal_gb * 1e9 / whole.hbm_bytes)
        assert slice_.hbm_bytes_per_s == pytest.approx(whole.hbm_bytes_per_s * eighths / 8)
        assert slice_.l2_bytes == whole.l2_bytes * {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}[sevenths] // 8
        assert slice_.domain is None and slice_.parent == parent
    assert {chip.name for chip in CHIPS.values() if chip.parent == parent} == {f"{parent}-mig-{profile}" for profile in profiles}


def test_the_published_slice():
    """XLA's description of H100 1g.10gb: its figures, and that an eighth of the GPU gives its bandwidth and L2."""
    chip = CHIPS["h100-mig-1g.10gb"]
    assert (chip.hbm_bytes, chip.hbm_bytes_per_s, chip.sm_count, chip.l2_bytes) == (10_468_982_784, 419.04e9, 16, 6_553_600)
    assert chip.hbm_bytes == pytest.approx(9.75 * GiB, rel=1e-4)  # and the listing of `nvidia-smi mig -lgip` agrees


# --- Target descriptions ----------------------------------------------------------------------------------------------


def _fields(text: str) -> dict[str, str]:
    """Last value of every scalar field outside the rate tables."""
    return dict(line.strip().split(": ", 1) for line in text.splitlines() if ": " in line)


@pytest.mark.parametrize("name", [chip.name for chip in CHIPS.values() if chip.kind == "gpu"])
def test_target_config_says_what_the_table_says(name):
    chip, text = CHIPS[name], target_config(name)
    fields = _fields(text)
    assert text.count("{") == text.count("}")
    assert int(fields["device_memory_size"]) == chip.hbm_bytes and int(fields["core_count"]) == chip.sm_count
    assert int(fields["memory_bandwidth"]) == round(chip.hbm_bytes_per_s) and int(fields["l2_cache_size"]) == chip.l2_bytes
    assert fields["platform_name"] == '"CUDA"'
    assert ("active_links" in fields) == (chip.domain_kind == "NVLink")


@pytest.mark.parametrize("name, capability", [("v100", "7.0"), ("a100-80gb", "8.0"), ("a6000", "8.6"), ("h200", "9.0"),
                                              ("b200", "10.0"), ("gb300", "10.3"), ("rtx-pro-6000", "12.0"),
                                              ("a100-40gb-mig-3g.20gb", "8.0")])
def test_compute_capability(name, capability):
    text = target_config(name)
    major, minor = capability.split(".")
    assert f"major: {major}\n    minor: {minor}\n    feature_extension" in text


def test_matrix_rates_reach_the_published_peak():
    """SMs x 4 units x operations x 2 x clock of the description is the datasheet's peak; boost clocks differ by some percent."""
    for name in ("h100", "h100-pcie", "h200", "b200", "gb200"):
        fma = {"h100": 512, "h100-pcie": 512, "h200": 512, "b200": 1024, "gb200": 1024}[name]
        clock = DEVICES[name].clock_ghz * 1e9 * DEVICES[name].architecture.rates.matrix_clock
        assert CHIPS[name].sm_count * 4 * fma * 2 * clock == pytest.approx(CHIPS[name].peak_flops["bf16"], rel=0.05)
        assert f"ops_per_clock: {fma}\n" in target_config(name)


def test_no_target_config_without_a_gpu():
    with pytest.raises(InputError, match="not a GPU"):
        target_config("v5e")


# Runs in a child: libtpu and the CUDA plugin must not enter the process of the tests.
CHILD = """
import numpy, jax
from jax.experimental import topologies
from jaxmem.hardware import parse_topology
from jaxmem.targets.gpu_target_config import target_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec
for text in {names!r}:
    t = parse_topology(text)
    if t.chip.kind == "tpu":
        devices = topologies.get_topology_desc(platform="tpu", topology_name=t.libtpu_name, **t.libtpu_kwargs).devices
    else:
        devices = topologies.get_topology_desc("", platform="cuda", target_config=target_config(t.chip.name),
                                               topology=t.gpu_shape).devices
        placed = NamedSharding(Mesh(numpy.array(devices), "x"), PartitionSpec())
        matrix = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=placed)
        assert "dot" in jax.jit(lambda a: a @ a).lower(matrix).compile().as_text()
    hosts = len({{(getattr(d, "slice_index", 0), d.process_index) for d in devices}})
    print("RESULT", text, len(devices), hosts, len({{getattr(d, "slice_index", 0) for d in devices}}))
"""


def _in_child(names: list[str]) -> dict[str, tuple[int, int, int]]:
    """name -> devices, hosts, slices as the described devices count them."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost",
               ALLOW_MULTIPLE_LIBTPU_LOAD="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-c", CHILD.format(names=names)], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return {name: (int(devices), int(hosts), int(slices)) for _, name, devices, hosts, slices in rows}


def test_libtpu_counts_what_we_count():
    names = [name for name in topologies("tpu") if parse_topology(name).devices <= 512]
    names += ["2xv5e-16", "3xv4-16", "2xtpu7x-8", "v5p:2x1x1", "v6e:1x2", "v5p:4x4x6", "v5e:16x4"]
    counted = _in_child(names)
    for name in names:
        topology = parse_topology(name)
        devices, _, slices = counted[name]
        assert (devices, slices) == (topology.devices, topology.slices), name
        if topology.slices == 1:
            assert counted[name][1] == topology.hosts, name


@pytest.mark.parametrize("names", [
    ["h100:8", "a100-40gb-mig-3g.20gb"],
    pytest.param([f"{name}:1" for name in DEVICES] + ["h100-mig-1g.10gb"], marks=pytest.mark.long),
], ids=["two", "every GPU"])
def test_gpu_topologies_compile(names):
    names = [name for name in names if parse_topology(name).chip.name not in REFUSED]
    counted = _in_child(names)
    assert {name: counted[name][0] for name in names} == {name: parse_topology(name).devices for name in names}


def test_topology_is_built_from_a_chip_and_a_shape():
    topology = Topology(chip=CHIPS["v5e"], shape=(16, 16), slices=2)
    assert topology == parse_topology("2xv5e-256") and topology.chips == 512

"""GPU speed against closed forms on hand-written text, in limiting cases, and on small programs that were compiled for H100s."""
import dataclasses
import gzip
import json
import math
import pathlib

import pytest

from experiments.benchmarks import gpu_speed
from jaxmem.chips import Link
from jaxmem.cost.flops import step_flops
from jaxmem.hardware import Topology, parse_topology
from jaxmem.hlo import speed, speed_gpu
from jaxmem.hlo.collectives import collectives_of
from jaxmem.hlo.kernel_work import WorkReader
from jaxmem.hlo.parse import Module, parse
from jaxmem.plan import Plan
from jaxmem.workload import Workload

H100, PEAK, HBM, SMS = parse_topology("h100:1"), 989.4e12, 3352.32e9, 132
ONE, POD = {"axes": {"fsdp": 1}}, {"axes": {"fsdp": 64}}
DEFAULT = speed_gpu.Achieved()
EXACT = speed_gpu.Achieved(math=1.0, memory=1.0, launch_s=0.0, nvlink=1.0, network=1.0, collective_sms=0, host=1.0)

SLICED = """
%cut (p0: f32[80,1024,512], p1: s32[]) -> bf16[1024,512] {
  %p0 = f32[80,1024,512]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,1024,512]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,1024,512}
  %flat = f32[1024,512]{1,0} bitcast(%slice)
  ROOT %half = bf16[1024,512]{1,0} convert(%flat)
}

%put (p0: f32[80,1024,512], p1: f32[1024,512], p2: s32[]) -> f32[80,1024,512] {
  %p0 = f32[80,1024,512]{2,1,0} parameter(0)
  %p1 = f32[1024,512]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %update = f32[1,1024,512]{2,1,0} bitcast(%p1)
  ROOT %whole = f32[80,1024,512]{2,1,0} dynamic-update-slice(%p0, %update, %p2, %zero, %zero)
}

%double (p0: f32[1024,512]) -> f32[1024,512] {
  %p0 = f32[1024,512]{1,0} parameter(0)
  ROOT %sum = f32[1024,512]{1,0} add(%p0, %p0)
}
"""
LAYER = 1024 * 512
PUT = ("  %w = f32[80,1024,512]{2,1,0} parameter(0)\n  %u = f32[1024,512]{1,0} parameter(1)\n  %i = s32[] parameter(2)\n"
       "  ROOT %all = f32[80,1024,512]{2,1,0} fusion(%w, %u, %i), kind=kLoop, calls=%put")
DOUBLE = "  %x = f32[1024,512]{1,0} parameter(0)\n  ROOT %y = f32[1024,512]{1,0} fusion(%x), kind=kLoop, calls=%double"


def text(entry: str, *, more: str = "", devices: int = 1) -> str:
    return (f"HloModule m, is_scheduled=true, num_partitions={devices}\n{more}\n"
            f"ENTRY %main (p: f32[1]) -> f32[1] {{\n{entry}\n}}\n")


def matmul_text(m: int, k: int, n: int, call: str = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}") -> str:
    return text(f"  %a = bf16[{m},{k}]{{1,0}} parameter(0)\n  %b = bf16[{k},{n}]{{1,0}} parameter(1)\n"
                f"  ROOT %c = bf16[{m},{n}]{{1,0}} {call}")


def predicted(source: str | Module, topology: Topology = H100, mesh: dict = ONE, **options) -> speed.Speed:
    return speed_gpu.predict(parse(source) if isinstance(source, str) else source, topology, mesh, **options)


# ---------------------------------------------------------------- kernels

def test_a_large_matmul_takes_its_flops_at_the_sustained_rate_with_waves_rounded_up() -> None:
    found = predicted(matmul_text(8192, 8192, 8192))
    flops = 2 * 8192**3
    waves = math.ceil((8192 / 128) * (8192 / 256) / SMS)                      # 2048 tiles of 128 x 256 in 16 waves of 132
    useful = 2048 / (waves * SMS) * 8192 / (8192 + speed_gpu.PROLOGUE_K)
    assert found.flops == flops
    assert found.step_s == pytest.approx(flops / (PEAK * DEFAULT.math * useful) + DEFAULT.launch_s)
    assert found.seconds_by_limit["math"] == found.step_s


def test_a_library_call_costs_what_the_same_dot_costs() -> None:
    dims = ('{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],'
            '"rhs_batch_dimensions":[]}')
    call = ('custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
            f'{{"dot_dimension_numbers":{dims},"precision_config":{{"operand_precision":["DEFAULT","DEFAULT"]}}}}}}')
    library = matmul_text(4096, 512, 2048, call)
    library = library.replace("%c = bf16[4096,2048]{1,0}", "%c = (bf16[4096,2048]{1,0}, s8[4194304]{0})")
    assert predicted(library) == predicted(matmul_text(4096, 512, 2048))


def test_batch_dims_of_a_dot_are_no_contraction() -> None:
    found = predicted(text("  %a = bf16[3,64,128]{2,1,0} parameter(0)\n  %b = bf16[3,128,256]{2,1,0} parameter(1)\n"
                           "  ROOT %c = bf16[3,64,256]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, "
                           "lhs_contracting_dims={2}, rhs_contracting_dims={1}"))
    assert found.flops == 2 * 3 * 64 * 256 * 128


def test_a_convolution_is_a_window_for_every_position() -> None:
    found = predicted(text("  %a = bf16[8,32,32,64]{3,2,1,0} parameter(0)\n  %k = bf16[3,3,64,128]{3,2,1,0} parameter(1)\n"
                           "  ROOT %c = bf16[8,32,32,128]{3,2,1,0} convolution(%a, %k), window={size=3x3 pad=1_1x1_1}, "
                           "dim_labels=b01f_01io->b01f"))
    assert found.flops == 2 * (8 * 32 * 32 * 128) * (3 * 3 * 64)


def test_f32_matmuls_run_in_tf32_unless_the_highest_precision_is_asked_for() -> None:
    plain = matmul_text(4096, 4096, 4096).replace("bf16", "f32")
    highest = plain.replace("rhs_contracting_dims={0}", "rhs_contracting_dims={0}, operand_precision={highest,highest}")
    ratio = predicted(highest, achieved=EXACT).step_s / predicted(plain, achieved=EXACT).step_s
    assert ratio == pytest.approx(494.7 / 67)


@pytest.mark.parametrize(("size", "least", "most"), [
    ((8192, 8192, 8192), 0.9, 1.0), ((128, 256, 4096), 0.0, 0.2), ((1, 1, 1), 0.0, 1e-4)])
def test_fill_falls_with_the_tiles_that_are_missing(size: tuple[int, int, int], least: float, most: float) -> None:
    assert least < speed_gpu.fill(1, *size, SMS) <= most


def test_few_tiles_of_a_long_contraction_are_split_over_the_sms() -> None:
    """768 x 768 is 18 tiles of 128 x 256; without splits 18 of 132 SMs would work."""
    assert speed_gpu.fill(1, 768, 768, 65536, SMS) > 3 * 18 / SMS


def test_a_slice_of_stacked_weights_reads_one_layer() -> None:
    module = parse(text("  %w = f32[80,1024,512]{2,1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
                        "  ROOT %one = bf16[1024,512]{1,0} fusion(%w, %i), kind=kLoop, calls=%cut", more=SLICED))
    assert WorkReader(module).work(module.entry.root, module.entry).hbm_bytes == LAYER * 4 + 4 + LAYER * 2


def test_an_update_in_place_writes_one_layer() -> None:
    module = parse(text(PUT, more=SLICED))
    assert WorkReader(module).work(module.entry.root, module.entry).hbm_bytes == pytest.approx(2 * LAYER * 4 + 4)


def test_an_update_of_a_computed_array_writes_the_whole_of_it() -> None:
    computed = SLICED.replace("dynamic-update-slice(%p0,", "dynamic-update-slice(%sum,").replace(
        "  %update =", "  %sum = f32[80,1024,512]{2,1,0} add(%p0, %p0)\n  %update =")
    module = parse(text(PUT, more=computed))
    assert WorkReader(module).work(module.entry.root, module.entry).hbm_bytes == 2 * 80 * LAYER * 4 + LAYER * 4 + 4


def test_element_wise_work_is_bound_by_memory() -> None:
    source = text(DOUBLE, more=SLICED)
    busy_s = 2 * LAYER * 4 / (HBM * DEFAULT.memory)
    found = predicted(source)
    assert found.step_s == pytest.approx(busy_s + DEFAULT.launch_s)
    assert found.seconds_by_limit["overhead"] == found.step_s  # 1.4 us of work: the launch is longer
    quick = predicted(source, achieved=dataclasses.replace(DEFAULT, launch_s=1e-7))
    assert quick.seconds_by_limit["memory"] == pytest.approx(busy_s + 1e-7)


ATTENTION = ("  %q = bf16[2,4096,8,4,128]{{4,3,2,1,0}} parameter(0)\n  %k = bf16[2,4096,8,128]{{3,2,1,0}} parameter(1)\n"
             "  %v = bf16[2,4096,8,128]{{3,2,1,0}} parameter(2)\n"
             '  ROOT %o = bf16[4,2,4096,8,128]{{4,3,2,1,0}} custom-call(%q, %k, %v), custom_call_target="__gpu$xla.gpu.triton", '
             'metadata={{op_name="jit(train)/attention/{name}/pallas_call"}}')
BLOCKS = sum(1 for query in range(32) for key in range(32) if key <= query)  # 4096 / 128 blocks a side, the masked ones left out


@pytest.mark.parametrize(("name", "matmuls", "share"), [
    ("mha_forward", 2, DEFAULT.triton_forward), ("mha_backward", 7, DEFAULT.triton_backward)])
def test_fused_attention_counts_the_blocks_that_the_mask_leaves(name: str, matmuls: int, share: float) -> None:
    found = predicted(text(ATTENTION.format(name=name)))
    flops = 2 * 8 * 4 * BLOCKS * 128**2 * 2 * 128 * matmuls
    assert found.flops == flops
    assert found.step_s == pytest.approx(flops / PEAK / share + DEFAULT.launch_s)
    assert not found.warnings


def test_attention_can_be_costed_as_another_kernel() -> None:
    found = predicted(text(ATTENTION.format(name="mha_forward")), attention="cudnn")
    assert found.step_s == pytest.approx(2 * 8 * 4 * BLOCKS * 128**2 * 4 * 128 / PEAK / DEFAULT.cudnn_forward + DEFAULT.launch_s)


def test_cudnn_attention_reads_scores_and_mask_from_its_configuration() -> None:
    config = ('{"cudnn_fmha_backend_config":{"mask_type":"MASK","intermediate_tensor_shape":{"element_type":"BF16",'
              '"dimensions":["2","32","4096","4096"],"tuple_shapes":[]}}}')
    call = ("  %q = bf16[2,4096,32,128]{3,2,1,0} parameter(0)\n  %k = bf16[2,4096,8,128]{3,2,1,0} parameter(1)\n"
            "  ROOT %o = (bf16[2,4096,32,128]{3,2,1,0}, u8[64]{0}) custom-call(%q, %k, %k), "
            f'custom_call_target="__cudnn$fmhaSoftmax", backend_config={config}')
    full = predicted(text(call.replace('"MASK"', '"NO_MASK"')))
    causal = predicted(text(call.replace('"MASK"', '"CAUSAL"')))
    assert full.flops == 2 * 32 * 4096**2 * 4 * 128
    assert causal.flops == 2 * 32 * BLOCKS * 128**2 * 4 * 128


def test_a_kernel_that_hides_its_arithmetic_warns() -> None:
    found = predicted(text(ATTENTION.format(name="my_kernel")))
    assert found.step_s is not None
    assert "my_kernel" in found.warnings[0] and "arithmetic is unknown" in found.warnings[0]


def test_a_dtype_without_a_published_peak_is_unknown() -> None:
    found = predicted(matmul_text(512, 512, 512), parse_topology("v100:1"))
    assert found.step_s is None and found.seconds_by_limit is None
    assert "v100" in found.warnings[0]


def test_host_memory_goes_over_the_host_link() -> None:
    found = predicted(text("  %x = f32[1024,512]{1,0} parameter(0)\n"
                           "  %s = (f32[1024,512]{1,0:S(5)}, f32[1024,512]{1,0}, u32[]) copy-start(%x)\n"
                           "  ROOT %d = f32[1024,512]{1,0:S(5)} copy-done(%s)"), achieved=EXACT)
    assert found.step_s == pytest.approx(LAYER * 4 / 64e9)
    assert (found.traffic[0].axis, found.traffic[0].collective, found.traffic[0].bytes) == ("host", "device-to-host", LAYER * 4)


# ---------------------------------------------------------------- loops

LOOP = SLICED + """
%cond (s: (s32[], f32[1024,512])) -> pred[] {
  %s = (s32[], f32[1024,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=NE
}

%body (s: (s32[], f32[1024,512])) -> (s32[], f32[1024,512]) {
  %s = (s32[], f32[1024,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1024,512]{1,0} get-tuple-element(%s), index=1
  %y = f32[1024,512]{1,0} fusion(%x), kind=kLoop, calls=%double
  ROOT %t = (s32[], f32[1024,512]{1,0}) tuple(%i, %y)
}
"""
LOOP_ENTRY = ("  %i = s32[] parameter(0)\n  %x = f32[1024,512]{1,0} parameter(1)\n"
              "  %t = (s32[], f32[1024,512]{1,0}) tuple(%i, %x)\n"
              "  ROOT %w = (s32[], f32[1024,512]{1,0}) while(%t), condition=%cond, body=%body")


def test_a_loop_costs_its_body_times_its_trips() -> None:
    known = LOOP_ENTRY + ', backend_config={"known_trip_count":{"n":"7"}}'
    once = 2 * LAYER * 4 / (HBM * DEFAULT.memory) + DEFAULT.launch_s
    assert predicted(text(known, more=LOOP)).step_s == pytest.approx(7 * once)


def test_a_loop_without_a_trip_count_is_unknown() -> None:
    found = predicted(text(LOOP_ENTRY, more=LOOP))
    assert found.step_s is None
    assert "trip count" in found.warnings[0]


# ---------------------------------------------------------------- collectives

GATHER = ("  %x = bf16[{shard}]{{0}} parameter(0)\n  %a = bf16[8192,8192]{{1,0}} parameter(1)\n"
          "  %s = (bf16[{shard}]{{0}}, bf16[{whole}]{{0}}) all-gather-start(%x), replica_groups={groups}, dimensions={{0}}\n"
          "{between}  ROOT %d = bf16[{whole}]{{0}} all-gather-done(%s)")
BETWEEN = "  %c = bf16[8192,8192]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"


def gather(hosts: int, whole: int, groups: str, between: str = "") -> str:
    devices = hosts * 8
    return text(GATHER.format(shard=whole // devices, whole=whole, groups=groups, between=between), devices=devices)


def test_a_gather_inside_a_host_goes_over_nvlink() -> None:
    found = predicted(gather(1, 2**30, "[1,8]<=[8]"), parse_topology("h100:8"), {"axes": {"fsdp": 8}})
    wire = 7 / 8 * 2**31 / (450e9 * DEFAULT.nvlink) + 7 * 3e-6
    assert found.seconds_by_limit["fsdp_exposed"] == pytest.approx(wire, rel=1e-3)
    assert found.traffic[0].bytes == pytest.approx(7 / 8 * 2**31)


def test_a_gather_over_hosts_is_as_fast_as_the_slower_of_nvlink_and_network() -> None:
    found = predicted(gather(8, 2**30, "[1,64]<=[64]"), parse_topology("h100:8x8"), POD)
    network = 7 / 8 * 2**31 / 8 / (50e9 * DEFAULT.network)
    assert network > 7 / 8 * 2**31 / (450e9 * DEFAULT.nvlink) * 0.9  # of 64 devices the two are close: NICs of 400 GB/s a host
    slower = max(network, 7 / 8 * 2**31 / (450e9 * DEFAULT.nvlink))
    assert found.seconds_by_limit["fsdp_exposed"] == pytest.approx(slower + 7 * 3e-6 + 7 * 1e-5, rel=1e-3)


def test_what_runs_between_start_and_done_hides_the_gather() -> None:
    alone = predicted(gather(8, 2**30, "[1,64]<=[64]"), parse_topology("h100:8x8"), POD)
    beside = predicted(gather(8, 2**30, "[1,64]<=[64]", BETWEEN), parse_topology("h100:8x8"), POD)
    matmul_s = predicted(matmul_text(8192, 8192, 8192)).step_s
    wire_s = alone.seconds_by_limit["fsdp_exposed"]
    hidden_s = min(matmul_s, wire_s)
    assert beside.seconds_by_limit["fsdp_hidden"] == pytest.approx(hidden_s, rel=1e-3)
    assert beside.seconds_by_limit["fsdp_exposed"] == pytest.approx(wire_s - hidden_s, rel=1e-3)
    slowed_s = hidden_s * DEFAULT.collective_sms / SMS                                   # the gather's SMs are not the matmul's
    assert beside.seconds_by_limit["math"] == pytest.approx(matmul_s + slowed_s, rel=1e-3)
    assert beside.step_s == pytest.approx(sum(s for name, s in beside.seconds_by_limit.items() if not name.endswith("_hidden")))


@pytest.mark.parametrize(("pairs", "rate", "latency_s"), [
    ("{{0,1},{1,0}}", 450e9 * DEFAULT.nvlink, 3e-6), ("{{0,1},{7,8}}", 50e9 * DEFAULT.network, 1e-5)])
def test_a_permute_that_leaves_the_host_goes_through_one_nic(pairs: str, rate: float, latency_s: float) -> None:
    found = predicted(text("  %x = bf16[1048576]{0} parameter(0)\n"
                           f"  ROOT %r = bf16[1048576]{{0}} collective-permute(%x), source_target_pairs={pairs}", devices=16),
                      parse_topology("h100:2x8"), {"axes": {"fsdp": 16}})
    assert found.seconds_by_limit["fsdp_exposed"] == pytest.approx(2**21 / rate + latency_s)


@pytest.mark.parametrize(("opcode", "shape", "whole"), [
    ("reduce-scatter-start", "((bf16[1024]{0}), bf16[128]{0})", 2048),
    ("all-reduce-start", "((f32[1024]{0}), f32[1024]{0})", 4096),
    ("all-gather-start", "((bf16[16]{0}, f32[8]{0}), (bf16[128]{0}, f32[64]{0}))", 512),
    ("all-gather", "(bf16[128]{0}, f32[64]{0})", 512), ("reduce-scatter", "(bf16[16]{0}, f32[8]{0})", 512),
])
def test_starts_as_gpu_text_writes_them_hold_operands_and_results(opcode: str, shape: str, whole: int) -> None:
    line = f"  %x = bf16[16]{{0}} parameter(0)\n  ROOT %r = {shape} {opcode}(%x), replica_groups=[1,8]<=[8]"
    module = parse(text(line, devices=8))
    assert collectives_of(module, module.entry.root)[0].whole_bytes == whole


@pytest.mark.parametrize(("topology", "groups", "expected"), [
    ("h100:8x8", "[8,8]<=[64]", (8, 1)), ("h100:8x8", "[8,8]<=[8,8]T(1,0)", (1, 8)), ("h100:8x8", "[1,64]<=[64]", (8, 8)),
    ("h100:8x8", "[4,16]<=[64]", (8, 2)), ("h100:16x4", "[1,64]<=[64]", (4, 16)), ("gb200:16x4", "[1,64]<=[64]", (64, 1)),
    ("gb200:36x4", "[1,144]<=[144]", (72, 2)),
])
def test_groups_spread_over_domains(topology: str, groups: str, expected: tuple[int, int]) -> None:
    where = parse_topology(topology)
    module = parse(text(f"  %x = f32[16]{{0}} parameter(0)\n  ROOT %r = f32[16]{{0}} all-gather(%x), replica_groups={groups}, "
                        "dimensions={0}", devices=where.devices))
    collective = collectives_of(module, module.entry.root)[0]
    assert speed_gpu.spread(collective, speed_gpu.domains(where, {}, where.devices)) == expected


def test_domains_follow_the_processes_of_a_permuted_mesh() -> None:
    places = [[None] * 5 + [process] for process in (1, 0, 1, 0)]
    assert speed_gpu.domains(parse_topology("h100:2x2"), {"places": places}, 4) == [1, 0, 1, 0]


# ---------------------------------------------------------------- constants

def test_every_constant_has_a_source_and_a_range_around_it() -> None:
    names = {field.name for field in dataclasses.fields(speed_gpu.Achieved)}
    assert names == set(speed_gpu.RANGES) == set(speed_gpu.FOUND)
    for name, ends in speed_gpu.RANGES.items():
        assert min(ends) < getattr(DEFAULT, name) < max(ends)
    pessimistic, optimistic = (speed_gpu.achieved_by(H100.chip, end) for end in ("pessimistic", "optimistic"))
    assert (pessimistic.math, optimistic.math, pessimistic.launch_s) == (0.65, 0.82, 5e-6)


# ---------------------------------------------------------------- compiled programs

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "speed_gpu"


def fixture(name: str) -> tuple[Module, dict]:
    module = parse(gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode())
    return module, json.loads((FIXTURES / f"{name}.json").read_text())


def of_fixture(name: str, topology: Topology | None = None, **options) -> speed.Speed:
    module, about = fixture(name)
    return predicted(module, topology or parse_topology(about["target"]), about["mesh"], **options)


@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_flops_of_a_compiled_step_equal_the_closed_form(name: str) -> None:
    _, about = fixture(name)
    workload, topology = Workload.parse(**about["workload"]), parse_topology(about["target"])
    plan = Plan.parse(about["plan"], devices=topology.devices)
    expected = step_flops(workload, plan, attention="triton", block_q=128, block_kv=128).hardware / topology.devices
    assert of_fixture(name).flops == pytest.approx(expected, rel=0.02)


def test_a_scanned_and_an_unrolled_program_agree() -> None:
    """In work and traffic closely, in the step less: the compiler combines the unrolled layers' scatters into one at the end."""
    scanned, unrolled = of_fixture("scanned"), of_fixture("unrolled")
    assert scanned.flops == unrolled.flops
    for limit in ("math", "memory"):
        assert scanned.seconds_by_limit[limit] == pytest.approx(unrolled.seconds_by_limit[limit], rel=0.03)
    sent = [{one.collective: one.bytes for one in each.traffic if one.collective != "all-reduce"} for each in (scanned, unrolled)]
    assert sent[0] == sent[1]
    assert scanned.step_s == pytest.approx(unrolled.step_s, rel=0.08)


def boundless(topology: Topology) -> Topology:
    free = Link(bytes_per_s=1e30, latency_s=0.0)
    return dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, hbm_bytes_per_s=1e30, domain=free, network=free))


def test_with_boundless_bandwidth_only_math_is_left() -> None:
    found = of_fixture("scanned", boundless(parse_topology("h100:8")), achieved=dataclasses.replace(DEFAULT, launch_s=0.0))
    assert found.step_s == pytest.approx(found.seconds_by_limit["math"])
    assert found.step_s > found.flops / (PEAK * DEFAULT.math)


@pytest.mark.parametrize("name", ["math", "memory", "nvlink", "network", "host", "triton_forward", "triton_backward"])
def test_more_of_anything_is_never_slower(name: str) -> None:
    steps = [of_fixture("scanned", achieved=dataclasses.replace(DEFAULT, **{name: value})).step_s for value in (0.3, 0.6, 0.9)]
    assert steps == sorted(steps, reverse=True)


def test_a_layer_is_gathered_twice_and_its_gradient_scattered_once() -> None:
    """bf16: forward, recomputed forward, backward. Embedding and head are gathered and scattered once."""
    traffic = {one.collective: one.bytes for one in of_fixture("scanned").traffic}
    model = Workload.parse(**fixture("scanned")[1]["workload"]).model
    tables = 2 * model.vocab * model.embed
    layers = model.parameters - tables
    assert traffic["all-gather"] == pytest.approx(7 / 8 * 2 * (2 * layers + tables), rel=0.01)
    assert traffic["reduce-scatter"] == pytest.approx(7 / 8 * 2 * (layers + tables), rel=0.01)


def test_the_prefetched_gathers_of_the_schedule_are_mostly_hidden() -> None:
    limits = of_fixture("scanned").seconds_by_limit
    assert limits["fsdp_hidden"] > limits["fsdp_exposed"] > 0


def test_the_published_step_lies_within_the_ranges_of_the_rates() -> None:
    """llama2-70b on 64 H100, 7.908 s (NVIDIA): recomputation and kernel unknown, rates at either end. The typical rates are within 20%."""
    candidates = [gpu_speed.load(name) for name in gpu_speed.POLICIES]
    lowest, highest = gpu_speed.interval(candidates, *gpu_speed.ENDS)
    assert lowest < gpu_speed.PUBLISHED_S < highest
    low, high = gpu_speed.interval(candidates, "typical")
    assert 0.8 * gpu_speed.PUBLISHED_S < low < high < 1.2 * gpu_speed.PUBLISHED_S


def test_more_than_the_peak_is_withheld() -> None:
    module, about = fixture("scanned")
    topology = parse_topology(about["target"])
    honest = speed.predict(module, topology, about["mesh"])
    refused = speed.predict(module, topology, about["mesh"], model_flops=1.01 * honest.step_s * PEAK * 8)
    assert honest.step_s is not None and refused.step_s is None
    assert "100% MFU" in refused.warnings[-1]

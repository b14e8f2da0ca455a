"""Predicted seconds against arithmetic by hand on hand-written schedules; FLOPs against closed forms on compiled programs."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from jaxmem.cost.calibration import CONSTANTS, TPU, Calibration
from jaxmem.cost.kernels import attention_kernels, kernel_time, visited_blocks
from jaxmem.hardware import parse_topology
from jaxmem.hlo import torus
from jaxmem.hlo.kernel_calls import attention_work, elementwise_work
from jaxmem.hlo.parse import parse
from jaxmem.hlo.speed import Cost, Speed, Transfer, predict, refuse_impossible, replay, speed_of
from jaxmem.hlo.speed_tpu import predict as predict_tpu
from jaxmem.hlo.work import hlo_flops

V5E = parse_topology("v5e-256")
IDEAL = Calibration(**{name: 1.0 for name in CONSTANTS})


def places(topology):
    """Row-major mesh over a slice's coordinates, as `result.json` has it."""
    x, y, z = (*topology.shape, 1)[:3]
    return [[i, j, k, 0, 0, 0] for i in range(x) for j in range(y) for k in range(z)]


def schedule(*lines: str, more: str = "") -> str:
    return ("HloModule m, is_scheduled=true, num_partitions=256\n\n" + more + "\nENTRY %main (p: f32[16]) -> f32[16] {\n"
            "  %p = f32[16]{0} parameter(0)\n" + "".join(f"  {line}\n" for line in lines) +
            "  ROOT %r = f32[16]{0} bitcast(%p)\n}\n")


WORK = '%{name} = f32[16]{{0}} custom-call(%p), custom_call_target="{target}"'


def op(name: str) -> str:
    return WORK.format(name=name, target="work")


# --- the replay, with costs given by name

def run(text: str, costs: dict[str, Cost]):
    return replay(parse(text), lambda instruction, computation: costs.get(instruction.name, Cost()))


def test_what_a_transfer_hides_behind_is_not_exposed() -> None:
    link = Transfer(stream="fsdp", seconds=5.0, bytes=7.0, opcode="all-gather")
    text = schedule(op("start"), op("matmul"), op("done"))
    for matmul, exposed in ((3.0, 2.0), (9.0, 0.0)):
        total = run(text, {"start": Cost(transfers=(link,), mode="starts"), "matmul": Cost(seconds=matmul, limit="math"),
                           "done": Cost(awaits=("start",))})
        speed = speed_of(total)
        assert speed.step_s == matmul + exposed
        assert speed.seconds_by_limit["fsdp_exposed"] == exposed
        assert speed.seconds_by_limit["fsdp_hidden"] == 5.0 - exposed
        assert speed.seconds_by_limit["math"] == matmul
        (traffic,) = speed.traffic
        assert (traffic.axis, traffic.count, traffic.bytes, traffic.exposed_s) == ("fsdp", 1, 7.0, exposed)


def test_transfers_of_one_stream_queue_and_those_of_two_do_not() -> None:
    text = schedule(op("a"), op("b"), op("done"))
    for stream, expected in (("fsdp", 7.0), ("tensor", 4.0)):
        total = run(text, {"a": Cost(transfers=(Transfer(stream="fsdp", seconds=3.0),), mode="starts"),
                           "b": Cost(transfers=(Transfer(stream=stream, seconds=4.0),), mode="starts"),
                           "done": Cost(awaits=("a", "b"))})
        assert total.seconds == expected


def test_two_directions_of_a_link_run_at_once() -> None:
    both = (Transfer(stream="host", lane="in", seconds=3.0), Transfer(stream="host", lane="out", seconds=4.0))
    assert run(schedule(op("a")), {"a": Cost(transfers=both)}).seconds == 4.0


def test_all_but_the_hidden_limits_add_up_to_the_step() -> None:
    total = run(schedule(op("a"), op("b"), op("c"), op("d")), {
        "a": Cost(transfers=(Transfer(stream="fsdp", seconds=5.0),), mode="starts"), "b": Cost(seconds=2.0, limit="memory"),
        "c": Cost(seconds=1.0, limit="math", awaits=("a",)), "d": Cost(transfers=(Transfer(stream="memory", seconds=0.5),))})
    speed = speed_of(total, overhead_s=0.25)
    parts = {name: value for name, value in speed.seconds_by_limit.items() if not name.endswith("_hidden")}
    assert sum(parts.values()) == pytest.approx(speed.step_s) == pytest.approx(5.0 + 1.0 + 0.5 + 0.25)
    assert parts["memory"] == 2.5


def loop(name: str, trips: int | None, inner: str, step: int = 1) -> str:
    bound = f"s32[] constant({trips})" if trips is not None else "s32[] get-tuple-element(%c), index=0"
    return f"""
%{name}_condition (c: (s32[], f32[16])) -> pred[] {{
  %c = (s32[], f32[16]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = {bound}
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%{name}_body (c: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %c = (s32[], f32[16]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %p = f32[16]{{0}} get-tuple-element(%c), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  %zero = s32[] constant(0)
  %start = (s32[], f32[16]{{0}}) tuple(%zero, %p)
{inner}
  ROOT %out = (s32[], f32[16]{{0}}) tuple(%next, %p)
}}
"""


def call(name: str) -> str:
    return f"  %{name} = (s32[], f32[16]{{0}}) while(%start), condition=%{name}_condition, body=%{name}_body"


def test_nested_loops_multiply() -> None:
    more = loop("inner", 3, "  " + op("work")) + loop("outer", 5, call("inner"))
    text = schedule("%zero = s32[] constant(0)", "%start = (s32[], f32[16]{0}) tuple(%zero, %p)", call("outer"), more=more)
    total = run(text, {"work": Cost(seconds=2.0, flops=10.0, limit="math", transfers=(Transfer(stream="fsdp", seconds=1.0),))})
    assert (total.seconds, total.flops) == (15 * 3.0, 150.0)
    assert total.counts["fsdp", ""] == 15


@pytest.mark.parametrize(("bound", "step", "trips"), [(8, 1, 8), (8, 2, 4), (9, 2, 5)])
def test_a_counter_may_grow_by_more_than_one(bound: int, step: int, trips: int) -> None:
    more = loop("outer", bound, "  " + op("work"), step)
    text = schedule("%zero = s32[] constant(0)", "%start = (s32[], f32[16]{0}) tuple(%zero, %p)", call("outer"), more=more)
    assert run(text, {"work": Cost(seconds=2.0)}).seconds == 2.0 * trips


def test_a_counter_that_does_not_count_is_unknown() -> None:
    more = loop("outer", 8, "  " + op("work")).replace("%next = s32[] add(", "%next = s32[] multiply(")
    text = schedule("%zero = s32[] constant(0)", "%start = (s32[], f32[16]{0}) tuple(%zero, %p)", call("outer"), more=more)
    assert speed_of(run(text, {"work": Cost(seconds=2.0)})).step_s is None


def test_an_unknown_trip_count_is_not_one() -> None:
    more = loop("outer", None, "  " + op("work"))
    text = schedule("%zero = s32[] constant(0)", "%start = (s32[], f32[16]{0}) tuple(%zero, %p)", call("outer"), more=more)
    speed = speed_of(run(text, {"work": Cost(seconds=2.0)}))
    assert speed.step_s is None and speed.seconds_by_limit is None and speed.flops is None
    assert any("outer" in warning and "trip count" in warning for warning in speed.warnings)


def test_a_conditional_costs_its_slowest_branch() -> None:
    def branch(name):
        return f"%{name} (p: f32[16]) -> f32[16] {{\n  %p = f32[16]{{0}} parameter(0)\n  {op('in_' + name)}\n" \
               f"  ROOT %b = f32[16]{{0}} bitcast(%p)\n}}\n"
    text = schedule("%which = pred[] constant(true)", "%if = f32[16]{0} conditional(%which, %p, %p), true_computation=%yes, "
                    "false_computation=%no", more=branch("yes") + branch("no"))
    assert run(text, {"in_yes": Cost(seconds=2.0), "in_no": Cost(seconds=3.0)}).seconds == 3.0


# --- costs of TPU instructions

def test_the_compilers_cycles_over_the_clock() -> None:
    text = schedule('%x = f32[16]{0} add(%p, %p), backend_config={"window_config":{"estimated_cycles":"3006000"}}')
    assert predict_tpu(parse(text), V5E, None, IDEAL).step_s == pytest.approx(3006000 / 1.503e9)


def test_the_sentinel_means_unknown_and_a_roofline_stands_in() -> None:
    text = schedule("%y = f32[1024,1024]{1,0} parameter(1)",
                    '%x = f32[1024,1024]{1,0} copy(%y), backend_config={"estimated_cycles":"9223372036854775807"}')
    assert predict_tpu(parse(text), V5E, None, IDEAL).step_s == pytest.approx(2 * 4 * 2**20 / 819e9)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.25, 1.5), (1.0, 3.0)])
def test_a_share_of_the_estimate_beyond_the_roofline_counts(share: float, expected: float) -> None:
    """A copy of 4 MiB takes 2 x 4 MiB of HBM; the compiler estimates three times as long."""
    roofline = 2 * 4 * 2**20 / 819e9
    text = schedule("%y = f32[1024,1024]{1,0} parameter(1)",
                    f'%x = f32[1024,1024]{{1,0}} copy(%y), backend_config={{"estimated_cycles":"{round(3 * roofline * 1.503e9)}"}}')
    speed = predict_tpu(parse(text), V5E, None, dataclasses.replace(IDEAL, estimate_share=share))
    assert speed.step_s == pytest.approx(expected * roofline, rel=1e-4)


def test_no_estimate_beats_the_peak() -> None:
    text = schedule('%x = bf16[4096,4096]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, '
                    'backend_config={"window_config":{"estimated_cycles":"10"}}')
    text = text.replace("  %x =", "  %y = bf16[4096,4096]{1,0} parameter(1)\n  %x =")
    speed = predict_tpu(parse(text), V5E, None, IDEAL)
    assert speed.step_s == pytest.approx(2 * 4096**3 / 197e12)
    assert speed.seconds_by_limit["math"] == speed.step_s
    assert speed.flops == 2 * 4096**3


def test_more_than_the_peak_is_refused() -> None:
    speed = Speed(step_s=1.0, seconds_by_limit={}, flops=0.0)
    peak = 197e12 * 256
    assert refuse_impossible(speed, V5E, 0.99 * peak).step_s == 1.0
    refused = refuse_impossible(speed, V5E, 1.01 * peak)
    assert refused.step_s is None and "100% MFU" in refused.warnings[-1]


def test_on_cpu_speed_is_unknown() -> None:
    speed = predict(parse(schedule(op("x"))), parse_topology("cpu:8"), None)
    assert speed.step_s is None and speed.warnings


def test_an_unknown_kernel_makes_the_step_unknown() -> None:
    text = schedule('%mine = f32[16]{0} custom-call(%p), custom_call_target="tpu_custom_call"')
    speed = predict_tpu(parse(text), V5E, None)
    assert speed.step_s is None and "mine" in speed.warnings[0]


SPLASH = (
    '%splash_mha_{kind}_segmented_residuals.3 = bf16[2,8,2048,128]{{3,2,1,0}} custom-call(%next, %mask, %q, %k, %k), '
    'custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{"xprof_metadata":"{{\\"block_q\\": 512, '
    '\\"block_kv\\": 1024, \\"block_q_dkv\\": 256, \\"block_kv_dkv\\": 512, \\"block_q_dq\\": 512, \\"block_kv_dq\\": 512, '
    '\\"use_fused_bwd_kernel\\": false}}"}}}}')


@pytest.mark.parametrize(("kind", "matmuls", "blocks"), [("fwd", 2, (512, 1024)), ("dkv", 4, (256, 512)), ("dq", 3, (512, 512))])
def test_splash_attention_is_read_from_its_call(kind: str, matmuls: int, blocks: tuple[int, int]) -> None:
    table = f"s8[1,{2048 // blocks[0]},{2048 // blocks[1]}]{{2,1,0}}"
    text = schedule(f"%next = {table} parameter(1)", f"%mask = {table} parameter(2)",
                    "%q = bf16[2,8,2048,128]{3,2,1,0} parameter(3)", "%k = bf16[2,2,2048,128]{3,2,1,0} parameter(4)",
                    SPLASH.format(kind=kind))
    module = parse(text)
    instruction = next(one for one in module.entry.instructions if one.opcode == "custom-call")
    work = attention_work(module.entry, instruction)
    area = visited_blocks(2048, *blocks) * blocks[0] * blocks[1]
    assert work is not None and work.flops == 2 * matmuls * 128 * area * 2 * 8
    unit = kernel_time(work, V5E.chip)
    turns = unit.math_s + max(unit.vector_s, unit.exponential_s)
    assert predict_tpu(module, V5E, None, IDEAL).step_s == pytest.approx(max(turns, unit.memory_s))
    assert turns > work.flops / V5E.chip.peak_flops["bf16"]


def test_a_window_shows_in_the_masks_table() -> None:
    text = schedule("%next = s8[1,16,3]{2,1,0} parameter(1)", "%mask = s8[1,16,3]{2,1,0} parameter(2)",
                    "%q = bf16[8,8192,128]{2,1,0} parameter(3)", "%k = bf16[8,8192,128]{2,1,0} parameter(4)",
                    SPLASH.format(kind="fwd").replace('\\"block_kv\\": 1024', '\\"block_kv\\": 512'))
    module = parse(text)
    work = attention_work(module.entry, module.entry.instructions[5])
    windowed = attention_kernels("splash", batch=1, seq=8192, heads=8, kv_heads=8, head_dim=128, window=1024)["forward"]
    assert work is not None and work.flops == windowed.flops


def test_copies_to_the_host_run_on_its_link_beside_the_computation() -> None:
    megabytes = 2**25 * 4
    text = schedule("%y = f32[33554432]{0} parameter(1)",
                    "%start = (f32[33554432]{0:S(5)}, f32[33554432]{0}, u32[]) copy-start(%y)",
                    '%x = f32[16]{0} add(%p, %p), backend_config={"window_config":{"estimated_cycles":"1503000"}}',
                    "%done = f32[33554432]{0:S(5)} copy-done(%start)")
    speed = predict_tpu(parse(text), V5E, None, IDEAL)
    link = megabytes / V5E.chip.host_link_bytes_per_s
    assert speed.seconds_by_limit["host_exposed"] == pytest.approx(link - 1e-3)
    assert speed.seconds_by_limit["host_hidden"] == pytest.approx(1e-3)
    assert [(row.axis, row.collective, row.bytes) for row in speed.traffic] == [("host", "device-to-host", megabytes)]


def test_a_gather_over_the_whole_torus_uses_every_link() -> None:
    result = 2**30
    text = schedule(f"%g = f32[{result // 4}]{{0}} all-gather(%p), replica_groups=[1,256]<=[256], dimensions={{0}}")
    mesh = {"axes": {"fsdp": 256}, "places": places(V5E)}
    speed = predict_tpu(parse(text), V5E, mesh, IDEAL)
    hops = 8 + 8  # halfway around each ring of 16
    assert speed.step_s == pytest.approx(255 / 256 * result / (4 * 45e9) + hops * V5E.chip.ici.latency_s)
    assert speed.seconds_by_limit["fsdp_exposed"] == speed.step_s
    half = predict_tpu(parse(text), V5E, mesh, dataclasses.replace(IDEAL, link_efficiency=0.5))
    assert half.step_s == pytest.approx(255 / 256 * result / (2 * 45e9) + hops * V5E.chip.ici.latency_s)


@pytest.mark.parametrize(("topology", "group", "links"), [
    ("v5e-256", range(16), 2.0),          # one row of a 16x16 torus: a ring
    ("v5e-64", range(8), 1.0),            # one row of 8x8: a line
    ("v5e-256", range(0, 16, 2), 1.0),    # every second of a row: shares the ring with another group
    ("v5p-128", range(0, 64, 16), 2.0),   # 4 along x of 4x4x4
    ("v5p-128", range(64), 6.0),
])
def test_links_of_a_group(topology: str, group: range, links: float) -> None:
    where = parse_topology(topology)
    route = torus.route_of(list(group), places(where), where)
    (ici,) = [level for level in route.levels if level.medium == "ici"]
    assert sum(ring.links for ring in ici.rings) == links
    assert math.prod(ring.size for ring in ici.rings) == len(group)


def test_a_permute_by_one_uses_one_link_and_by_two_takes_twice() -> None:
    where = parse_topology("v5e-256")
    ring = places(where)[:16]
    near = [(i, (i + 1) % 16) for i in range(16)]
    far = [(i, (i - 2) % 16) for i in range(16)]
    once, direction = torus.permute_seconds(45e9, near, ring, where)
    twice, back = torus.permute_seconds(45e9, far, ring, where)
    assert once == pytest.approx(1.0, rel=1e-3) and twice == pytest.approx(2.0, rel=1e-3)
    assert (direction, back) == ("+", "-")


# --- FLOPs

def scanned(weights, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()


def unrolled(weights, x):
    for i in range(weights.shape[0]):
        x = jnp.tanh(x @ weights[i])
    return x.sum()


def test_scanned_and_unrolled_programs_have_the_same_flops() -> None:
    layers, rows, width = 12, 64, 128
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, width, width), (rows, width))]
    texts = [jax.jit(jax.grad(function)).lower(*arguments).compile().as_text() for function in (scanned, unrolled)]
    counts = [hlo_flops(parse(text)) for text in texts]
    # forward, and backward to the weights of every layer and to the input of all but the first
    expected = 2 * rows * width * width * (3 * layers - 1)
    assert counts[0] == pytest.approx(expected, rel=0.05)
    assert counts[1] == pytest.approx(expected, rel=0.05)


def test_padding_of_a_tpu_matmul_is_not_counted() -> None:
    text = schedule("%a = bf16[1024,512,1]{1,0,2} parameter(1)", "%b = bf16[2,256,512]{2,1,0} parameter(2)",
                    "%c = bf16[2,1024,256]{2,1,0} convolution(%a, %b), window={size=2 pad=1_1 rhs_reversal=1}, "
                    "dim_labels=bf0_0oi->0bf")
    assert hlo_flops(parse(text)) == 2 * 2 * 1024 * 256 * 512  # two products of 1024 x 512 by 512 x 256


# --- constants

def test_constants_are_few_and_inside_their_physical_ranges() -> None:
    assert {field.name for field in dataclasses.fields(Calibration)} == set(CONSTANTS)
    assert len(CONSTANTS) <= 4
    for name, constant in CONSTANTS.items():
        assert constant.low < getattr(TPU, name) <= constant.high, name


def test_unknown_places_make_a_collective_unknown() -> None:
    text = schedule("%g = f32[4096]{0} all-gather(%p), replica_groups=[1,256]<=[256], dimensions={0}")
    speed = predict_tpu(parse(text), V5E, {"axes": {"fsdp": 256}, "places": None})
    assert speed.step_s is None and "torus" in speed.warnings[0]


def test_between_slices_the_network_carries_it() -> None:
    where = parse_topology("2xv5e-4")
    attributes = ('frontend_attributes={_xla_host_transfer_rendezvous="all-reduce_0",_xla_megascale_target="{1,2}x{0:3}",'
                  '_xla_megascale_transfer_type="ALL_REDUCE"}')
    text = schedule("%go = token[] after-all()", "%y = f32[1000000]{0} parameter(1)",
                    f"%send = (f32[1000000]{{0}}, u32[]{{:S(2)}}, token[]) send(%y, %go), is_host_transfer=true, {attributes}",
                    f"%recv = (f32[1000000]{{0}}, u32[]{{:S(2)}}, token[]) recv(%go), is_host_transfer=true, {attributes}",
                    "%got = (f32[1000000]{0}, token[]) recv-done(%recv), is_host_transfer=true")
    mesh = {"axes": {"data": 2, "fsdp": 4},
            "places": [[x, y, 0, 0, number, 0] for number in range(2) for x in range(2) for y in range(2)]}
    speed = predict_tpu(parse(text.replace("num_partitions=256", "num_partitions=4")), where, mesh, IDEAL)
    network = where.chip.network
    assert speed.seconds_by_limit["data_exposed"] == speed.step_s
    assert speed.step_s == pytest.approx(4e6 / network.total_bytes_per_s + 2 * network.latency_s)


def test_an_update_on_the_host_moves_the_update_alone() -> None:
    """One layer of 32 MiB goes into a stack of 8 on the host, and comes back."""
    text = schedule("%stack = f32[8,8388608]{1,0:S(5)} parameter(1)", "%layer = f32[1,8388608]{1,0} parameter(2)",
                    "%zero = s32[] constant(0)",
                    "%put = ((f32[8,8388608]{1,0:S(5)}, f32[1,8388608]{1,0}, s32[], s32[]), f32[8,8388608]{1,0:S(5)}, u32[]) "
                    "dynamic-update-slice-start(%stack, %layer, %zero, %zero)",
                    "%there = f32[8,8388608]{1,0:S(5)} dynamic-update-slice-done(%put)",
                    "%get = ((f32[8,8388608]{1,0:S(5)}, s32[], s32[]), f32[1,8388608]{1,0}, u32[]) "
                    "dynamic-slice-start(%there, %zero, %zero), dynamic_slice_sizes={1,8388608}",
                    "%back = f32[1,8388608]{1,0} dynamic-slice-done(%get)")
    speed = predict_tpu(parse(text), V5E, None, IDEAL)
    assert {row.collective: row.bytes for row in speed.traffic} == {"device-to-host": 2**25, "host-to-device": 2**25}
    assert speed.step_s == pytest.approx(2 * 2**25 / V5E.chip.host_link_bytes_per_s)


def test_a_kernel_that_is_named_after_its_work():
    """Bytes are those of operands and results in HBM; its slowest unit decides."""
    text = schedule('%g = f32[2,512,1024]{2,1,0} broadcast(%p)', '%v = f32[512,1024]{1,0:S(1)} broadcast(%p)',
                    '%step.1 = (f32[2,512,1024]{2,1,0}, f32[2,4]{1,0}) custom-call(%g, %v), custom_call_target="tpu_custom_call", '
                    'metadata={op_name="jit(step)/elementwise_v100_s7"}')
    module = parse(text)
    [call] = [x for x in module.entry.instructions if x.opcode == "custom-call"]
    work, n = elementwise_work(module.entry, call), 2 * 512 * 1024
    assert work is not None
    assert (work.vector_ops, work.scores, work.hbm_bytes, work.flops) == (100 * n, 7 * n, 4 * (2 * n + 8), 0)
    rate = 4 * 8 * 128 * V5E.chip.clock_hz  # four vector units of 8 x 128 lanes
    assert kernel_time(work, V5E.chip).seconds == pytest.approx(100 * n / rate) and 100 / rate > 8 / V5E.chip.hbm_bytes_per_s
    assert elementwise_work(module.entry, module.entry.instructions[1]) is None
    found = predict_tpu(module, V5E, {"axes": {"data": 256}, "places": places(V5E), "ids": None})
    assert found.step_s is not None and not [w for w in found.warnings if "opaque" in w]

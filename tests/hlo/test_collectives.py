"""Groups, axes, bytes and counts of collectives, on hand-written text and on small programs compiled here for 8 CPU devices."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.hlo.collectives import axes_of, collectives, collectives_of, groups_of, sent_bytes
from jaxmem.hlo.parse import parse

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""

MESH = {"axes": {"data": 2, "fsdp": 4}}


def program(body: str, attributes: str = "num_partitions=8", more: str = "") -> str:
    return f"HloModule m, is_scheduled=true, {attributes}\n\n{more}\nENTRY %main (p: f32[16]) -> f32[16] {{\n" \
           f"  %p = f32[16]{{0}} parameter(0)\n{body}\n}}\n"


@pytest.mark.parametrize(("text", "expected"), [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", "fsdp"),
    ("replica_groups=[2,4]<=[8]", "fsdp"),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", "data"),
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", "fsdp"),
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", "data"),
    ("replica_groups=mesh['a'=8] {'a'}", "data+fsdp"),
    ("replica_groups={}", "data+fsdp"),
])
def test_every_form_of_groups_names_its_axis(text: str, expected: str) -> None:
    module = parse(program(f"  ROOT %r = f32[16]{{0}} all-reduce(%p), channel_id=1, {text}, to_apply=%add",
                           more=ADD))
    groups = groups_of(module.entry.root, module.partitions)
    assert groups is not None
    assert sorted(itertools.chain(*groups)) == list(range(8))
    assert axes_of(groups, MESH["axes"]) == expected


def test_iota_groups_transpose_as_numpy_does() -> None:
    module = parse(program("  ROOT %r = f32[32]{0} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(1,0,2), dimensions={0}"))
    expected = np.arange(8).reshape(2, 2, 2).transpose(1, 0, 2).reshape(4, 2)
    assert groups_of(module.entry.root, 8) == tuple(map(tuple, expected.tolist()))


@pytest.mark.parametrize("text", ["replica_groups=mesh['a'=8] {'a':(2)4}", "replica_groups=@something"])
def test_an_unknown_form_of_groups_is_unknown(text: str) -> None:
    module = parse(program(f"  ROOT %r = f32[16]{{0}} all-gather(%p), {text}, dimensions={{0}}"))
    assert groups_of(module.entry.root, 8) is None


def test_bytes_follow_the_textbook_rings() -> None:
    assert sent_bytes("all-gather", 800.0, 8) == 700.0
    assert sent_bytes("reduce-scatter", 800.0, 8) == 700.0
    assert sent_bytes("all-reduce", 800.0, 8) == 1400.0
    assert sent_bytes("all-to-all", 800.0, 4) == 600.0
    assert sent_bytes("collective-permute", 800.0, 2) == 800.0
    assert sent_bytes("all-reduce", 800.0, 1) == 0.0


LOOP = """
%condition (c: (s32[], f32[64])) -> pred[] {
  %c = (s32[], f32[64]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}

%fused (q: f32[64]) -> f32[16] {
  %q = f32[64]{0} parameter(0)
  %sum = f32[64]{0} all-reduce(%q), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[16]{0} dynamic-slice(%sum, %zero), dynamic_slice_sizes={16}
}

%body (c: (s32[], f32[64])) -> (s32[], f32[64]) {
  %c = (s32[], f32[64]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%c), index=0
  %x = f32[64]{0} get-tuple-element(%c), index=1
  %part = f32[16]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %start = (f32[16]{0}, f32[64]{0}) all-gather-start(%part), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}
  %done = f32[64]{0} all-gather-done(%start)
  %one = s32[] constant(1)
  %next = s32[] add(%counter, %one)
  ROOT %out = (s32[], f32[64]{0}) tuple(%next, %done)
}
""".replace("%fused (q", "%all-reduce-scatter.1 (q")

def test_a_loop_multiplies_counts_and_a_scatter_in_a_fusion_is_no_all_reduce() -> None:
    module = parse(program("  %zero = s32[] constant(0)\n  %big = f32[64]{0} broadcast(%p), dimensions={0}\n"
                           "  %carry = (s32[], f32[64]{0}) tuple(%zero, %big)\n"
                           "  %loop = (s32[], f32[64]{0}) while(%carry), condition=%condition, body=%body\n"
                           "  ROOT %r = f32[64]{0} get-tuple-element(%loop), index=1", more=ADD + LOOP))
    found = {row["opcode"]: row for row in collectives(module, MESH)}
    assert set(found) == {"reduce-scatter", "all-gather"}
    assert found["reduce-scatter"] == {"axis": "fsdp", "opcode": "reduce-scatter", "count": 5, "bytes": 5 * 3 / 4 * 256,
                                       "group_size": 4, "exposed_s": None}
    assert found["all-gather"]["count"] == 5 and found["all-gather"]["bytes"] == 5 * 3 / 4 * 256


def test_an_unknown_trip_count_makes_traffic_unknown() -> None:
    text = program("  %zero = s32[] constant(0)\n  %big = f32[64]{0} broadcast(%p), dimensions={0}\n"
                   "  %carry = (s32[], f32[64]{0}) tuple(%zero, %big)\n"
                   "  %loop = (s32[], f32[64]{0}) while(%carry), condition=%condition, body=%body\n"
                   "  ROOT %r = f32[64]{0} get-tuple-element(%loop), index=1", more=ADD + LOOP)
    text = text.replace("%bound = s32[] constant(5)", "%bound = s32[] get-tuple-element(%c), index=0")
    assert all(row["count"] is None and row["bytes"] is None for row in collectives(parse(text), MESH))


CHAIN = """
%begin (q: f32[16]) -> (f32[16], f32[64]) {
  %q = f32[16]{0} parameter(0)
  %gather = f32[64]{0} all-gather(%q), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT %call = (f32[16]{0}, f32[64]{0}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}

%beside (q: f32[16]) -> f32[16] {
  %q = f32[16]{0} parameter(0)
  %gather = f32[64]{0} all-gather(%q), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT %twice = f32[16]{0} add(%q, %q)
}

%end (q: f32[16]) -> f32[64] {
  %q = f32[16]{0} parameter(0)
  %gather = f32[64]{0} all-gather(%q), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT %call = f32[64]{0} custom-call(%gather), custom_call_target="AsyncCollectiveDone"
}
"""


def test_a_chain_of_fusions_is_one_collective() -> None:
    module = parse(program("  %s = (f32[16]{0}, f32[64]{0}) fusion(%p), kind=kCustom, calls=%begin\n"
                           "  %b = f32[16]{0} fusion(%p), kind=kOutput, calls=%beside\n"
                           "  ROOT %d = f32[64]{0} fusion(%p), kind=kCustom, calls=%end", more=CHAIN))
    roles = [[(one.role, one.key) for one in collectives_of(module, instruction)] for instruction in module.entry.instructions]
    assert roles == [[], [("start", "chain 7")], [("continue", "chain 7")], [("done", "chain 7")]]
    assert [(row["count"], row["bytes"]) for row in collectives(module, MESH)] == [(1, 0.75 * 256)]


def compiled(function, *arguments, mesh):
    with jax.set_mesh(mesh):
        return parse(jax.jit(function).lower(*arguments).compile().as_text())


def test_fsdp_gathers_every_layer_once_per_pass() -> None:
    layers, width, devices = 6, 64, 8
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,))
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    rows = jax.ShapeDtypeStruct((devices, width), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

    def forward(weights, rows):
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w, PartitionSpec(None, None))
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), PartitionSpec("fsdp")), None
        return jax.lax.scan(layer, rows, weights)[0]

    found = [row for row in collectives(compiled(forward, weights, rows, mesh=mesh), {"axes": {"fsdp": devices}})
             if row["opcode"] == "all-gather"]
    assert [(row["axis"], row["count"]) for row in found] == [("fsdp", layers)]
    assert found[0]["bytes"] == layers * (devices - 1) / devices * width * width * 4


def test_tensor_parallelism_reduces_activations_once_a_layer() -> None:
    layers, width, batch = 4, 64, 16
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def argument(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    up, down = argument((layers, width, 2 * width), None, None, "tensor"), argument((layers, 2 * width, width), None, "tensor")
    rows = argument((batch, width), "data")

    def forward(up, down, rows):
        def layer(x, pair):
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ pair[0]) @ pair[1], PartitionSpec("data")), None
        return jax.lax.scan(layer, rows, (up, down))[0]

    found = [row for row in collectives(compiled(forward, up, down, rows, mesh=mesh), {"axes": {"data": 2, "tensor": 4}})]
    assert [(row["axis"], row["opcode"], row["count"]) for row in found] == [("tensor", "all-reduce", layers)]
    assert found[0]["bytes"] == layers * 2 * 3 / 4 * (batch / 2) * width * 4


@pytest.mark.parametrize(("line", "whole"), [
    ("%r = f32[4]{0} reduce-scatter(%p), GROUPS, dimensions={0}, to_apply=%add", 64),
    ("%r = ((f32[16]{0}), f32[4]{0}) reduce-scatter-start(%p), GROUPS, dimensions={0}, to_apply=%add", 64),
    ("%r = (f32[16]{0}, f32[64]{0}) all-gather-start(%p), GROUPS, dimensions={0}", 256),
    ("%r = f32[16]{0} all-reduce-start(%p), GROUPS, to_apply=%add", 64),
    ("%r = f32[64]{0:S(3)} all-gather(%p), GROUPS, dimensions={0}", 256),  # a v4 has its CMEM there
    ("%r = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}", 64),
])
def test_the_whole_array_of_every_form(line: str, whole: int) -> None:
    """f32[16] on each of 4 devices: 256 bytes gathered, 64 bytes to be scattered or reduced."""
    module = parse(program("  ROOT " + line.replace("GROUPS", "replica_groups=[2,4]<=[8]"), more=ADD))
    (found,) = collectives_of(module, module.entry.root)
    assert found.whole_bytes == whole


MEGASCALE = ('frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="NAME_0",'
             '_xla_megascale_reduce_operation="SUM",_xla_megascale_target=TARGET,_xla_megascale_transfer_type="TYPE"}')


@pytest.mark.parametrize(("kind", "target", "opcode", "sent"), [
    ("ALL_REDUCE", '"{1,2}x{0:3}"', "all-reduce", 64),       # 2 x 1/2 of 64 bytes
    ("ALL_REDUCE", '"{1,2,3,4}x{0:3}"', "all-reduce", 96),   # 2 x 3/4 of 64 bytes
    ("ALL_GATHER", '"{1,2,3,4}x{0:3}"', "all-gather", 192),  # 3/4 of 4 x 64 bytes
    ("ONE_TO_ONE", "{{100001->200001},{200001->100001}}", "collective-permute", 64),
])
def test_between_slices_a_send_starts_and_a_recv_ends(kind: str, target: str, opcode: str, sent: int) -> None:
    attributes = MEGASCALE.replace("TARGET", target).replace("TYPE", kind)
    module = parse(program(
        f"  %go = token[] after-all()\n"
        f"  %send = (f32[16]{{0}}, u32[]{{:S(2)}}, token[]) send(%p, %go), channel_id=2, is_host_transfer=true, {attributes}\n"
        f"  %recv = (f32[16]{{0}}, u32[]{{:S(2)}}, token[]) recv(%go), channel_id=1, is_host_transfer=true, {attributes}\n"
        f"  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true\n"
        f"  %got = (f32[16]{{0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true\n"
        f"  ROOT %r = f32[16]{{0}} get-tuple-element(%got), index=0", attributes="num_partitions=4"))
    found = [collectives_of(module, instruction) for instruction in module.entry.instructions]
    assert [[(one.role, one.key) for one in ones] for ones in found if ones] == [
        [("start", 'megascale "NAME_0"')], [("done", 'megascale "NAME_0"')]]
    slices = target.count(",") + 1 if target.startswith('"') else 2
    (row,) = collectives(module, {"axes": {"data": slices, "fsdp": 4}})
    assert (row["axis"], row["opcode"], row["count"], row["bytes"]) == ("data", opcode, 1, sent)

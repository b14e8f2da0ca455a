"""The timeline against programs small enough to add up by hand, and against the compiler's own figures of stored ones."""
# ruff: noqa: E501 (lines of HLO text)

import gzip
import json
import pathlib

import pytest

from jaxmem.hlo.liveness import timeline
from jaxmem.hlo.parse import parse
from jaxmem.hlo.schedule import aliasing_operands, replay

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures" / "hlo"
KIB = 1024
HEAD = "HloModule jit_f, is_scheduled=true"


def program(body: str, before: str = "", head: str = HEAD) -> str:
    return f"{head}\n\n{before}\nENTRY %main (p: f32[256]) -> f32[256] {{\n{body}}}\n"


def peak(text: str, result: dict | None = None) -> int:
    return timeline(parse(text), result or {}).peak_bytes


def test_a_chain_holds_two_arrays_at_a_time():
    # x lives 0..3 as argument; a dies where b is made, c is the result and is held throughout
    text = program("""\
  %p = f32[256]{0} parameter(0)
  %a = f32[1024]{0} broadcast(%p), dimensions={0}
  %b = f32[512]{0} slice(%a), slice={[0:512]}
  ROOT %c = f32[256]{0} slice(%b), slice={[0:256]}
""")
    line = timeline(parse(text), {})
    assert line.peak_bytes == 1 * KIB + 1 * KIB + 4 * KIB + 2 * KIB
    assert line.peak_instruction == "b"
    assert [(point.index, point.bytes) for point in line.points] == [(0, 2 * KIB), (1, 6 * KIB), (2, 8 * KIB), (3, 4 * KIB)]


def test_a_donated_argument_and_its_result_are_one():
    body = """\
  %p = f32[256]{0} parameter(0)
  ROOT %c = f32[256]{0} negate(%p)
"""
    assert peak(program(body)) == 2 * KIB
    donated = HEAD + ", input_output_alias={ {}: (0, {}, may-alias) }"
    assert peak(program(body, head=donated)) == 1 * KIB


def test_padding_is_counted_and_shown():
    line = timeline(
        parse(
            program("""\
  %p = f32[256]{0:T(256)} parameter(0)
  %a = f32[9,130]{1,0:T(8,128)} broadcast(%p), dimensions={}
  ROOT %c = f32[256]{0:T(256)} reduce(%a)
""")
        ),
        {},
    )
    held = next(block for block in line.buffers if block.name == "a")
    assert (held.bytes, held.padding_bytes) == (16 * 256 * 4, 16 * 256 * 4 - 9 * 130 * 4)
    assert sum(share.bytes for share in line.composition if share.kind == "padding") == held.padding_bytes
    assert sum(share.bytes for share in line.composition) + line.unattributed_bytes == line.peak_bytes


def test_other_memories_are_not_hbm():
    text = program("""\
  %p = f32[256]{0} parameter(0)
  %v = f32[4096]{0:S(1)} broadcast(%p), dimensions={}
  %h = f32[2048]{0:S(5)} custom-call(%v), custom_call_target="MoveToHost"
  %flag = u32[]{:S(2)} custom-call(%h), custom_call_target="Flag"
  ROOT %c = f32[256]{0} custom-call(%h, %flag), custom_call_target="MoveToDevice"
""")
    line = timeline(parse(text), {})
    assert (line.peak_bytes, line.host_peak_bytes) == (2 * KIB, 8 * KIB)


def test_what_an_async_copy_reads_and_writes_lives_until_it_is_done():
    text = program("""\
  %p = f32[256]{0} parameter(0)
  %a = f32[1024]{0} broadcast(%p), dimensions={}
  %start = (f32[1024]{0}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%a)
  %big = f32[2048]{0} broadcast(%p), dimensions={}
  %small = f32[1]{0} slice(%big), slice={[0:1]}
  %done = f32[1024]{0} copy-done(%start)
  ROOT %c = f32[256]{0} custom-call(%done, %small), custom_call_target="x"
""")
    line = timeline(parse(text), {})
    assert (line.peak_bytes, line.peak_instruction) == (2 * KIB + 4 * KIB + 4 * KIB + 8 * KIB + 4, "small")
    assert next(point.bytes for point in line.points if point.index == 2) == 2 * KIB + 4 * KIB + 4 * KIB  # the operand once


@pytest.mark.parametrize(
    ("shape", "opcode"),
    [
        ("(f32[1024]{0}, f32[4096]{0})", "all-gather"),
        ("((f32[1024]{0}), f32[4096]{0}, u32[]{:S(2)})", "slice"),
        ("((f32[1024]{0}), f32[4096]{0}, u32[]{:S(2)})", "async"),
    ],
)
def test_started_operations_hold_their_operand(shape, opcode):
    text = program(f"""\
  %p = f32[256]{{0}} parameter(0)
  %a = f32[1024]{{0}} broadcast(%p), dimensions={{}}
  %start = {shape} {opcode}-start(%a)
  %other = f32[512]{{0}} broadcast(%p), dimensions={{}}
  %small = f32[1]{{0}} slice(%other), slice={{[0:1]}}
  %done = f32[4096]{{0}} {opcode}-done(%start)
  ROOT %c = f32[256]{{0}} custom-call(%done, %small), custom_call_target="x"
""")
    assert peak(text) == 2 * KIB + 4 * KIB + 16 * KIB + 2 * KIB + 4


LOOP = """\
%condition (c: (s32[], f32[256], f32[4,256])) -> pred[] {
  %c = (s32[], f32[256]{0}, f32[4,256]{1,0}) parameter(0)
  %limit = s32[] constant(4)
  %i.1 = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

%body (b: (s32[], f32[256], f32[4,256])) -> (s32[], f32[256], f32[4,256]) {
  %b = (s32[], f32[256]{0}, f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[256]{0} get-tuple-element(%b), index=1
  %stack = f32[4,256]{1,0} get-tuple-element(%b), index=2
  %row = f32[1,256]{1,0} bitcast(%x)
  %written = f32[4,256]{1,0} dynamic-update-slice(%stack, %row, %i, %i)
  %wide = f32[2048]{0} broadcast(%x), dimensions={}
  %next = f32[256]{0} slice(%wide), slice={[0:256]}
  ROOT %t = (s32[], f32[256]{0}, f32[4,256]{1,0}) tuple(%i, %next, %written)
}
"""

CALLER = """\
  %p = f32[256]{0} parameter(0)
  %zero = s32[] constant(0)
  %first = f32[256]{0} copy(%p)
  %empty = f32[4,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %carry = (s32[], f32[256]{0}, f32[4,256]{1,0}) tuple(%zero, %first, %empty)
  %loop = (s32[], f32[256]{0}, f32[4,256]{1,0}) while(%carry), condition=%condition, body=%body
  %stacked = f32[4,256]{1,0} get-tuple-element(%loop), index=2
  ROOT %out = f32[256]{0} reduce(%stacked)
"""


def test_a_loop_carries_its_arrays_in_place():
    # argument and result 1 KiB each, the counter 4 bytes, the stack 4 KiB once, x 1 KiB until `wide` (8 KiB) has read it,
    # and x's successor takes its place while `wide` still lives
    assert peak(program(CALLER, LOOP)) == 2 * KIB + 4 + 4 * KIB + 1 * KIB + 8 * KIB


def test_a_carry_is_free_between_its_last_use_and_its_next_value():
    body = LOOP.replace(
        "  %next =",
        "  %narrow = f32[64]{0} slice(%wide), slice={[0:64]}\n  %wide2 = f32[2048]{0} broadcast(%narrow), dimensions={}\n  %next =",
    )
    body = body.replace("slice(%wide), slice={[0:256]}", "slice(%wide2), slice={[0:256]}")
    # at `wide2`: narrow (256 B) and wide2 (8 KiB), but not x (1 KiB); at `wide`: x and wide
    line = timeline(parse(program(CALLER, body)), {})
    at = {point.index: point.bytes for point in line.points}
    names = {instruction.name: index for index, instruction in enumerate(replay(parse(program(CALLER, body))).points)}
    assert at[names["wide"]] - at[names["wide2"]] == 1 * KIB - 256


def test_a_loop_that_copies_instead_of_updating_needs_the_stack_twice():
    copied = LOOP.replace("dynamic-update-slice(%stack, %row, %i, %i)", "add(%stack, %row)")
    # the new stack and the old one overlap at the add, but share one place between rounds: they are one piece of memory
    assert peak(program(CALLER, copied)) == peak(program(CALLER, LOOP))
    late = copied.replace("tuple(%i, %next, %written)", "tuple(%i, %next, %moved)").replace(
        "  %wide =", "  %moved = f32[4,256]{1,0} copy(%written)\n  %wide ="
    )
    assert peak(program(CALLER, late)) > peak(program(CALLER, LOOP)) - 1 * KIB


def test_an_untouched_carry_is_one_array_from_before_to_after_the_loop():
    schedule = replay(parse(program(CALLER, LOOP.replace("tuple(%i, %next, %written)", "tuple(%i, %x, %written)"))))
    first = [value for value in schedule.values if value.instruction.name == "first"]
    assert len(first) == 1 and first[0].end == [i.name for i in schedule.points].index("loop")
    assert not [value for value in schedule.values if value.instruction.opcode == "while" and value.index == (1,)]


FUSED = """\
%fused (a: f32[4,256], b: f32[1,256], i: s32[]) -> f32[4,256] {
  %a = f32[4,256]{1,0} parameter(0)
  %b = f32[1,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %doubled = f32[1,256]{1,0} add(%b, %b)
  ROOT %u = f32[4,256]{1,0} dynamic-update-slice(%a, %doubled, %i, %i)
}

"""


def updating(attributes: str) -> str:
    return program(
        f"""\
  %p = f32[256]{{0}} parameter(0)
  %i = s32[] constant(0)
  %stack = f32[4,256]{{1,0}} broadcast(%p), dimensions={{}}
  %row = f32[1,256]{{1,0}} bitcast(%p)
  %new = f32[4,256]{{1,0}} {attributes}
  ROOT %c = f32[256]{{0}} reduce(%new)
""",
        FUSED,
    )


@pytest.mark.parametrize(
    "attributes",
    [
        "fusion(%stack, %row, %i), kind=kLoop, calls=%fused",
        'custom-call(%stack, %row, %i), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}',
        'custom-call(%stack, %row, %i), custom_call_target="k", backend_config={"aliasing_operands":{"lists":[{"indices":["0","3"]}]}}',
    ],
)
def test_updates_in_place(attributes):
    assert peak(updating(attributes)) == 2 * KIB + 4 * KIB + 4


def test_all_lists_of_shared_arrays_are_read():
    config = '{"aliasing_operands":{"lists":[{"indices":["0","2"]},{"indices":["1","3","4"]}]},"other":[{"indices":["9"]}]}'
    text = program(
        f"""\
  %p = f32[256]{{0}} parameter(0)
  ROOT %t = (f32[256]{{0}}) custom-call(%p, %p), custom_call_target="k", backend_config={config}
""",
    )
    assert aliasing_operands(parse(text).entry.root) == [[0, 2], [1, 3, 4]]


def test_what_shares_nothing_is_held_beside_its_operand():
    assert (
        peak(updating('custom-call(%stack, %row, %i), custom_call_target="k", backend_config={"aliasing_operands":{"lists":[]}}'))
        == 10 * KIB + 4
    )


def test_a_call_on_another_core_is_given_its_operands_later():
    text = program(
        """\
  %p = f32[256]{0} parameter(0)
  %a = f32[1024]{0} broadcast(%p), dimensions={}
  %start = ((), (), (s32[1]{0:S(2)})) call-start(), to_apply=%gather, async_execution_thread="sparsecore"
  %given = ((f32[1024]{0}), f32[512]{0}) call-update(%start, %a)
  %other = f32[2048]{0} broadcast(%p), dimensions={}
  %small = f32[1]{0} slice(%other), slice={[0:1]}
  %done = f32[512]{0} call-done(%given)
  ROOT %c = f32[256]{0} custom-call(%done, %small), custom_call_target="x"
""",
        """\
%gather (q: f32[1024]) -> f32[512] {
  %q = f32[1024]{0} parameter(0)
  ROOT %g = f32[512]{0} slice(%q), slice={[0:512]}
}, execution_thread="sparsecore"

""",
    )
    assert peak(text) == 2 * KIB + 4 * KIB + 2 * KIB + 8 * KIB + 4


def test_a_stack_on_the_host_is_updated_in_place():
    text = program(
        """\
  %p = f32[256]{0} parameter(0)
  %i = s32[] constant(0)
  %stack = f32[4,256]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %row = f32[1,256]{1,0} broadcast(%p), dimensions={}
  %start = ((f32[4,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[]), f32[4,256]{1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%stack, %row, %i)
  %done = f32[4,256]{1,0:S(5)} dynamic-update-slice-done(%start)
  ROOT %c = f32[256]{0} custom-call(%done), custom_call_target="MoveToDevice"
""",
    )
    line = timeline(parse(text), {})
    assert line.host_peak_bytes == 4 * KIB
    assert line.peak_bytes == 2 * KIB + 1 * KIB + 4


def test_of_a_conditional_only_one_branch_runs():
    branch = """\
%{name} (q: f32[256]) -> f32[256] {{
  %q = f32[256]{{0}} parameter(0)
  %w = f32[{size}]{{0}} broadcast(%q), dimensions={{}}
  ROOT %s = f32[256]{{0}} slice(%w), slice={{[0:256]}}
}}

"""
    text = program(
        """\
  %p = f32[256]{0} parameter(0)
  %which = pred[] constant(true)
  %c = f32[256]{0} conditional(%which, %p, %p), true_computation=%yes, false_computation=%no
  ROOT %d = f32[256]{0} negate(%c)
""",
        branch.format(name="yes", size=1024) + branch.format(name="no", size=3072),
    )
    assert peak(text) == 2 * KIB + 12 * KIB + 1 * KIB + 1


def test_gaps_of_the_packing_are_shown_as_such():
    text = program("  %p = f32[256]{0} parameter(0)\n  ROOT %c = f32[256]{0} negate(%p)\n")
    line = timeline(parse(text), {"memory": {"allocated_bytes": 2 * KIB + 700}})
    assert line.peak_bytes == 2 * KIB + 700
    assert [(share.kind, share.module) for share in line.composition if share.bytes == 700] == [("padding", "fragmentation")]


def test_text_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        timeline(parse(program("  ROOT %p = f32[256]{0} parameter(0)\n", head="HloModule jit_f")), {})


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda folder: folder.name)
def test_stored_programs(folder):
    """Live bytes equal the compiler's own peak; what it allocates beyond is packing; every byte of note has a name."""
    result = json.loads((folder / "result.json").read_text())
    module, memory = parse(gzip.open(folder / "hlo.txt.gz", "rt").read()), result["memory"]
    allocated = memory.pop("allocated_bytes", None)
    host = memory["host_argument_bytes"] + memory["host_output_bytes"] - memory["host_alias_bytes"] + memory["host_temp_bytes"]
    line = timeline(module, result)
    # `peak_bytes` is of the fullest memory space: with the host's bytes in it, it says nothing about HBM
    assert line.peak_bytes == pytest.approx(
        allocated if host else min(memory["peak_bytes"], allocated or memory["peak_bytes"]), rel=0.012
    )
    assert line.host_peak_bytes == pytest.approx(host, rel=0.001)
    assert line.unattributed_bytes <= 0.1 * line.peak_bytes
    assert sum(share.bytes for share in line.composition) + line.unattributed_bytes == line.peak_bytes
    assert sum(block.bytes for block in line.buffers) == line.peak_bytes
    assert max(point.bytes for point in line.points) == line.peak_bytes
    if allocated is not None:
        memory["allocated_bytes"] = allocated
        assert timeline(module, result).peak_bytes == allocated

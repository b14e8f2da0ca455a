"""The HLO reader against text written by hand and sizes worked out by hand."""
# ruff: noqa: E501 (lines of HLO text)

import gzip
import pathlib
import time

import pytest

from jaxmem.hlo.parse import Shape, parse, parse_shape, trip_count

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures" / "hlo"

TPU = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1,2}: (0, {3}, must-alias) }, num_partitions=4, \
entry_computation_layout={(f32[8]{0:T(256)})->f32[8]{0:T(256)}}

FileNames
1 "/home/someone/project/models/decoder.py"
2 "/usr/lib/python3.12/site-packages/optax/_src/transform.py"

FunctionNames
1 "step"
2 "update_fn"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=8 end_column=9}
2 {file_name_id=2 function_name_id=2 line=283 end_line=283 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%condition (carry: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %carry = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%carry), index=0
  ROOT %less = pred[]{:T(512)} compare(%counter, %limit), direction=LT, metadata={op_name="jit(step)/while/cond/lt" stack_frame_id=1}
}

%body (carry.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %one = s32[]{:T(128)} constant(1)
  %carry.1 = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  %next = s32[]{:T(128)} add(%counter.1, %one)
  %x = f32[8]{0:T(256)} get-tuple-element(%carry.1), index=1
  %kernel.1 = f32[8]{0:T(256)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"tuning":"{\\"block\\": 128}"
}}, metadata={op_name="jit(step)/while/body/kernel" stack_frame_id=2}, backend_config={"custom_call_config":{"body":"Tq}=="},"n":["1"]}
  ROOT %out = (s32[]{:T(128)}, f32[8]{0:T(256)}) tuple(%next, %kernel.1)
}

ENTRY %main (p1: f32[8], p0: s32[]) -> f32[8] {
  %p1 = f32[8]{0:T(256)} parameter(1), sharding={devices=[4]<=[4]}, metadata={op_name="state[\\'w\\']"}
  %p0 = s32[]{:T(128)} parameter(0)
  %start = s32[]{:T(128)} constant(2)
  %start.copy = s32[]{:T(128)} copy(%start)
  %tuple.1 = (s32[]{:T(128)}, f32[8]{0:T(256)}) tuple(%start.copy, /*index=1*/%p1)
  %loop = (s32[]{:T(128)}, f32[8]{0:T(256)}) while(%tuple.1), condition=%condition, body=%body
  ROOT %result = f32[8]{0:T(256)} get-tuple-element(%loop), index=1, control-predecessors={%p0}
}
"""

GPU = """\
HloModule jit_f, is_scheduled=true, replica_count=2

%wrapped (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %s = f32[4]{0} sine(%p), metadata={op_name="jit(f)/while/body/sin" source_file="/a/b/c.py" source_line=7}
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[4]{0} get-tuple-element(%t), index=1
  %f = f32[4]{0} fusion(%v), kind=kLoop, calls=%wrapped, backend_config={"operation_queue_id":"0","fusion_backend_config":{"kind":"a, b}"}}
  ROOT %r = (s32[], f32[4]{0}) tuple(%i, %f)
}

%condition (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[], f32[4]{0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (a: s32[], b: f32[4]) -> (s32[], f32[4]) {
  %a = s32[] parameter(0)
  %b = f32[4]{0} parameter(1)
  %in = (s32[], f32[4]{0}) tuple(%a, %b)
  %reduce = (f32[4]{0}, f32[4]{0}) all-reduce-start(%b), replica_groups=[2,4]<=[8], to_apply=%wrapped
  ROOT %w = (s32[], f32[4]{0}) while(%in), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"31"},"init":"0"}
}, execution_thread="main"
"""


@pytest.mark.parametrize(
    ("text", "logical", "tiled", "space"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096, 4096, 0),
        ("f32[9,129]{1,0:T(8,128)}", 9 * 129 * 4, 16 * 256 * 4, 0),  # both dims round up to a tile
        ("f32[129,9]{0,1:T(8,128)}", 9 * 129 * 4, 16 * 256 * 4, 0),  # the same bytes, transposed
        ("bf16[3,5,7]{2,1,0:T(8,128)(2,1)}", 210, 3 * 8 * 128 * 2, 0),  # the leading dim is not tiled
        ("bf16[1,100]{1,0:T(2,128)(2,1)}", 200, 2 * 128 * 2, 0),
        ("bf16[1,100]{1,0:T(1,128)(2,1)}", 200, 2 * 128 * 2, 0),  # the second tile pads the first one's single row to two
        ("s32[]{:T(128)}", 4, 512, 0),  # a scalar takes a whole tile
        ("f32[100]{0:T(128)S(1)}", 400, 512, 1),
        ("f32[16,4]{1,0:T(8,128)S(5)}", 256, 16 * 128 * 4, 5),
        ("s4[16,256]{1,0:T(8,128)(8,1)E(4)}", 2048, 2048, 0),
        ("pred[3]{0}", 3, 3, 0),
        ("u32[]{:S(2)}", 4, 4, 2),
    ],
)
def test_sizes(text, logical, tiled, space):
    shape = parse_shape(text)
    assert (shape.bytes, shape.tiled_bytes, shape.memory_space) == (logical, tiled, space)


def test_a_starred_tile_merges_its_dim_with_the_next():
    # f32[3,5] tiled (*,8): the two dims become one of 15, which takes two tiles of 8
    assert parse_shape("f32[3,5]{1,0:T(*,8)}").tiled_bytes == 2 * 8 * 4


def test_tuples_nest_and_sum():
    shape = parse_shape("((f32[8]{0:T(256)}, s32[2]{0}), /*index=1*/bf16[4]{0:T(256)S(1)}, u32[]{:S(2)})")
    assert [index for index, _ in shape.leaves()] == [(0, 0), (0, 1), (1,), (2,)]
    assert shape.bytes == 32 + 8 + 8 + 4
    assert shape.at((0, 1)).text == "s32[2]"
    assert shape.text == "((f32[8], s32[2]), bf16[4], u32[])"


@pytest.mark.parametrize("text", ["f32", "nonsense[2]", "f32[2]{0} trailing", ""])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises((ValueError, IndexError)):
        parse_shape(text)


def test_structure_of_tpu_text():
    module = parse(TPU)
    assert (module.name, module.is_scheduled, module.partitions, module.replicas) == ("jit_step", True, 4, 1)
    assert module.aliases == {(0,): (1, ()), (1, 2): (0, (3,))}
    assert [i.name for i in module.entry.instructions] == ["p1", "p0", "start", "start.copy", "tuple.1", "loop", "result"]
    assert [i.index for i in module.entry.instructions] == list(range(7))
    assert [i.name for i in module.entry.parameters] == ["p0", "p1"]
    assert module.entry.root.name == "result"
    assert module.entry.by_name["tuple.1"].operands == ("start.copy", "p1")
    assert module.entry.by_name["loop"].called == {"body": ("body",), "condition": ("condition",)}
    assert module.entry.by_name["start"].literal == "2"
    assert module.entry.by_name["p1"].op_name == "state['w']"


def test_an_instruction_may_run_over_lines_that_look_like_the_end_of_a_computation():
    body = parse(TPU).computations["body"]
    assert [i.name for i in body.instructions][-2:] == ["kernel.1", "out"]
    kernel = body.by_name["kernel.1"]
    assert kernel.custom_call_target == "tpu_custom_call"
    assert kernel.op_name == "jit(step)/while/body/kernel"
    assert kernel.backend_config == '{"custom_call_config":{"body":"Tq}=="},"n":["1"]}'


def test_sources_come_from_the_innermost_frame_outside_libraries():
    module = parse(TPU)
    assert module.computations["condition"].root.source == "models/decoder.py:17"
    assert (
        module.computations["body"].by_name["kernel.1"].source == "models/decoder.py:17"
    )  # frame 2 is optax, called from frame 1
    assert parse(GPU).computations["wrapped"].root.source == "b/c.py:7"
    assert module.entry.root.source is None


def test_attributes_keep_brackets_and_quotes_whole():
    module = parse(GPU)
    fusion = module.computations["body"].by_name["f"]
    assert fusion.attributes["kind"] == "kLoop"
    assert fusion.backend_config == '{"operation_queue_id":"0","fusion_backend_config":{"kind":"a, b}"}}'
    assert module.entry.by_name["reduce"].attributes["replica_groups"] == "[2,4]<=[8]"
    assert module.replicas == 2
    assert len(module.computations) == 4


def test_trip_counts():
    tpu, gpu = parse(TPU), parse(GPU)
    assert trip_count(tpu, tpu.entry.by_name["loop"]) == 10  # from 2 while below 12
    assert trip_count(gpu, gpu.entry.by_name["w"]) == 31  # said by the compiler
    reversed_ = TPU.replace("compare(%counter, %limit), direction=LT", "compare(%limit, %counter), direction=GE")
    module = parse(reversed_)
    assert trip_count(module, module.entry.by_name["loop"]) == 11  # from 2 while at most 12
    unknown = TPU.replace("direction=LT", "direction=NE")
    module = parse(unknown)
    assert trip_count(module, module.entry.by_name["loop"]) is None


def test_a_condition_inside_a_fusion():
    text = TPU.replace(
        """  ROOT %less = pred[]{:T(512)} compare(%counter, %limit), direction=LT, metadata={op_name="jit(step)/while/cond/lt" stack_frame_id=1}
""",
        "  ROOT %less = pred[]{:T(512)} fusion(%counter, %limit), kind=kLoop, calls=%inside\n",
    ).replace(
        "%condition (carry",
        """\
%inside (a.1: s32[], b.1: s32[]) -> pred[] {
  %a.1 = s32[]{:T(128)} parameter(0)
  %b.1 = s32[]{:T(128)} parameter(1)
  ROOT %lt = pred[]{:T(512)} compare(%a.1, %b.1), direction=LT
}

%condition (carry""",
    )
    module = parse(text)
    assert trip_count(module, module.entry.by_name["loop"]) == 10


@pytest.mark.parametrize(
    "text", ["", "module @jit_f {}", "HloModule x\n\n%a (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"]
)
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError):
        parse(text)


def test_parsing_is_fast():
    texts = [gzip.open(path, "rt").read() for path in FIXTURES.glob("*/hlo.txt.gz")]
    assert texts
    begin = time.process_time()
    for text in texts:
        parse(text)
    megabytes = sum(map(len, texts)) / 1e6
    assert time.process_time() - begin < 1 + megabytes  # about 0.3 s a megabyte on an idle core


def test_a_shape_prints_without_layout():
    assert Shape(dtype="f32", dims=(2, 3), element_bits=32).text == "f32[2,3]"

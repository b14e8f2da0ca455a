"""Kinds and modules: names as tracing writes them, and buffers of small programs whose answer is plain."""
# ruff: noqa: E501 (lines of HLO text)

import gzip
import json
import pathlib

import pytest

from jaxmem.hlo.attribute import Attribution, classify, scope
from jaxmem.hlo.liveness import timeline
from jaxmem.hlo.parse import parse
from jaxmem.hlo.schedule import replay

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures" / "hlo"


@pytest.mark.parametrize(
    ("op_name", "phase", "module"),
    [
        ("jit(step)/jvp(head)/dot_general", "forward", "head"),
        ("jit(step)/transpose(jvp(head))/dot_general", "backward", "head"),
        ("jit(step)/jvp()/while/body/eval_jaxpr/blocks/attention/dot_general", "forward", "blocks/attention"),
        (
            "jit(step)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/rematted_computation/blocks/mlp/mul",
            "recomputed",
            "blocks/mlp",
        ),
        ("jit(step)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/blocks/mlp/jit(silu)/mul", "backward", "blocks/mlp"),
        (
            "jit(step)/transpose(jvp())/while/body/checkpoint/blocks/attention/bqkgh,bskh->bkgqs/dot_general",
            "backward",
            "blocks/attention",
        ),
        ("jit(step)/optimizer/jit(tree_bias_correction)/div", "plain", "optimizer"),
        ("jit(train)/jvp(Transformer)/Block_0/Dense_1/dot_general", "forward", "Transformer/Block_0/Dense_1"),
        ("jit(train)/transpose(jvp(vmap(Encoder/layer)))/add", "backward", "Encoder/layer"),
        ("jit(step)/jvp()/while/body/dynamic_update_slice", "forward", None),
        (
            "jit(f)/blocks/while/body/eval_jaxpr/attention/shard_map/splash_mha/pallas_call",
            "plain",
            "blocks/attention",
        ),
        ("broadcast.12", "plain", None),
        (None, "plain", None),
    ],
)
def test_scopes(op_name, phase, module):
    assert scope(op_name) == (phase, module)


@pytest.mark.parametrize(
    ("op_name", "opcode", "dims", "expected"),
    [
        ("jit(s)/transpose(jvp())/while/body/blocks/mlp/dot_general", "fusion", (64, 256), ("gradients", "blocks/mlp")),
        ("jit(s)/transpose(jvp())/while/body/blocks/mlp/dot_general", "fusion", (8, 32, 64), ("activations", "blocks/mlp")),
        ("jit(s)/jvp()/while/body/blocks/mlp/dot_general", "fusion", (64, 256), ("activations", "blocks/mlp")),
        (
            "jit(s)/transpose(jvp())/checkpoint/rematted_computation/blocks/mlp/mul",
            "fusion",
            (8, 32, 64),
            ("recomputed", "blocks/mlp"),
        ),
        ("jit(s)/jvp(head)/dot_general", "fusion", (8, 32, 1000), ("logits", "head")),
        ("jit(s)/transpose(jvp(loss))/mul", "fusion", (8, 32, 1000), ("logits", "loss")),
        ("jit(s)/jvp()/while/body/blocks/mlp/dot_general", "all-gather", (64, 256), ("collective", "blocks/mlp")),
        ("jit(s)/transpose(jvp(head))/dot_general", "reduce-scatter", (64, 256), ("gradients", "head")),
        ("jit(s)/transpose(jvp(head))/dot_general", "reduce-scatter", (3, 3), ("collective", "head")),
        ("jit(s)/optimizer/add", "fusion", (64, 256), ("workspace", "optimizer")),
        ("jit(s)/gradients/div", "fusion", (3,), ("gradients", "gradients")),
        (None, "copy", (64, 256), (None, None)),
    ],
)
def test_kinds(op_name, opcode, dims, expected):
    assert classify(op_name, opcode=opcode, dims=dims, parameter_dims=frozenset({(64, 256)})) == expected


TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%forward (b: (f32[8,64], f32[4,8,64], f32[64,64])) -> (f32[8,64], f32[4,8,64], f32[64,64]) {
  %b = (f32[8,64]{1,0}, f32[4,8,64]{2,1,0}, f32[64,64]{1,0}) parameter(0)
  %x = f32[8,64]{1,0} get-tuple-element(%b), index=0
  %stack = f32[4,8,64]{2,1,0} get-tuple-element(%b), index=1
  %w = f32[64,64]{1,0} get-tuple-element(%b), index=2
  %zero = s32[] constant(0)
  %row = f32[1,8,64]{2,1,0} bitcast(%x)
  %kept = f32[4,8,64]{2,1,0} dynamic-update-slice(%stack, %row, %zero, %zero, %zero), metadata={op_name="jit(step)/jvp()/while/body/dynamic_update_slice"}
  %y = f32[8,64]{1,0} dot(%x, %w), metadata={op_name="jit(step)/jvp()/while/body/blocks/mlp/dot_general"}
  ROOT %t = (f32[8,64]{1,0}, f32[4,8,64]{2,1,0}, f32[64,64]{1,0}) tuple(%y, %kept, %w)
}

%condition (c: (f32[8,64], f32[4,8,64], f32[64,64])) -> pred[] {
  %c = (f32[8,64]{1,0}, f32[4,8,64]{2,1,0}, f32[64,64]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (p0: f32[64,64], p1: f32[8,64]) -> (f32[64,64], f32[]) {
  %p0 = f32[64,64]{1,0} parameter(0), metadata={op_name="state['params']['blocks']['up']"}
  %p1 = f32[8,64]{1,0} parameter(1)
  %staged = f32[64,64]{1,0} copy(%p0)
  %x0 = f32[8,64]{1,0} add(%p1, %p1), metadata={op_name="jit(step)/jvp(embed)/add"}
  %empty = f32[4,8,64]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %in = (f32[8,64]{1,0}, f32[4,8,64]{2,1,0}, f32[64,64]{1,0}) tuple(%x0, %empty, %staged)
  %loop = (f32[8,64]{1,0}, f32[4,8,64]{2,1,0}, f32[64,64]{1,0}) while(%in), condition=%condition, body=%forward
  %last = f32[8,64]{1,0} get-tuple-element(%loop), index=0
  %saved = f32[4,8,64]{2,1,0} get-tuple-element(%loop), index=1
  %weights = f32[64,64]{1,0} get-tuple-element(%loop), index=2
  %whole = f32[256,64]{1,0} all-gather(%weights), dimensions={0}
  %grad = f32[64,64]{1,0} custom-call(%saved, %whole, %weights), custom_call_target="k", metadata={op_name="jit(step)/transpose(jvp())/blocks/mlp/dot_general"}
  %loss = f32[] reduce(%last), metadata={op_name="jit(step)/jvp(loss)/reduce_sum"}
  %new = f32[64,64]{1,0} subtract(%p0, %grad), metadata={op_name="jit(step)/optimizer/sub"}
  ROOT %out = (f32[64,64]{1,0}, f32[]) tuple(%new, %loss)
}
"""
RESULT = {
    "arguments": [
        {
            "path": "state/params/blocks/mlp/up",
            "kind": "params",
            "module": "blocks/mlp",
            "shape": [256, 64],
            "sharding": "P('fsdp', None)",
        },
        {"path": "batch/x", "kind": "batch", "module": "input", "shape": [32, 64], "sharding": "P('fsdp',)"},
    ],
    "outputs": [{"path": "0", "kind": "params", "module": "blocks/mlp"}, {"path": "1", "kind": "other", "module": "loss"}],
}


def labels(result):
    line = timeline(parse(TEXT), result)
    return {block.name: block for block in line.buffers}, line


def test_every_buffer_of_a_step_has_its_kind():
    held, line = labels(RESULT)
    assert line.peak_instruction == "grad"
    found = {name: (block.kind, block.module) for name, block in held.items()}
    assert found == {
        "p0": ("params", "blocks/mlp"),  # argument, and the result that takes its place
        "p1": ("batch", "input"),
        "loss": ("output", "loss"),
        "staged": ("params", "blocks/mlp"),  # a nameless copy of an argument
        "empty": ("saved", "blocks/mlp"),  # nameless: named by what the loop writes into it
        "x0": ("activations", "blocks/mlp"),  # the loop's carry
        "whole": ("collective", "blocks/mlp"),  # nameless: gathers the parameter
        "grad": ("gradients", "blocks/mlp"),
    }
    assert line.unattributed_bytes == 0
    assert (held["p0"].sharding, held["p0"].path) == ("P('fsdp', None)", "state/params/blocks/mlp/up")


def test_a_copy_of_a_parameter_is_a_parameter():
    text = TEXT.replace(
        "%whole = f32[256,64]{1,0} all-gather(%weights), dimensions={0}", "%whole = f32[64,64]{1,0} copy(%weights)"
    )
    line = timeline(parse(text), RESULT)
    assert {(b.kind, b.module) for b in line.buffers if b.name in ("staged", "whole")} == {("params", "blocks/mlp")}


def test_without_lists_arguments_are_read_from_their_names():
    held, _ = labels({})
    assert (held["p0"].kind, held["p0"].module) == ("params", "blocks")
    assert (held["p1"].kind, held["p1"].module) == ("other", None)  # unnamed: said to be unknown, not guessed


EXPECTED = {
    # the logits of 2 x 1024 tokens x 32,000 words, in float32 and bfloat16: 250 + 125 MiB
    "decoder-scan-block-v5e": {("logits", "head"): 375, ("saved", "blocks"): 16},
    # 8 x 2048 tokens in 16 layers, and those of the layer at hand once more: two mlp values of 5632 / 2; query, key and value of
    # 1024, 512 and 512, and the projected output of 2048; the layer's input of 2048
    "decoder-scan-dots-tensor-v4": {
        ("saved", "blocks/mlp"): 17 * 8 * 2048 * 2 * 2816 * 2 / 2**20,
        ("saved", "blocks/attention"): 17 * 8 * 2048 * 2 * (1024 + 2 * 512 + 2048) / 2**20,
        ("saved", "blocks"): 17 * 8 * 2048 * 2 * 2048 / 2**20,
    },
    # 64 layers of 8 x 2048 tokens on a device: two mlp values of 57,344 / 8; query, key and value of 16 heads of 128, and the output
    # of attention, 8192 wide and split over 8 along the sequence
    "128b-v5p-256": {
        ("saved", "blocks/mlp"): 64 * 8 * 2048 * 2 * 7168 * 2 / 2**20,
        ("saved", "blocks/attention"): 64 * 8 * 2048 * (3 * 16 * 128 + 8192 / 8) * 2 / 2**20,
    },
    # 4 x 8192 tokens x 128,256 words in bfloat16
    "llama3.1-8b-offload-v6e-256": {("logits", "head"): 4 * 8192 * 128256 * 2 / 2**20},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_stored_programs(name):
    """What the options of these programs make in bfloat16, worked out from their shapes, in MiB."""
    folder = FIXTURES / name
    line = timeline(parse(gzip.open(folder / "hlo.txt.gz", "rt").read()), json.loads((folder / "result.json").read_text()))
    found = {(share.kind, share.module): share.bytes / 2**20 for share in line.composition}
    for key, size in EXPECTED[name].items():
        assert found[key] == pytest.approx(size, rel=0.01), key


def test_scratch_of_a_library_matmul_is_workspace():
    """cuBLAS calls return their result and a byte array; the result keeps its kind."""
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %c = (bf16[64,64]{1,0}, s8[4194304]{0}) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/mlp/dot"}
  ROOT %g = bf16[64,64]{1,0} get-tuple-element(%c), index=0
}
"""
    module = parse(text)
    schedule = replay(module)
    attribution = Attribution(module, schedule, {})
    labels = {value.shape.dtype: attribution.of_value(value) for value in schedule.values if value.instruction.name == "c" and value.index}
    assert (labels["s8"].kind, labels["s8"].module) == ("workspace", "mlp")
    assert labels["bf16"].kind == "activations"

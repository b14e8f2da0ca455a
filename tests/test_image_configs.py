"""Classifiers of images as words: their sizes against published ones, and nonsense refused before anything is traced."""

import dataclasses
import json
import math

import pytest

from jaxmem import kernel_limits
from jaxmem.checkpoint.formats.config_json import from_json, model_text, to_json
from jaxmem.cost.flops import model_flops, step_flops
from jaxmem.cost.memory import state_bytes
from jaxmem.hardware import parse_topology
from jaxmem.models.configs import MODELS, batch_rows, blocks, mask, parameter_shapes, problems
from jaxmem.models.image_configs import IMAGE_MODELS, MlpConfig, VitConfig
from jaxmem.plan import Plan
from jaxmem.spec import InputError, differences, parse_preset
from jaxmem.workload import Workload


@pytest.mark.parametrize(("name", "published", "embed"), [
    ("vit-ti16", 5_717_416, 192), ("vit-s16", 22_050_664, 384), ("vit-b16", 86_567_656, 768), ("vit-l16", 304_326_632, 1024)])
def test_parameters_are_the_published_ones_without_the_class_token(name, published, embed):
    """The counts of the checkpoints with a class token, which has a vector and a position of its own."""
    assert MODELS[name].parameters == published - 2 * embed


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_shapes_sum_to_parameters(name):
    c = MODELS[name]
    shapes = parameter_shapes(c)
    assert sum(math.prod(shape) for shape, _ in shapes.values()) == c.parameters
    assert all(len(shape) == len(dims) and len(set(dims)) == len(dims) for shape, dims in shapes.values())
    assert all((dims[0] == "layers") == path.startswith("blocks/") for path, (_, dims) in shapes.items())


def test_an_mlp_by_hand():
    c = MlpConfig(height=4, width=5, channels=3, classes=7, layers=3, mlp=8)
    assert parameter_shapes(c) == {
        "hidden_0/weights": ((60, 8), ("pixels", "mlp")), "hidden_0/bias": ((8,), ("mlp",)),
        "hidden_1/weights": ((8, 8), ("mlp", "embed")), "hidden_1/bias": ((8,), ("embed",)),
        "hidden_2/weights": ((8, 8), ("embed", "mlp")), "hidden_2/bias": ((8,), ("mlp",)),
        "head/weights": ((8, 7), ("mlp", "vocab")), "head/bias": ((7,), ("vocab",))}
    assert c.parameters == 61 * 8 + 2 * 9 * 8 + 9 * 7
    assert MODELS["mlp-mnist"].parameters == 785 * 128 + 129 * 10  # 784-128-10


def test_a_vision_transformer_by_hand():
    c = VitConfig(height=4, width=6, channels=3, patch=2, classes=7, layers=3, embed=8, heads=2, mlp=5)
    shapes = {path: shape for path, (shape, _) in parameter_shapes(c).items()}
    assert (c.seq, c.pixels, c.head_dim) == (6, 12, 4)
    assert {path: shape for path, shape in shapes.items() if not path.startswith("blocks/")} == {
        "patches/weights": (12, 8), "patches/bias": (8,), "positions": (6, 8), "final_norm/scale": (8,), "final_norm/bias": (8,),
        "head/weights": (8, 7), "head/bias": (7,)}
    assert shapes["blocks/attention/query"] == (3, 8, 2, 4) and shapes["blocks/mlp/up_bias"] == (3, 5) and "blocks/mlp/gate" not in shapes


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_presets_print_back_and_are_held_by_a_folder(name):
    assert problems(MODELS[name]) == []
    changed = parse_preset(MODELS, f"{name},layers=7,classes=3", what="model")
    assert parse_preset(MODELS, ",".join([name, *differences(changed, MODELS[name])]), what="model") == changed
    assert from_json(json.loads(json.dumps(to_json("jaxmem", changed, dtype="f32"))), "there") == ("jaxmem", changed)
    assert parse_preset(MODELS, model_text(changed), what="model") == changed


def test_the_sequence_follows_from_the_model():
    for text, seq in (("mlp", 1), ("vit-tiny", 16), ("vit-tiny,patch=4", 4), ("vit-s16", 196)):
        line = f"model={text},optimizer=adamw,batch=8,seq={seq}"
        assert str(Workload.parse(model=text, batch=8)) == str(Workload.parse_line(f"model={text},batch=8")) == line
        assert str(Workload.parse_line(line)) == line
    assert Workload.parse(model="gpt2", batch=8, usual_seq=4096).seq == 1024
    assert Workload.parse(model="decoder-tiny", batch=8, usual_seq=4096).seq == 4096


@pytest.mark.parametrize(("text", "expected"), [
    ("vit-tiny,patch=3", ["height=8 is not a multiple of patch=3; nearest: height=9, or patch=1, 2, 4", "width=8 is not"]),
    ("vit-tiny,heads=5", ["embed=64 is not a multiple of heads=5; nearest heads that work: 2, 4, 8"]),
    ("vit-tiny,patch=0", ["patch=0: expected at least 1"]),
    ("vit-tiny,norm_eps=0", ["norm_eps=0.0: expected a finite number above 0"]),
    ("mlp,layers=0", ["layers=0: expected at least 1"]),
    ("mlp,classes=1", ["classes=1: expected at least 2"]),
])
def test_nonsense_is_named_with_what_would_work(text, expected):
    with pytest.raises(InputError) as error:
        Workload.parse(model=text, batch=8)
    lines = str(error.value).splitlines()
    assert len(lines) == len(expected) and all(part in line for part, line in zip(expected, lines, strict=True))


@pytest.mark.parametrize(("line", "expected"), [
    ("model=vit-tiny,batch=8,seq=64", "seq=64: vit-tiny has seq=16, the patches of an image; leave seq out"),
    ("model=mlp,batch=8,seq=2", "seq=2: mlp has seq=1"),
    ("model=decoder-tiny,batch=8", "seq missing"),
    ("model=mlp,patch=2,batch=8", "unknown field 'patch'"),
])
def test_a_sequence_of_ones_own_is_refused(line, expected):
    with pytest.raises(InputError) as error:
        Workload.parse_line(line)
    assert expected in str(error.value)
    if "decoder" in line:
        with pytest.raises(InputError, match="needs seq=N"):
            Workload.parse(model="decoder-tiny", batch=8)


@pytest.mark.parametrize(("model", "plan", "expected"), [
    ("mlp", "fsdp=8,remat=block", "remat=block: mlp has no transformer blocks; remat=none"),
    ("mlp", "fsdp=8,layers=unroll", "layers=unroll: mlp has no transformer blocks"),
    ("mlp", "fsdp=8,attention=xla", "attention=xla: mlp has no transformer blocks"),
    ("mlp", "tensor=3,fsdp=8", "mlp(128) is not a multiple of tensor(3)"),
    ("mlp,mlp=100", "fsdp=8", "splits mlp(100) over fsdp(8) = 8"),
    ("mlp", "fsdp=4,tensor=2,sequence=tensor", "seq(1) is not a multiple of tensor(2)"),
    ("vit-tiny", "fsdp=8,loss_chunks=2", "loss_chunks=2: vit-tiny has one loss an image"),
    ("vit-tiny,heads=2", "fsdp=2,tensor=4", "heads(2) is not a multiple of tensor(4)"),
    ("vit-tiny,embed=60,heads=4", "fsdp=8", "splits embed(60) over fsdp(8) = 8"),
    ("vit-s16", "fsdp=8,sequence=tensor,tensor=3", "seq(196) is not a multiple of tensor(3)"),
])
def test_plans_that_have_no_meaning_are_refused(model, plan, expected):
    parsed = Plan.parse(plan)
    found = parsed.problems(Workload.parse(model=model, batch=24), parse_topology(f"cpu:{parsed.devices}"))
    assert len([problem for problem in found if expected in problem]) == 1


def test_more_shards_than_classes_is_no_problem():
    """Logits of a classifier are small: where the classes do not divide, they are whole."""
    assert Plan.parse("tensor=4").problems(Workload.parse(model="vit-tiny", batch=8), parse_topology("cpu:4")) == []
    assert Plan.parse("tensor=8").problems(Workload.parse(model="mlp", batch=8), parse_topology("cpu:8")) == []


def test_what_attends():
    assert blocks(MODELS["mlp"]) is None and blocks(MODELS["llama3-8b"]) is MODELS["llama3-8b"]
    stack = blocks(MODELS["vit-s16"])
    assert stack is not None and (stack.layers, stack.embed, stack.heads, stack.kv_heads, stack.head_dim) == (12, 384, 6, 6, 64)
    assert (mask(MODELS["vit-s16"]), mask(MODELS["gpt2"])) == ("full", "causal")
    shape = dict(seq=256, head_dim=64, heads=6, kv_heads=6)
    assert [kernel_limits.choose(kind, mask="full", **shape) for kind in ("tpu", "gpu", "cpu")] == ["splash", "xla", "xla"]
    assert kernel_limits.choose("gpu", **shape) == "triton"
    assert kernel_limits.choose("tpu", mask="full", **(shape | {"seq": 196})) == "xla"


# ---------------------------------------------------------------- closed forms

def test_flops_of_a_vision_transformer_as_published():
    """4.6 GFLOPs (multiplications and additions counted as one) of one image through DeiT-S, arXiv 2012.12877, which has a class token
    more: a training step is three times that forward pass, each of two."""
    assert model_flops(Workload.parse(model="vit-s16", batch=1)) / 6 == pytest.approx(4.6e9, rel=0.01)
    assert model_flops(Workload.parse(model="vit-b16", batch=1)) / 6 == pytest.approx(17.5e9, rel=0.01)


def test_flops_by_hand():
    """Patches are tokens; positions are added and multiply nothing; the head multiplies once an image."""
    w = Workload.parse(model="vit-tiny", batch=32)
    norms_and_biases = 2 * (4 * 64 + 4 * 64 + 128 + 64) + 2 * 64
    per_token = 5 * 64 + 2 * (4 * 64 * 64 + 2 * 64 * 128) + norms_and_biases
    assert model_flops(w) == 6 * 32 * 16 * per_token + 6 * 32 * 65 * 10 + 12 * 2 * 64 * 16 * 32 * 16
    assert model_flops(Workload.parse(model="mlp-mnist", batch=56)) == 6 * 56 * 101_770


def test_recomputation_of_blocks_alone():
    """`remat=block` computes everything of the blocks again but their last matrix, which only the sum needs."""
    w = Workload.parse(model="vit-tiny", batch=32)
    plain, again = step_flops(w, Plan()), step_flops(w, Plan(remat="block"))
    tokens = 32 * 16
    blocks_forward = 2 * (2 * tokens * (4 * 64 * 64 + 64 * 128) + 4 * 32 * 16 * 16 * 64)
    assert again.recomputed - plain.recomputed == blocks_forward and plain.recomputed == 0
    assert (again.forward, again.backward) == (plain.forward, plain.backward)
    splash = step_flops(w, Plan(), attention="splash")
    assert splash.forward == plain.forward  # no causal mask, no block that a kernel could skip


@pytest.mark.parametrize(("model", "row"), [("mlp", 8 * 8 * 4 + 4), ("vit-s16", 224 * 224 * 3 * 4 + 4),
                                            ("vit-s16,image_dtype=uint8", 224 * 224 * 3 + 4), ("decoder-tiny", 4 * 4 * 128)])
def test_bytes_of_a_batch(model, row):
    w = Workload.parse(model=model, batch=64, usual_seq=128)
    assert state_bytes(w, Plan.parse("data=2,fsdp=4,tensor=2")).batch == row * 8
    assert sum(math.prod(shape) * (1 if dtype == "uint8" else 4) for shape, dtype in batch_rows(w.model, w.seq).values()) == row


def test_state_of_one_device_by_hand():
    """784-128-10 in fsdp=4, tensor=2: the hidden dim is split over tensor, the largest other dim that divides over fsdp."""
    w = Workload.parse(model="mlp-mnist", batch=8)
    split = 784 * 128 // 8 + 128 // 2 + 128 * 10 // 8 + 10 // 2
    found = state_bytes(w, Plan.parse("fsdp=4,tensor=2"))
    assert (found.params, found.opt_state) == (4 * split, 2 * 4 * split + 4)
    assert dataclasses.replace(found, batch=0).total == 4 * 4 * split + 4

"""Presets have the published parameter counts, and the per-parameter table agrees with the closed form."""

import dataclasses
import math

import pytest

from jaxmem.models.configs import DECODERS, MODELS, DecoderConfig, parameter_shapes, problems
from jaxmem.optim import configs as optim_configs
from jaxmem.optim.configs import OPTIMIZERS
from jaxmem.spec import InputError, differences, parse_preset

# Totals of the published checkpoints (safetensors metadata of the repositories on huggingface.co), a tied table counted once.
PUBLISHED = {
    "gpt2": 124_439_808,  # openai-community/gpt2, without the causal-mask buffers stored beside the weights
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,  # meta-llama/Llama-2-7b
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,  # meta-llama/Llama-3.1-405B
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,  # mistralai/Mistral-7B-v0.1
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,  # Qwen/Qwen3-0.6B and -1.7B store the tied table twice
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,  # google/gemma-2-2b
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,  # google/gemma-3-1b-pt
    # The larger ones with their vision part: SigLIP So400m at 896 pixels, and a projection (1152 x embed) behind a norm (1152).
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2560 - 1152,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3840 - 1152,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5376 - 1152,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_count(name):
    assert MODELS[name].parameters == PUBLISHED[name]


def test_siglip_part_of_gemma3():
    width, mlp, layers, patch, patches = 1152, 4304, 27, 14, (896 // 14) ** 2
    block = 4 * (width * width + width) + 2 * width * mlp + mlp + width + 4 * width
    assert layers * block + 3 * patch ** 2 * width + width + patches * width + 2 * width == 416_866_032


@pytest.mark.parametrize("name, embed, heads, mlp, layers", [
    ("scale-16b", 4096, 64, 28672, 32), ("scale-32b", 8192, 64, 28672, 32), ("scale-64b", 8192, 64, 28672, 64),
    ("scale-128b", 8192, 128, 57344, 64), ("scale-256b", 16384, 128, 57344, 64), ("scale-512b", 16384, 128, 57344, 128)])
def test_scale_family_is_as_published(name, embed, heads, mlp, layers):
    """Dimensions of the published speed table: head size 128, gated mlp, untied, 32,000 words."""
    by_hand = layers * (4 * embed * heads * 128 + 3 * embed * mlp + 2 * embed) + 2 * 32_000 * embed + embed
    assert MODELS[name].parameters == by_hand
    assert by_hand == pytest.approx(float(name.removeprefix("scale-").removesuffix("b")) * 1e9, rel=0.03)


# Variants beyond what the presets hold together.
TINY = MODELS["decoder-tiny"]
VARIANTS = {**MODELS,
            "qkv-bias": dataclasses.replace(TINY, bias="qkv"),
            "gated-bias-layer": dataclasses.replace(TINY, bias="all", norm="layer", post_norms="both", qk_norm=True),
            "plain-untied-learned": dataclasses.replace(TINY, mlp_kind="plain", positions="learned", max_positions=32)}


@pytest.mark.parametrize("name", VARIANTS)
def test_table_of_shapes_sums_to_parameters(name):
    shapes = parameter_shapes(VARIANTS[name])
    assert sum(math.prod(shape) for shape, _ in shapes.values()) == VARIANTS[name].parameters
    assert all(len(shape) == len(dims) and len(set(dims)) == len(dims) for shape, dims in shapes.values())
    assert all((dims[0] == "layers") == path.startswith("blocks/") for path, (_, dims) in shapes.items())


def test_shapes_of_a_small_model_by_hand():
    config = DecoderConfig(layers=3, embed=8, heads=4, kv_heads=2, head_dim=5, mlp=7, vocab=11, qk_norm=True)
    assert {path: shape for path, (shape, _) in parameter_shapes(config).items()} == {
        "embed": (11, 8), "blocks/attention_norm/scale": (3, 8), "blocks/attention/query": (3, 8, 4, 5),
        "blocks/attention/key": (3, 8, 2, 5), "blocks/attention/value": (3, 8, 2, 5), "blocks/attention/out": (3, 4, 5, 8),
        "blocks/attention/query_norm/scale": (3, 5), "blocks/attention/key_norm/scale": (3, 5), "blocks/mlp_norm/scale": (3, 8),
        "blocks/mlp/gate": (3, 8, 7), "blocks/mlp/up": (3, 8, 7), "blocks/mlp/down": (3, 7, 8), "final_norm/scale": (8,),
        "head": (8, 11)}


def test_embedding_parameters_follow_the_mfu_convention():
    assert MODELS["llama3-8b"].embedding_parameters == 128_256 * 4096
    assert MODELS["gemma2-2b"].embedding_parameters == 0  # one table, and it multiplies as the head
    assert MODELS["gpt2"].embedding_parameters == 1024 * 768  # learned positions are only looked up


def test_which_layers_are_global():
    assert [MODELS["gemma2-2b"].is_global(i) for i in range(4)] == [False, True, False, True]
    assert [MODELS["gemma3-4b"].is_global(i) for i in (0, 4, 5, 6, 11)] == [False, False, True, False, True]
    assert not any(MODELS["mistral-7b"].is_global(i) for i in range(32))
    assert all(MODELS["llama3-8b"].is_global(i) for i in range(32))


def test_405b_has_both_names():
    assert MODELS["llama3-405b"] == MODELS["llama3.1-405b"]
    assert MODELS["llama3-8b"] != MODELS["llama3.1-8b"]


@pytest.mark.parametrize("name", DECODERS)
def test_presets_have_no_problems_and_print_back(name):
    assert problems(MODELS[name]) == []
    text = f"{name},layers=1,window=none,norm_eps=1e-07"
    changed = parse_preset(MODELS, text, what="model")
    assert parse_preset(MODELS, ",".join([name, *differences(changed, MODELS[name])]), what="model") == changed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_presets_have_no_problems(name):
    assert optim_configs.problems(OPTIMIZERS[name]) == []
    assert OPTIMIZERS[name].name == name


@pytest.mark.parametrize("text, expected", [
    ("decoder-tiny,kv_heads=3", "nearest kv_heads that work: 1, 2, 4"),
    ("decoder-tiny,head_dim=15", "nearest: 14 or 16"),
    ("decoder-tiny,layers=0", "layers=0: expected at least 1"),
    ("decoder-tiny,window_pattern=2", "without window"),
    ("decoder-tiny,positions=learned", "max_positions=0"),
])
def test_nonsense_is_named_with_what_would_work(text, expected):
    found = problems(parse_preset(MODELS, text, what="model"))
    assert len(found) == 1 and expected in found[0]


def test_not_a_number_is_a_problem():
    assert problems(dataclasses.replace(TINY, rope_theta=float("nan"))) == ["model: rope_theta=nan: expected a finite number"]
    assert len(problems(dataclasses.replace(TINY, query_scale=float("inf")))) == 1


@pytest.mark.parametrize("text, expected", [
    ("llama3-8", "did you mean llama3-8b"), ("llama3-8b,layer=4", "did you mean layers"),
    ("gpt2,activation=gelu_tan", "gelu_tanh"),
    ("gpt2,layers=4.5", "whole number")])
def test_a_mistyped_model_is_refused_with_the_nearest(text, expected):
    with pytest.raises(InputError, match=expected):
        parse_preset(MODELS, text, what="model")

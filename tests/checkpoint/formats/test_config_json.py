"""config.json of published models against the presets, both spellings of rope, and what is refused."""

import dataclasses
import json
import pathlib

import pytest

from jaxmem.checkpoint.formats.config_json import CLASSES, PLAIN, from_json, model_text, relevant, to_json
from jaxmem.checkpoint.formats.layouts import HUGGING_FACE, LAYOUTS
from jaxmem.models.configs import MODELS
from jaxmem.spec import InputError, parse_preset

GOLDEN = pathlib.Path(__file__).parents[2] / "fixtures" / "hf"

# The fields that matter, and some that do not, as the released config.json files have them.
PUBLISHED = {
    "llama2-7b": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
                  "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
                  "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
                  "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "vocab_size": 32000},
    "llama3.1-8b": {"model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "hidden_act": "silu",
                    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
                    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
                    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256},
    "gpt2-medium": {"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "n_ctx": 1024,
                    "layer_norm_epsilon": 1e-05, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_positions": 1024, "n_special": 0,
                    "predict_special_tokens": True, "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257},
    "qwen3-0.6b": {"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
                   "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
                   "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
                   "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
}
QWEN2_7B = {"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
            "vocab_size": 152064}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_the_presets(name):
    layout, config = from_json(PUBLISHED[name], "there")
    assert layout == PUBLISHED[name]["model_type"]
    assert config == MODELS[name]


def test_qwen2_has_biases_and_its_published_parameters():
    layout, config = from_json(QWEN2_7B, "there")
    assert (layout, config.bias, config.head_dim, config.qk_norm, config.window) == ("qwen2", "qkv", 128, False, None)
    assert config.parameters == 7_615_616_512


def test_both_spellings_of_rope_are_one():
    old = PUBLISHED["llama3.1-8b"]
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": 500000.0}
    assert from_json(new, "there") == from_json(old, "there")
    older = old | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_json(older, "there")[1].rope_scaling == "linear"
    assert from_json(older, "there")[1].rope_factor == 2


@pytest.mark.parametrize("name", ["llama", "llama3", "gpt2", "qwen2", "qwen3"])
def test_what_is_written_means_what_the_reference_wrote(name):
    """Every field that both have is equal, but for token ids, the name of the activation, and rope's and dtype's older spelling."""
    theirs = json.loads((GOLDEN / name / "config.json").read_text())
    layout, config = from_json(theirs, name)
    ours = to_json(layout, config, dtype="f32", max_positions=512)
    assert from_json(ours, name) == (layout, config)
    rope = theirs.get("rope_parameters", {})
    same = {k for k in ours if k in theirs} - {"bos_token_id", "eos_token_id"}
    assert same >= {"vocab_size", "model_type", "architectures", "tie_word_embeddings"}
    assert {k: ours[k] for k in same} == {k: theirs[k] for k in same}
    assert set(ours) - same <= {"bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "torch_dtype", "head_dim"}
    assert ours["torch_dtype"] == theirs["dtype"] == "float32"
    if rope:
        assert ours["rope_theta"] == rope["rope_theta"]
        assert (ours["rope_scaling"] or {"rope_type": "default"}) == {k: v for k, v in rope.items() if k != "rope_theta"}


@pytest.mark.parametrize("change, words", [
    ({"model_type": "mistral"}, ["model_type='mistral' is not supported"]),
    ({"model_type": None}, ["model_type is missing"]),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512}, ["use_sliding_window=true is not supported, only false"]),
    ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias=true is not supported, only false"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types with sliding_attention", "only full_attention"]),
    ({"sliding_window": 4096}, ["sliding_window=4096 is not supported, only null"]),
    ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config="]),
    ({"attention_bias": True}, ["attention_bias=true with mlp_bias=false"]),
    ({"hidden_act": "relu2"}, ["hidden_act='relu2' is not supported; did you mean", "relu"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type='yarn' is not supported", "linear", "llama3"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
     ["low_freq_factor is missing", "high_freq_factor is missing", "original_max_position_embeddings is missing"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
    ({"hidden_size": "4096"}, ["hidden_size='4096': expected a whole number"]),
    ({"num_hidden_layers": None, "vocab_size": True}, ["num_hidden_layers is missing", "vocab_size=True: expected a whole number"]),
    ({"num_key_value_heads": 5}, ["heads=32 is not a multiple of kv_heads=5"]),
    ({"hidden_size": 4097}, ["hidden_size=4097 is not a multiple of num_attention_heads=32"]),
])
def test_what_cannot_be_computed_is_refused_by_name(change, words):
    with pytest.raises(InputError) as error:
        from_json(PUBLISHED["llama3.1-8b"] | change, "a/config.json")
    assert all(word in str(error.value) for word in words), error.value
    assert all(line.startswith("a/config.json: ") for line in str(error.value).splitlines())


@pytest.mark.parametrize("change", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"n_head": 7}])
def test_gpt2_variants_are_refused(change):
    with pytest.raises(InputError, match=next(iter(change))):
        from_json(PUBLISHED["gpt2-medium"] | change, "there")


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_is_held_by_the_layouts_that_say_so(name):
    """Own names hold everything; the others hold what comes back equal and name what would not."""
    for layout in LAYOUTS:
        try:
            written = to_json(layout, MODELS[name], dtype="bf16")
        except InputError as error:
            assert layout != "jaxmem" and "layouts that can: " in str(error) and str(error).endswith("jaxmem")
            assert layout in ("llama", "qwen2", "qwen3", "gpt2")
        else:
            assert relevant(from_json(json.loads(json.dumps(written)), name)[1]) == relevant(MODELS[name])


@pytest.mark.parametrize("name, layout", [("llama3.1-8b", "llama"), ("llama2-7b", "llama"), ("scale-16b", "llama"), ("gpt2-xl", "gpt2"),
                                          ("qwen3-0.6b", "qwen3"), ("decoder-tiny", "llama")])
def test_presets_have_their_layout(name, layout):
    assert to_json(layout, MODELS[name], dtype="f32")["model_type"] == layout


def test_what_a_layout_cannot_hold_is_named():
    with pytest.raises(InputError) as error:
        to_json("llama", parse_preset(MODELS, "decoder-tiny,window=8,qk_norm=true,bias=qkv", what="model"), dtype="f32")
    assert "window=8" in str(error.value) and "qk_norm=true" in str(error.value) and "bias=qkv" in str(error.value)
    with pytest.raises(InputError, match="layout=lama: unknown; did you mean llama"):
        to_json("lama", MODELS["llama2-7b"], dtype="f32")


def test_settings_that_nothing_reads_are_no_obstacle():
    unread = dataclasses.replace(MODELS["llama2-7b"], rope_factor=3.0, rope_original_positions=99, max_positions=7, query_scale=128 ** -0.5)
    assert from_json(to_json("llama", unread, dtype="f32"), "there")[1] == MODELS["llama2-7b"]
    with pytest.raises(InputError, match="query_scale=0.5"):
        to_json("llama", dataclasses.replace(unread, query_scale=0.5), dtype="f32")


def test_the_longest_sequence_is_written_where_it_is_known():
    assert "max_position_embeddings" not in to_json("llama", MODELS["llama2-7b"], dtype="f32")
    assert to_json("llama", MODELS["llama2-7b"], dtype="f32", max_positions=4096)["max_position_embeddings"] == 4096
    scaled = MODELS["llama3.1-8b"]
    for given, said in ((None, 65536), (8192, 65536), (131072, 131072)):
        assert to_json("llama", scaled, dtype="f32", max_positions=given)["max_position_embeddings"] == said
    assert to_json("gpt2", MODELS["gpt2"], dtype="f32")["n_positions"] == 1024


def test_own_names_refuse_unknown_values():
    written = to_json("jaxmem", MODELS["gemma3-1b"], dtype="bf16")
    assert from_json(written, "there") == ("jaxmem", MODELS["gemma3-1b"])
    with pytest.raises(InputError, match="norm=rmx: expected rms|layer"):
        from_json(written | {"norm": "rmx"}, "there")
    with pytest.raises(InputError, match="there: vocab is missing"):
        from_json({k: v for k, v in written.items() if k != "vocab"}, "there")


def test_the_model_flag_that_a_folder_needs():
    config = from_json(QWEN2_7B, "there")[1]
    assert model_text(MODELS["llama3.1-8b"]) == "llama3.1-8b"
    assert parse_preset(MODELS, model_text(config), what="model") == config


def test_every_layout_is_described():
    assert set(CLASSES) == set(PLAIN) == set(HUGGING_FACE)

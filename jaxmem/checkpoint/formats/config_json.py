"""`config.json` of a folder <-> a model's config. What a decoder here cannot compute is refused by name. No jax.

The Hugging Face layouts are of decoders; jaxmem's own holds every model, and says in `architecture` which where it is no decoder.

Defaults are those of the reference's configuration classes, for files leave out what equals them. Fields that change nothing of the
forward pass (dropout, token ids, initialisers, caching) are not looked at.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem import spec
from jaxmem.checkpoint.formats.layouts import LAYOUTS, OWN
from jaxmem.models.configs import DECODERS, MODELS, DecoderConfig, MlpConfig, ModelConfig, VitConfig, problems
from jaxmem.spec import InputError, nearest

Json = Mapping[str, Any]
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
# What has to be so, where it is said at all.
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "use_mrope": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
}
ARCHITECTURES: dict[str, type[ModelConfig]] = {"decoder": DecoderConfig, "mlp": MlpConfig, "vit": VitConfig}
REQUIRED = object()


class Fields:
    """Values of a JSON object with their types checked; `problems` collects what is wrong."""

    def __init__(self, values: Json) -> None:
        self.values, self.problems = values, list[str]()

    def take(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """The value, or `default` where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                self.problems.append(f"{name} is missing")
            return kind(1) if default is REQUIRED else default
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object"}
            self.problems.append(f"{name}={value!r}: expected {kinds[kind]}")
            return kind(1) if kind in (int, float) else kind()
        return kind(value)

    def has_to_be(self, name: str, value: Any) -> None:
        found = self.values.get(name, value)
        if found != value:
            self.problems.append(f"{name}={_said(found)} is not supported, only {_said(value)}")


def from_json(values: Json, where: str) -> tuple[str, ModelConfig]:
    """(layout, config). Raises InputError with every field that is missing, wrong, or means something that jaxmem does not compute."""
    layout, config, found = _understood(values, where)
    found = found or problems(config)
    if found:
        raise InputError("\n".join(f"{where}: {problem}" for problem in found))
    return layout, config


def to_json(layout: str, config: ModelConfig, *, dtype: str, max_positions: int | None = None) -> dict[str, Any]:
    """What `config.json` says. `dtype` is f32, bf16 or f16; `max_positions` the longest sequence, for models whose positions have no table.

    Raises InputError with every field of `config` that `layout` has no word for, and the layouts that have.
    """
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout}: unknown{nearest(layout, LAYOUTS)}")
    if lost := not_held(layout, config):
        able = [name for name in LAYOUTS if not not_held(name, config)]
        raise InputError(f"layout={layout} cannot hold this model, which has {', '.join(lost)}; layouts that can: {', '.join(able)}")
    return _written(layout, config) | _extra(layout, config, dtype, max_positions)


def not_held(layout: str, config: ModelConfig) -> list[str]:
    """`field=value` of everything in `config` that would be another after writing and reading."""
    if layout != OWN and not isinstance(config, DecoderConfig):
        return [f"classes={config.classes}"]
    _, back, found = _understood(_written(layout, config), layout)
    return found or spec.differences(relevant(config), relevant(back))


def differences(found: ModelConfig, wanted: ModelConfig) -> str:
    """In what `found` is not `wanted`, as far as anything reads it; empty where it is."""
    if type(found) is not type(wanted):
        return model_text(found)
    return ", ".join(spec.differences(relevant(found), relevant(wanted)))


def model_text(config: ModelConfig) -> str:
    """The shortest `preset,field=value` that is `config`, as `--model` takes it."""
    texts = [",".join([name, *spec.differences(config, preset)]) for name, preset in MODELS.items() if type(preset) is type(config)]
    return min(texts, key=lambda text: (text.count(","), len(text)))


# ---------------------------------------------------------------- reading

def _understood(values: Json, where: str) -> tuple[str, ModelConfig, list[str]]:
    """(layout, config, problems of the fields)."""
    fields = Fields(values)
    layout = fields.take("model_type", str)
    if not fields.problems and layout not in LAYOUTS:
        raise InputError(f"{where}: model_type={layout!r} is not supported{nearest(layout, LAYOUTS)}")
    if fields.problems:
        return layout, DECODERS["decoder-tiny"], fields.problems
    read: Callable[[str, Fields], ModelConfig] = _own if layout == OWN else _gpt2 if layout == "gpt2" else _llama
    config = read(layout, fields)
    return layout, config, fields.problems


def _own(layout: str, fields: Fields) -> ModelConfig:
    which = fields.take("architecture", str, "decoder")
    if which not in ARCHITECTURES:
        fields.problems.append(f"architecture={which!r} is not supported{nearest(which, ARCHITECTURES)}")
    config = ARCHITECTURES.get(which, DecoderConfig)
    names = {f.name for f in dataclasses.fields(config)}
    texts = [f"{name}={spec.show(value)}" for name, value in fields.values.items() if name in names]
    fields.problems += [f"{f.name} is missing" for f in dataclasses.fields(config)
                        if f.default is dataclasses.MISSING and f.name not in fields.values]
    return DECODERS["decoder-tiny"] if fields.problems else config(**spec.fields_from(config, texts, OWN))  # type: ignore[arg-type]


def _plain(layout: str, fields: Fields) -> None:
    for name, value in PLAIN[layout].items():
        fields.has_to_be(name, value)
    fields.has_to_be("quantization_config", None)
    for kind in sorted(set(fields.values.get("layer_types") or ()) - {"full_attention"}):
        fields.problems.append(f"layer_types with {kind} are not supported, only full_attention")


def _activation(fields: Fields, name: str, default: str) -> Any:
    found = fields.take(name, str, default)
    if found not in ACTIVATIONS:
        fields.problems.append(f"{name}={found!r} is not supported{nearest(found, ACTIVATIONS)}")
    return ACTIVATIONS.get(found, "silu")


def _llama(layout: str, fields: Fields) -> DecoderConfig:
    _plain(layout, fields)
    embed, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    bias: Any = {"llama": "none", "qwen2": "qkv", "qwen3": "none"}[layout]
    if layout == "llama":
        attention, mlp = fields.take("attention_bias", bool, False), fields.take("mlp_bias", bool, False)
        if attention != mlp:
            fields.problems.append(f"attention_bias={_said(attention)} with mlp_bias={_said(mlp)} is not supported, only both or none")
        bias = "all" if attention and mlp else "none"
    if heads > 0 and embed % heads and fields.values.get("head_dim") is None:
        fields.problems.append(f"hidden_size={embed} is not a multiple of num_attention_heads={heads} and there is no head_dim")
    return DecoderConfig(
        layers=fields.take("num_hidden_layers", int), embed=embed, heads=heads,
        kv_heads=fields.take("num_key_value_heads", int, heads),
        head_dim=fields.take("head_dim", int, 128 if layout == "qwen3" else embed // max(heads, 1)),
        mlp=fields.take("intermediate_size", int), vocab=fields.take("vocab_size", int),
        activation=_activation(fields, "hidden_act", "silu"), norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        tied=fields.take("tie_word_embeddings", bool, False), bias=bias, qk_norm=layout == "qwen3", **_rope(fields))


def _rope(fields: Fields) -> dict[str, Any]:
    """Both spellings: `rope_theta` with `rope_scaling` (null, or an object with `type` or `rope_type`), and one `rope_parameters`."""
    both = fields.take("rope_scaling", dict, {}) | fields.take("rope_parameters", dict, {})
    rope = Fields(both)
    found: dict[str, Any] = {"rope_theta": rope.take("rope_theta", float, fields.take("rope_theta", float, 10_000.0))}
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    for holder in (rope, fields):
        if holder.take("partial_rotary_factor", float, 1.0) != 1:
            holder.problems.append(f"partial_rotary_factor={holder.values['partial_rotary_factor']} is not supported, only 1")
    if kind == "llama3":
        found |= {"rope_scaling": "llama3", "rope_factor": rope.take("factor", float), "rope_low_freq": rope.take("low_freq_factor", float),
                  "rope_high_freq": rope.take("high_freq_factor", float),
                  "rope_original_positions": rope.take("original_max_position_embeddings", int)}
    elif kind == "linear":
        found |= {"rope_scaling": "linear", "rope_factor": rope.take("factor", float)}
    elif kind != "default":
        rope.problems.append(f"rope_type={kind!r} is not supported{nearest(kind, ('default', 'linear', 'llama3'))}")
    fields.problems += [f"rope: {problem}" for problem in rope.problems]
    return found


def _gpt2(layout: str, fields: Fields) -> DecoderConfig:
    _plain(layout, fields)
    embed, heads = fields.take("n_embd", int, 768), fields.take("n_head", int, 12)
    if heads > 0 and embed % heads:
        fields.problems.append(f"n_embd={embed} is not a multiple of n_head={heads}")
    return DecoderConfig(
        layers=fields.take("n_layer", int, 12), embed=embed, heads=heads, kv_heads=heads, head_dim=embed // max(heads, 1),
        mlp=fields.take("n_inner", int, 4 * embed), vocab=fields.take("vocab_size", int, 50_257), mlp_kind="plain",
        activation=_activation(fields, "activation_function", "gelu_new"), positions="learned",
        max_positions=fields.take("n_positions", int, 1024), norm="layer", norm_eps=fields.take("layer_norm_epsilon", float, 1e-5),
        bias="all", tied=fields.take("tie_word_embeddings", bool, True))


# ---------------------------------------------------------------- writing

def _written(layout: str, c: ModelConfig) -> dict[str, Any]:
    """The fields that `from_json` reads."""
    if layout == OWN:
        which = next(name for name, config in ARCHITECTURES.items() if isinstance(c, config))
        return {"model_type": OWN, **({} if which == "decoder" else {"architecture": which}), **dataclasses.asdict(c)}
    assert isinstance(c, DecoderConfig)  # `not_held` says so before
    spelled = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if layout == "gpt2":
        return {"model_type": layout, "vocab_size": c.vocab, "n_positions": c.max_positions, "n_embd": c.embed, "n_layer": c.layers,
                "n_head": c.heads, "n_inner": c.mlp, "activation_function": spelled[c.activation], "layer_norm_epsilon": c.norm_eps,
                "tie_word_embeddings": c.tied}
    spelled["gelu_tanh"] = "gelu_pytorch_tanh"  # the same function under the name that these use
    scaling: dict[str, Any] | None = None
    if c.rope_scaling == "linear":
        scaling = {"rope_type": "linear", "factor": c.rope_factor}
    if c.rope_scaling == "llama3":
        scaling = {"rope_type": "llama3", "factor": c.rope_factor, "low_freq_factor": c.rope_low_freq,
                   "high_freq_factor": c.rope_high_freq, "original_max_position_embeddings": c.rope_original_positions}
    values = {"model_type": layout, "vocab_size": c.vocab, "hidden_size": c.embed, "intermediate_size": c.mlp,
              "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
              "hidden_act": spelled[c.activation], "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "rope_scaling": scaling,
              "tie_word_embeddings": c.tied}
    return values | ({"attention_bias": c.bias == "all", "mlp_bias": c.bias == "all"} if layout == "llama" else {})


def _extra(layout: str, c: ModelConfig, dtype: str, max_positions: int | None) -> dict[str, Any]:
    """What other readers want besides. Token ids are null: the reference's defaults are another tokenizer's."""
    if layout == OWN or not isinstance(c, DecoderConfig):
        return {"dtype": dtype}
    if layout != "gpt2" and c.rope_scaling == "llama3":  # what it is scaled for
        max_positions = max(round(c.rope_factor * c.rope_original_positions), max_positions or 0)
    lengths = {} if max_positions is None or layout == "gpt2" else {"max_position_embeddings": max_positions}
    return {"architectures": [CLASSES[layout]], "torch_dtype": DTYPES[dtype], "bos_token_id": None, "eos_token_id": None, **lengths}


def relevant(c: ModelConfig) -> ModelConfig:
    """Without settings that nothing reads, such as a rope factor where nothing is scaled."""
    if not isinstance(c, DecoderConfig):
        return c
    unread: set[str] = set()
    if c.positions == "learned":
        unread |= {"rope_theta", "rope_scaling"}
    else:
        unread |= {"max_positions"}
    if c.positions == "learned" or c.rope_scaling == "none":
        unread |= {"rope_factor"}
    if c.positions == "learned" or c.rope_scaling != "llama3":
        unread |= {"rope_low_freq", "rope_high_freq", "rope_original_positions"}
    if c.window is None:
        unread |= {"rope_local_theta"}
    if c.query_scale == c.head_dim ** -0.5:
        unread |= {"query_scale"}
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(c)}
    return dataclasses.replace(c, **{name: defaults[name] for name in unread})


def _said(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else repr(value)

"""Which model: a decoder's sizes, its variants, the parameters it has; presets with their published numbers. No jax here.

Classifiers of images are in `image_configs.py`; `ModelConfig` is any of them, and what is asked of any of them is here.

Shape letters: D embed, F mlp, N query heads, K key/value heads, H head size, V vocab, L layers, P learned positions.
"""

import dataclasses
import math
from typing import Literal

from jaxmem.kernel_limits import Mask
from jaxmem.models.image_configs import IMAGE_MODELS, MlpConfig, VitConfig, image_problems, mlp_shapes, patch_shapes

Shapes = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
Rows = dict[str, tuple[tuple[int, ...], Literal["f32", "int32", "uint8"]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A dense decoder-only transformer. Sizes are counts; every field can be given as `name=value` after a preset."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    mlp_kind: Literal["gated", "plain"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    positions: Literal["rope", "learned"] = "rope"
    max_positions: int = 0  # rows of the learned table; rope has none
    rope_theta: float = 10_000.0
    rope_scaling: Literal["none", "llama3", "linear"] = "none"  # linear: every frequency of the global layers / rope_factor
    rope_factor: float = 8.0
    rope_low_freq: float = 1.0
    rope_high_freq: float = 4.0
    rope_original_positions: int = 8192
    rope_local_theta: float | None = None  # theta of the windowed layers (gemma3), never scaled; None: as the global layers
    norm: Literal["rms", "layer"] = "rms"  # layer norms also have a bias
    norm_eps: float = 1e-5
    norm_offset: Literal["none", "one"] = "none"  # one: multiply by 1 + scale (gemma)
    post_norms: Literal["none", "both"] = "none"  # both: a norm also after attention and after the mlp, before the residual sum
    tied: bool = False  # the head is the embedding table
    bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: bool = False  # rms norm over head_dim on queries and keys, before rope
    attention_softcap: float | None = None  # scores -> cap * tanh(scores / cap)
    final_softcap: float | None = None  # the same for logits
    window: int | None = None  # a query sees this many latest positions, itself included
    window_pattern: int = 1  # every n-th layer (n, 2n, ...) is global and the others windowed; 1: all windowed if `window` is set
    embed_scale: bool = False  # embeddings times sqrt(embed)
    query_scale: float | None = None  # scores = query_scale * q.k; None: head_dim ** -0.5

    @property
    def outputs(self) -> int:
        """Scores that it gives: one a token of the vocabulary."""
        return self.vocab

    @property
    def parameters(self) -> int:
        """Every trained number, a tied table once."""
        matrices = 3 if self.mlp_kind == "gated" else 2
        norm_vectors = 2 if self.norm == "layer" else 1
        norms = (4 if self.post_norms == "both" else 2) * norm_vectors * self.embed
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        block = 2 * self.embed * (query + key_value) + matrices * self.embed * self.mlp + norms
        if self.bias != "none":
            block += query + 2 * key_value
        if self.bias == "all":
            block += 2 * self.embed + (matrices - 1) * self.mlp
        if self.qk_norm:
            block += 2 * self.head_dim
        tables = (1 if self.tied else 2) * self.vocab * self.embed + self.position_parameters
        return self.layers * block + tables + norm_vectors * self.embed

    @property
    def position_parameters(self) -> int:
        return self.max_positions * self.embed if self.positions == "learned" else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters that are looked up and do no matrix multiplication: what the MFU convention leaves out.

        Untied: the input table. Tied: none, for the one table is also the head and multiplies there. Learned positions
        are looked up in both cases. So `parameters - embedding_parameters` is what 6 x parameters x tokens counts.
        """
        return (0 if self.tied else self.vocab * self.embed) + self.position_parameters

    def is_global(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) attends to the whole past."""
        return self.window is None or (self.window_pattern > 1 and (layer + 1) % self.window_pattern == 0)


ModelConfig = DecoderConfig | MlpConfig | VitConfig


def blocks(config: ModelConfig) -> DecoderConfig | None:
    """The transformer blocks of a model as a decoder's: their sizes and variants. None for a model that has none.

    Vision transformers have a decoder's blocks with full attention; the vocabulary is their classes, and positions are added before.
    """
    if isinstance(config, VitConfig):
        c = config
        return DecoderConfig(layers=c.layers, embed=c.embed, heads=c.heads, kv_heads=c.heads, head_dim=c.head_dim, mlp=c.mlp,
                             vocab=c.classes, mlp_kind="plain", activation=c.activation, positions="learned", max_positions=c.seq,
                             norm="layer", norm_eps=c.norm_eps, bias="all")
    return config if isinstance(config, DecoderConfig) else None


def own_seq(config: ModelConfig) -> int | None:
    """Tokens of one example, where the model decides it: patches of an image, 1 for an MLP. None where it is free."""
    return None if isinstance(config, DecoderConfig) else config.seq


def seq_for(config: ModelConfig, usual: int | None) -> int | None:
    """The sequence length where none is given: the model's own, or `usual`, or fewer where there are fewer learned positions."""
    if isinstance(config, DecoderConfig) and usual is not None and config.positions == "learned":
        return min(usual, config.max_positions)
    return usual if isinstance(config, DecoderConfig) else own_seq(config)


def mask(config: ModelConfig) -> Mask:
    """What a token sees: what came before it, or in an image everything."""
    return "causal" if isinstance(config, DecoderConfig) else "full"


def batch_rows(config: ModelConfig, seq: int) -> Rows:
    """`{field: (shape, dtype)}` of one row of a batch. Text has segment ids and positions; a target or label below 0 is left out."""
    if isinstance(config, DecoderConfig):
        return {name: ((seq,), "int32") for name in ("tokens", "targets", "segment_ids", "positions")}
    return {"images": ((config.height, config.width, config.channels), config.image_dtype), "labels": ((), "int32")}


def parameter_shapes(config: ModelConfig) -> Shapes:
    """`{path: (shape, dims)}` of every parameter; layers are stacked in the first dim, as the scanned model holds them."""
    if isinstance(config, MlpConfig):
        return mlp_shapes(config)
    if isinstance(config, VitConfig):
        stack = blocks(config)
        assert stack is not None
        return patch_shapes(config) | {path: found for path, found in parameter_shapes(stack).items() if path.startswith("blocks/")}
    c = config
    size = {"layers": c.layers, "embed": c.embed, "heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "mlp": c.mlp,
            "vocab": c.vocab, "positions": c.max_positions}
    dims: dict[str, str] = {"embed": "vocab embed"}
    if c.positions == "learned":
        dims["positions"] = "positions embed"

    def norm(path: str, of: str) -> None:
        dims[f"{path}/scale"] = of
        if c.norm == "layer":
            dims[f"{path}/bias"] = of

    norm("blocks/attention_norm", "layers embed")
    attention = "blocks/attention/"
    dims |= {attention + "query": "layers embed heads head_dim", attention + "key": "layers embed kv_heads head_dim",
             attention + "value": "layers embed kv_heads head_dim", attention + "out": "layers heads head_dim embed"}
    if c.bias != "none":
        dims |= {attention + "query_bias": "layers heads head_dim", attention + "key_bias": "layers kv_heads head_dim",
                 attention + "value_bias": "layers kv_heads head_dim"}
    if c.bias == "all":
        dims[attention + "out_bias"] = "layers embed"
    if c.qk_norm:
        dims |= {attention + "query_norm/scale": "layers head_dim", attention + "key_norm/scale": "layers head_dim"}
    if c.post_norms == "both":
        norm("blocks/attention_post_norm", "layers embed")
    norm("blocks/mlp_norm", "layers embed")
    wide = ("gate", "up") if c.mlp_kind == "gated" else ("up",)
    dims |= {f"blocks/mlp/{name}": "layers embed mlp" for name in wide} | {"blocks/mlp/down": "layers mlp embed"}
    if c.bias == "all":
        dims |= {f"blocks/mlp/{name}_bias": "layers mlp" for name in wide} | {"blocks/mlp/down_bias": "layers embed"}
    if c.post_norms == "both":
        norm("blocks/mlp_post_norm", "layers embed")
    norm("final_norm", "embed")
    if not c.tied:
        dims["head"] = "embed vocab"
    return {path: (tuple(size[d] for d in names.split()), tuple(names.split())) for path, names in dims.items()}


def _gpt2(layers: int, embed: int, heads: int) -> DecoderConfig:
    return DecoderConfig(layers=layers, embed=embed, heads=heads, kv_heads=heads, head_dim=64, mlp=4 * embed, vocab=50_257,
                         mlp_kind="plain", activation="gelu_tanh", positions="learned", max_positions=1024, norm="layer",
                         bias="all", tied=True)


def _llama(layers: int, embed: int, heads: int, kv_heads: int, mlp: int, *, vocab: int, theta: float, window: int | None = None,
           scaling: Literal["none", "llama3"] = "none") -> DecoderConfig:
    return DecoderConfig(layers=layers, embed=embed, heads=heads, kv_heads=kv_heads, head_dim=128, mlp=mlp, vocab=vocab,
                         rope_theta=theta, rope_scaling=scaling, window=window)


def _llama3(layers: int, embed: int, heads: int, mlp: int, scaling: Literal["none", "llama3"]) -> DecoderConfig:
    return _llama(layers, embed, heads, 8, mlp, vocab=128_256, theta=500_000.0, scaling=scaling)


def _qwen3(layers: int, embed: int, heads: int, mlp: int, *, tied: bool) -> DecoderConfig:
    return DecoderConfig(layers=layers, embed=embed, heads=heads, kv_heads=8, head_dim=128, mlp=mlp, vocab=151_936,
                         rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied=tied)


def _gemma2(layers: int, embed: int, heads: int, kv_heads: int, head_dim: int, mlp: int, query_scalar: int) -> DecoderConfig:
    return DecoderConfig(layers=layers, embed=embed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp=mlp, vocab=256_000,
                         activation="gelu_tanh", norm_eps=1e-6, norm_offset="one", post_norms="both", tied=True, embed_scale=True,
                         attention_softcap=50.0, final_softcap=30.0, window=4096, window_pattern=2,
                         query_scale=query_scalar ** -0.5)


def _gemma3(layers: int, embed: int, heads: int, kv_heads: int, head_dim: int, mlp: int, query_scalar: int, *, vocab: int,
            window: int, scaling: Literal["none", "linear"]) -> DecoderConfig:
    return DecoderConfig(layers=layers, embed=embed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp=mlp, vocab=vocab,
                         activation="gelu_tanh", norm_eps=1e-6, norm_offset="one", post_norms="both", tied=True, embed_scale=True,
                         qk_norm=True, rope_theta=1e6, rope_local_theta=1e4, rope_scaling=scaling, rope_factor=8.0, window=window,
                         window_pattern=6, query_scale=query_scalar ** -0.5)


def _scale(layers: int, embed: int, heads: int, mlp: int) -> DecoderConfig:
    return _llama(layers, embed, heads, heads, mlp, vocab=32_000, theta=10_000.0)


DECODERS: dict[str, DecoderConfig] = {
    # For the CPU: byte text (256 values and a few marks) fits the vocabulary, and every size halves evenly.
    "decoder-tiny": DecoderConfig(layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=512),
    "decoder-small": DecoderConfig(layers=4, embed=128, heads=8, kv_heads=4, head_dim=16, mlp=384, vocab=512),
    # Radford et al. 2019; sizes as in the released checkpoints.
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    # Touvron et al. 2023, arXiv 2307.09288.
    "llama2-7b": _llama(32, 4096, 32, 32, 11_008, vocab=32_000, theta=10_000.0),
    "llama2-13b": _llama(40, 5120, 40, 40, 13_824, vocab=32_000, theta=10_000.0),
    "llama2-70b": _llama(80, 8192, 64, 8, 28_672, vocab=32_000, theta=10_000.0),
    # Grattafiori et al. 2024, arXiv 2407.21783. 3.1 adds the rope scaling; 405B was released as 3.1 alone, so both names mean it.
    "llama3-8b": _llama3(32, 4096, 32, 14_336, "none"),
    "llama3-70b": _llama3(80, 8192, 64, 28_672, "none"),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248, "llama3"),
    "llama3.1-8b": _llama3(32, 4096, 32, 14_336, "llama3"),
    "llama3.1-70b": _llama3(80, 8192, 64, 28_672, "llama3"),
    "llama3.1-405b": _llama3(126, 16_384, 128, 53_248, "llama3"),
    # Jiang et al. 2023, arXiv 2310.06825 (v0.1, with its sliding window).
    "mistral-7b": _llama(32, 4096, 32, 8, 14_336, vocab=32_000, theta=10_000.0, window=4096),
    # Yang et al. 2025, arXiv 2505.09388.
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600, tied=False),
    # Gemma Team 2024, arXiv 2408.00118, and 2025, arXiv 2503.19786 (the text part; 4B and up scale the global layers' rope by 8).
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 256, 9216, 256),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 256, 14_336, 256),
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 128, 36_864, 144),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 256, 6912, 256, vocab=262_144, window=512, scaling="none"),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 256, 10_240, 256, vocab=262_208, window=1024, scaling="linear"),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 256, 15_360, 256, vocab=262_208, window=1024, scaling="linear"),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 128, 21_504, 168, vocab=262_208, window=1024, scaling="linear"),
    # The family that MaxText publishes speeds for (configs/tpu of AI-Hypercomputer/maxtext at e591f30c).
    "scale-16b": _scale(32, 4096, 64, 28_672),
    "scale-32b": _scale(32, 8192, 64, 28_672),
    "scale-64b": _scale(64, 8192, 64, 28_672),
    "scale-128b": _scale(64, 8192, 128, 57_344),
    "scale-256b": _scale(64, 16_384, 128, 57_344),
    "scale-512b": _scale(128, 16_384, 128, 57_344),
}


MODELS: dict[str, ModelConfig] = {**DECODERS, **IMAGE_MODELS}


def problems(config: ModelConfig) -> list[str]:
    """Everything that makes `config` nonsense, with the numbers and what would work."""
    if not isinstance(config, DecoderConfig):
        return image_problems(config)
    c, found = config, []
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            found.append(f"model: {field.name}={value}: expected a finite number")
    for name in ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "window_pattern"):
        if getattr(c, name) <= 0:
            found.append(f"model: {name}={getattr(c, name)}: expected at least 1")
    for name in ("rope_theta", "rope_factor", "rope_low_freq", "rope_high_freq", "rope_original_positions", "norm_eps",
                 "rope_local_theta", "attention_softcap", "final_softcap", "window", "query_scale"):
        if getattr(c, name) is not None and getattr(c, name) <= 0:
            found.append(f"model: {name}={getattr(c, name)}: expected more than 0{', or none' if _optional(name) else ''}")
    if c.heads > 0 and c.kv_heads > 0 and c.heads % c.kv_heads:
        legal = sorted((d for d in range(1, c.heads + 1) if c.heads % d == 0), key=lambda d: abs(d - c.kv_heads))[:3]
        found.append(f"model: heads={c.heads} is not a multiple of kv_heads={c.kv_heads}; nearest kv_heads that work: "
                     f"{', '.join(map(str, sorted(legal)))}")
    if c.positions == "rope" and c.head_dim % 2:
        found.append(f"model: head_dim={c.head_dim} is odd and rope turns pairs; nearest: {c.head_dim - 1} or {c.head_dim + 1}")
    if c.positions == "learned" and c.max_positions <= 0:
        found.append(f"model: positions=learned with max_positions={c.max_positions}: the table needs as many rows as seq")
    if c.rope_scaling == "llama3" and c.rope_low_freq >= c.rope_high_freq:
        found.append(f"model: rope_low_freq={c.rope_low_freq} must be below rope_high_freq={c.rope_high_freq}")
    if c.window is None and c.window_pattern != 1:
        found.append(f"model: window_pattern={c.window_pattern} without window; give window=... or window_pattern=1")
    return found


def _optional(name: str) -> bool:
    return name in ("rope_local_theta", "attention_softcap", "final_softcap", "window", "query_scale")

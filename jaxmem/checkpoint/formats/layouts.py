"""Where each parameter lies in a folder of tensors: names, dims and parts, as data. No jax.

A parameter is named by its path and its dims (`models.configs.parameter_shapes`). A tensor is described by the same dims in its own
order: `"heads*head_dim embed"` is a matrix whose rows are (head, head_dim) pairs. That is all that reading, writing and slicing need.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from jaxmem.models.configs import ModelConfig, parameter_shapes

LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class At:
    """One parameter's place. `tensor` is a name, one a layer if it has `{layer}`. `dims` are the tensor's; `*` joins those of the
    parameter that share one. `part` (i, n): the parameter is the i-th of n equal parts of the tensor's last dim."""

    tensor: str
    dims: str
    part: tuple[int, int] = (0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """`prefix` is missing in folders that hold the model without its head; `ignored` matches tensors that are no parameters."""

    prefix: str
    table: Mapping[str, At]
    ignored: re.Pattern[str]


_BLOCK = "model.layers.{layer}."
_LLAMA = {
    "embed": At("model.embed_tokens.weight", "vocab embed"),
    "blocks/attention_norm/scale": At(_BLOCK + "input_layernorm.weight", "embed"),
    "blocks/attention/query": At(_BLOCK + "self_attn.q_proj.weight", "heads*head_dim embed"),
    "blocks/attention/key": At(_BLOCK + "self_attn.k_proj.weight", "kv_heads*head_dim embed"),
    "blocks/attention/value": At(_BLOCK + "self_attn.v_proj.weight", "kv_heads*head_dim embed"),
    "blocks/attention/out": At(_BLOCK + "self_attn.o_proj.weight", "embed heads*head_dim"),
    "blocks/attention/query_bias": At(_BLOCK + "self_attn.q_proj.bias", "heads*head_dim"),
    "blocks/attention/key_bias": At(_BLOCK + "self_attn.k_proj.bias", "kv_heads*head_dim"),
    "blocks/attention/value_bias": At(_BLOCK + "self_attn.v_proj.bias", "kv_heads*head_dim"),
    "blocks/attention/out_bias": At(_BLOCK + "self_attn.o_proj.bias", "embed"),
    "blocks/attention/query_norm/scale": At(_BLOCK + "self_attn.q_norm.weight", "head_dim"),
    "blocks/attention/key_norm/scale": At(_BLOCK + "self_attn.k_norm.weight", "head_dim"),
    "blocks/mlp_norm/scale": At(_BLOCK + "post_attention_layernorm.weight", "embed"),
    "blocks/mlp/gate": At(_BLOCK + "mlp.gate_proj.weight", "mlp embed"),
    "blocks/mlp/up": At(_BLOCK + "mlp.up_proj.weight", "mlp embed"),
    "blocks/mlp/down": At(_BLOCK + "mlp.down_proj.weight", "embed mlp"),
    "blocks/mlp/gate_bias": At(_BLOCK + "mlp.gate_proj.bias", "mlp"),
    "blocks/mlp/up_bias": At(_BLOCK + "mlp.up_proj.bias", "mlp"),
    "blocks/mlp/down_bias": At(_BLOCK + "mlp.down_proj.bias", "embed"),
    "final_norm/scale": At("model.norm.weight", "embed"),
    "head": At("lm_head.weight", "vocab embed"),
}

# Its matrices are stored input first, and queries, keys and values are one.
_H = "transformer.h.{layer}."
_GPT2 = {
    "embed": At("transformer.wte.weight", "vocab embed"),
    "positions": At("transformer.wpe.weight", "positions embed"),
    "blocks/attention_norm/scale": At(_H + "ln_1.weight", "embed"),
    "blocks/attention_norm/bias": At(_H + "ln_1.bias", "embed"),
    "blocks/attention/query": At(_H + "attn.c_attn.weight", "embed heads*head_dim", (0, 3)),
    "blocks/attention/key": At(_H + "attn.c_attn.weight", "embed kv_heads*head_dim", (1, 3)),
    "blocks/attention/value": At(_H + "attn.c_attn.weight", "embed kv_heads*head_dim", (2, 3)),
    "blocks/attention/out": At(_H + "attn.c_proj.weight", "heads*head_dim embed"),
    "blocks/attention/query_bias": At(_H + "attn.c_attn.bias", "heads*head_dim", (0, 3)),
    "blocks/attention/key_bias": At(_H + "attn.c_attn.bias", "kv_heads*head_dim", (1, 3)),
    "blocks/attention/value_bias": At(_H + "attn.c_attn.bias", "kv_heads*head_dim", (2, 3)),
    "blocks/attention/out_bias": At(_H + "attn.c_proj.bias", "embed"),
    "blocks/mlp_norm/scale": At(_H + "ln_2.weight", "embed"),
    "blocks/mlp_norm/bias": At(_H + "ln_2.bias", "embed"),
    "blocks/mlp/up": At(_H + "mlp.c_fc.weight", "embed mlp"),
    "blocks/mlp/up_bias": At(_H + "mlp.c_fc.bias", "mlp"),
    "blocks/mlp/down": At(_H + "mlp.c_proj.weight", "mlp embed"),
    "blocks/mlp/down_bias": At(_H + "mlp.c_proj.bias", "embed"),
    "final_norm/scale": At("transformer.ln_f.weight", "embed"),
    "final_norm/bias": At("transformer.ln_f.bias", "embed"),
    "head": At("lm_head.weight", "vocab embed"),
}

# Old files also hold rotary frequencies and causal masks, which follow from the configuration.
_LLAMA_LAYOUT = Layout(prefix="model.", table=_LLAMA, ignored=re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"))
HUGGING_FACE: dict[str, Layout] = {
    "llama": _LLAMA_LAYOUT,
    "qwen2": _LLAMA_LAYOUT,
    "qwen3": _LLAMA_LAYOUT,
    "gpt2": Layout(prefix="transformer.", table=_GPT2, ignored=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")),
}
OWN = "jaxmem"  # parameters under their paths, layers stacked, dims as they are
LAYOUTS = (*HUGGING_FACE, OWN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """One parameter of one model: `shape` and `dims` are the parameter's, `groups` its dims in the order of the tensor's dims."""

    path: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    tensor: str
    groups: tuple[tuple[str, ...], ...]
    part: tuple[int, int]

    @property
    def per_layer(self) -> bool:
        return LAYER in self.tensor

    @property
    def layers(self) -> int:
        """Tensors that hold it."""
        return self.shape[0] if self.per_layer else 1

    @property
    def size(self) -> dict[str, int]:
        return dict(zip(self.dims, self.shape, strict=True))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, other parts included."""
        shape = [math.prod(self.size[d] for d in group) for group in self.groups]
        return (*shape[:-1], shape[-1] * self.part[1])

    @property
    def turned(self) -> bool:
        """The parameter is the tensor's matrix transposed, and otherwise it has the tensor's dims in their order."""
        return len(self.groups) == 2 and self.dims[-len(self.groups[0]):] == self.groups[0] != self.groups[1]

    def name(self, layer: int) -> str:
        return self.tensor.replace(LAYER, str(layer))


def places(layout: str, config: ModelConfig) -> dict[str, Place]:
    """Where every parameter of `config` lies; KeyError for one that `layout` has no place for."""
    found = {}
    for path, (shape, dims) in parameter_shapes(config).items():
        at = At(path, " ".join(dims)) if layout == OWN else HUGGING_FACE[layout].table[path]
        groups = tuple(tuple(group.split("*")) for group in at.dims.split())
        found[path] = Place(path=path, shape=shape, dims=dims, tensor=at.tensor, groups=groups, part=at.part)
    return found


def expected(placed: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """`{tensor name: shape}` of a whole folder."""
    return {place.name(layer): place.tensor_shape for place in placed.values() for layer in range(place.layers)}


def by_layer(names: Sequence[str]) -> list[str]:
    """`model.layers.0-31.mlp.up_proj.weight` for what differs in the number of its layer only; the others as they are."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        template = name[:number.start()] + LAYER + name[number.end():] if number else name
        numbers.setdefault(template, []).append(int(number.group()) if number else 0)
    lines = []
    for template, layers in numbers.items():
        runs: list[list[int]] = []
        for layer in sorted(layers):
            if runs and layer == runs[-1][1] + 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        lines.append(template.replace(LAYER, ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)))
    return lines

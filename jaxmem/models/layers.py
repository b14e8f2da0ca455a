"""Layers of the models: norms, rotary positions, attention, MLP, a matrix with a bias. Parameters carry the names of their dims;
nothing here knows a mesh.

B batch, S sequence, D embed, F mlp, N query heads, K kv heads, H head size.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmem.dims import constrain
from jaxmem.models.configs import DecoderConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu, "gelu": lambda x: jax.nn.gelu(x, approximate=False), "gelu_tanh": jax.nn.gelu, "relu": jax.nn.relu}


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], dims: tuple[str, ...], *, scale: float, dtype: jnp.dtype) -> nnx.Param:
    """Normal with standard deviation `scale`; zeros for 0. `dims` names each dim."""
    if scale == 0:
        return nnx.Param(jnp.zeros(shape, dtype), dims=dims)
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * scale).astype(dtype), dims=dims)


def last_dim(vector: jax.Array, x: jax.Array) -> jax.Array:
    """`vector` (one or more trailing dims) with leading dims of size 1, so that it broadcasts over `x`."""
    return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def intensities(images: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Images in 0..1 as `dtype`; bytes are divided by 255."""
    x = images.astype(dtype)
    return x / jnp.asarray(255, dtype) if images.dtype == jnp.uint8 else x


class Affine(nnx.Module):
    """`x @ weights + bias` over the last dim; `dims` names the matrix's two. Biases begin at 0."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int], dims: tuple[str, str], *, scale: float, dtype: jnp.dtype):
        self.weights = parameter(rngs, shape, dims, scale=scale, dtype=dtype)
        self.bias = parameter(rngs, shape[1:], dims[1:], scale=0, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("...i,io->...o", x, self.weights[...].astype(x.dtype))
        return y + last_dim(self.bias[...].astype(x.dtype), y)


class Norm(nnx.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dim, in f32; `offset` one stores the scale minus one (Gemma)."""

    def __init__(self, config: DecoderConfig, size: int, dim: str, dtype: jnp.dtype, *, kind: str | None = None):
        self.kind, self.eps, self.offset = kind or config.norm, config.norm_eps, config.norm_offset
        self.scale = nnx.Param(jnp.full((size,), 0 if self.offset == "one" else 1, dtype), dims=(dim,))
        if self.kind == "layer":
            self.bias = nnx.Param(jnp.zeros((size,), dtype), dims=(dim,))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        y = y * last_dim(scale + 1 if self.offset == "one" else scale, y)
        if self.kind == "layer":
            y = y + last_dim(self.bias[...].astype(jnp.float32), y)
        return y.astype(x.dtype)


def rope_frequencies(config: DecoderConfig, theta: float, *, scaled: bool) -> jax.Array:
    """Rotary frequencies [H/2] (arXiv 2104.09864); `scaled` applies the config's rule: linear divides all by `factor`;
    Llama-3.1's slows wavelengths longer than original/low by `factor`, keeps those shorter than original/high, interpolates between."""
    half = config.head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if not scaled or config.rope_scaling == "none":
        return frequencies
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    turns = config.rope_original_positions * frequencies / (2 * math.pi)  # full turns within the original context
    low, high = config.rope_low_freq, config.rope_high_freq
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_factor)


def rotary_table(config: DecoderConfig, positions_BS: jax.Array, *, local: bool = False) -> tuple[jax.Array, jax.Array]:
    """(sin, cos), each [B, S, 1, H/2] in f32."""
    theta = config.rope_local_theta if local and config.rope_local_theta else config.rope_theta
    frequencies = rope_frequencies(config, theta, scaled=not local)
    angles = positions_BS[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    return jnp.sin(angles), jnp.cos(angles)


def rotate(x_BSNH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    sin, cos = table
    a, b = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BSNH.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245)."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        into, outof = c.embed ** -0.5, (c.heads * c.head_dim) ** -0.5 / math.sqrt(2 * c.layers)
        self.config = c
        self.query = parameter(rngs, (c.embed, c.heads, c.head_dim), ("embed", "heads", "head_dim"), scale=into, dtype=dtype)
        self.key = parameter(rngs, (c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), scale=into, dtype=dtype)
        self.value = parameter(rngs, (c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), scale=into, dtype=dtype)
        self.out = parameter(rngs, (c.heads, c.head_dim, c.embed), ("heads", "head_dim", "embed"), scale=outof, dtype=dtype)
        if c.bias != "none":
            self.query_bias = parameter(rngs, (c.heads, c.head_dim), ("heads", "head_dim"), scale=0, dtype=dtype)
            self.key_bias = parameter(rngs, (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), scale=0, dtype=dtype)
            self.value_bias = parameter(rngs, (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), scale=0, dtype=dtype)
        if c.bias == "all":
            self.out_bias = parameter(rngs, (c.embed,), ("embed",), scale=0, dtype=dtype)
        if c.qk_norm:
            self.query_norm = Norm(c, c.head_dim, "head_dim", dtype, kind="rms")
            self.key_norm = Norm(c, c.head_dim, "head_dim", dtype, kind="rms")

    def __call__(self, x_BSD, segment_ids_BS, table, attend) -> jax.Array:
        c, dtype = self.config, x_BSD.dtype
        q = jnp.einsum("bsd,dnh->bsnh", x_BSD, self.query[...].astype(dtype))
        k = jnp.einsum("bsd,dkh->bskh", x_BSD, self.key[...].astype(dtype))
        v = jnp.einsum("bsd,dkh->bskh", x_BSD, self.value[...].astype(dtype))
        if c.bias != "none":
            q = q + last_dim(self.query_bias[...].astype(dtype), q)
            k = k + last_dim(self.key_bias[...].astype(dtype), k)
            v = v + last_dim(self.value_bias[...].astype(dtype), v)
        if c.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)
        if c.query_scale is not None:  # `attend` divides by sqrt(head_dim); a model with its own scale undoes that here
            q = q * jnp.asarray(c.query_scale * math.sqrt(c.head_dim), dtype)
        q = constrain(checkpoint_name(q, "query_proj"), "batch", "seq", "heads", "head_dim")
        k = constrain(checkpoint_name(k, "key_proj"), "batch", "seq", "kv_heads", "head_dim")
        v = constrain(checkpoint_name(v, "value_proj"), "batch", "seq", "kv_heads", "head_dim")
        o = constrain(attend(q, k, v, segment_ids_BS), "batch", "seq", "heads", "head_dim")  # `attend` names its own output context
        y = jnp.einsum("bsnh,nhd->bsd", o, self.out[...].astype(dtype))
        if c.bias == "all":
            y = y + last_dim(self.out_bias[...].astype(dtype), y)
        return checkpoint_name(constrain(y, "batch", "seq_residual", "embed"), "out_proj")


class Mlp(nnx.Module):
    """Plain, or gated (arXiv 2002.05202)."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = c
        if c.mlp_kind == "gated":
            self.gate = parameter(rngs, (c.embed, c.mlp), ("embed", "mlp"), scale=c.embed ** -0.5, dtype=dtype)
        self.up = parameter(rngs, (c.embed, c.mlp), ("embed", "mlp"), scale=c.embed ** -0.5, dtype=dtype)
        self.down = parameter(rngs, (c.mlp, c.embed), ("mlp", "embed"), scale=c.mlp ** -0.5 / math.sqrt(2 * c.layers), dtype=dtype)
        if c.bias == "all" and c.mlp_kind == "gated":
            self.gate_bias = parameter(rngs, (c.mlp,), ("mlp",), scale=0, dtype=dtype)
        if c.bias == "all":
            self.up_bias = parameter(rngs, (c.mlp,), ("mlp",), scale=0, dtype=dtype)
            self.down_bias = parameter(rngs, (c.embed,), ("embed",), scale=0, dtype=dtype)

    def __call__(self, x_BSD) -> jax.Array:
        c, dtype = self.config, x_BSD.dtype
        up = jnp.einsum("bsd,df->bsf", x_BSD, self.up[...].astype(dtype))
        if c.bias == "all":
            up = up + last_dim(self.up_bias[...].astype(dtype), up)
        up = constrain(checkpoint_name(up, "mlp_up"), "batch", "seq", "mlp")
        if c.mlp_kind == "gated":
            gate = jnp.einsum("bsd,df->bsf", x_BSD, self.gate[...].astype(dtype))
            if c.bias == "all":
                gate = gate + last_dim(self.gate_bias[...].astype(dtype), gate)
            gate = constrain(checkpoint_name(gate, "mlp_gate"), "batch", "seq", "mlp")
            hidden = ACTIVATIONS[c.activation](gate) * up
        else:
            hidden = ACTIVATIONS[c.activation](up)
        y = jnp.einsum("bsf,fd->bsd", hidden, self.down[...].astype(dtype))
        if c.bias == "all":
            y = y + last_dim(self.down_bias[...].astype(dtype), y)
        return checkpoint_name(constrain(y, "batch", "seq_residual", "embed"), "mlp_down")

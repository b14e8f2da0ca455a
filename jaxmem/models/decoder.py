"""A dense decoder-only transformer. Names dims and calls ops; knows nothing of meshes or plans.

B batch, S sequence, D embed, V vocab.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmem.dims import constrain
from jaxmem.models.configs import DecoderConfig
from jaxmem.models.layers import Attention, Mlp, Norm, parameter, rotary_table
from jaxmem.models.loss import counted, head_loss
from jaxmem.models.ops import Ops


class Block(nnx.Module):
    """Pre-norm attention and MLP; `post_norms` both adds Gemma's norms after each."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.post_norms = c.post_norms
        self.attention_norm = Norm(c, c.embed, "embed", dtype)
        self.attention = Attention(c, rngs, dtype)
        self.mlp_norm = Norm(c, c.embed, "embed", dtype)
        self.mlp = Mlp(c, rngs, dtype)
        if c.post_norms == "both":
            self.attention_post_norm = Norm(c, c.embed, "embed", dtype)
            self.mlp_post_norm = Norm(c, c.embed, "embed", dtype)

    def __call__(self, x_BSD, segment_ids_BS, table, attend) -> jax.Array:
        x_BSD = checkpoint_name(constrain(x_BSD, "batch", "seq_residual", "embed"), "decoder_layer_input")
        both = self.post_norms == "both"
        with jax.named_scope("norm"):
            y = constrain(self.attention_norm(x_BSD), "batch", "seq", "embed")
        with jax.named_scope("attention"):
            y = self.attention(y, segment_ids_BS, table, attend)
        with jax.named_scope("norm"):
            x_BSD = x_BSD + (self.attention_post_norm(y) if both else y)
            y = constrain(self.mlp_norm(x_BSD), "batch", "seq", "embed")
        with jax.named_scope("mlp"):
            y = self.mlp(y)
        with jax.named_scope("norm"):
            return constrain(x_BSD + (self.mlp_post_norm(y) if both else y), "batch", "seq_residual", "embed")


class Decoder(nnx.Module):
    """Parameters: `embed` [V, D], `positions` [P, D] if learned, `blocks` stacked over layers, `final_norm`, `head` [D, V] if untied."""

    sums = ("loss_sum", "tokens")

    def __init__(self, c: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = c
        # unit-variance hidden states for tied tables with Gemma's sqrt(D) factor; 0.02 is GPT-2's
        self.embed = parameter(rngs, (c.vocab, c.embed), ("vocab", "embed"), scale=c.embed ** -0.5 if c.tied else 0.02, dtype=dtype)
        if c.positions == "learned":
            self.positions = parameter(rngs, (c.max_positions, c.embed), ("positions", "embed"), scale=0.02, dtype=dtype)
        stack = nnx.vmap(lambda r: Block(c, r, dtype), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=c.layers)(stack)(rngs)
        self.final_norm = Norm(c, c.embed, "embed", dtype)
        if not c.tied:
            self.head = parameter(rngs, (c.embed, c.vocab), ("embed", "vocab"), scale=c.embed ** -0.5, dtype=dtype)

    def hidden(self, tokens_BS, positions_BS, segment_ids_BS, ops: Ops, compute: jnp.dtype) -> jax.Array:
        """Final hidden states [B, S, D] in `compute`."""
        c = self.config
        with jax.named_scope("embed"):
            # gathered after the cast, so in `compute`; looked up rows are batch-split, so embed cannot stay split over the same axes
            table_VD = constrain(self.embed[...].astype(compute), "vocab", "embed_state")
            table_VD = constrain(table_VD, "vocab", None)
            x_BSD = constrain(table_VD[tokens_BS], "batch", "seq_residual", "embed")
            if c.embed_scale:
                x_BSD = x_BSD * jnp.asarray(c.embed ** 0.5, compute)
            if c.positions == "learned":
                x_BSD = x_BSD + constrain(self.positions[...].astype(compute), None, None)[positions_BS]
            rotary = rotary_table(c, positions_BS) if c.positions == "rope" else None
            rotary_local = rotary_table(c, positions_BS, local=True) if rotary and c.rope_local_theta else rotary
        graph, stacked = nnx.split(self.blocks)

        def apply_layer(index, layer, x_BSD):
            block = nnx.merge(graph, layer)

            def go(attend, table):
                return lambda x: block(x, segment_ids_BS, table, attend)
            if ops.attend_local is None or c.window is None:
                return go(ops.attend, rotary)(x_BSD)
            if c.window_pattern == 1:
                return go(ops.attend_local, rotary_local)(x_BSD)
            is_global = (index + 1) % c.window_pattern == 0
            return jax.lax.cond(is_global, go(ops.attend, rotary), go(ops.attend_local, rotary_local), x_BSD)

        with jax.named_scope("blocks"):
            x_BSD = ops.run_blocks(apply_layer, stacked, x_BSD)
        with jax.named_scope("final_norm"):
            return constrain(self.final_norm(x_BSD), "batch", "seq_residual", "embed")

    def head_weights(self, compute: jnp.dtype) -> jax.Array:
        """[D, V] in `compute`."""
        with jax.named_scope("head"):
            if self.config.tied:
                return constrain(self.embed[...].astype(compute), "vocab", "embed_state").T
            return constrain(self.head[...].astype(compute), "embed_state", "vocab")

    def loss_sum(self, batch: dict[str, jax.Array], ops: Ops, compute: jnp.dtype, *, chunks: int) -> jax.Array:
        """Summed cross-entropy of the targets >= 0, each of the batch's fields [B, S]."""
        hidden = self.hidden(batch["tokens"], batch["positions"], batch["segment_ids"], ops, compute)
        weights = self.head_weights(compute)
        with jax.named_scope("head"):
            weights = constrain(weights, None, "vocab_logits")
        return head_loss(hidden, weights, batch["targets"], softcap=self.config.final_softcap, chunks=chunks)

    def evaluate(self, batch: dict[str, jax.Array], ops: Ops, compute: jnp.dtype, *, chunks: int) -> dict[str, jax.Array]:
        return {"loss_sum": self.loss_sum(batch, ops, compute, chunks=chunks), "tokens": self.counted(batch)}

    @staticmethod
    def counted(batch: dict[str, jax.Array]) -> jax.Array:
        return counted(batch["targets"])

"""A vision transformer that classifies images (arXiv 2010.11929): the decoder's blocks over patches. Knows nothing of meshes or plans.

B batch, S patches, P values of a patch, D embed, V classes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.dims import constrain
from jaxmem.models.configs import VitConfig, blocks
from jaxmem.models.decoder import Block
from jaxmem.models.layers import Affine, Norm, intensities, parameter
from jaxmem.models.loss import correct, counted, label_loss
from jaxmem.models.ops import Ops


class Vit(nnx.Module):
    """Parameters: `patches` (`weights` [P, D], `bias` [D]), `positions` [S, D], `blocks` stacked over layers, `final_norm`, `head`
    (`weights` [D, V], `bias` [V])."""

    sums = ("loss_sum", "images", "correct")

    def __init__(self, c: VitConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        stack = blocks(c)
        assert stack is not None
        self.config = c
        self.patches = Affine(rngs, (c.pixels, c.embed), ("pixels", "embed"), scale=c.pixels ** -0.5, dtype=dtype)
        self.positions = parameter(rngs, (c.seq, c.embed), ("positions", "embed"), scale=0.02, dtype=dtype)
        self.blocks = nnx.split_rngs(splits=c.layers)(nnx.vmap(lambda r: Block(stack, r, dtype), in_axes=0, out_axes=0))(rngs)
        self.final_norm = Norm(stack, c.embed, "embed", dtype)
        self.head = Affine(rngs, (c.embed, c.classes), ("embed", "vocab"), scale=c.embed ** -0.5, dtype=dtype)

    def logits(self, images: jax.Array, ops: Ops, compute: jnp.dtype) -> jax.Array:
        """Scores [B, V] in `compute` of images [B, H, W, C]."""
        with jax.named_scope("patches"):
            x_BSD = self.patches(patches_of(intensities(images, compute), self.config.patch))
            x_BSD = constrain(x_BSD + self.positions[...].astype(compute)[None], "batch", "seq_residual", "embed")
        graph, stacked = nnx.split(self.blocks)

        def apply_layer(index, layer, x_BSD):
            return nnx.merge(graph, layer)(x_BSD, None, None, ops.attend)

        with jax.named_scope("blocks"):
            x_BSD = ops.run_blocks(apply_layer, stacked, x_BSD)
        with jax.named_scope("final_norm"):
            x_BSD = constrain(self.final_norm(x_BSD), "batch", "seq_residual", "embed")
        with jax.named_scope("head"):
            mean_BD = constrain(x_BSD.mean(1, dtype=jnp.float32).astype(compute), "batch", "embed")
            return constrain(self.head(mean_BD), "batch", "vocab_logits")

    def loss_sum(self, batch: dict[str, jax.Array], ops: Ops, compute: jnp.dtype, *, chunks: int) -> jax.Array:
        return label_loss(self.logits(batch["images"], ops, compute), batch["labels"])

    def evaluate(self, batch: dict[str, jax.Array], ops: Ops, compute: jnp.dtype, *, chunks: int) -> dict[str, jax.Array]:
        logits = self.logits(batch["images"], ops, compute)
        return {"loss_sum": label_loss(logits, batch["labels"]), "images": self.counted(batch), "correct": correct(logits, batch["labels"])}

    @staticmethod
    def counted(batch: dict[str, jax.Array]) -> jax.Array:
        return counted(batch["labels"])


def patches_of(images: jax.Array, patch: int) -> jax.Array:
    """[B, H, W, C] -> [B, S, P]: patches row by row, the values of each in the image's order."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // patch, patch, width // patch, patch, channels).swapaxes(2, 3)
    return x.reshape(batch, (height // patch) * (width // patch), patch * patch * channels)

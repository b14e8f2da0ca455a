"""A multilayer perceptron that classifies images. Names dims; knows nothing of meshes or plans.

B batch, P pixel values of an image, F width of a hidden layer, V classes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.dims import constrain
from jaxmem.models.configs import MlpConfig
from jaxmem.models.image_configs import hidden_dims
from jaxmem.models.layers import ACTIVATIONS, Affine, intensities
from jaxmem.models.loss import correct, counted, label_loss
from jaxmem.models.ops import Ops


class MlpClassifier(nnx.Module):
    """Parameters: `hidden_I` (`weights` [P or F, F], `bias` [F]) for every hidden layer, `head` (`weights` [F, V], `bias` [V])."""

    sums = ("loss_sum", "images", "correct")

    def __init__(self, c: MlpConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = c
        size = c.height * c.width * c.channels
        for layer in range(c.layers):  # twice the variance that keeps a linear layer's: relu halves it (He et al. 2015, arXiv 1502.01852)
            setattr(self, f"hidden_{layer}", Affine(rngs, (size, c.mlp), hidden_dims(layer), scale=(2 / size) ** 0.5, dtype=dtype))
            size = c.mlp
        self.head = Affine(rngs, (size, c.classes), (hidden_dims(c.layers - 1)[1], "vocab"), scale=size ** -0.5, dtype=dtype)

    def logits(self, images: jax.Array, compute: jnp.dtype) -> jax.Array:
        """Scores [B, V] in `compute` of images [B, H, W, C]."""
        c = self.config
        x = constrain(intensities(images, compute).reshape(len(images), -1), "batch", "pixels")
        for layer in range(c.layers):
            with jax.named_scope(f"hidden_{layer}"):
                x = ACTIVATIONS[c.activation](constrain(getattr(self, f"hidden_{layer}")(x), "batch", hidden_dims(layer)[1]))
        with jax.named_scope("head"):  # a head that is split by rows gives whole scores
            return constrain(self.head(x), "batch", "vocab_logits" if hidden_dims(c.layers - 1)[1] == "embed" else None)

    def loss_sum(self, batch: dict[str, jax.Array], ops: Ops, compute: jnp.dtype, *, chunks: int) -> jax.Array:
        return label_loss(self.logits(batch["images"], compute), batch["labels"])

    def evaluate(self, batch: dict[str, jax.Array], ops: Ops, compute: jnp.dtype, *, chunks: int) -> dict[str, jax.Array]:
        logits = self.logits(batch["images"], compute)
        return {"loss_sum": label_loss(logits, batch["labels"]), "images": self.counted(batch), "correct": correct(logits, batch["labels"])}

    @staticmethod
    def counted(batch: dict[str, jax.Array]) -> jax.Array:
        return counted(batch["labels"])

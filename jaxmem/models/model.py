"""What a step asks of a model: a Flax module with a loss over a batch. Which module a config makes is here too."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxmem.models.configs import DecoderConfig, MlpConfig, ModelConfig, VitConfig
from jaxmem.models.decoder import Decoder
from jaxmem.models.mlp import MlpClassifier
from jaxmem.models.ops import Ops
from jaxmem.models.vit import Vit

Batch = Mapping[str, jax.Array]  # the fields of `configs.batch_rows`, each [B, ...]


class Model(Protocol):
    """The step divides `loss_sum` and its gradients by `counted`. `chunks` is the plan's loss_chunks; a classifier has one."""

    sums: ClassVar[tuple[str, ...]]  # what `evaluate` gives: loss_sum; tokens or images, which are what counts; correct

    def loss_sum(self, batch: Batch, ops: Ops, compute: jnp.dtype, *, chunks: int) -> jax.Array:
        """f32 scalar over all that count; activations and matmuls are in `compute`."""

    def evaluate(self, batch: Batch, ops: Ops, compute: jnp.dtype, *, chunks: int) -> dict[str, jax.Array]:
        """`sums` of one batch, f32 scalars."""

    @staticmethod
    def counted(batch: Batch) -> jax.Array:
        """How many targets of the batch are not left out, f32, at least 1."""


def module_of(config: ModelConfig) -> Any:
    """The class, an nnx module and a `Model`, that is made as `module(config, rngs=..., dtype=...)`."""
    match config:
        case DecoderConfig():
            return Decoder
        case MlpConfig():
            return MlpClassifier
        case VitConfig():
            return Vit

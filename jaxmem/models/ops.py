"""The operations whose implementation depends on how a model is split. A model calls them; the assembly chooses them."""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True, kw_only=True)
class Ops:
    """attend: (q_BSNH, k_BSKH, v_BSKH, segment_ids_BS) -> o_BSNH. For a decoder causal and masked to equal segment ids; for a model of
    images from every patch to every patch, and segment ids are None.
    attend_local: the same within the model's sliding window.
    run_blocks: (apply_layer, stacked, x_BSD) -> x_BSD, where apply_layer(layer_index, layer, x_BSD) -> x_BSD runs one layer."""

    attend: Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
    attend_local: Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array] | None
    run_blocks: Callable[..., jax.Array]

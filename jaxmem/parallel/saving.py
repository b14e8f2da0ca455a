"""What the backward pass of the layers finds stored.

Split: nothing. Moves: with `offload`, the named values to the host after the forward pass of a layer and back before its backward.
Costs: recomputing what was not stored: about a third more FLOPs for `block`, the attention kernel for `attention` and `dots`.
Use: `block` when memory decides; names to keep what is dear to compute and small to keep. Avoid: offloading more than the host
    link carries during a step.
"""

from collections.abc import Callable

import jax

from jaxmem.plan import Remat


def policy_for(remat: Remat) -> Callable | None:
    """The `jax.checkpoint` policy; None stores the input alone (arXiv 1604.06174)."""
    policies = jax.checkpoint_policies
    if remat.policy == "dots":
        return policies.dots_with_no_batch_dims_saveable
    if remat.policy == "names" and remat.offload:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(remat.save), names_which_can_be_offloaded=list(remat.offload),
            offload_src="device", offload_dst="pinned_host")
    if remat.policy == "names":
        return policies.save_only_these_names(*remat.save)
    return None


def run_layers(remat: Remat, *, layers: int, unroll: bool) -> Callable:
    """`run(apply_layer, stacked, x)`: one compiled loop over stacked layers (or all written out), with the remat policy on each."""

    def run(apply_layer: Callable, stacked: object, x: jax.Array) -> jax.Array:
        apply = apply_layer
        if remat.policy not in ("none", "attention"):
            apply = jax.checkpoint(apply_layer, policy=policy_for(remat), prevent_cse=unroll)

        def one(x, indexed):
            index, layer = indexed
            return apply(index, layer, x), None
        return jax.lax.scan(one, x, (jax.numpy.arange(layers), stacked), unroll=layers if unroll else 1)[0]
    return run


def recomputed_attention(attend: Callable) -> Callable:
    """`attend` with nothing of it stored."""
    return jax.checkpoint(attend, policy=None, prevent_cse=False)

"""Attention over documents (causal) or over patches (full), by the fastest kernel that the target's compiler accepts.

Split: batch over `batch_axes`, heads over `head_axes`; the sequence is whole on every device. Kernels are opaque to the
    partitioner, so every implementation runs inside one `jax.shard_map` and sees only its own sequences and heads.
Moves: nothing, as long as the projections around it leave batch and heads where they are.
Costs: 4 x B x S x S x N x H FLOPs forward over the full square (the fused kernels skip the blocks above the diagonal), 2 to 2.5
    times that backward. The fused kernels keep O(S) besides the inputs; `xla` keeps the S x S scores of all heads.
Use: `splash` on TPU, `triton` on NVIDIA, `xla` anywhere. Avoid: `xla` at long sequences.

What compiles ahead of time for a GPU that is not there (jax 0.12.0.1, CUDA 13 plugin and pjrt alone; forward and backward of
8 x 4096 x 32 heads x 8 kv heads x 128 bf16 with segment ids on data 4 x tensor 2 H100; inputs 48 MiB a device; busy cores):

    implementation                   temp MiB   compile s   what it lacks
    `triton_attention`, ours               33        4-20   -; also on A100 and B200
    Pallas-Triton `mha` of jax            128        2-5    window, soft cap, kv heads (a dk and dv a query head); not used
    cuDNN, with its wheel                 128        3-18   soft cap; segment ids only as a [B, 1, S, S] bias (64 MiB of the 128)
    cuDNN, without its wheel                -          -    "cuDNN not found"
    XLA                                  5153        4-6    -
    Pallas Mosaic-GPU (`attention_mgpu`)    -          -    causal backward ("not supported ... yet"), segment ids; not used
    tokamax 0.0.17, triton or mosaic        -          -    asks the default backend: "Not supported on cpu"; its own choice falls
                                                            back to XLA (6160 MiB); not used

On TPU, 4 x 8192 with the same heads on v5e, v5p and v6e: splash takes 400-500 MiB at any block size (the f32 row sums, 128 lanes
wide, are 256 MiB of it) and 9-26 s; blocks of 1024 fit the scoped VMEM of each, 2048 only v6e's; XLA at half the length 4128 MiB.

Shape letters: B batch, S sequence (queries), T sequence (keys), N query heads, K kv heads, G = N / K, H head size.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxmem.kernel_limits import LANES, Implementation, Mask

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]

# What a remat policy may save of attention: the output and, in the fused kernels, the row sums that the backward pass needs.
CONTEXT = "context"
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, so that a fully masked block gives no inf - inf


def attention(implementation: Implementation, mesh: Mesh | AbstractMesh | None, batch_axes: tuple[str, ...] = (),
              head_axes: tuple[str, ...] = (), *, mask: Mask = "causal", window: int | None = None, softcap: float | None = None,
              block_size: int | None = None, execution: Literal["compiled", "interpreted"] = "compiled") -> Attend:
    """Builds `attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS) -> o_BSNH`, scaled by 1 / sqrt(H).

    A query sees the keys of its own document (equal segment id; None: all are of one) at its own and earlier positions, of which the
    last `window` (itself included) when that is given, or at all positions where `mask` is full; `softcap` bounds the logits to
    +-softcap by tanh (Gemma 2, arXiv:2408.00118).
    `mesh` may consist of compile-only devices; None or one device runs without `shard_map`. `batch_axes` must divide B and
    `head_axes` must divide N. Where they do not divide K, kv heads are repeated just as often as makes them divisible.
    `block_size` is the tile of the fused kernels along the sequence; None takes `block_size_for`. `execution="interpreted"` runs
    the Pallas kernels on CPU, for tests.
    Splash attention: jax.experimental.pallas.ops.tpu; FlashAttention-2: arXiv:2307.08691.
    """
    local: Attend
    match implementation:
        case "splash":
            local = functools.partial(_splash, mask=mask, window=window, softcap=softcap, block_size=block_size, execution=execution)
        case "triton":
            if mask == "full":
                raise ValueError("attention=triton is causal; use attention=xla")
            local = functools.partial(_triton, window=window, softcap=softcap, execution=execution)
        case "cudnn":
            local = functools.partial(_cudnn, mask=mask, window=window, softcap=softcap)
        case "xla":
            local = functools.partial(_xla, mask=mask, window=window, softcap=softcap)
        case _:
            raise ValueError(f"attention {implementation!r} is not one of splash, cudnn, triton, xla")
    if mesh is None or mesh.size == 1:
        return local

    head_shards = math.prod(mesh.shape[axis] for axis in head_axes)
    whole_or = lambda axes: axes or None  # noqa: E731
    heads_spec = P(whole_or(batch_axes), None, whole_or(head_axes), None)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(heads_spec, heads_spec, heads_spec, P(whole_or(batch_axes), None)),
                            out_specs=heads_spec, check_vma=False)

    def attend(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BS: jax.Array | None) -> jax.Array:
        copies = head_shards // math.gcd(head_shards, k_BSKH.shape[2])
        if copies > 1:
            k_BSKH, v_BSKH = jnp.repeat(k_BSKH, copies, axis=2), jnp.repeat(v_BSKH, copies, axis=2)
        return sharded(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)

    return attend


def block_size_for(seq: int, largest: int = 512) -> int:
    """The largest power of two times 128 that divides `seq` and is at most `largest`."""
    block = LANES
    while block * 2 <= largest and seq % (block * 2) == 0:
        block *= 2
    return block


def _splash(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, *, mask, window, softcap, block_size, execution):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    _, seq, heads, head_dim = q_BSNH.shape
    block = block_size or block_size_for(seq)
    seen = (splash_attention_mask.FullMask((seq, seq)) if mask == "full" else splash_attention_mask.CausalMask((seq, seq))
            if window is None else splash_attention_mask.LocalMask((seq, seq), (window - 1, 0), 0))
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([seen] * heads),
        # The fused backward kernel would write one partial dq for every block of keys: S / block copies of q.
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block),
        attn_logits_soft_cap=softcap, residual_checkpoint_name=CONTEXT, interpret=execution == "interpreted")

    def one_sequence(q, k, v, ids):
        return kernel(q, k, v, None if ids is None else splash_attention_kernel.SegmentIds(ids, ids))
    o_BNSH = jax.vmap(one_sequence)(
        (q_BSNH * head_dim ** -0.5).swapaxes(1, 2), k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), segment_ids_BS)
    return o_BNSH.swapaxes(1, 2)


def _triton(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, *, window, softcap, execution):
    from jaxmem.parallel import triton_attention

    _, seq, _, head_dim = q_BSNH.shape
    settings = triton_attention.Settings(
        scale=head_dim ** -0.5, window=window if window is not None and window < seq else None, softcap=softcap,
        residual_name=CONTEXT, interpret=execution == "interpreted", **triton_attention.blocks_for(seq, head_dim))
    more = (1 << (head_dim - 1).bit_length()) - head_dim  # Triton's arrays are powers of two; zeros change no product
    q_BSNH, k_BSKH, v_BSKH = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) if more else x for x in (q_BSNH, k_BSKH, v_BSKH))
    return triton_attention.attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, settings)[..., :head_dim]


def _cudnn(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, *, mask, window, softcap):
    if softcap is not None:
        raise ValueError("attention=cudnn has no soft cap; use attention=xla")
    seen_BST = _seen(q_BSNH.shape[1], segment_ids_BS, mask, window)
    mask_B1ST = None if seen_BST is None else seen_BST[:, None]
    o_BSNH = jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, mask=mask_B1ST, implementation="cudnn")
    return checkpoint_name(o_BSNH, CONTEXT)


def _xla(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, *, mask, window, softcap):
    batch, seq, heads, head_dim = q_BSNH.shape
    kv_heads = k_BSKH.shape[2]
    q_BSKGH = q_BSNH.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    logits_BKGST = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k_BSKH, preferred_element_type=jnp.float32) * head_dim ** -0.5
    if softcap is not None:
        logits_BKGST = softcap * jnp.tanh(logits_BKGST / softcap)
    seen_BST = _seen(seq, segment_ids_BS, mask, window)
    if seen_BST is not None:
        logits_BKGST = jnp.where(seen_BST[:, None, None], logits_BKGST, MASKED)
    weights_BKGST = jax.nn.softmax(logits_BKGST, axis=-1)
    o_BSKGH = jnp.einsum("bkgst,btkh->bskgh", weights_BKGST.astype(v_BSKH.dtype), v_BSKH)
    return checkpoint_name(o_BSKGH.reshape(q_BSNH.shape), CONTEXT)


def _seen(seq: int, segment_ids_BS: jax.Array | None, mask: Mask, window: int | None) -> jax.Array | None:
    """[B or 1, S, T], True where query s sees key t; None where every query sees every key."""
    if mask == "full":
        return None if segment_ids_BS is None else segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    positions_S = jnp.arange(seq)
    distance_ST = positions_S[:, None] - positions_S[None, :]
    seen_ST = distance_ST >= 0
    if window is not None:
        seen_ST = seen_ST & (distance_ST < window)
    if segment_ids_BS is None:
        return seen_ST[None]
    return seen_ST[None] & (segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :])

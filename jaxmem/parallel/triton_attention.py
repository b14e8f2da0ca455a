"""FlashAttention-2 for NVIDIA GPUs in Pallas-Triton: causal, documents, grouped kv heads, sliding window, soft cap.

Split: one program a block of queries and head (forward), a block of positions and kv head (backward).
Moves: keys and values once for every block of queries; nothing between devices.
Costs: 2 matmuls over the visited blocks forward, 7 backward; kept besides the output: one f32 a query and head.
Use: where the compiler has no fused kernel of its own, which ahead of time is everywhere. Avoid: head sizes above 256.

The kernel that ships with jax (`jax.experimental.pallas.ops.gpu.attention`) is deprecated, has neither window nor soft cap, wants
as many kv as query heads, and its row sums cannot be saved by a remat policy. The algorithm is that of arXiv:2307.08691.

Shape letters: B batch, S sequence, N query heads, K kv heads, G = N / K, H head size.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOG2E = math.log2(math.e)  # the hardware has exp2
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a block that is masked as a whole must not give inf - inf


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed when the kernel is compiled. Blocks are positions; all divide the sequence."""

    scale: float
    window: int | None
    softcap: float | None
    block_q: int
    block_k: int
    block_backward: int  # of keys while it makes dk and dv, of queries while it makes dq
    block_inner: int     # of what these loop over
    residual_name: str
    interpret: bool


def blocks_for(seq: int, head_dim: int) -> dict[str, int]:
    """Block sizes that fit the shared memory of every GPU since A100; `seq` is 16, 32, 64 or a multiple of 128."""
    wanted = {"block_q": 128, "block_k": 128 if head_dim <= 64 else 64, "block_backward": 64, "block_inner": 32}
    return {name: min(size, seq) for name, size in wanted.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BS: jax.Array, settings: Settings) -> jax.Array:
    """o_BSNH in the dtype of `q_BSNH`; logits, softmax and sums in float32. H must be a power of two."""
    return _forward(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, settings)[0]


def _attend_forward(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, settings):
    o_BSNH, lse_BNS = _forward(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, settings)
    # Both under the name, else a policy that saves the output would still run the forward kernel again for the row sums.
    o_BSNH, lse_BNS = (checkpoint_name(x, settings.residual_name) for x in (o_BSNH, lse_BNS))
    return o_BSNH, (q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, o_BSNH, lse_BNS)


def _attend_backward(settings, residuals, do_BSNH):
    q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, o_BSNH, lse_BNS = residuals
    batch, seq, heads, head_dim = q_BSNH.shape
    kv_heads, block = k_BSKH.shape[2], settings.block_backward
    group = heads // kv_heads
    delta_BNS = jnp.einsum("bsnh,bsnh->bns", o_BSNH.astype(jnp.float32), do_BSNH.astype(jnp.float32))
    whole_group = pl.BlockSpec((None, seq, group, head_dim), lambda i, b, k: (b, 0, k, 0))
    whole_head = pl.BlockSpec((None, seq, None, head_dim), lambda i, b, k: (b, 0, k, 0))
    rows = pl.BlockSpec((None, group, seq), lambda i, b, k: (b, k, 0))
    dq, dk, dv = pl.pallas_call(
        functools.partial(_backward_kernel, settings=settings, group=group),
        grid=(seq // block, batch, kv_heads),
        in_specs=[whole_group, whole_head, whole_head, pl.BlockSpec((None, seq), lambda i, b, k: (b, 0)), whole_group, rows,
                  rows],
        out_specs=[pl.BlockSpec((None, block, group, head_dim), lambda i, b, k: (b, i, k, 0)),
                   *[pl.BlockSpec((None, block, None, head_dim), lambda i, b, k: (b, i, k, 0))] * 2],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BSNH, k_BSKH, v_BSKH)],
        compiler_params=plt.CompilerParams(num_warps=4 if head_dim <= 64 else 8, num_stages=2),
        interpret=settings.interpret, name="mha_backward",
    )(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, do_BSNH, lse_BNS, delta_BNS)
    return dq, dk, dv, None


attend.defvjp(_attend_forward, _attend_backward)


def _forward(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, settings):
    batch, seq, heads, head_dim = q_BSNH.shape
    group, block = heads // k_BSKH.shape[2], settings.block_q
    own = pl.BlockSpec((None, block, None, head_dim), lambda i, b, n: (b, i, n, 0))
    of_group = pl.BlockSpec((None, seq, None, head_dim), lambda i, b, n: (b, 0, n // group, 0))
    return pl.pallas_call(
        functools.partial(_forward_kernel, settings=settings),
        grid=(seq // block, batch, heads),
        in_specs=[own, of_group, of_group, pl.BlockSpec((None, seq), lambda i, b, n: (b, 0))],
        out_specs=[own, pl.BlockSpec((None, None, block), lambda i, b, n: (b, n, i))],
        out_shape=[jax.ShapeDtypeStruct(q_BSNH.shape, q_BSNH.dtype), jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=4 if head_dim <= 64 else 8, num_stages=2),
        interpret=settings.interpret, name="mha_forward",
    )(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)


def _forward_kernel(q_ref, k_ref, v_ref, ids_ref, o_ref, lse_ref, *, settings: Settings):
    block_q, block_k = settings.block_q, settings.block_k
    begin = pl.program_id(0) * block_q
    q = q_ref[...]
    q_ids = ids_ref[pl.ds(begin, block_q)]

    def step(i, carry):
        o, top, total = carry
        at = pl.ds(i * block_k, block_k)
        k = k_ref[at, :]
        logits, _ = _logits(q, k, settings)
        logits = jnp.where(_seen(begin, q_ids, i * block_k, ids_ref[at], settings), logits, MASKED)
        new_top = jnp.maximum(top, logits.max(axis=1))
        shrink, p = jnp.exp2(top - new_top), jnp.exp2(logits - new_top[:, None])
        v = v_ref[at, :]
        return o * shrink[:, None] + plt.dot(p.astype(v.dtype), v), new_top, total * shrink + p.sum(axis=1)

    zero = jnp.zeros((block_q,), jnp.float32)
    start = (jnp.zeros((block_q, q_ref.shape[-1]), jnp.float32), zero - jnp.inf, zero)
    o, top, total = lax.fori_loop(_first_key_block(begin, block_k, settings), _key_blocks(begin, block_q, block_k), step, start)
    o_ref[...] = (o / total[:, None]).astype(o_ref.dtype)
    lse_ref[...] = top + jnp.log2(total)


def _backward_kernel(q_ref, k_ref, v_ref, ids_ref, do_ref, lse_ref, delta_ref, dq_ref, dk_ref, dv_ref, *, settings: Settings,
                     group: int):
    """dk and dv of one block of keys, summed over the heads of the group; then dq of the same block of queries, head by head."""
    block, inner, seq = settings.block_backward, settings.block_inner, k_ref.shape[0]
    begin = pl.program_id(0) * block
    own = pl.ds(begin, block)
    own_ids = ids_ref[own]

    def gradients(q, k, v, do, lse, delta, seen):
        """p, and the gradient of the products q k before they are scaled."""
        logits, slope = _logits(q, k, settings)
        p = jnp.exp2(jnp.where(seen, logits, MASKED) - lse[:, None])
        dproduct = p * (plt.dot(do, v.T) - delta[:, None]) * settings.scale
        return p, dproduct if slope is None else dproduct * slope

    k, v = k_ref[own, :], v_ref[own, :]

    def keys_of_head(head, carry):
        def step(i, carry):
            dk, dv = carry
            at = pl.ds(i * inner, inner)
            q, do = q_ref[at, head, :], do_ref[at, head, :]
            seen = _seen(i * inner, ids_ref[at], begin, own_ids, settings)
            p, dproduct = gradients(q, k, v, do, lse_ref[head, at], delta_ref[head, at], seen)
            return dk + plt.dot(dproduct.astype(q.dtype).T, q), dv + plt.dot(p.astype(do.dtype).T, do)
        last = seq // inner
        if settings.window is not None:
            last = jnp.minimum(last, (begin + block + settings.window - 2) // inner + 1)
        return lax.fori_loop(begin // inner, last, step, carry)

    zero = jnp.zeros((block, k_ref.shape[-1]), jnp.float32)
    dk, dv = lax.fori_loop(0, group, keys_of_head, (zero, zero))
    dk_ref[...] = dk.astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)

    def queries_of_head(head, _):
        q, do, lse, delta = q_ref[own, head, :], do_ref[own, head, :], lse_ref[head, own], delta_ref[head, own]

        def step(i, dq):
            at = pl.ds(i * inner, inner)
            k, v = k_ref[at, :], v_ref[at, :]
            _, dproduct = gradients(q, k, v, do, lse, delta, _seen(begin, own_ids, i * inner, ids_ref[at], settings))
            return dq + plt.dot(dproduct.astype(k.dtype), k)
        dq = lax.fori_loop(_first_key_block(begin, inner, settings), _key_blocks(begin, block, inner), step, zero)
        dq_ref[:, head, :] = dq.astype(dq_ref.dtype)
        return 0
    lax.fori_loop(0, group, queries_of_head, 0)


def _logits(q, k, settings: Settings):
    """Logits to base 2, and their slope against the scaled product where the soft cap bends it."""
    scaled = plt.dot(q, k.T) * settings.scale
    if settings.softcap is None:
        return scaled * LOG2E, None
    bent = 1.0 - 2.0 / (1.0 + jnp.exp2(scaled * (2.0 * LOG2E / settings.softcap)))  # tanh, which needs no library of device code
    return bent * (settings.softcap * LOG2E), 1.0 - bent * bent


def _seen(q_begin, q_ids, k_begin, k_ids, settings: Settings):
    """Which key of the block each query of the block may see."""
    distance = (q_begin + jnp.arange(q_ids.shape[0]))[:, None] - (k_begin + jnp.arange(k_ids.shape[0]))[None, :]
    seen = (distance >= 0) & (q_ids[:, None] == k_ids[None, :])
    return seen if settings.window is None else seen & (distance < settings.window)


def _first_key_block(q_begin, block_k: int, settings: Settings):
    """The first block of keys that the window of the first query reaches."""
    return 0 if settings.window is None else jnp.maximum(0, q_begin - settings.window + 1) // block_k


def _key_blocks(q_begin, block_q: int, block_k: int):
    """One past the last block of keys that the last query of the block may see."""
    return (q_begin + block_q + block_k - 1) // block_k

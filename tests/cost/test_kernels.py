"""Blocks against a brute-force mask; the splash kernel's own schedule; bounds by unit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.cost.kernels import attention_kernels, kernel_time, mxu_fill, vector_rates, visited_blocks
from jaxmem.hardware import CHIPS


@given(blocks=st.integers(1, 12), block_q=st.sampled_from([4, 8, 16]), block_kv=st.sampled_from([4, 8, 16]),
       window=st.none() | st.integers(1, 80))
def test_visited_blocks_equal_a_brute_force_mask(blocks, block_q, block_kv, window):
    seq = blocks * 16
    i, j = np.indices((seq, seq))
    mask = (j <= i) & (True if window is None else i - j < window)
    tiles = mask.reshape(seq // block_q, block_q, seq // block_kv, block_kv)
    assert visited_blocks(seq, block_q, block_kv, window) == tiles.any((1, 3)).sum()


@pytest.mark.parametrize("window", [None, 300])
def test_visited_blocks_equal_the_splash_kernels_own_table(window):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info
    seq = 1024
    mask = masks.CausalMask((seq, seq)) if window is None else masks.LocalMask((seq, seq), (window - 1, 0), 0)
    table, _ = info.process_mask(masks.MultiHeadMask([mask]), (128, 256), head_shards=1, q_seq_shards=1)
    assert visited_blocks(seq, 128, 256, window) == int((np.asarray(table.block_mask) != 0).sum())


def test_costs_by_hand():
    passes = attention_kernels("splash", batch=2, seq=1024, heads=4, kv_heads=2, head_dim=128, block_q=512, block_kv=512)
    scores = 2 * 4 * 3 * 512 * 512  # three of four blocks
    assert {name: cost.flops for name, cost in passes.items()} == {
        "forward": 4 * 128 * scores, "dq": 6 * 128 * scores, "dkv": 8 * 128 * scores}
    assert all(cost.scores == scores for cost in passes.values())
    head = 1024 * 128 * 2  # bytes of one head of one sequence
    # q and o once, keys and values for each of three visited blocks of half a head, row sums in f32
    assert passes["forward"].hbm_bytes == 2 * 4 * (2 * head + 2 * 3 * head / 2 + 1024 * 4)
    fused = attention_kernels("splash_fused", batch=2, seq=1024, heads=4, kv_heads=2, head_dim=128, block_q=512, block_kv=512)
    assert fused["backward"].flops == 10 * 128 * scores
    one = attention_kernels("cudnn", batch=2, seq=1024, heads=4, kv_heads=2, head_dim=128, block_q=512, block_kv=512)
    assert fused["backward"].hbm_bytes > one["backward"].hbm_bytes


def test_smaller_blocks_skip_more():
    def area(block):
        return attention_kernels("splash", batch=1, seq=4096, heads=1, kv_heads=1, head_dim=128, block_q=block,
                                 block_kv=block)["forward"].scores

    areas = [area(block) for block in (4096, 2048, 1024, 512)]
    assert areas == sorted(areas, reverse=True)
    assert areas[0] == 4096 ** 2 and areas[-1] == 4096 ** 2 / 2 * (1 + 512 / 4096)


def test_v6e_array_is_half_idle_with_heads_of_128():
    assert [mxu_fill(CHIPS[name], 128) for name in ("v5e", "v5p", "v6e", "h100")] == [1, 1, 0.5, 1]
    assert mxu_fill(CHIPS["v6e"], 256) == 1 and mxu_fill(CHIPS["v5p"], 64) == 0.5
    cost = attention_kernels("splash", batch=1, seq=8192, heads=8, kv_heads=8, head_dim=128)["forward"]
    assert kernel_time(cost, CHIPS["v6e"]).math_s == pytest.approx(2 * cost.flops / 918e12)


def test_vector_unit_of_v5p_and_h100():
    """Scaling book: 8 x 128 x 4 x 2 x 1.75 GHz = 1.4e13 on v5p; FlashAttention-3: 3.9e12 exponentials a second on H100 SXM."""
    assert vector_rates(CHIPS["v5p"])[0] == pytest.approx(1.43e13, rel=0.01)
    assert vector_rates(CHIPS["h100"])[1] == pytest.approx(3.9e12, rel=0.1)
    assert vector_rates(CHIPS["cpu"]) == (None, None)


def test_time_is_the_slowest_unit_over_the_efficiency():
    cost = attention_kernels("splash", batch=1, seq=4096, heads=8, kv_heads=8, head_dim=128)["dkv"]
    full = kernel_time(cost, CHIPS["v5p"])
    assert full.seconds == max(full.math_s, full.vector_s, full.exponential_s, full.memory_s) == full.math_s
    assert kernel_time(cost, CHIPS["v5p"], efficiency=0.5).seconds == 2 * full.seconds
    assert kernel_time(cost, CHIPS["cpu"]).seconds is None
    with pytest.raises(ValueError, match="efficiency=0"):
        kernel_time(cost, CHIPS["v5p"], efficiency=0)


def test_exponentials_take_half_the_matmuls_time_on_h100():
    """512 FLOPs and one exponential a score with heads of 128: FlashAttention-3's point. Heads of 64 halve the matmuls alone."""
    share = {}
    for head_dim in (64, 128):
        time = kernel_time(attention_kernels("cudnn", batch=1, seq=8192, heads=32, kv_heads=32, head_dim=head_dim)["forward"],
                           CHIPS["h100"])
        share[head_dim] = time.exponential_s / time.math_s
    assert share[128] == pytest.approx(0.5, rel=0.05) and share[64] == pytest.approx(2 * share[128])

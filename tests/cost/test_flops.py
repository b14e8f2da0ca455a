"""The MFU convention reproduces published rows; hardware FLOPs agree with what XLA counts for the same block."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.cost.flops import layer_forward, mfu, model_flops, optimizer_flops, step_flops
from jaxmem.hardware import parse_topology
from jaxmem.models.configs import MODELS
from jaxmem.plan import Plan
from jaxmem.workload import Workload


def workload(model, batch, seq, optimizer="adamw"):
    return Workload.parse(model=model, optimizer=optimizer, batch=batch, seq=seq)


def test_llama31_8b_on_v6e_as_published():
    """7,207 tokens/s a device is published as 45.46% and comes to 45.47% of 918 TFLOP/s."""
    topology = parse_topology("v6e-256")
    w = workload("llama3.1-8b", 4 * 256, 8192)
    step_s = w.tokens / (7207 * 256)
    assert mfu(w, topology, step_s) == pytest.approx(0.4547, abs=5e-5)


def test_llama2_70b_on_h100_as_published():
    """1,035.97 tokens/s a GPU (7.908 s for 128 x 4096 tokens on 64) is published as 460.48 TFLOP/s and comes to 460.49."""
    w = workload("llama2-70b", 128, 4096)
    step_s = w.tokens / (1035.97 * 64)
    assert step_s == pytest.approx(7.908, abs=5e-4)
    assert model_flops(w) / step_s / 64 == pytest.approx(460.49e12, abs=0.005e12)


def test_mfu_of_unknown_hardware_is_unknown():
    assert mfu(workload("decoder-tiny", 8, 128), parse_topology("cpu:8"), 1.0) is None


def test_tied_head_counts_and_learned_positions_do_not():
    w = workload("gpt2", 8, 1024)
    per_layer = 12 * 768 ** 2 + 13 * 768  # attention and mlp matrices, biases and norms
    expected = 6 * (12 * per_layer + 2 * 768 + 50_257 * 768) * 8192 + 12 * 12 * 768 * 1024 * 8192
    assert model_flops(w) == expected


def counted(function, *shapes):
    """FLOPs that XLA counts in the optimized program; matmuls dominate at these sizes."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def test_layer_agrees_with_xla():
    c = MODELS["decoder-tiny"]
    t, d, n, k, h, f = 512, c.embed, c.heads, c.kv_heads, c.head_dim, c.mlp

    def projections(x, q, key, v, o, gate, up, down):
        a = (x @ q, x @ key, x @ v)
        y = a[0] @ o
        return a, (y @ gate + y @ up) @ down

    flops = counted(projections, (t, d), (d, n * h), (d, k * h), (d, k * h), (n * h, d), (d, f), (d, f), (f, d))
    assert sum(layer_forward(c, t).values()) == pytest.approx(flops, rel=0.01)


def test_attention_square_agrees_with_xla():
    w = workload("decoder-tiny,layers=1", 2, 256)
    n, h, s, b = 4, 16, 256, 2
    flops = counted(lambda q, k, v: jnp.einsum("bnst,btnh->bsnh", jnp.einsum("bsnh,btnh->bnst", q, k), v), *[(b, s, n, h)] * 3)
    without = sum(layer_forward(w.model, w.tokens).values()) + 2 * w.tokens * 64 * 512
    assert step_flops(w, Plan()).forward - without == pytest.approx(flops, rel=0.01)


def test_remat_by_hand():
    w = workload("decoder-tiny", 4, 256)
    parts, layers = layer_forward(w.model, w.tokens), 2
    square = 2.0 * 4 * 4 * 16 * 256 * 256 * layers  # one matmul over the scores of all heads and layers

    def again(remat, attention="xla", **fields):
        return step_flops(w, Plan(remat=remat, **fields), attention=attention, block_q=256, block_kv=256).recomputed

    everything = layers * (sum(parts.values()) - parts["mlp_down"])
    assert again("none") == 0
    assert again("block") == everything + 2 * square
    assert again("dots") == 2 * square and again("attention") == square
    assert again("dots", "splash") == again("attention", "splash") == 2 * square
    assert again("save:context") == everything + square
    assert again("save:context", "splash") == everything
    names = "query_proj+key_proj+value_proj+out_proj+offload:mlp_gate"
    assert again(f"save:{names}", "splash") == layers * parts["mlp_up"] + 2 * square
    assert again("none", loss_chunks=2) == 2 * w.tokens * 64 * 512


def test_backward_is_twice_forward_with_xla_attention_and_more_with_kernels():
    w = workload("decoder-tiny", 4, 256)
    xla = step_flops(w, Plan())
    assert xla.backward == 2 * xla.forward
    splash = step_flops(w, Plan(), attention="splash", block_q=128, block_kv=128)
    square = 2.0 * 4 * 4 * 16 * 256 * 256 * 2
    assert xla.forward - splash.forward == pytest.approx(2 * square * 1 / 4)  # one of four blocks is above the diagonal
    assert splash.backward - 2 * (splash.forward - 2 * square * 3 / 4) == pytest.approx(7 * square * 3 / 4)


def test_a_post_norm_needs_the_last_matmul_again():
    plain, sandwich = (step_flops(workload(f"decoder-tiny,post_norms={kind}", 4, 256), Plan(remat="block"))
                       for kind in ("none", "both"))
    assert sandwich.recomputed - plain.recomputed == 2 * 2 * 1024 * 128 * 64


def test_gemma_windows_cut_kernel_work_in_local_layers():
    w = workload("gemma2-2b,layers=2", 1, 16384)
    whole = step_flops(workload("gemma2-2b,layers=2,window=none,window_pattern=1", 1, 16384), Plan(), attention="splash")
    local = step_flops(w, Plan(), attention="splash")
    blocks = 16384 // 512
    saved = sum(max(0, i + 1 - (4096 // 512 + 1)) for i in range(blocks)) * 512 * 512
    assert whole.forward - local.forward == 2 * 2.0 * 8 * 256 * saved


def test_muon_iteration_by_hand():
    w = workload("decoder-tiny,layers=1", 4, 128, optimizer="muon,newton_schulz_steps=1")
    # embed 64: query and out 64 x 64, key and value 32 x 64, gate, up and down 64 x 128
    def iteration(n, m):
        return 2 * n * n * m * 2 + 2 * n ** 3
    assert optimizer_flops(w) == 2 * iteration(64, 64) + 2 * iteration(32, 64) + 3 * iteration(64, 128)
    assert optimizer_flops(workload("decoder-tiny", 4, 128)) == 0

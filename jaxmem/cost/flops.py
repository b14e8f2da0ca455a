"""FLOPs of a training step: the model's, by the convention that published MFU follows, and what the hardware computes.

Split: counts are of the whole step over all devices; divide by the device count for an even split.
Moves: nothing.
Costs: 6 x parameters x tokens for the matmuls, attention scores on top, and what the plan's remat computes again.
Use: MFU, throughput, a first estimate of step time. Avoid: as a bound on time where memory or collectives limit.

Element-wise work (norms, activations, softmax) is left out: memory bounds it, not the matmul peak. All figures are estimates.
Shape letters: D embed, F mlp, N query heads, K kv heads, H head size, V vocab, L layers, S sequence, T tokens.
"""

import dataclasses
import math
from typing import Literal

from jaxmem.cost.kernels import PASSES, visited_blocks
from jaxmem.hardware import Topology
from jaxmem.models.configs import DecoderConfig, ModelConfig, blocks, mask, parameter_shapes
from jaxmem.optim.configs import LEARNED_WEIGHTS
from jaxmem.plan import Plan, Remat
from jaxmem.workload import Workload

Attention = Literal["xla", "splash", "splash_fused", "triton", "cudnn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of one step over all devices; `recomputed` is forward work done again for the backward pass."""

    forward: float
    backward: float
    recomputed: float
    optimizer: float

    @property
    def hardware(self) -> float:
        return self.forward + self.backward + self.recomputed + self.optimizer


def model_flops(workload: Workload) -> float:
    """6 (P - E) T + 12 L N H S T: every parameter but the looked-up ones E multiplies once forward and twice backward, and
    attention counts the full S x S square although a causal mask needs half of it. Windows and remat do not change it.

    Of images the patches are the tokens (an MLP's image is one), and the head multiplies once an image: its parameters times B, not T.
    """
    m, stack = workload.model, blocks(workload.model)
    parameters = m.parameters - m.embedding_parameters
    squares = 12 * stack.layers * stack.heads * stack.head_dim * workload.seq * workload.tokens if stack else 0
    once_an_image = 0 if isinstance(m, DecoderConfig) else head_parameters(m) * (workload.tokens - workload.batch)
    return float(6 * (parameters * workload.tokens - once_an_image) + squares)


def head_parameters(config: ModelConfig) -> int:
    """Parameters of a classifier's head."""
    return sum(math.prod(shape) for path, (shape, _) in parameter_shapes(config).items() if path.startswith("head/"))


def mfu(workload: Workload, topology: Topology, step_s: float, *, dtype: str = "bf16") -> float | None:
    """Model FLOPs over what all devices could do in `step_s` at the dense peak of `dtype`; None where that peak is unknown."""
    peak = topology.chip.peak_flops.get(dtype)
    return model_flops(workload) / (step_s * peak * topology.devices) if peak else None


def tokens_per_s(workload: Workload, step_s: float) -> float:
    return workload.tokens / step_s


def step_flops(workload: Workload, plan: Plan, *, attention: Attention = "xla", block_q: int = 512,
               block_kv: int = 512) -> StepFlops:
    """What the hardware computes in one step under the plan's remat, loss chunks and attention implementation."""
    m, seq = blocks(workload.model), workload.seq
    outside, outside_backward = outside_blocks(workload)
    if m is None:
        return StepFlops(forward=outside, backward=outside_backward, recomputed=0.0, optimizer=optimizer_flops(workload))
    parts = layer_forward(m, workload.tokens)
    # One matmul over the scores, all heads, all layers.
    whole = "xla" if mask(workload.model) == "full" else attention  # without a causal mask no kernel skips a block
    scores = sum(2.0 * workload.batch * m.heads * m.head_dim * _score_area(m, layer, seq, whole, block_q, block_kv)
                 for layer in range(m.layers))
    forward_matmuls, backward_matmuls = _score_matmuls(attention)
    forward = m.layers * sum(parts.values()) + outside + forward_matmuls * scores
    backward = 2 * m.layers * sum(parts.values()) + outside_backward + backward_matmuls * scores
    remat = Remat.parse(plan.remat)
    again = m.layers * sum(parts[name] for name in _recomputed(m, remat)) + _recomputed_scores(remat, attention) * scores
    if plan.loss_chunks > 1:
        again += outside
    return StepFlops(forward=forward, backward=backward, recomputed=again, optimizer=optimizer_flops(workload))


def outside_blocks(workload: Workload) -> tuple[float, float]:
    """(forward, backward) FLOPs of the matmuls with parameters outside of the blocks. A decoder has its head alone there. A classifier's
    head multiplies once an image, and of the matrix of the pixels there is no gradient with respect to the image."""
    m = workload.model
    if isinstance(m, DecoderConfig):
        head = 2.0 * workload.tokens * m.embed * m.vocab
        return head, 2 * head
    forward = backward = 0.0
    for path, (shape, dims) in parameter_shapes(m).items():
        if path.endswith("/weights"):
            one = 2.0 * (workload.batch if path == "head/weights" else workload.tokens) * math.prod(shape)
            forward, backward = forward + one, backward + (one if "pixels" in dims else 2 * one)
    return forward, backward


def layer_forward(config: DecoderConfig, tokens: int) -> dict[str, float]:
    """FLOPs of one layer's matmuls with parameters, by the name of the value they make (see DESIGN.md on saved values)."""
    c = config
    per_token = {"query_proj": c.embed * c.heads * c.head_dim, "key_proj": c.embed * c.kv_heads * c.head_dim,
                 "value_proj": c.embed * c.kv_heads * c.head_dim, "out_proj": c.heads * c.head_dim * c.embed,
                 "mlp_up": c.embed * c.mlp, "mlp_down": c.mlp * c.embed}
    if c.mlp_kind == "gated":
        per_token["mlp_gate"] = c.embed * c.mlp
    return {name: 2.0 * tokens * size for name, size in per_token.items()}


def optimizer_flops(workload: Workload) -> float:
    """Matmuls of Muon's Newton-Schulz iteration (2 n n m + 2 n n n + 2 n n m for an n x m matrix, n <= m), each matrix once over
    all devices; a learned rule's network once for each parameter, without the inputs that are folded into biases (12 of rows and
    columns, 11 of the step count); 0 for the element-wise optimizers, whose work is bound by memory."""
    o = workload.optimizer
    if o.name == "learned":
        weights = LEARNED_WEIGHTS[o.rule]
        inputs, hidden = weights["w0"]
        folded = 12 if o.rule == "celo" else 23
        return 2.0 * workload.model.parameters * ((inputs - folded) * hidden + math.prod(weights["w1"]) + math.prod(weights["w2"]))
    if o.name != "muon":
        return 0.0
    total = 0.0
    for shape, dims in parameter_shapes(workload.model).values():
        sizes = dict(zip(dims, shape, strict=True))
        layers = sizes.pop("layers", 1)
        if "embed" not in sizes or len(sizes) < 2 or not {"vocab", "positions", "pixels"}.isdisjoint(sizes):
            continue  # vectors, tables, the matrix of the pixels and the head go to Adam
        embed = sizes.pop("embed")
        n, m = sorted((embed, math.prod(sizes.values())))
        total += layers * o.newton_schulz_steps * (4.0 * n * n * m + 2.0 * n ** 3)
    return total


def _score_area(config: DecoderConfig, layer: int, seq: int, attention: Attention, block_q: int, block_kv: int) -> float:
    """Scores of one head that are computed: the whole square in XLA, whole blocks that the mask leaves in a fused kernel."""
    if attention == "xla":
        return float(seq * seq)
    window = None if config.is_global(layer) else config.window
    block_q, block_kv = min(block_q, seq), min(block_kv, seq)
    return float(visited_blocks(seq, block_q, block_kv, window) * block_q * block_kv)


def _score_matmuls(attention: Attention) -> tuple[int, int]:
    if attention == "xla":
        return 2, 4
    passes = PASSES[attention]
    return passes["forward"], sum(passes.values()) - passes["forward"]


def _recomputed(config: DecoderConfig, remat: Remat) -> tuple[str, ...]:
    """Matmuls done again. The block's last one makes a value that only the residual sum needs, unless a norm follows it."""
    if remat.policy in ("none", "attention", "dots"):
        return ()
    kept = set(remat.save) | set(remat.offload)
    if config.post_norms == "none":
        kept.add("mlp_down")
    return tuple(name for name in layer_forward(config, 1) if name not in kept)


def _recomputed_scores(remat: Remat, attention: Attention) -> int:
    """Score matmuls done again. The fused kernels name their output and row sums `context`, so saving it saves the kernel. In XLA
    the scores come again in any case, and the product with V only where the context is not at hand."""
    if remat.policy == "none":
        return 0
    at_hand = "context" in remat.save + remat.offload
    if attention == "xla":
        return 1 if at_hand or remat.policy == "attention" else 2
    return 0 if at_hand else PASSES[attention]["forward"]

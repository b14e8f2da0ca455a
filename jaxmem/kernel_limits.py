"""Which attention kernel a target gets, and what each of them cannot do. No jax: plans are refused before anything is traced."""

from typing import Literal

Implementation = Literal["splash", "cudnn", "triton", "xla"]
Mask = Literal["causal", "full"]  # what a query sees: itself and before, or all
LANES = 128  # a TPU vector register's width: splash blocks are multiples of it


def choose(chip_kind: Literal["tpu", "gpu", "cpu"], *, seq: int, head_dim: int, heads: int, kv_heads: int,
           window: int | None = None, softcap: float | None = None, mask: Mask = "causal") -> Implementation:
    """The implementation a plan gets when it names none: the target's fused kernel, or `xla` where that one has problems.

    `cudnn` is never chosen: it compiles only where the cuDNN wheel is installed, so the choice would depend on the machine.
    """
    fused: dict[str, Implementation] = {"tpu": "splash", "gpu": "triton", "cpu": "xla"}
    wanted = fused[chip_kind]
    problems = attention_problems(wanted, seq=seq, head_dim=head_dim, heads=heads, kv_heads=kv_heads, window=window,
                                  softcap=softcap, mask=mask)
    return "xla" if problems else wanted


def attention_problems(implementation: Implementation, *, seq: int, head_dim: int, heads: int, kv_heads: int,
                       window: int | None = None, softcap: float | None = None, mask: Mask = "causal") -> list[str]:
    """Every reason why `implementation` cannot attend over these shapes; empty when it can."""
    problems = []
    if heads % kv_heads:
        problems.append(f"heads({heads}) is not a multiple of kv_heads({kv_heads})")
    if implementation == "splash" and seq % LANES:
        problems.append(f"attention=splash needs seq({seq}) to be a multiple of {LANES}; nearest {_nearest(seq, LANES)}")
    if implementation == "triton":
        if mask == "full":
            problems.append("attention=triton is causal, and this model attends to everything; attention=xla does")
        if seq % 128 and seq not in (16, 32, 64):
            problems.append(f"attention=triton needs seq({seq}) to be a multiple of 128; nearest {_nearest(seq, 128)}")
        if head_dim > 256 or head_dim < 16:
            problems.append(f"attention=triton keeps whole heads in shared memory: head_dim({head_dim}) must lie in 16..256")
    if implementation == "cudnn":
        if head_dim % 8 or head_dim > 128:
            problems.append(f"attention=cudnn needs head_dim({head_dim}) to be a multiple of 8 and at most 128")
        if softcap is not None:
            problems.append("attention=cudnn has no logit soft cap; attention=xla has")
    return problems


def _nearest(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} and {below + of}" if below else f"{of}"

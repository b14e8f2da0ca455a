"""Which optimizer, and its constants. Learning rates are inputs at run time and not here. No jax."""

import dataclasses
from typing import Literal

LearnedRule = Literal["small_fc", "small_fc_nominal", "celo"]

_SMALL_FC = {"momentum_decays": (3,), "rms_decays": (1,), "adafactor_decays": (3,), "w0": (39, 4), "b0": (4,), "w1": (4, 4), "b1": (4,)}
# Arrays of f32 that a learned rule's file holds; matrices are (in, out). 197, 207 and 329 numbers.
LEARNED_WEIGHTS: dict[LearnedRule, dict[str, tuple[int, ...]]] = {
    "small_fc": _SMALL_FC | {"w2": (4, 2), "b2": (2,)},
    "small_fc_nominal": _SMALL_FC | {"w2": (4, 4), "b2": (4,)},
    "celo": {"w0": (30, 8), "b0": (8,), "w1": (8, 8), "b1": (8,), "w2": (8, 1), "b2": (1,)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Fields an optimizer does not use are ignored by it; the comments say who uses what."""

    name: Literal["adamw", "sgd", "lion", "adafactor", "muon", "learned"]
    b1: float = 0.9  # adamw, lion, and muon's Adam part
    b2: float = 0.999  # adamw, lion, and muon's Adam part
    eps: float = 1e-8  # adamw, muon; adafactor: 1e-30, added to squared gradients
    weight_decay: float = 0.0  # decoupled: parameters shrink by lr * weight_decay a step
    decay: Literal["matrices", "all"] = "matrices"  # matrices: norms and biases are not decayed
    momentum: float | None = None  # sgd, adafactor (None: no buffer); muon's for matrices
    nesterov: Literal["none", "nesterov"] = "none"  # sgd, muon
    moments: Literal["f32", "bf16", "int8"] = "f32"  # first moments and momenta (int8: learned); second moments have the parameters' dtype
    decay_rate: float = 0.8  # adafactor: second moments decay by 1 - step ** -decay_rate
    factored_above: int = 128  # adafactor: factor second moments when the two largest dims of a matrix reach this
    clip_update: float | None = 1.0  # adafactor: largest root mean square of an update
    newton_schulz_steps: int = 5  # muon
    rule: LearnedRule = "celo"  # learned
    weights: str | None = "shipped"  # learned: shipped (untrained where none come with jaxmem), FILE (.npz, .json) or none (untrained)
    # learned: elements of a tensor (over all devices) that are worked on at a time; None: 2**18 on CPU, all on TPU and GPU
    chunk: int | None = None
    kernel: Literal["xla", "pallas"] = "xla"  # learned: what does matrices of whole tiles on TPU and GPU; elsewhere XLA does


OPTIMIZERS: dict[str, OptimizerConfig] = {
    # Loshchilov and Hutter 2019, arXiv 1711.05101; the decay that large language models use.
    "adamw": OptimizerConfig(name="adamw", weight_decay=0.1),
    "sgd": OptimizerConfig(name="sgd", momentum=0.9),
    # Chen et al. 2023, arXiv 2302.06675: b2 0.99 and a decay about 10 x AdamW's, with a learning rate about 10 x smaller.
    "lion": OptimizerConfig(name="lion", b2=0.99, weight_decay=1.0),
    # Shazeer and Stern 2018, arXiv 1804.04235.
    "adafactor": OptimizerConfig(name="adafactor", eps=1e-30),
    # Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982: Adam for embeddings, head and vectors.
    "muon": OptimizerConfig(name="muon", b2=0.95, momentum=0.95, nesterov="nesterov", weight_decay=0.1),
    # Metz et al. 2022, arXiv 2203.11860, and Celo2; trained weights come with the latter.
    "learned": OptimizerConfig(name="learned"),
}


def problems(config: OptimizerConfig) -> list[str]:
    """Everything that makes `config` nonsense, with the numbers and what would work."""
    c, found = config, []
    for name in ("b1", "b2", "momentum"):
        value = getattr(c, name)
        if value is not None and not 0 <= value < 1:
            found.append(f"optimizer {c.name}: {name}={value}: expected 0 <= {name} < 1")
    if not c.weight_decay >= 0 or c.weight_decay == float("inf"):
        found.append(f"optimizer {c.name}: weight_decay={c.weight_decay}: expected a finite number, 0 or more")
    for name in ("eps", "decay_rate", "factored_above", "newton_schulz_steps", "clip_update", "chunk"):
        value = getattr(c, name)
        if value is not None and not 0 < value < float("inf"):
            found.append(f"optimizer {c.name}: {name}={value}: expected a finite number above 0")
    if c.moments == "int8" and c.name != "learned":
        found.append(f"optimizer {c.name}: moments=int8: only learned has it; expected f32 or bf16")
    if c.name == "muon" and c.momentum is None:
        found.append("optimizer muon: momentum=none: muon needs a momentum; its preset has 0.95")
    return found

"""How many bytes does each optimizer keep for each parameter?

Command: `python -m experiments.benchmarks.optimizer_memory` (seconds; nothing is allocated) `--models=gpt2,gpt2-medium,gpt2-xl`
         `--docs=docs/optimizer_memory.md`
Expected: AdamW keeps 8 bytes, a learned rule 16.03, 10.03 with bf16 momenta and 7.04 with int8; gradients and parameters (f32) apart.

Exact (estimate: nothing is compiled): the shapes that each optimizer's own `init` gives for the model's parameters (`jax.eval_shape`).
8-bit Adam and Shampoo are not in optax: their rows are computed by the formula beside them. Attention weights are taken as matrices,
heads and their size as one dim, as the literature counts; `--attention=split` takes them as the model here holds them, (embed, heads,
head_dim), where Adafactor finds no two dims of 128 and keeps full second moments.
"""

import math
import pathlib
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from jaxmem import environment
from jaxmem.models.configs import MODELS, parameter_shapes
from jaxmem.optim import transforms
from jaxmem.optim.configs import OPTIMIZERS
from jaxmem.optim.dims import nested
from jaxmem.spec import parse_preset

# row -> optimizer text, exact by the shapes of its state
ROWS = {
    "sgd": "sgd,momentum=none", "sgd, momentum": "sgd", "lion": "lion", "lion, bf16": "lion,moments=bf16", "adafactor": "adafactor",
    "adafactor, momentum": "adafactor,momentum=0.9", "muon (Adam for tables and vectors)": "muon",
    "adamw, mu in bf16": "adamw,moments=bf16", "adamw": "adamw", "learned (celo)": "learned", "learned (small_fc)": "learned,rule=small_fc",
    "learned, momenta in bf16": "learned,moments=bf16", "learned, momenta in int8": "learned,moments=int8",
}
# row -> optax transformation without a preset here
OPTAX = {"sm3": lambda: optax.sm3(1.0), "schedule-free adamw": lambda: optax.contrib.schedule_free_adamw(1.0),
         "ademamix": lambda: optax.contrib.ademamix(1.0)}


def flat(shape: tuple[int, ...], dims: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Heads and head_dim, side by side, as one dim."""
    for i, dim in enumerate(dims[:-1]):
        if dim in ("heads", "kv_heads"):
            return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2:]), (*dims[:i + 1], *dims[i + 2:])
    return shape, dims


def state_bytes(model: str, row: str, attention: Literal["flat", "split"] = "flat") -> int:
    """Bytes of the optimizer's state for the f32 parameters of preset `model`."""
    shapes = parameter_shapes(parse_preset(MODELS, model, what="model"))
    if attention == "flat":
        shapes = {path: flat(*value) for path, value in shapes.items()}
    params = nested({path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, (shape, _) in shapes.items()})
    if row in COMPUTED:
        return sum(COMPUTED[row](shape[1:] if dims[0] == "layers" else shape) * (shape[0] if dims[0] == "layers" else 1)
                   for shape, dims in shapes.values())
    if row in ROWS:
        tx = transforms.build(parse_preset(OPTIMIZERS, ROWS[row], what="optimizer"),
                              nested({path: dims for path, (_, dims) in shapes.items()}))
    else:
        tx = OPTAX[row]()
    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(tx.init, params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def adam_8bit(shape: tuple[int, ...]) -> int:
    """Two bytes each, and two f32 scales for each block of 256."""
    size = math.prod(shape)
    return 2 * size + 8 * math.ceil(size / 256)


def shampoo(shape: tuple[int, ...], block: int = 1024) -> int:
    """Statistics and inverse roots of both sides of each block of at most 1024 x 1024, a momentum and a grafting moment; vectors as Adam.
    More than two dims are taken as (all but the last, last)."""
    size = math.prod(shape)
    if len(shape) < 2:
        return 8 * size
    rows, cols = size // shape[-1], shape[-1]

    def sides(n: int) -> list[int]:
        return [min(block, n - i) for i in range(0, n, block)]
    return 8 * size + sum(2 * 4 * (a * a + b * b) for a in sides(rows) for b in sides(cols))


COMPUTED: dict[str, Callable[[tuple[int, ...]], int]] = {"8-bit Adam, blocks of 256 (computed)": adam_8bit,
                                                         "Shampoo, blocks of 1024 (computed)": shampoo}


def table(models: list[str], attention: Literal["flat", "split"]) -> str:
    count = {model: parse_preset(MODELS, model, what="model").parameters for model in models}
    rows = sorted([*ROWS, *OPTAX, *COMPUTED], key=lambda row: state_bytes(models[0], row, attention))
    head = ["state, f32 parameters", *(f"{model} ({n / 1e6:.0f}M): B / parameter (MiB)" for model, n in count.items())]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        sizes = {model: state_bytes(model, row, attention) for model in models}
        lines.append("| " + " | ".join([row, *(f"{sizes[m] / count[m]:.3f} ({sizes[m] / 2**20:,.1f})" for m in models)]) + " |")
    return "\n".join(lines)


_MODELS = flags.DEFINE_list("models", ["gpt2", "gpt2-medium", "gpt2-xl"], "presets, by comma")
_ATTENTION = flags.DEFINE_enum("attention", "flat", ["flat", "split"], "attention weights as matrices, or as (embed, heads, head_dim)")
_DOCS = flags.DEFINE_string("docs", None, "write the table here")


def main(argv: list[str]) -> None:
    del argv
    text = table(_MODELS.value, _ATTENTION.value)
    print(text)
    if _DOCS.value:
        pathlib.Path(_DOCS.value).write_text(
            "# Bytes of optimizer state for each parameter\n\nExact, from the shapes of each optimizer's own state (estimate: nothing is "
            "compiled); \"computed\" rows by the formulas in\n`experiments/benchmarks/optimizer_memory.py`. Made by `python -m "
            f"experiments.benchmarks.optimizer_memory --attention={_ATTENTION.value}`;\n{environment.versions_text()}.\n\n"
            + text + "\n")


if __name__ == "__main__":
    app.run(main)

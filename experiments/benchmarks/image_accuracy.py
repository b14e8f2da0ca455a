"""How many held-out images do the small presets get right, and would something simpler do as well?

Command: `python -m experiments.benchmarks.image_accuracy --docs=docs/image_models.md` (about ten quiet minutes on two cores)
Expected: above logistic regression on MNIST, about the nearest neighbour; on 85 held-out digits nothing stands apart from the controls.

Every row is the checked train program with AdamW and a cosine, nothing tuned, no augmentation; accuracy is of the last step on the
held-out twentieth, which no choice was made on. Controls, on the same split: logistic regression and the nearest neighbour of scikit-learn.
"""

import itertools
import pathlib
import sys

import jax
import numpy as np
from absl import app, flags

from jaxmem import environment, schedules, step
from jaxmem.data import Batches, Data, eval_batches, open_for
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.tabulate import interval
from jaxmem.workload import Workload

# preset -> data, steps of 64 images, peak learning rate
ROWS = {"mlp": ("images:digits", 600, 3e-3), "vit-tiny": ("images:digits", 1200, 2e-3),
        "mlp-mnist": ("images:mnist5k", 1200, 3e-3), "vit-mnist": ("images:mnist5k", 2400, 2e-3)}
_ONLY = flags.DEFINE_list("only", [], "presets, by comma; all without")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "a run for each")
_STEPS = flags.DEFINE_integer("steps", None, "steps of every run, in place of its own")
_DOCS = flags.DEFINE_string("docs", None, "write the page there")


def accuracies(preset: str, seeds: list[int]) -> list[float]:
    """Of one run a seed, compiled once, on one device."""
    source, steps, lr = ROWS[preset]
    steps = _STEPS.value or steps
    workload = Workload.parse(model=preset, batch=64)
    programs = step.build(workload, Plan(), parse_topology("cpu:1"), jax.devices())
    run = {name: programs[name].lower().compile() for name in ("init", "train", "eval")}
    data, held_out = (open_for(workload, source, split=split) for split in ("train", "eval"))
    shardings = {name: field.sharding for name, field in programs.batch.items()}
    rate = schedules.learning_rate(schedules.parse("cosine"), peak=lr, warmup=steps // 20, steps=steps)
    found = []
    for seed in seeds:
        state = run["init"](np.uint32(seed))
        with Batches(data, batch=64, seed=seed, shardings=shardings) as batches:
            for at, (_, batch) in enumerate(itertools.islice(batches, steps), 1):
                state, _ = run["train"](state, batch, {"lr": np.float32(rate(at)), "clip": np.float32(1)})
        totals = [run["eval"](state["params"], batch) for batch in eval_batches(held_out, batch=64, shardings=shardings)]
        found.append(sum(float(one["correct"]) for one in totals) / sum(float(one["images"]) for one in totals))
        print(f"{preset} seed {seed}: {found[-1]:.4f}", file=sys.stderr, flush=True)
    return found


def controls(source: str) -> tuple[int, dict[str, float]]:
    """(held-out images, accuracy on them of what needs no network); both controls are deterministic."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    preset = next(name for name, row in ROWS.items() if row[0] == source)
    train, held_out = (arrays(open_for(Workload.parse(model=preset, batch=64), source, split=split)) for split in ("train", "eval"))
    return len(held_out[1]), {"logistic regression": float(LogisticRegression(max_iter=2000).fit(*train).score(*held_out)),
                              "nearest neighbour": float(KNeighborsClassifier(1).fit(*train).score(*held_out))}


def arrays(data: Data) -> tuple[np.ndarray, np.ndarray]:
    """(images [rows, pixels], labels [rows])."""
    rows = [data.row(i) for i in range(data.rows)]
    return np.stack([row["images"].reshape(-1) for row in rows]), np.array([int(row["labels"]) for row in rows])


def table(found: dict[str, list[float]]) -> str:
    lines = ["| data | held-out images | model | steps of 64 | accuracy | seeds |", "|---|---|---|---|---|---|"]
    for source in dict.fromkeys(ROWS[preset][0] for preset in found):
        images, simple = controls(source)
        for preset, values in found.items():
            if ROWS[preset][0] == source:
                over = interval(values)
                spread = f" ± {100 * over.half_width:.1f}%" if over.half_width is not None else ""
                steps = _STEPS.value or ROWS[preset][1]
                lines.append(f"| {source} | {images} | `{preset}` | {steps} | {100 * over.mean:.1f}%{spread} | {over.seeds} |")
        lines += [f"| {source} | {images} | {name} (control) | | {100 * value:.1f}% | |" for name, value in simple.items()]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    text = table({preset: accuracies(preset, [int(seed) for seed in _SEEDS.value]) for preset in _ONLY.value or ROWS})
    print(text)
    if _DOCS.value:
        pathlib.Path(_DOCS.value).write_text(
            "# Classifiers of images: held-out accuracy\n\nWhat `python -m experiments.benchmarks.image_accuracy` found on CPU "
            f"({environment.versions_text()}). Accuracy (measure, cpu) is that on the held-out twentieth, so few images that a difference "
            "of some of them says nothing. "
            "Intervals are 95% over seeds (initialisation and order of the data), not over images. Nothing was tuned.\n\n"
            f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)

"""Runs side by side: how their configurations differ, their losses at the same steps, speed, memory, goodput."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem.runs.reading import Run, Series
from jaxmem.runs.summary import Summary, summarize

MOST_STEPS = 8
OWN = ("run_id",)  # of every run its own, so no difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """`runs` in the order given. Every row has a value a run, None where it is unknown.

    `config`: the entries of the configurations that are not the same in all. `losses` and `eval_losses`: by step, of steps that all
    of them have. `notes`: what makes the figures hard to compare.
    """

    runs: list[Summary]
    config: dict[str, list[str | None]]
    losses: dict[int, list[float | None]]
    eval_losses: dict[int, list[float | None]]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": [run.as_json() for run in self.runs],
            "config": self.config,
            "losses": [{"step": step, "loss": values} for step, values in self.losses.items()],
            "eval_losses": [{"step": step, "loss": values} for step, values in self.eval_losses.items()],
            "notes": self.notes,
        }


def compare(runs: Sequence[Run], now: float | None = None) -> Comparison:
    """Of two runs or more."""
    config = config_differences([run.config for run in runs])
    notes = []
    losses = _losses([run.metrics.train for run in runs])
    if not losses:
        notes.append("no step is in all of them: losses cannot be compared")
    if moved := [name for name in ("batch", "seq", "data", "workload") if name in config]:
        notes.append(f"{' and '.join(moved)} {'differs' if len(moved) == 1 else 'differ'}: the same step is not the same work")
    summaries = [summarize(run, now) for run in runs]
    if len({summary.backend for summary in summaries}) > 1:
        notes.append(f"measured on different backends: {', '.join(summary.backend or 'unknown' for summary in summaries)}")
    return Comparison(
        runs=summaries, config=config, losses=losses, eval_losses=_losses([run.metrics.eval for run in runs]), notes=notes
    )


def config_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """`{entry: a value a run}` where they are not all equal; flags that are kept in a group of their own count as entries."""
    flat: list[dict[str, Any]] = []
    for config in configs:
        flags = config.get("flags")
        flat.append({**config, **flags} if isinstance(flags, Mapping) else dict(config))
        flat[-1].pop("flags", None)
    names = dict.fromkeys(name for config in flat for name in config if name not in OWN)
    rows = {name: [_text(config[name]) if name in config else None for config in flat] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _text(value: object) -> str:
    return {True: "true", False: "false", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)


def _losses(series: Sequence[Series]) -> dict[int, list[float | None]]:
    """The loss at up to eight steps that all have: the first, the last, and between them by equal count."""
    common = sorted(set(series[0].steps).intersection(*(one.steps for one in series[1:])))
    if len(common) > MOST_STEPS:
        common = [common[round(i * (len(common) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]
    return {step: [one.at("loss", step) for one in series] for step in common}

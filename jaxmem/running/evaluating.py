"""The held-out loss of a state, source by source."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.continual import mixing
from jaxmem.data import Data, eval_batches
from jaxmem.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """`loss` (and a classifier's `accuracy`) is the mean over the sources, weighted by their shares of a mixture; `count` of `unit`s."""

    loss: float
    accuracy: float | None
    count: int
    unit: str  # images or tokens
    by_source: dict[str, float] | None  # of a mixture

    def line(self) -> dict[str, Any]:
        """As metrics.jsonl has it."""
        found: dict[str, Any] = {"loss": self.loss, self.unit: self.count}
        if self.accuracy is not None:
            found["accuracy"] = self.accuracy
        return found | ({"by_source": self.by_source} if self.by_source else {})

    def __str__(self) -> str:
        right = f", accuracy {self.accuracy:.2%}" if self.accuracy is not None else ""
        each = ", ".join(f"{name} {value:.4f}" for name, value in (self.by_source or {}).items())
        return f"evaluation loss {self.loss:.4f}{right} over {self.count} {self.unit}{f' ({each})' if each else ''}"


def evaluate(run: Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]], params: Any, held_out: Data, *, workload: Workload,
             shardings: dict[str, jax.sharding.Sharding], limit: int | None) -> Evaluation:
    """`run(params, batch)` is the eval program of `workload`; at most `limit` batches of each source."""
    unit = "images" if "images" in workload.rows else "tokens"
    loss, accuracy, count, by_source = 0.0, 0.0, 0.0, {}
    for name, share, source in mixing.parts(held_out):
        totals = [run(params, batch) for batch in eval_batches(source, batch=workload.batch, shardings=shardings, limit=limit)]
        sums = {field: math.fsum(float(total[field]) for total in totals) for field in totals[0]}
        by_source[name], count = sums["loss_sum"] / sums[unit], count + sums[unit]
        loss, accuracy = loss + share * by_source[name], accuracy + share * sums.get("correct", 0.0) / sums[unit]
    return Evaluation(loss=loss, accuracy=accuracy if unit == "images" else None, count=int(count), unit=unit,
                      by_source=by_source if held_out.sources else None)

"""Watches the losses: NaN at once, a spike when it lasts. No jax; every process that sees the same losses decides the same."""

import math
from collections.abc import Sequence

WINDOW = 50  # accepted losses that a new one is compared with
ENOUGH = 20
PATIENCE = 2  # spiked steps in a row


class Guard:
    """`spike`: how many robust standard deviations (1.4826 x median absolute deviation, at least 1% of the median) above the median of the
    latest losses is too high; 0 watches for NaN alone. `recent` and `high` (steps in a row that were too high) are what a checkpoint
    carries; while `high` is not 0 the state is suspect."""

    def __init__(self, spike: float, recent: Sequence[float] = (), high: int = 0) -> None:
        self.spike, self.recent, self.high = spike, list(recent)[-WINDOW:], high

    def problem(self, loss: float, grad_norm: float) -> str | None:
        """What is wrong with this step, or None; its loss is then remembered."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"loss {loss:g}, gradient norm {grad_norm:g}"
        if self.spike > 0 and len(self.recent) >= ENOUGH:
            middle = median(self.recent)
            spread = max(1.4826 * median([abs(x - middle) for x in self.recent]), 0.01 * abs(middle))
            if loss > middle + self.spike * spread:
                self.high += 1
                if self.high >= PATIENCE:
                    return (f"loss {loss:.4g} is {(loss - middle) / spread:.1f} deviations above the median {middle:.4g} of the latest "
                            f"{len(self.recent)}")
                return None
        self.high = 0
        self.recent = [*self.recent, loss][-WINDOW:]
        return None


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

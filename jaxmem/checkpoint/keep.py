"""Which checkpoints stay: the latest, the best by evaluation loss, and every n-th step. No jax."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxmem import spec
from jaxmem.spec import InputError


@dataclass(frozen=True, kw_only=True)
class Keep:
    """`last=2,best=1,every=1000`: the `last` latest, the `best` lowest evaluation losses, and every step that `every` divides (0: none)."""

    last: int = 2
    best: int = 0
    every: int = 0

    @classmethod
    def parse(cls, text: str) -> "Keep":
        text = f"last={text}" if text.strip().isdigit() else text
        keep = spec.parse(cls, text, what="keep")
        if keep.last < 1 or keep.best < 0 or keep.every < 0:
            raise InputError(f"keep={text}: last must be at least 1, best and every at least 0")
        return keep

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in ("last", "best", "every"))

    def kept(self, losses: Mapping[int, float | None]) -> set[int]:
        """Of the steps of `losses` (step -> evaluation loss, None where none was taken), those that stay."""
        steps = sorted(losses)
        known = [s for s in steps if (loss := losses[s]) is not None and math.isfinite(loss)]
        best = sorted(known, key=lambda s: (losses[s], -s))[:self.best]
        return {*steps[-self.last:], *best, *(s for s in steps if self.every and s % self.every == 0)}

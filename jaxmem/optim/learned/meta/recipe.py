"""What a meta-training run is made of: everything that decides its numbers."""

import dataclasses
from typing import Literal

from jaxmem.optim.configs import LearnedRule
from jaxmem.optim.learned.meta.es import Estimator
from jaxmem.spec import InputError

# loss: the mean validation loss over a truncation. log_loss: its logarithm, so that one per cent counts the same on every task, early
# in a problem and late.
Objective = Literal["loss", "log_loss"]
OBJECTIVES: tuple[Objective, ...] = ("loss", "log_loss")
LIMITS: dict[Objective, float] = {"loss": 20.0, "log_loss": 3.0}  # what a broken problem counts as

# Peak learning rates that inner problems draw from. Celo's step has a root mean square of one; small_fc has its own size at 1.
LEARNING_RATES: dict[LearnedRule, tuple[float, float]] = {"celo": (1e-3, 3e-2), "small_fc": (0.3, 3.0), "small_fc_nominal": (0.3, 10.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """`tasks` inner problems of every family in each meta-step; lengths and truncations in inner steps, batches in rows."""

    rule: LearnedRule = "celo"
    estimator: Estimator = "pes"
    objective: Objective = "loss"
    families: tuple[str, ...]
    tasks: int = 8
    truncation: int = 50
    batch: int = 64
    lengths: tuple[int, int] = (100, 2000)  # log-uniform between them
    learning_rates: tuple[float, float]  # log-uniform between them
    sigma: float = 0.01
    difference_limit: float = 1.0  # between the two copies, in nats or, of log_loss, as a part
    iterations: int = 2300
    outer_lr: float = 1e-3  # Adam, cosine to zero over `iterations`
    seed: int = 0


def check(recipe: Recipe, devices: int) -> None:
    """Raises InputError for what cannot be run on so many devices, with the nearest that can."""
    r, problems = recipe, []
    for name in ("tasks", "truncation", "batch", "iterations"):
        if getattr(r, name) < 1:
            problems.append(f"{name}={getattr(r, name)}: expected 1 or more")
    for name in ("sigma", "outer_lr", "difference_limit"):
        if not getattr(r, name) > 0:
            problems.append(f"{name}={getattr(r, name):g}: expected a number above 0")
    for name in ("lengths", "learning_rates"):
        low, high = getattr(r, name)
        if not 0 < low <= high:
            problems.append(f"{name}={low:g}:{high:g}: expected LOW:HIGH with 0 < LOW <= HIGH")
    if not problems and r.lengths[0] < r.truncation:
        problems.append(f"lengths={r.lengths[0]}:{r.lengths[1]}: the shortest problem is shorter than a truncation of {r.truncation} steps")
    if not problems and r.tasks % devices:
        problems.append(f"tasks={r.tasks} of a family cannot be split over {devices} devices; nearest: {-(-r.tasks // devices) * devices}")
    if not r.families:
        problems.append("no families")
    if problems:
        raise InputError("; ".join(problems))

"""Ways to go through a sequence of tasks, as presets of one flat dataclass: `rehearsal,r=14,buffer=0.1`.

A method says which rows are trained on, where each task starts from, and what keeps the earlier tasks.
"""

import dataclasses
from typing import Literal

from jaxmem import spec
from jaxmem.spec import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """rows: a task's own, or those of all tasks so far. start: each task after the first begins from the last parameters, from fresh
    ones, or from shrunk and perturbed ones; the last two reset the optimizer.

    r: rows from the rehearsal buffer in each step; buffer: its share of all training rows; policy: how a full one takes rows in;
    candidates: of each batch, for policy replace. alpha, beta: DER++'s weights; None is plain rehearsal. replay: rows a step from all
    earlier training rows, as if everything were kept. ewc: strength of the penalty. fisher: how its Fisher information is computed.
    """

    rows: Literal["task", "all"] = "task"
    start: Literal["last", "fresh", "shrunk"] = "last"
    r: int = 0
    buffer: float = 0.3
    policy: Literal["reservoir", "replace"] = "reservoir"
    candidates: int = 14
    alpha: float | None = None
    beta: float | None = None
    replay: int = 0
    ewc: float = 0.0
    fisher: Literal["exact", "sampled", "empirical"] = "exact"
    shrink: float = 0.4
    perturb: float = 0.1

    @property
    def distils(self) -> bool:
        return self.alpha is not None


METHODS: dict[str, Method] = {
    "incremental": Method(),  # fine-tuning: the lower bound
    "scratch": Method(rows="all", start="fresh"),  # the upper bound
    "warm": Method(rows="all"),  # all rows so far, from the last parameters
    "shrink-perturb": Method(rows="all", start="shrunk"),
    "rehearsal": Method(r=14),
    "der++": Method(r=14, alpha=0.5, beta=1.0),
    "replay": Method(replay=14),
    "ewc": Method(ewc=100.0),
}


def parse(text: str) -> Method:
    """`rehearsal,r=28,policy=replace` -> Method. Raises InputError with everything that is wrong."""
    method = spec.parse_preset(METHODS, text, what="method")
    if found := problems(method):
        raise InputError(f"method {text}: " + "; ".join(found))
    return method


def problems(method: Method) -> list[str]:
    m, found = method, []
    for name in ("r", "replay", "ewc", "candidates", "perturb"):
        if getattr(m, name) < 0:
            found.append(f"{name}={getattr(m, name):g}: expected 0 or more")
    if not 0 < m.buffer <= 1:
        found.append(f"buffer={m.buffer:g}: expected a share of the training rows, above 0 and at most 1")
    if not 0 <= m.shrink <= 1:
        found.append(f"shrink={m.shrink:g}: expected a factor between 0 and 1")
    if m.r and m.replay:
        found.append(f"r={m.r} and replay={m.replay}: either a buffer or all earlier rows")
    if (m.alpha is None) != (m.beta is None):
        found.append("alpha and beta: give both (DER++) or neither; DER is beta=0")
    if m.distils and not m.r:
        found.append("alpha and beta are weights of rows from the buffer: r needs to be at least 1")
    if m.rows == "all" and (m.r or m.replay):
        found.append("rows=all trains on every earlier row already: r and replay have nothing to add")
    if m.ewc and m.start != "last":
        found.append(f"start={m.start} resets the optimizer's state, and with it what ewc holds on to; leave start=last")
    return found

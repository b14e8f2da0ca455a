"""The state that a run without a checkpoint begins with: from its seed, from a folder of weights, or from another run."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxmem import schedules, step
from jaxmem.checkpoint.formats import config_of, read_into
from jaxmem.checkpoint.formats.config_json import differences
from jaxmem.checkpoint.store import agreed, committed_steps
from jaxmem.continual import start
from jaxmem.data.rehearsal.rehearsing import Rehearsing
from jaxmem.optim import transforms
from jaxmem.runs.folder import Folder
from jaxmem.runs.settings import Settings
from jaxmem.runs.start_from import parse as parse_start
from jaxmem.spec import InputError


def check(s: Settings, folder: Folder) -> None:
    """Refuses, before anything is compiled, what could not be begun with. Raises InputError."""
    if s.init_from and (other := differences(config_of(s.init_from)[1], s.workload.model)):
        raise InputError(f"--init_from={s.init_from} holds another model than --model={s.workload.model_text}: {other}")
    if s.start_from and not agreed(lambda: committed_steps(folder.checkpoints)):
        start.find(parse_start(s.start_from), s.workload, s.schedule)


def rate_of(s: Settings, origin: int) -> Callable[[int], float]:
    """Learning rate of each step; `origin` steps of the schedule were made before this run's first one."""
    return schedules.learning_rate(s.schedule, peak=s.lr, warmup=s.warmup, steps=s.steps, origin=origin)


def begin(s: Settings, programs: step.Programs, init: Callable[[jax.Array], Any], kept: Rehearsing | None,
          note: Callable[[str], None]) -> tuple[Any, int]:
    """`(state, origin)`, on the devices that hold it; the rehearsal buffer, if there is one, begins too. `init` is the compiled program."""
    if kept:
        kept.begin(s.seed)
    state, origin = init(jax.make_array_from_callback((), programs["init"].args[0].sharding, lambda _: np.uint32(s.seed))), 0
    if s.init_from:
        state = state | {"params": read_into(s.init_from, s.workload.model, programs.state["params"])}
    if s.start_from:
        asked = parse_start(s.start_from)
        found = start.find(asked, s.workload, s.schedule)
        state, origin = start.begin(asked, found, state, programs.state, s.workload, seed=s.seed), found.steps
        if kept and "rehearsal" in found.meta:  # what the other run remembered is what this one must not forget
            kept.memory = None
            memory = start.read(found, {"rehearsal": kept.abstract(found.meta)})["rehearsal"]
            note(kept.adopt(memory, found.meta) or f"the rehearsal buffer of {asked.run} is taken along")
        note(start.described(asked, found, rate_of(s, origin)(1)))
    state = state | {"opt_state": transforms.with_trained_weights(state["opt_state"], s.workload.optimizer)}
    return jax.block_until_ready(state), origin


def check_same_data(meta: Mapping[str, Any], at: int, fingerprint: str, text: str) -> None:
    """A checkpoint's position means nothing in other data. Raises InputError."""
    if meta["fingerprint"] != fingerprint:
        raise InputError(f"--data={text} is not what the checkpoint of step {at} was trained on: its content or its settings "
                         f"changed (fingerprint {fingerprint[:12]}, was {meta['fingerprint'][:12]}), so its position means nothing; "
                         "bring the old data back, or start a new --out")

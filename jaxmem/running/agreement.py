"""Every process of a run must have been started alike and see the same files: else some would train on something else, or wait for ever."""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmem.spec import InputError


def check(**what: Any) -> None:
    """Raises InputError, in every process, that names each value which is not the same in all of them, and in which it differs."""
    if jax.process_count() == 1:
        return
    mine = np.stack([np.frombuffer(hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()[:8], np.uint32)
                     for value in what.values()])
    rows = np.asarray(multihost_utils.process_allgather(mine))
    if problems := differing(list(what), rows):
        raise InputError("the processes of this run were not started alike, or do not see the same files: " + "; ".join(problems))


def differing(names: list[str], rows: np.ndarray) -> list[str]:
    """`name differs in process 2, 5` for each name; `rows` is [process, name, word], process 0 the reference."""
    out = []
    for i, name in enumerate(names):
        other = [str(k) for k in range(len(rows)) if not np.array_equal(rows[k, i], rows[0, i])]
        if other:
            shown = ", ".join(other[:8]) + (" and more" if len(other) > 8 else "")
            out.append(f"{name} of process {shown} {'is' if len(other) == 1 else 'are'} not that of process 0")
    return out

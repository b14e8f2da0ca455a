"""One hash of a whole state, to say that two runs ended the same."""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

HASHED_AT_ONCE = 2**26  # bytes of an array that are gathered at once


def state_hash(state: Any) -> str:
    """SHA-256 over the values of parameters and optimizer state, the same on any mesh."""
    total = hashlib.sha256()
    for x in jax.tree.leaves({"params": state["params"], "opt_state": state["opt_state"]}):
        rows = max(1, HASHED_AT_ONCE // max(1, x.nbytes // max(1, x.shape[0]))) if x.ndim else 1
        parts = [x] if x.is_fully_addressable or not x.ndim else [x[i:i + rows] for i in range(0, x.shape[0], rows)]
        for part in parts:
            whole = np.asarray(part) if part.is_fully_addressable else np.asarray(multihost_utils.process_allgather(part, tiled=True))
            total.update(np.ascontiguousarray(whole).tobytes())
    return total.hexdigest()

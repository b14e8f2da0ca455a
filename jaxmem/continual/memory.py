"""The rehearsal buffer as a method uses it inside its own step: how large, what a row holds, what a draw gives."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmem.continual.methods import Method
from jaxmem.continual.tasks import Task
from jaxmem.data.rehearsal import programs
from jaxmem.rehearsal import Rehearsal
from jaxmem.spec import InputError
from jaxmem.step import Program

Rows = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """`draws` independent draws of r rows come with each step. `rehearsal.every` is 1 on one device; on W it is the smallest number of
    steps whose rows the balanced exchange can split."""

    rehearsal: Rehearsal
    programs: dict[str, Program]
    draws: int

    @classmethod
    def of(cls, method: Method, tasks: Sequence[Task], classes: int, batch: int, mesh: Mesh) -> "Memory | None":
        """None for a method without a buffer. Each class has floor(rows x buffer / classes / devices) slots on each device, as in
        Bouvier et al. (arXiv 2406.03285). Raises InputError."""
        if not method.r:
            return None
        total, shards = sum(len(task.train[1]) for task in tasks), programs.shards_on(mesh)
        slots = int(total * method.buffer / classes / shards + 1e-9)
        if not slots:
            raise InputError(f"buffer={method.buffer:g} of {total} training rows is less than one row for each of {classes} classes on "
                             f"each of {shards} devices; smallest: buffer={classes * shards / total:.4g}")
        draws = 2 if method.distils else 1
        rehearsal = Rehearsal(r=draws * method.r, capacity=slots * classes * shards, policy=method.policy, classes=classes,
                              candidates=method.candidates if method.policy == "replace" else None,
                              every=shards**2 // math.gcd(draws * method.r, shards**2))
        inputs = tasks[0].train[0]
        fields: dict[str, Any] = {"inputs": (inputs.shape[1:], inputs.dtype), "labels": ((), np.dtype(np.int32))}
        if method.distils:
            fields["logits"] = ((classes,), np.dtype(np.float32))
        return cls(rehearsal=rehearsal, draws=draws, programs=programs.build(rehearsal, fields, mesh, batch=batch, labels="labels"))

    def start(self, seed: int) -> Any:
        init = self.programs["init"]
        return init.jitted()(jax.device_put(np.uint32(seed), init.args[0].sharding))

    def staged(self, tree: Any) -> list[Rows]:
        """For each draw its rows {name: [r, ...]} and their `weights` f32 [r]: 0 where there is no row, as before the first insertion."""
        turn = tree["inserts"] % self.rehearsal.every
        found = tree["staged"]["rows"] | {"weights": tree["staged"]["weights"]}
        own = {name: jax.lax.dynamic_index_in_dim(x, turn, axis=1, keepdims=False) for name, x in found.items()}  # [W, draws x Q, ...]
        each = self.rehearsal.r // self.draws // next(iter(own.values())).shape[0]
        return [{name: x[:, i * each:(i + 1) * each].reshape(-1, *x.shape[2:]) for name, x in own.items()} for i in range(self.draws)]

    def after(self, tree: Any, rows: Rows) -> Any:
        """The buffer once it was offered `rows`, with what is drawn for the next steps when its turn has come."""
        tree = self.programs["insert"].fn(tree, rows)
        if self.rehearsal.every == 1:
            return self.programs["draw"].fn(tree)
        return jax.lax.cond(tree["inserts"] % self.rehearsal.every == 0, self.programs["draw"].fn, lambda same: same, tree)

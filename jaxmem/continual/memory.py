"""The rehearsal buffer as a method uses it: how large, what a row holds, how many rows a draw has."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmem.continual.methods import Method
from jaxmem.continual.tasks import Task
from jaxmem.data.rehearsal import buffer as rehearsal
from jaxmem.spec import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """classes x slots rows of `fields`, over all devices; `rows` of a draw; `probability` that a full class takes a row in (replace)."""

    fields: rehearsal.Fields
    classes: int
    slots: int
    rows: int
    policy: rehearsal.Policy
    probability: float

    @classmethod
    def of(cls, method: Method, tasks: Sequence[Task], classes: int, batch: int, mesh: Mesh) -> "Memory | None":
        """None for a method without a buffer. Each class has the same number of slots, as in arXiv 2406.03285. Raises InputError."""
        if not method.r:
            return None
        total = sum(len(task.train[1]) for task in tasks)
        slots = int(total * method.buffer / classes)
        if not slots:
            raise InputError(f"buffer={method.buffer:g} of {total} training rows is less than one row for each of {classes} classes; "
                             f"smallest: buffer={classes / total:.4g}")
        inputs = tasks[0].train[0]
        fields = {"inputs": (inputs.shape[1:], inputs.dtype), "labels": ((), np.dtype(np.int32))}
        if method.distils:
            fields["logits"] = ((classes,), np.dtype(np.float32))
        return cls(fields=fields, classes=classes, slots=slots, rows=method.r, policy=method.policy,
                   probability=min(1.0, method.candidates / batch))

    def start(self) -> rehearsal.Buffer:
        return rehearsal.init(self.fields, classes=self.classes, slots=self.slots)

    def insert(self, buffer: rehearsal.Buffer, rows: dict[str, jax.Array], key: jax.Array) -> rehearsal.Buffer:
        return rehearsal.insert(buffer, rows, rows["labels"], key, policy=self.policy, probability=self.probability)

    def draw(self, buffer: rehearsal.Buffer, key: jax.Array) -> dict[str, jax.Array]:
        """`rows` rows {name: [R, ...]} and their `weights` f32 [R]: 0 while nothing is stored."""
        rows, stored = rehearsal.draw(buffer, key, self.rows)
        return rows | {"weights": jnp.full((self.rows,), stored, jnp.float32)}

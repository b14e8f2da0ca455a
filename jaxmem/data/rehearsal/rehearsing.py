"""Rehearsal as a training loop holds it: what is put beside a batch, what is kept of it, and what a checkpoint must have.

A step: `batch = kept.beside(rows)`; the training program on `batch`; `kept.offer(rows)`. Nothing here waits for a device.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.data.rehearsal import programs as programs_module
from jaxmem.data.rehearsal.buffer import Fields
from jaxmem.data.rehearsal.redeal import redeal, redeal_staged
from jaxmem.data.rehearsal.slots import stored_shape
from jaxmem.data.rows import Data
from jaxmem.rehearsal import Rehearsal
from jaxmem.spec import InputError

Meta = Mapping[str, Any]
PREFIX = "rehearsal_"


class Rehearsing:
    """`memory`: the tree of `programs.py`; None until `begin` or `adopt`, and whenever the loop sets it so to free the devices.
    `run`: the compiled programs, which the loop puts there. Raises InputError."""

    def __init__(self, rehearsal: Rehearsal, data: Data, mesh: Mesh, *, batch: int) -> None:
        self.rehearsal, self.fields, self.mesh = rehearsal, dict(data.fields), mesh
        self.programs = programs_module.build(rehearsal, self.fields, mesh, batch=batch, empty=data.empty_row(),
                                              labels="labels" if "labels" in data.fields else None)
        self.run: dict[str, Callable] = {}
        self.memory: Any = None
        self._steps = 0  # as `memory["inserts"]`, known without waiting for a device

    # ---- a step

    def beside(self, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The incoming rows [B, ...] and the staged ones, [B + r, ...]."""
        return self.run["join"](self.memory["staged"]["rows"], self.memory["inserts"], rows)

    def offer(self, rows: dict[str, jax.Array]) -> None:
        """Offer the incoming rows to the buffer, and exchange the rows of the next steps when it is time."""
        self.memory = self.run["insert"](self.memory, rows)
        self._steps += 1
        if self._steps % self.rehearsal.every == 0:
            self.memory = self.run["draw"](self.memory)

    # ---- its place in a run's state

    def begin(self, seed: int) -> None:
        """An empty buffer."""
        sharding = NamedSharding(self.mesh, P())
        self.memory, self._steps = self.run["init"](jax.make_array_from_callback((), sharding, lambda _: np.uint32(seed))), 0

    def meta(self) -> dict[str, Any]:
        """What a checkpoint's meta must say beside the tree."""
        return {"rehearsal": str(self.rehearsal), "shards": programs_module.shards_on(self.mesh)}

    def abstract(self, meta: Meta) -> Any:
        """The tree as the checkpoint with this meta has it, laid over this mesh."""
        saved, shards = saved_rehearsal(meta)
        own = programs_module.abstract(self.rehearsal, self.fields, self.mesh)
        if (saved, shards) == (self.rehearsal, programs_module.shards_on(self.mesh)):
            return own
        return abstract_of_others(saved, shards, self.fields, self.mesh)

    def adopt(self, memory: Any, meta: Meta) -> str | None:
        """Go on with the tree of a checkpoint. One of another number of shards or slots is dealt out again, and said."""
        saved, shards = saved_rehearsal(meta)
        own = programs_module.shards_on(self.mesh)
        note = None
        if (saved, shards) != (self.rehearsal, own):
            before = stored_rows(memory)
            memory, note = self._dealt(memory, saved, shards), f"the rehearsal buffer of {shards} shards ({saved}) was dealt to {own}"
            if lost := before - stored_rows(memory):
                note += f"; {lost} of {before} rows had no place, and were left out at random"
        self.memory, self._steps = memory, int(memory["inserts"])
        return note

    def _dealt(self, memory: Any, saved: Rehearsal, shards: int) -> Any:
        now, own = self.rehearsal, programs_module.shards_on(self.mesh)
        if saved.classes != now.classes:
            raise InputError(f"rehearsal: the buffer that was saved has classes={saved.classes}, not classes={now.classes}")
        layout = programs_module.shardings(self.fields, self.mesh, now)
        key = jax.jit(lambda data, count: jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(data), 2), count))(
            memory["key"], memory["draws"])
        buffer = redeal(memory["buffer"], key, shards=own, slots=now.slots(own), shardings=layout["buffer"],
                        row_shapes={name: stored_shape(shape, now.memory) for name, (shape, _) in self.fields.items()})
        if (saved.r, saved.every) == (now.r, now.every):
            staged = redeal_staged(memory["staged"], shards=own, shardings=layout["staged"])
            return memory | {"buffer": buffer, "staged": staged}
        empty = self.run["init"](jax.make_array_from_callback((), NamedSharding(self.mesh, P()), lambda _: np.uint32(0)))
        # on to the next multiple of `every`, from which draws are counted: the counters make the keys, and go back to none that was used
        inserts = jax.jit(lambda n: n + (-n) % now.every)(memory["inserts"])
        return memory | {"buffer": buffer, "staged": empty["staged"], "inserts": inserts}


def stored_rows(memory: Any) -> int:
    return int(jax.jit(lambda filled: filled.sum(dtype=np.int32))(memory["buffer"]["filled"]))


def saved_rehearsal(meta: Meta) -> tuple[Rehearsal, int]:
    """What a checkpoint's buffer is, and its shards."""
    found = meta["rehearsal"]
    return Rehearsal.parse(found["rehearsal"]), found["shards"]


def abstract_of_others(saved: Rehearsal, shards: int, fields: Fields, mesh: Mesh) -> Any:
    """The tree of `shards` shards on a mesh that has another number: split along the shards or the slots where they divide, else whole
    on every device."""
    parts, axes = programs_module.shards_on(mesh), programs_module.batch_axes(mesh)

    def placed(x: jax.ShapeDtypeStruct, dims: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        dim = next((d for d in dims if x.shape[d] % parts == 0), None)
        spec = P(*(axes if d == dim else None for d in range(x.ndim))) if axes and dim is not None else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    shapes = programs_module.shapes(saved, shards, fields)
    return {name: jax.tree.map(lambda x, name=name: placed(x, {"buffer": (0, 2) if x.ndim > 2 else (), "staged": (0,)}.get(name, ())), part)
            for name, part in shapes.items()}

"""The four programs of rehearsal on a mesh: init, join, insert, draw. The buffer is split over the axes that split the batch.

A step: `join` puts the staged rows beside the incoming ones, the training program runs on both, `insert` offers the incoming rows to
the buffer in place, and after every `every` steps `draw` exchanges the rows of the next `every` steps. None of them waits for the
training program, so all are dispatched before its result is looked at. A staged row is a stored row as of the latest draw: it is at
most `every` steps old, and rows of the last steps can be among them.

Everything that is needed to go on is in one tree, `memory`: buffer, staged rows, key, and how often was inserted and drawn.

B incoming rows, W shards, K classes, S slots of a class in a shard, T steps of a draw (`every`), Q rows of a shard in a step (r / W).
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.data.rehearsal.buffer import Fields, insert_into
from jaxmem.data.rehearsal.exchange import Unequal, exchange
from jaxmem.data.rehearsal.slots import stored_shape
from jaxmem.rehearsal import Rehearsal
from jaxmem.rules import BATCH_AXES
from jaxmem.sharding import with_sharding
from jaxmem.spec import InputError
from jaxmem.step import Program, make_program

Tree = Any  # {"buffer": {"rows": {name: [W, K, S, ...]}, "filled": [W, K], "seen": [W, K]},
#              "staged": {"rows": {name: [W, T, Q, ...]}, "weights": f32 [W, T, Q]}, "key": uint32 [2], "inserts": int32, "draws": int32}


def build(rehearsal: Rehearsal, fields: Fields, mesh: Mesh, *, batch: int, empty: Mapping[str, Any] | None = None,
          labels: str | None = None, unequal: Unequal = "reject") -> dict[str, Program]:
    """`init(seed) -> memory`, `join(memory, rows) -> rows of B + r`, `insert(memory, rows) -> memory`, `draw(memory) -> memory`; the last
    two donate. `fields` are of the rows, all [B, ...] and split over the batch's axes; `labels` names the int32 [B] field that says a
    row's class where there are several. `empty` is what a staged row of weight 0 holds (zeros). Raises InputError.
    """
    axes = batch_axes(mesh)
    shards = shards_on(mesh)
    if problems := rehearsal.problems(batch=batch, shards=shards):
        raise InputError("\n".join(problems))
    if rehearsal.classes > 1 and labels is None:
        raise InputError(f"rehearsal: classes={rehearsal.classes}, and the rows ({', '.join(fields)}) have no labels; leave classes=1")
    k, steps, own = rehearsal.classes, rehearsal.every, rehearsal.r // shards
    given = dict(empty or {})
    empty = {name: np.broadcast_to(np.asarray(given.get(name, 0), dtype), shape) for name, (shape, dtype) in fields.items()}
    split = P(axes or None)
    # on the abstract mesh: described GPUs list no memories, and a concrete sharding would silently fall back to the device's
    layout = shardings(fields, mesh, rehearsal, of=mesh.abstract_mesh)
    tree = jax.tree.map(with_sharding, shapes(rehearsal, shards, fields), layout)
    rows = {name: jax.ShapeDtypeStruct((batch, *shape), dtype, sharding=NamedSharding(mesh, split))
            for name, (shape, dtype) in fields.items()}
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def init(seed):
        new = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes(rehearsal, shards, fields)["buffer"])
        staged = {name: jnp.broadcast_to(jnp.asarray(empty[name], dtype), (shards, steps, own, *shape))
                  for name, (shape, dtype) in fields.items()}
        return {"buffer": new, "staged": {"rows": staged, "weights": jnp.zeros((shards, steps, own), jnp.float32)},
                "key": jax.random.key_data(jax.random.key(seed)), "inserts": jnp.int32(0), "draws": jnp.int32(0)}

    def join(staged, inserts, incoming):
        def beside(staged, inserts, incoming):
            turn = inserts % steps
            return {name: jnp.concatenate([x, jax.lax.dynamic_index_in_dim(staged[name][0], turn, keepdims=False)], axis=0)
                    for name, x in incoming.items()}
        return over(beside, in_specs=(split, P(), split), out_specs=split)(staged, inserts, incoming)

    def insert(memory, incoming):
        def offer(buffer, key, incoming):
            key = jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key
            classes = incoming[labels] if labels and k > 1 else jnp.zeros((batch // shards,), jnp.int32)
            return insert_into(buffer, incoming, classes, key, policy=rehearsal.policy, probability=rehearsal.probability(batch),
                               memory=rehearsal.memory)
        with jax.named_scope("rehearsal_insert"):
            key = _key(memory["key"], 0, memory["inserts"])
            new = over(offer, in_specs=(split, P(), split), out_specs=split)(memory["buffer"], key, incoming)
        return memory | {"buffer": new, "inserts": memory["inserts"] + 1}

    def draw(memory):
        def swap(buffer, key):
            found, weights = exchange(buffer, key, rows_per_pair=rehearsal.rows_per_pair(shards), shards=shards, axes=axes,
                                      unequal=unequal, empty=empty, memory=rehearsal.memory)
            return jax.tree.map(lambda x: x.reshape(1, steps, own, *x.shape[1:]), {"rows": found, "weights": weights})
        with jax.named_scope("rehearsal_draw"):
            key = _key(memory["key"], 1, memory["draws"])
            staged = over(swap, in_specs=(split, P()), out_specs=split)(memory["buffer"], key)
        return memory | {"staged": staged, "draws": memory["draws"] + 1}

    make = functools.partial(make_program, mesh=mesh, shapes={})
    whole = NamedSharding(mesh, P())
    joined = {name: NamedSharding(mesh, split) for name in fields}
    return {
        "init": make("rehearsal_init", init, (jax.ShapeDtypeStruct((), jnp.uint32, sharding=whole),), out_shardings=layout),
        "join": make("rehearsal_join", join, (tree["staged"]["rows"], tree["inserts"], rows), out_shardings=joined),
        "insert": make("rehearsal_insert", insert, (tree, rows), out_shardings=layout, donate_argnums=(0,)),
        "draw": make("rehearsal_draw", draw, (tree,), out_shardings=layout, donate_argnums=(0,)),
    }


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(a for a in BATCH_AXES if mesh.shape[a] > 1)


def shards_on(mesh: Mesh) -> int:
    return int(np.prod([mesh.shape[a] for a in batch_axes(mesh)], dtype=np.int64))


def shapes(rehearsal: Rehearsal, shards: int, fields: Fields) -> Tree:
    """The tree's shapes on any number of shards; rows in pinned host memory are flat."""
    k, slots, steps, own = rehearsal.classes, rehearsal.slots(shards), rehearsal.every, rehearsal.r // shards
    counts, scalar = jax.ShapeDtypeStruct((shards, k), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return {
        "buffer": {"rows": {name: jax.ShapeDtypeStruct((shards, k, slots, *stored_shape(shape, rehearsal.memory)), dtype)
                            for name, (shape, dtype) in fields.items()}, "filled": counts, "seen": counts},
        "staged": {"rows": {name: jax.ShapeDtypeStruct((shards, steps, own, *shape), dtype) for name, (shape, dtype) in fields.items()},
                   "weights": jax.ShapeDtypeStruct((shards, steps, own), jnp.float32)},
        "key": jax.ShapeDtypeStruct((2,), jnp.uint32), "inserts": scalar, "draws": scalar}


def abstract(rehearsal: Rehearsal, fields: Fields, mesh: Mesh) -> Tree:
    """The tree as ShapeDtypeStructs with shardings: what a checkpoint is restored into."""
    return jax.tree.map(with_sharding, shapes(rehearsal, shards_on(mesh), fields), shardings(fields, mesh, rehearsal))


def shardings(fields: Fields, mesh: Mesh, rehearsal: Rehearsal, of: Mesh | AbstractMesh | None = None) -> Tree:
    """On `mesh`; the buffer's rows on `of`, where that is given and they are in pinned host memory."""
    split, whole = NamedSharding(mesh, P(batch_axes(mesh) or None)), NamedSharding(mesh, P())
    stored = split if rehearsal.memory == "device" else NamedSharding(of or mesh, split.spec, memory_kind="pinned_host")
    return {"buffer": {"rows": {name: stored for name in fields}, "filled": split, "seen": split},
            "staged": {"rows": {name: split for name in fields}, "weights": split}, "key": whole, "inserts": whole, "draws": whole}


def _key(data: jax.Array, what: int, count: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(data), what), count)

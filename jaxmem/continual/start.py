"""A new run's state from another run's checkpoint: read onto any mesh, verified by its digests, grown where the model is larger."""

import pathlib
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import spec
from jaxmem.checkpoint import store
from jaxmem.checkpoint.digest import digests
from jaxmem.continual import growth
from jaxmem.continual.shrink import shrink_and_perturb
from jaxmem.models.configs import DecoderConfig, parameter_shapes
from jaxmem.optim.dims import Path, names
from jaxmem.runs.start_from import StartFrom
from jaxmem.schedules import Schedule
from jaxmem.spec import InputError
from jaxmem.workload import Workload

DEGREES = {"mu": 1, "trace": 1, "nu": 2}  # of what optax's states call first and second moments
State = Any


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that a run begins with. `steps` of the run's schedule were made before it; `rate`: the last of them, if known."""

    path: pathlib.Path
    step: int
    meta: dict[str, Any]
    steps: int
    rate: float | None

    @property
    def workload(self) -> Workload:
        return Workload.parse_line(self.meta["workload"])


def find(start: StartFrom, workload: Workload, schedule: Schedule) -> Origin:
    """The checkpoint that `start` names, and everything that keeps a run of `workload` from beginning with it as an InputError."""
    where = start.run / "checkpoints"
    steps = store.agreed(lambda: store.committed_steps(where))
    if not steps:
        raise InputError(f"--start_from={start.run}: there is no checkpoint in {where}" +
                         (spec.nearest(start.run.name, [entry.name for entry in start.run.parent.iterdir() if entry.is_dir()], limit=1)
                          if not start.run.is_dir() and start.run.parent.is_dir() else ""))
    step = steps[-1] if start.step is None else start.step
    if step not in steps:
        raise InputError(f"--start_from={start.run}@{step}: no such checkpoint; there are {', '.join(map(str, steps))}")
    path = where / str(step)
    meta = store.read_meta(path)
    before = meta.get("schedule") or {}
    origin = Origin(path=path, step=step, meta=meta, rate=before.get("rate"),
                    steps=before.get("origin", 0) + step if start.schedule == "continue" else 0)
    refuse(start, origin, workload, schedule)
    return origin


def refuse(start: StartFrom, origin: Origin, workload: Workload, schedule: Schedule) -> None:
    old, found = origin.workload, []
    if type(old.model) is not type(workload.model):
        found.append(f"{origin.path} holds --model={old.model_text}, which --model={workload.model_text} is no variant of")
    elif old.model != workload.model:
        changed = ", ".join(spec.differences(workload.model, old.model))
        if not start.grow:
            found.append(f"{origin.path} holds --model={old.model_text}, and --model={workload.model_text} has {changed}; "
                         ",grow=true makes it larger without changing what it computes")
        if isinstance(old.model, DecoderConfig) and isinstance(workload.model, DecoderConfig):
            found += growth.problems(old.model, workload.model)
        elif start.grow:
            found.append(f"--model={workload.model_text}: decoders grow, other models do not")
    if start.optimizer == "keep" and old.optimizer != workload.optimizer:
        found.append(f"optimizer=keep: {origin.path} has the state of --optimizer={old.optimizer_text}, not of {workload.optimizer_text}")
    if start.schedule == "continue" and not schedule.goes_on:
        found.append(f"schedule=continue: {schedule.kind} is made for its number of steps, and is over; "
                     "infinite, wsd, constant and rsqrt go on")
    if found:
        raise InputError(f"--start_from={start.run}: " + "\n".join(found))


def begin(start: StartFrom, origin: Origin, fresh: State, abstract: State, workload: Workload, *, seed: int) -> State:
    """`fresh` (a new run's state) with the parameters of `origin`, and its moments if they are kept, with the shardings of `abstract`.

    Raises InputError, in every process alike, for a checkpoint that does not read back to what was written.
    """
    taken = ("params", "opt_state") if start.optimizer == "keep" else ("params",)
    wanted = {part: abstract[part] for part in taken}
    old, new = origin.workload.model, workload.model
    if old == new and not start.perturb:  # what is replaced makes room before, not after
        for leaf in jax.tree.leaves({part: fresh[part] for part in taken}):
            leaf.delete()
    if isinstance(old, DecoderConfig) and isinstance(new, DecoderConfig) and old != new:
        found = grown(read(origin, smaller(wanted, old, new)), wanted, fresh["params"], old, new, seed=seed)
    else:
        found = read(origin, wanted)
    if start.shrink != 1 or start.perturb:
        noise = fresh["params"] if start.perturb else found["params"]
        found["params"] = shrink_and_perturb(found["params"], noise, shrink=start.shrink, perturb=start.perturb)
    return fresh | found


def described(start: StartFrom, origin: Origin, first_rate: float) -> str:
    """What the run began with, for its log; a jump of the learning rate is what users overlook."""
    text = f"beginning with step {origin.step} of {start.run} (run {origin.meta['run_id']}), optimizer={start.optimizer}"
    if start.shrink != 1 or start.perturb:
        text += f", shrink={start.shrink:g}, perturb={start.perturb:g}"
    if start.schedule == "continue":
        text += f"; the schedule goes on after its step {origin.steps}"
    was = "" if origin.rate is None else f", and was {origin.rate:.3g} there"
    return f"{text}; the learning rate begins at {first_rate:.3g}{was}"


def read(origin: Origin, abstract: State) -> State:
    """The part `abstract` of a checkpoint's state, verified."""
    store.check_same(origin.path, abstract)
    state, why = None, ""
    try:
        state = store.read_tree(origin.path / "state", abstract)
    except Exception as error:  # noqa: BLE001 - tensorstore and the file system each have their own
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
    if problem := store.first_of(why):
        raise InputError(f"{origin.path} cannot be read ({problem}); an earlier step of that run may be good: --start_from=RUN@STEP")
    values, _ = digests(state)
    if wrong := [name for name, value in values.items() if origin.meta["digests"].get(name) != value]:
        raise InputError(f"{origin.path} is damaged: {len(wrong)} of {len(values)} arrays differ from what was written, {wrong[0]} among "
                         "them; an earlier step of that run may be good: --start_from=RUN@STEP")
    return state


# ---------------------------------------------------------------- growth of a whole state

def smaller(abstract: State, old: DecoderConfig, new: DecoderConfig) -> State:
    """`abstract` of the new model with the shapes of the old one, split over the same axes where its dims divide by them."""
    shapes, before = parameter_shapes(new), parameter_shapes(old)

    def of(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        owner = owner_of(names(path), shapes)
        if owner is None:
            return leaf
        check_moment(names(path), leaf.shape, owner, shapes)
        shape = before[owner][0]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=dividing(leaf.sharding, shape))
    return jax.tree_util.tree_map_with_path(of, abstract)


def grown(state: State, abstract: State, fresh: State, old: DecoderConfig, new: DecoderConfig, *, seed: int) -> State:
    """`state` of the old model -> of the new one, with the shardings of `abstract`, in one program."""
    shapes = parameter_shapes(new)

    def every(state: State, fresh: State) -> State:
        flat_fresh = {"/".join(names(path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(fresh)[0]}
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        trees: dict[Path, dict[str, jax.Array]] = {}  # the parameters, and each set of moments, as flat trees
        for path, leaf in leaves:
            if owner := owner_of(names(path), shapes):
                trees.setdefault(_before(names(path), owner), {})[owner] = leaf
        larger = {place: growth.grow(tree, old, new, fresh=flat_fresh, seed=seed, degree=DEGREES[place[-1]] if place[0] != "params" else 0)
                  for place, tree in trees.items()}

        def of(path: Path, leaf: jax.Array) -> jax.Array:
            owner = owner_of(path, shapes)
            return larger[_before(path, owner)][owner] if owner else leaf
        return jax.tree.unflatten(structure, [of(names(path), leaf) for path, leaf in leaves])
    return jax.jit(every, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))(state, fresh)


def owner_of(path: Path, shapes: Any) -> str | None:
    """The parameter that a leaf belongs to: the longest end of its path that is one's name."""
    return next((name for i in range(len(path)) if (name := "/".join(path[i:])) in shapes), None)


def check_moment(path: Path, shape: tuple[int, ...], owner: str, shapes: Any) -> None:
    place = _before(path, owner)
    if place[0] != "params" and (place[-1] not in DEGREES or shape != shapes[owner][0]):
        raise InputError(f"the optimizer's state {'/'.join(path)} does not grow with the model; optimizer=reset begins with a fresh one")


def dividing(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding without the axes that `shape` does not divide by."""
    mesh, entries = sharding.mesh, []
    for i, entry in enumerate(sharding.spec):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        parts = 1
        for axis in axes:
            parts *= mesh.shape[axis]
        entries.append(entry if shape[i] % parts == 0 else None)
    return NamedSharding(mesh, P(*entries))


def _before(path: Path, owner: str) -> Path:
    return path[:len(path) - owner.count("/") - 1]

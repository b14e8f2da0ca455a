"""Programs that are not jaxmem's own: a function handed to `jaxmem.check`, or `build` in a file of the user's.

The function of `jaxmem.check` lives in the calling process, which must not load a compiler that can abort: it is exported there
(`jax.export`: StableHLO with scopes and source lines) and compiled in the child. Nothing is pickled. A file is imported in the child.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem import environment
from jaxmem.hardware import Topology, parse_topology
from jaxmem.spec import InputError, nearest
from jaxmem.targets.callbacks import has_callbacks


class NotCovered(Exception):
    """A check would say nothing true about this program."""


KINDS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignProgram:
    """What `child.compile_one` needs of a program."""

    fn: Callable
    args: tuple
    jit_kwargs: dict[str, Any]
    labels: tuple[dict[str, str], ...]
    output_labels: tuple[dict[str, str], ...]
    mesh: Any
    name: str = "program"

    def traced(self) -> Any:
        import jax
        jitted = self.fn if hasattr(self.fn, "trace") and not self.jit_kwargs else jax.jit(self.fn, **self.jit_kwargs)
        if self.mesh is None:
            return jitted.trace(*self.args)
        with jax.set_mesh(self.mesh):
            return jitted.trace(*self.args)

    def lower(self, traced: Any = None) -> Any:
        import jax
        traced = traced or self.traced()
        if self.mesh is None:
            return traced.lower()
        with jax.set_mesh(self.mesh):
            return traced.lower()


def mesh(topology: str | Topology, axes: dict[str, int], *, axis_types: Any = None) -> Any:
    """An abstract mesh for `jaxmem.check`'s arguments: no device and no compiler is touched.

    Raises InputError when the product of the axis sizes is not the topology's device count.
    """
    import jax
    topology = topology if isinstance(topology, Topology) else parse_topology(topology)
    check_axes(topology, axes)
    types = axis_types or (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)


def check_axes(topology: Topology, axes: dict[str, int]) -> None:
    product = 1
    for size in axes.values():
        product *= size
    if product != topology.devices:
        raise InputError(f"mesh {' * '.join(f'{a}({n})' for a, n in axes.items())} = {product} devices, and {topology} has "
                         f"{topology.devices}")


def export(fn: Callable, args: tuple, kwargs: dict, topology: Topology, *, donate_argnums: tuple[int, ...] = (),
           static_argnums: tuple[int, ...] = (), jit_kwargs: dict[str, Any] | None = None) -> tuple[bytes, dict[str, Any]]:
    """(StableHLO, description of its arguments) of `fn(*args, **kwargs)` for `topology`.

    Raises InputError for concrete arrays, for arguments without a sharding on several devices, and for a mesh of another size.
    """
    import jax
    stay_on_cpu()
    extra = dict(jit_kwargs or {})
    own = {"donate_argnums", "static_argnums", "donate_argnames", "static_argnames", "in_shardings"}
    for name in set(extra) & own:
        raise InputError(f"jit_kwargs: {name} is given to check itself (donate_argnums, static_argnums) or by the arguments' shardings")
    check_arguments(args, topology, donate_argnums, static_argnums)
    for name, value in kwargs.items():
        check_arguments((value,), topology, (), (), label=f"argument {name}=")
    dynamic = tuple(a for i, a in enumerate(args) if i not in static_argnums)
    place = [i for i in range(len(args)) if i not in static_argnums]
    leaves, tree = jax.tree.flatten((dynamic, kwargs))
    paths = argument_paths(fn, {**dict(zip(place, dynamic, strict=True)), **kwargs})
    out_paths: list[str] = []

    def flat(*values: Any) -> list[Any]:
        given, named = jax.tree.unflatten(tree, values)
        full = list(args)
        for i, value in zip(place, given, strict=True):
            full[i] = value
        out = fn(*full, **named)
        out_paths[:] = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
        return jax.tree.leaves(out)
    flat.__name__ = getattr(fn, "__name__", "program").strip("<>")
    donated = jitted_donations(fn, args, kwargs) if not static_argnums else []
    position = 0
    for i, a in zip(place, dynamic, strict=True):
        count = len(jax.tree.leaves(a))
        if i in donate_argnums:
            donated += [n for n in range(position, position + count) if n not in donated]
        position += count
    meshes = {leaf.sharding.mesh for leaf in leaves if getattr(leaf, "sharding", None) is not None}
    if len({(tuple(m.shape.items())) for m in meshes}) > 1:
        found = " and ".join(str(dict(m.shape)) for m in meshes)
        raise InputError(f"the arguments lie on different meshes: {found}; one program has one mesh")
    the_mesh = next(iter(meshes), None)
    if "out_shardings" in extra:  # the exported function returns a flat list
        extra["out_shardings"] = jax.tree.leaves(extra["out_shardings"], is_leaf=lambda x: x is None)
    with jax.sharding.use_abstract_mesh(the_mesh) if the_mesh is not None else contextlib.nullcontext():
        jitted = jax.jit(flat, donate_argnums=tuple(donated), **extra)
        if has_callbacks(jitted.trace(*leaves)):
            raise NotCovered("host callbacks run inside: their memory and time are outside of what a compiler sees")
        exported = jax.export.export(jitted, platforms=[KINDS[topology.chip.kind]], disabled_checks=_allow_custom_calls())(*leaves)
    description = {"paths": paths, "outputs": out_paths, "donate": donated,
                   "axes": dict(the_mesh.shape) if the_mesh is not None else {},
                   "axis_types": [t.name for t in the_mesh.axis_types] if the_mesh is not None else [],
                   "specs": [_spec(leaf) for leaf in leaves]}
    return bytes(exported.serialize()), description


def stay_on_cpu() -> None:
    """Tracing asks JAX for its backends, and plugins without a device complain loudly; a backend that is in use stays."""
    import jax
    wanted = environment.platforms(os.environ, environment.accelerators(), environment.plugins())
    if wanted and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", wanted)


def jitted_donations(fn: Callable, args: tuple, kwargs: dict) -> list[int]:
    """Flat positions of the arguments that an already jitted `fn` donates: inside another jit its own donation would be lost."""
    import jax
    if not hasattr(fn, "trace"):
        return []
    try:
        info = fn.trace(*args, **kwargs).args_info
    except Exception:  # whatever is wrong with the function shows when it is exported
        return []
    return [i for i, leaf in enumerate(jax.tree.leaves(info)) if getattr(leaf, "donated", False)]


def _allow_custom_calls() -> Sequence:
    import jax
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in
            ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu_v2", "annotate_device_placement", "MoveToHost",
             "MoveToDevice")]


def _spec(leaf: Any) -> dict[str, Any] | None:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return None
    return {"spec": [list(s) if isinstance(s, tuple) else s for s in sharding.spec], "memory_kind": sharding.memory_kind}


def argument_paths(fn: Callable, arguments: dict[int | str, Any]) -> list[str]:
    """`params/mlp/kernel` for every leaf, in order: the parameter's name in `fn` (its number where it has none), then its place."""
    import jax
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    out = []
    for position, tree in arguments.items():
        name = names[position] if isinstance(position, int) and position < len(names) else str(position)
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
            keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))).lstrip(".") for k in path]
            out.append("/".join([name, *keys]))
    return out


def check_arguments(args: tuple, topology: Topology, donate_argnums: tuple[int, ...], static_argnums: tuple[int, ...], *,
                    label: str | None = None) -> None:
    import jax
    import numpy as np
    for i in (*donate_argnums, *static_argnums):
        if not 0 <= i < len(args):
            raise InputError(f"donate_argnums or static_argnums names argument {i}; there are {len(args)}")
    for i, arg in enumerate(args):
        if i in static_argnums:
            continue
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            where = f"{label or f'argument {i}'}{jax.tree_util.keystr(path)}"
            if isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, jax.core.Tracer):
                raise InputError(f"{where} is a concrete array of shape {leaf.shape}; a check needs its description only: "
                                 "jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=...), or jax.eval_shape for a whole tree")
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                raise InputError(f"{where} is a {type(leaf).__name__}, not a jax.ShapeDtypeStruct; name it in static_argnums if it is a "
                                 "constant of the program")
            if leaf.sharding is None:
                if topology.devices > 1:
                    raise InputError(
                        f"{where} of shape {leaf.shape} has no sharding, and {topology} has {topology.devices} devices: give it "
                        "sharding=NamedSharding(jaxmem.mesh(topology, axes), PartitionSpec(...)); PartitionSpec() replicates")
            elif not isinstance(leaf.sharding, jax.sharding.NamedSharding):
                raise InputError(f"{where}: its sharding is a {type(leaf.sharding).__name__}; a NamedSharding on "
                                 "jaxmem.mesh(topology, axes) is needed")
            elif leaf.sharding.mesh.size != topology.devices:
                raise InputError(f"{where} is sharded over a mesh of {leaf.sharding.mesh.size} devices "
                                 f"({dict(leaf.sharding.mesh.shape)}), and {topology} has {topology.devices}")
            elif problem := uneven(leaf):
                raise InputError(f"{where}: {problem}")


def uneven(leaf: Any) -> str | None:
    """Dim and mesh axes that do not divide, with the nearest sizes that would."""
    sizes = leaf.sharding.mesh.shape
    for i, axes in enumerate(leaf.sharding.spec):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        parts = 1
        for name in names:
            parts *= sizes[name]
        if leaf.shape[i] % parts:
            below = leaf.shape[i] // parts * parts
            return (f"dim {i} of shape {leaf.shape} is not a multiple of {' * '.join(f'{n}({sizes[n]})' for n in names)} = {parts}; "
                    f"nearest {below} or {below + parts}")
    return None


# ---------------------------------------------------------------- in the child

def load(request: dict, topology: Topology, devices: Sequence) -> ForeignProgram:
    return load_file(request, topology, devices) if request["kind"] == "file" else load_export(request, topology, devices)


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def real_mesh(axes: dict[str, int], topology: Topology, devices: Sequence, axis_types: Sequence[str] = ()) -> Any:
    """A mesh of described devices laid out for the network; on several slices the first axis crosses them."""
    import jax
    import numpy as np
    from jax.experimental import mesh_utils
    check_axes(topology, axes)
    shape = tuple(axes.values())
    if topology.slices > 1:
        if shape[0] % topology.slices:
            raise InputError(f"the first mesh axis {next(iter(axes))}({shape[0]}) is not a multiple of the {topology.slices} slices")
        grid = mesh_utils.create_hybrid_device_mesh((shape[0] // topology.slices, *shape[1:]), (topology.slices, *(1,) * (len(shape) - 1)),
                                                    devices, allow_split_physical_axes=True)
    elif topology.chip.kind == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices).reshape(shape)
    types = tuple(jax.sharding.AxisType[t] for t in axis_types) or (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.sharding.Mesh(grid, tuple(axes), axis_types=types)


def load_export(request: dict, topology: Topology, devices: Sequence) -> ForeignProgram:
    import jax
    about = request["description"]
    exported = jax.export.deserialize(bytearray(pathlib.Path(request["export"]).read_bytes()))
    axes = about["axes"] or {"device": topology.devices}
    the_mesh = real_mesh(axes, topology, devices, about["axis_types"])

    def struct(aval: Any, spec: dict | None) -> Any:
        parts = [tuple(s) if isinstance(s, list) else s for s in spec["spec"]] if spec else []
        kind = spec["memory_kind"] if spec else None
        sharding = jax.sharding.NamedSharding(the_mesh, jax.sharding.PartitionSpec(*parts), memory_kind=kind)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
    args = tuple(struct(a, s) for a, s in zip(exported.in_avals, about["specs"], strict=True))
    donate = set(about["donate"])
    return ForeignProgram(fn=exported.call, args=args, jit_kwargs={"donate_argnums": tuple(donate)}, mesh=the_mesh,
                          labels=tuple(label(p, donated=i in donate) for i, p in enumerate(about["paths"])),
                          output_labels=tuple(label(p) for p in about["outputs"]))


def load_file(request: dict, topology: Topology, devices: Sequence) -> ForeignProgram:
    """`FILE:build`, where `build(mesh_for) -> (fn, args, jit_kwargs)` and `mesh_for({"axis": size}) -> Mesh`."""
    import jax
    path = pathlib.Path(request["file"])
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"--program: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    build = getattr(module, request["function"], None)
    if build is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InputError(f"--program: {path.name} has no function {request['function']!r}{nearest(request['function'], names)}")
    meshes: list[Any] = []

    def mesh_for(axes: dict[str, int]) -> Any:
        meshes.append(real_mesh(dict(axes), topology, devices))
        return meshes[-1]
    if not callable(build):
        raise InputError(f"--program: {request['function']} in {path.name} is a {type(build).__name__}, not a function")
    built = build(mesh_for)
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not callable(built[0]) or not isinstance(built[1], (tuple, list)) or (
            len(built) == 3 and not isinstance(built[2], dict)):
        raise InputError(f"--program: {request['function']} returned {type(built).__name__}; expected (fn, args) or (fn, args, jit_kwargs)")
    fn, args, *rest = built
    jit_kwargs = dict(rest[0]) if rest else {}
    args = tuple(args)
    statics = _as_tuple(jit_kwargs.pop("static_argnums", ()))
    donated = _as_tuple(jit_kwargs.pop("donate_argnums", ()))
    check_arguments(args, topology, donated, statics)
    place = [i for i in range(len(args)) if i not in statics]
    paths = argument_paths(fn, {i: args[i] for i in place})
    call = fn
    if statics:
        def call(*dynamic: Any) -> Any:
            full = list(args)
            for i, value in zip(place, dynamic, strict=True):
                full[i] = value
            return fn(*full)
    counts = [len(jax.tree.leaves(args[i])) for i in place]
    flags = [i in donated for i, count in zip(place, counts, strict=True) for _ in range(count)]
    labels = tuple(label(p, donated=d) for p, d in zip(paths, flags, strict=True))
    if donated:
        jit_kwargs["donate_argnums"] = tuple(place.index(i) for i in donated)
    return ForeignProgram(fn=call, args=tuple(args[i] for i in place), jit_kwargs=jit_kwargs, mesh=meshes[-1] if meshes else None,
                          labels=labels, output_labels=())


def label(path: str, *, donated: bool = False) -> dict[str, str]:
    """Kind by the words of a path: a program of one's own says no more of its arguments than their names, and what it donates is state."""
    words = path.lower().replace("_", "/").split("/")
    kind = "other"
    if {"opt", "optimizer", "mu", "nu", "momentum", "moments"} & set(words) or "opt_state" in path.lower():
        kind = "opt_state"
    elif {"params", "param", "weights", "kernel", "embedding", "model", "bias", "scale"} & set(words):
        kind = "params"
    elif {"batch", "tokens", "inputs", "labels", "targets", "images", "x", "y"} & set(words):
        kind = "batch"
    elif donated:
        kind = "params"
    parts = [p for p in path.split("/") if not p.isdigit()]
    return {"path": path, "kind": kind, "module": "/".join(parts[:-1]) or (parts[0] if parts else path)}

"""K runs of one workload and plan in one program: `step.build`'s own functions under `jax.vmap`, with a leading dim `runs`.

Split: runs over a mesh axis of their own, `runs`, of which every group of devices holds as many; each run by its plan inside a group.
Moves: nothing between runs. Costs: K times state and activations, and what each step costs once a program (launches, weights of ops
    that are shared) only once.
Use: many runs too small for a device that differ in seed, data order, learning rate or clip. Avoid: runs that fill a device, that
    differ in shape, or of which some stop early: all make every step.

Seeds are inputs of `init`, learning rates and clips of `train`, rows of the batch are each run's own. Runs agree with separate ones up to
the order of sums: a batched matmul adds up in another order.

R runs, B batch, S sequence.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import step
from jaxmem.colocate.parts import part_of, parts_for
from jaxmem.hardware import Topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.workload import Workload

RUNS = "runs"


def build(workload: Workload, plan: Plan, topology: Topology, devices: Sequence, *, runs: int) -> step.Programs:
    """`init`, `train` (or `gradients` and `update`) and `eval` of `runs` runs at once; every argument and result has a leading dim R.

    `plan` is of one run. Where it has fewer devices than `topology`, the rest are groups that hold runs of their own. Raises InputError.
    """
    groups = groups_of(plan, topology, runs)
    mesh = runs_mesh(plan, topology, devices, groups)
    one = step.build(workload, plan, part_of(topology, groups), devices, mesh)
    names = [name for name in one.programs if name != "save"]  # a copy to the host, which has nothing to batch
    programs = {name: stacked_program(one[name], runs, mesh) for name in names}
    return step.Programs(programs=programs, mesh=mesh, state=stacked(one.state, runs, mesh), batch=stacked(one.batch, runs, mesh),
                         attention=one.attention)


def groups_of(plan: Plan, topology: Topology, runs: int) -> int:
    """Groups of devices that hold `runs / groups` runs each. Raises InputError where they cannot."""
    if runs < 1:
        raise InputError(f"{runs} runs: at least 1")
    groups = parts_for(plan, topology)
    if runs % groups:
        below, above = runs // groups * groups, -(-runs // groups) * groups
        near = " or ".join(map(str, filter(None, (below, above))))
        raise InputError(f"{runs} runs of {plan.devices} devices each do not fill the {groups} groups of {topology} evenly; "
                         f"nearest: {near}")
    return groups


def runs_mesh(plan: Plan, topology: Topology, devices: Sequence, groups: int) -> Mesh:
    """Axis `runs` outermost: a group is a box of the network."""
    shape = (groups, *plan.sizes.values())
    if topology.chip.kind == "tpu" and len(devices) > 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, (RUNS, *plan.sizes), axis_types=(AxisType.Auto,) * len(shape))


def stacked_program(one: step.Program, runs: int, mesh: Mesh) -> step.Program:
    jit_kwargs = {**one.jit_kwargs, "out_shardings": jax.tree.map(lambda s: with_runs(s, mesh), one.jit_kwargs["out_shardings"])}
    return dataclasses.replace(one, fn=jax.vmap(one.fn, spmd_axis_name=RUNS), args=stacked(one.args, runs, mesh), jit_kwargs=jit_kwargs)


def stacked(tree: Any, runs: int, mesh: Mesh) -> Any:
    """ShapeDtypeStructs with a leading dim R, split over the axis `runs`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((runs, *x.shape), x.dtype, sharding=with_runs(x.sharding, mesh)), tree)


def with_runs(sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(RUNS, *sharding.spec), memory_kind=sharding.memory_kind)


def run_of(tree: Any, index: int) -> Any:
    """The part of one run."""
    return jax.tree.map(lambda x: x[index], tree)

"""Meshes, and the tables of `rules.py` as JAX shardings."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.plan import Plan
from jaxmem.rules import Table, partition


def make_mesh(plan: Plan, devices: Sequence, *, slices: int = 1) -> Mesh:
    """A mesh of `plan`'s axes over `devices`, laid out for the physical network: `data` crosses slices, the others stay inside."""
    shape = tuple(plan.sizes.values())
    if slices > 1:
        inner = (plan.data // slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(inner, (slices, *(1,) * (len(shape) - 1)), devices, allow_split_physical_axes=True)
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:  # hosts and NVLink domains are contiguous in device order
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, tuple(plan.sizes), axis_types=(AxisType.Auto,) * len(shape))


def spec_for(dims: tuple[str | None, ...], shape: tuple[int, ...], table: Table, mesh: Mesh) -> P:
    """The PartitionSpec of an array whose dims are named."""
    return P(*(axes[0] if len(axes) == 1 else axes or None for axes in partition(dims, shape, table, dict(mesh.shape))))


def sharding_for(dims: tuple[str | None, ...], shape: tuple[int, ...], table: Table, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec_for(dims, shape, table, mesh))


def with_sharding(struct: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

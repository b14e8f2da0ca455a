"""The step programs of (workload, plan) on a topology's devices: init, train, eval, save.

The only file that sees plan, model and optimizer.

What is checked is what runs: every command and experiment gets its programs here, and their text depends on the workload, the plan
and the topology alone. Learning rate and clip norm are inputs at run time.

B batch, S sequence.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import dims as dims_module
from jaxmem import kernel_limits
from jaxmem.hardware import Topology
from jaxmem.models import configs as models
from jaxmem.models import model as model_module
from jaxmem.models.ops import Ops
from jaxmem.optim import dims as state_dims_module
from jaxmem.optim import transforms
from jaxmem.parallel import attend as attention
from jaxmem.parallel import saving
from jaxmem.plan import Plan, Remat
from jaxmem.rules import BATCH_AXES, Table, rules
from jaxmem.sharding import make_mesh, sharding_for, spec_for, with_sharding
from jaxmem.spec import InputError
from jaxmem.workload import Workload

ARRAY_DTYPES = {"f32": jnp.dtype(jnp.float32), "int32": jnp.dtype(jnp.int32), "uint8": jnp.dtype(jnp.uint8)}  # of a batch
DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16), "f16": jnp.dtype(jnp.float16)}
# GPUs that jax's Triton lowering (0.12.0.1, pallas/triton/gpu_info.py) knows only when they are present: what runs must be what was checked
WITHOUT_TRITON = {"a6000", "v100"}
BATCH_FIELDS = ("tokens", "targets", "segment_ids", "positions", "images", "labels")  # of any model; `workload.rows` has one model's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A jitted function and abstract arguments that carry their shardings; `labels` has one entry a flattened argument."""

    name: str
    fn: Callable
    args: tuple
    jit_kwargs: dict[str, Any]
    labels: tuple[dict[str, str], ...]
    output_labels: tuple[dict[str, str], ...]
    mesh: Mesh

    def jitted(self) -> Any:
        return jax.jit(self.fn, **self.jit_kwargs)

    def traced(self) -> jax.stages.Traced:
        with jax.set_mesh(self.mesh):
            return self.jitted().trace(*self.args)

    def lower(self, traced: jax.stages.Traced | None = None) -> jax.stages.Lowered:
        """Lowered for the devices of its mesh."""
        traced = traced or self.traced()
        with jax.set_mesh(self.mesh):
            return traced.lower()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Every program of a run, in the order in which a run meets them, with the shardings of its state and batch."""

    programs: dict[str, Program]
    mesh: Mesh
    state: Any  # ShapeDtypeStructs with shardings: {"params", "opt_state", "step"}
    batch: dict[str, jax.ShapeDtypeStruct]  # `workload.rows`, each [B, ...]
    attention: str

    def __getitem__(self, name: str) -> Program:
        return self.programs[name]


def build(workload: Workload, plan: Plan, topology: Topology, devices: Sequence, mesh: Mesh | None = None) -> Programs:
    """Raises InputError with every problem of the plan. `devices` are real or described ones, `topology.devices` of them. `mesh`: one
    that has the plan's axes and others beside them (the runs of `colocate`), in place of `devices`."""
    if problems := plan.problems(workload, topology):
        raise InputError("\n".join(problems))
    c, remat = workload.model, Remat.parse(plan.remat)
    compute, stored = DTYPES[plan.compute], DTYPES[plan.params]
    mesh = mesh or make_mesh(plan, devices, slices=topology.slices)
    whole = NamedSharding(mesh, P())
    rows = NamedSharding(mesh, P(tuple(a for a in BATCH_AXES if mesh.shape[a] > 1) or None))

    # ---- model, its parameters and their dims
    Module = model_module.module_of(c)
    graph = nnx.split(nnx.eval_shape(lambda: Module(c, rngs=nnx.Rngs(0), dtype=stored)))[0]

    def new_params(key):
        return nnx.to_pure_dict(nnx.split(Module(c, rngs=nnx.Rngs(key), dtype=stored), nnx.Param)[1])

    variables = nnx.split(nnx.eval_shape(lambda: Module(c, rngs=nnx.Rngs(0), dtype=stored)), nnx.Param)[1]
    dims = parameter_dims(variables)
    params = jax.eval_shape(new_params, jax.eval_shape(lambda: jax.random.key(0)))

    def shardings(what):
        table = rules(plan, what)
        return jax.tree.map(lambda d, v: sharding_for(d, v.shape, table, mesh), dims, params, is_leaf=transforms.is_dims)

    # ---- optimizer state, split like the parameters it belongs to
    tx = transforms.build(workload.optimizer, dims, topology.chip.kind, shardings("opt_state"))
    opt_state = jax.eval_shape(tx.init, params)
    dims_by_path = state_dims_module.flatten_dims(dims)
    known = {path: (v.shape, dims_by_path[path]) for path, v in state_dims_module.flatten(params).items()}
    opt_table = rules(plan, "opt_state")

    def opt_sharding(path, leaf):
        leaf_dims, _ = state_dims_module.state_dims(state_dims_module.names(path), leaf.shape, known)
        return sharding_for(leaf_dims, leaf.shape, opt_table, mesh)
    opt_shardings = jax.tree_util.tree_map_with_path(opt_sharding, opt_state)

    state_shardings = {"params": shardings("params"), "opt_state": opt_shardings, "step": whole}
    state = jax.tree.map(with_sharding, {"params": params, "opt_state": opt_state, "step": jax.ShapeDtypeStruct((), jnp.int32)},
                         state_shardings)
    batch = {name: jax.ShapeDtypeStruct((workload.batch, *shape), ARRAY_DTYPES[dtype], sharding=rows)
             for name, (shape, dtype) in workload.rows.items()}
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    hyper = {"lr": scalar, "clip": scalar}

    # ---- activations
    constrain_with = activation_layout(plan, workload, mesh)
    implementation = choose_attention(workload, plan, topology)
    ops = make_ops(workload, plan, mesh, implementation, remat)

    def model(params) -> model_module.Model:
        return nnx.merge(graph, pure_to_state(variables, params))

    def loss_sum(params, batch, ops):
        return model(params).loss_sum(batch, ops, compute, chunks=plan.loss_chunks)

    # ---- programs
    def init(seed):
        new = new_params(jax.random.key(seed))
        return {"params": new, "opt_state": tx.init(new), "step": jnp.int32(0)}

    def gradients(params, batch):
        """Mean loss and its gradients, split by the plan's gradient table."""
        table = shardings("gradients")
        grad = jax.value_and_grad(loss_sum)
        with dims_module.layout(constrain_with):
            if plan.accumulate == 1:
                total, grads = grad(params, batch, ops)
                grads = jax.lax.with_sharding_constraint(grads, table)
            else:
                # every device keeps its own rows: part i takes row i, i + parts, ... of each device's block
                parts = jax.tree.map(lambda x: x.reshape(-1, plan.accumulate, *x.shape[1:]).swapaxes(0, 1), batch)

                def add(carry, part):
                    total, grads = carry
                    part = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), part)
                    value, more = grad(params, part, ops)
                    with jax.named_scope("gradients"):
                        return (total + value, jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, grads, more), table)), None
                zero = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, params), table)
                (total, grads), _ = jax.lax.scan(add, (jnp.float32(0), zero), parts)
        with jax.named_scope("gradients"):
            n = Module.counted(batch)
            return total / n, jax.tree.map(lambda g: (g / n).astype(g.dtype), grads)

    def update(state, loss, grads, hyper):
        with jax.named_scope("optimizer"):
            norm = optax.global_norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
            scale = jnp.minimum(1.0, hyper["clip"] / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
            updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
            new = jax.tree.map(lambda p, u: (p + hyper["lr"] * u).astype(p.dtype), state["params"], updates)
            return {"params": new, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": loss, "grad_norm": norm}

    def train(state, batch, hyper):
        loss, grads = gradients(state["params"], batch)
        return update(state, loss, grads, hyper)

    def evaluate(params, batch):
        run_blocks = saving.run_layers(Remat(policy="none"), layers=c.layers, unroll=plan.layers == "unroll")
        plain = dataclasses.replace(ops, run_blocks=run_blocks)
        with dims_module.layout(constrain_with):
            return model(params).evaluate(batch, plain, compute, chunks=plan.loss_chunks)

    # on the abstract mesh: described GPUs list no memories, and a concrete sharding would silently fall back to the device's
    host = jax.tree.map(lambda s: NamedSharding(mesh.abstract_mesh, s.spec, memory_kind="pinned_host"), state_shardings)

    def save(state):
        """A copy of the state in pinned host memory, from where it is written."""
        return jax.tree.map(jax.device_put, state, host)

    metrics = {"loss": whole, "grad_norm": whole}
    make = functools.partial(make_program, mesh=mesh, shapes=known)
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=whole)
    table = {"init": make("init", init, (seed,), out_shardings=state_shardings)}
    if plan.step == "fused":
        table["train"] = make("train", train, (state, batch, hyper), out_shardings=(state_shardings, metrics), donate_argnums=(0,))
    else:
        grads = jax.tree.map(with_sharding, params, shardings("gradients"))
        table["gradients"] = make("gradients", gradients, (state["params"], batch), out_shardings=(whole, shardings("gradients")))
        table["update"] = make("update", update, (state, scalar, grads, hyper), out_shardings=(state_shardings, metrics),
                               donate_argnums=(0,))
    table["eval"] = make("eval", evaluate, (state["params"], batch), out_shardings=dict.fromkeys(Module.sums, whole))
    table["save"] = make("save", save, (state,), out_shardings=host)
    return Programs(programs=table, mesh=mesh, state=state, batch=batch, attention=implementation)


# ---------------------------------------------------------------- pieces

def parameter_dims(variables: nnx.State) -> Any:
    """Nested dict of dim names; parameters of the blocks are stacked along a leading `layers` dim."""
    def of(v):
        own = v.get_metadata()["dims"]
        return ("layers",) * (v.ndim - len(own)) + tuple(own)
    return nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(of(v)), variables, is_leaf=lambda v: isinstance(v, nnx.Variable)))


def pure_to_state(variables: nnx.State, params: Any) -> nnx.State:
    """The model's state with the arrays of the nested dict `params`."""
    leaves = jax.tree.leaves(params)
    structure = jax.tree.structure(variables)
    return jax.tree.unflatten(structure, leaves)


def activation_layout(plan: Plan, workload: Workload, mesh: Mesh) -> dims_module.Constrain:
    """`constrain_with(x, dims)` by the plan's table. Logits are split over the vocabulary, or over the sequence where the
    vocabulary does not divide, so that they are never replicated over `tensor`."""
    table: Table = rules(plan, "activations")
    table |= {"embed_state": rules(plan, "params").get("embed", ())}
    divides = workload.model.outputs % plan.tensor == 0
    table |= {"vocab_logits": ("tensor",)} if divides else {"seq_logits": ("tensor",)}

    def constrain_with(x, dims):
        return jax.lax.with_sharding_constraint(x, spec_for(dims, x.shape, table, mesh))
    return constrain_with


def choose_attention(workload: Workload, plan: Plan, topology: Topology) -> kernel_limits.Implementation:
    c = models.blocks(workload.model)
    if c is None:  # nothing attends, and nothing is called
        return "xla"
    shape: dict[str, Any] = dict(seq=workload.seq, head_dim=c.head_dim, heads=c.heads, kv_heads=c.kv_heads, window=c.window,
                                 softcap=c.attention_softcap, mask=models.mask(workload.model))
    if plan.attention == "auto" and topology.chip.name in WITHOUT_TRITON:
        return "xla"
    if plan.attention == "auto":
        return kernel_limits.choose(topology.chip.kind, **shape)
    if problems := kernel_limits.attention_problems(plan.attention, **shape):
        raise InputError("\n".join(problems))
    return plan.attention


def make_ops(workload: Workload, plan: Plan, mesh: Mesh, implementation: kernel_limits.Implementation, remat: Remat) -> Ops:
    c = models.blocks(workload.model)
    run_blocks = saving.run_layers(remat, layers=workload.model.layers, unroll=plan.layers == "unroll")
    batch_axes = tuple(a for a in BATCH_AXES if mesh.shape[a] > 1)
    head_axes = ("tensor",) if mesh.shape["tensor"] > 1 else ()

    def attend(window):
        one = attention.attention(implementation, mesh if math.prod(mesh.shape.values()) > 1 else None, batch_axes, head_axes,
                                  mask=models.mask(workload.model), window=window, softcap=c.attention_softcap if c else None)
        return saving.recomputed_attention(one) if remat.policy == "attention" else one
    return Ops(attend=attend(None), attend_local=attend(c.window) if c and c.window else None, run_blocks=run_blocks)


def make_program(name: str, fn: Callable, args: tuple, *, mesh: Mesh, shapes: dict, **jit_kwargs: Any) -> Program:
    outputs = jax.tree_util.tree_flatten_with_path(jit_kwargs["out_shardings"])[0]
    return Program(name=name, fn=fn, args=args, jit_kwargs=jit_kwargs, mesh=mesh,
                   labels=tuple(label(path, shapes) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]),
                   output_labels=tuple(label(path, shapes) for path, _ in outputs))


def label(path: tuple, shapes: dict) -> dict[str, str]:
    """`{"path", "kind", "module"}` of one argument or result, from its place in the tree."""
    names = state_dims_module.names(path)
    owner = next((names[i:] for i in range(len(names)) if names[i:] in shapes), None)
    if owner:
        kind = "opt_state" if "opt_state" in names else "gradients" if names[0] in ("1", "2") and "params" not in names else "params"
        return {"path": "/".join(names), "kind": kind, "module": "/".join(owner[:-1]) or owner[0]}
    kind = "batch" if names[-1] in BATCH_FIELDS else "opt_state" if "opt_state" in names else "other"
    return {"path": "/".join(names) or "output", "kind": kind, "module": "optimizer" if kind == "opt_state" else "input"}

"""The package's own classifiers of images, as methods see them: the model of a workload under a plan."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxmem import dims as dims_module
from jaxmem import step
from jaxmem.continual.classifier import Classifier, Params
from jaxmem.hardware import Topology
from jaxmem.models.configs import DecoderConfig, MlpConfig
from jaxmem.models.model import module_of
from jaxmem.plan import Plan, Remat
from jaxmem.rules import rules
from jaxmem.sharding import sharding_for
from jaxmem.spec import InputError
from jaxmem.workload import Workload


def is_dims(x: object) -> bool:
    return isinstance(x, tuple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """dims: names of each parameter's dims, which an optimizer is built from. shardings: abstract parameters -> shardings by the plan."""

    classifier: Classifier
    dims: Any
    shardings: Callable[[Params], Any]


def classifier_of(workload: Workload, plan: Plan, topology: Topology, mesh: Mesh) -> Placed:
    """The workload's model; its compute and parameter dtypes and its split are the plan's. Raises InputError for a model of text."""
    config = workload.model
    if isinstance(config, DecoderConfig):
        raise InputError(f"model {workload.model_name} reads text; tasks of classes take a classifier: mlp, mlp-mnist, vit-tiny, vit-mnist")
    if found := plan.problems(workload, topology):
        raise InputError("\n".join(found))
    module, compute, stored = module_of(config), step.DTYPES[plan.compute], step.DTYPES[plan.params]
    graph, variables = nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0), dtype=stored)), nnx.Param)[:2]
    dims = step.parameter_dims(variables)
    ops = step.make_ops(workload, plan, mesh, step.choose_attention(workload, plan, topology), Remat.parse(plan.remat))
    layout = step.activation_layout(plan, workload, mesh)

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.split(module(config, rngs=nnx.Rngs(key), dtype=stored), nnx.Param)[1])

    def logits(params: Params, inputs: jax.Array) -> jax.Array:
        model = nnx.merge(graph, step.pure_to_state(variables, params))
        with dims_module.layout(layout):
            found = model.logits(inputs, compute) if isinstance(config, MlpConfig) else model.logits(inputs, ops, compute)
            return found.astype(jnp.float32)

    def shardings(params: Params) -> Any:
        table = rules(plan, "params")
        return jax.tree.map(lambda names, x: sharding_for(names, x.shape, table, mesh), dims, params, is_leaf=is_dims)
    return Placed(classifier=Classifier(classes=config.classes, init=init, logits=logits), dims=dims, shardings=shardings)

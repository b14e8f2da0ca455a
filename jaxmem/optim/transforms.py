"""`OptimizerConfig` -> optax transformation with unit learning rate: the step multiplies its updates by the rate given at run time."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxmem.optim.configs import LEARNED_WEIGHTS, OptimizerConfig
from jaxmem.optim.learned import weights as learned_weights
from jaxmem.optim.learned.celo import scale_by_celo
from jaxmem.optim.learned.fused import Kernel
from jaxmem.optim.learned.nominal import scale_by_small_fc_nominal
from jaxmem.optim.learned.rule import CHUNK
from jaxmem.optim.learned.small_fc import scale_by_small_fc

Dims = dict  # nested like the parameters, each leaf a tuple of dim names
Kind = Literal["cpu", "tpu", "gpu"]

_MATRIX_INPUT = {"embed", "mlp", "heads", "kv_heads", "head_dim"}


def build(config: OptimizerConfig, dims: Dims, kind: Kind = "cpu", shardings: Any = None) -> optax.GradientTransformationExtraArgs:
    """The transformation for parameters whose dims are named by `dims`. Its updates are for learning rate 1 and already negative.
    `kind` of devices decides what is fast, and nothing else; `shardings`, nested like the parameters, says how their state is split
    (None: not)."""
    c = config
    moments = jnp.bfloat16 if c.moments == "bf16" else jnp.float32
    decays = jax.tree.map(lambda d: c.decay == "all" or is_matrix(d), dims, is_leaf=is_dims)
    nesterov = c.nesterov == "nesterov"
    match c.name:
        case "adamw":
            tx = optax.adamw(1.0, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=decays, mu_dtype=moments)
        case "lion":
            tx = optax.lion(1.0, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=decays, mu_dtype=moments)
        case "sgd":
            tx = optax.chain(optax.add_decayed_weights(c.weight_decay, mask=decays) if c.weight_decay else optax.identity(),
                             optax.sgd(1.0, momentum=c.momentum, nesterov=nesterov, accumulator_dtype=moments))
        case "adafactor":
            tx = optax.adafactor(1.0, min_dim_size_to_factor=c.factored_above, decay_rate=c.decay_rate, eps=c.eps, momentum=c.momentum,
                                 dtype_momentum=moments, clipping_threshold=c.clip_update, weight_decay_rate=c.weight_decay or None,
                                 weight_decay_mask=decays)
        case "muon":
            tx = muon(1.0, ns_steps=c.newton_schulz_steps, beta=c.momentum, eps=c.eps, weight_decay=c.weight_decay,
                      weight_decay_mask=decays, mu_dtype=moments, nesterov=nesterov, adam_b1=c.b1, adam_b2=c.b2, consistent_rms=0.2,
                      muon_weight_dimension_numbers=jax.tree.map(matrix_of, dims, is_leaf=is_dims))
        case "learned":
            decay = optax.add_decayed_weights(c.weight_decay, mask=decays) if c.weight_decay else optax.identity()
            tx = optax.chain(learned(c, dims, kind, shardings), decay, optax.scale(-1.0))
    return standard_promotion(optax.with_extra_args_support(tx))


def learned(config: OptimizerConfig, dims: Dims, kind: Kind = "cpu", shardings: Any = None) -> optax.GradientTransformationExtraArgs:
    """The learned rule, its weights in its state. `init` makes those that come with jaxmem, or untrained ones. No program's text depends
    on what is in a user's file: there `init` makes NaN, until `with_trained_weights` puts the file's in their place."""
    make = {"small_fc": scale_by_small_fc, "small_fc_nominal": scale_by_small_fc_nominal, "celo": scale_by_celo}[config.rule]
    stacked = jax.tree.map(lambda d: d.count("layers"), dims, is_leaf=is_dims)
    chunk = CHUNK if config.chunk is None and kind == "cpu" else config.chunk
    split = {jax.tree_util.keystr(path): s for path, s in jax.tree_util.tree_flatten_with_path(shardings)[0]}
    kernel = Kernel(backend=kind, shardings=split) if config.kernel == "pallas" and kind != "cpu" else None

    def start() -> learned_weights.Weights:
        if config.weights not in (None, "shipped"):
            return {name: jnp.full(shape, jnp.nan, jnp.float32) for name, shape in LEARNED_WEIGHTS[config.rule].items()}
        if config.weights == "shipped" and (path := learned_weights.shipped(config.rule)) is not None:
            return learned_weights.load(path, config.rule)
        learned_weights.warn_untrained(config.rule)
        return learned_weights.initial(config.rule, jax.random.key(0))
    return learned_weights.carrying(
        lambda w: make(w, stacked=stacked, moments=config.moments, chunk=chunk, fenced=kind == "gpu", kernel=kernel), start)


def with_trained_weights(opt_state: optax.OptState, config: OptimizerConfig) -> optax.OptState:
    """A new run's state with the numbers of `config.weights`; the same state where that is no file. A restored state has them already.
    Raises InputError for a file that does not fit."""
    if config.name != "learned" or config.weights in (None, "shipped"):
        return opt_state
    return learned_weights.placed(opt_state, learned_weights.load(config.weights, config.rule))


def standard_promotion(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Optax mixes Python floats with integer counters, which a caller's strict promotion would refuse."""
    def init(params: optax.Params) -> optax.OptState:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return tx.init(params)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object) -> tuple:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return tx.update(updates, state, params, **extra)
    return optax.GradientTransformationExtraArgs(init, update)


def is_dims(x: object) -> bool:
    return isinstance(x, tuple)


def is_matrix(dims: tuple[str, ...]) -> bool:
    """Two or more dims besides the stack of layers, of which one is `embed`, pixels or classes: a weight, not a bias or a norm."""
    return len([d for d in dims if d != "layers"]) >= 2 and not {"embed", "pixels", "vocab"}.isdisjoint(dims)


def matrix_of(dims: tuple[str, ...]) -> MuonDimensionNumbers | None:
    """What Muon orthogonalises: inputs are one side and outputs the other, layers a batch; embeddings, the matrix of the pixels, head
    and vectors go to Adam."""
    if not is_matrix(dims) or not {"vocab", "positions", "pixels"}.isdisjoint(dims):
        return None
    axes = [i for i, d in enumerate(dims) if d in _MATRIX_INPUT]
    embed = dims.index("embed")
    other = tuple(i for i in axes if i != embed)
    return MuonDimensionNumbers((embed,), other) if embed < other[0] else MuonDimensionNumbers(other, (embed,))

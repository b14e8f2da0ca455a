"""Shrink and perturb: the numbers, and that nothing moves between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.continual.shrink import made_like, shrink_and_perturb
from jaxmem.optim.transforms import standard_promotion
from jaxmem.spec import InputError

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
WHERE = {"w": NamedSharding(MESH, P("data", "tensor")), "b": NamedSharding(MESH, P("tensor")), "half": NamedSharding(MESH, P())}


def fresh(key):
    one, two, three = jax.random.split(key, 3)
    return {"w": jax.random.normal(one, (8, 6)), "b": jax.random.normal(two, (6,)), "half": jax.random.normal(three, (4,), jnp.bfloat16)}


def same_places(tree):
    return all(tree[name].sharding.is_equivalent_to(WHERE[name], tree[name].ndim) for name in WHERE)


def test_shrink_and_perturb():
    old, new = jax.device_put(fresh(jax.random.key(0)), WHERE), fresh(jax.random.key(1))
    found = shrink_and_perturb(old, new, shrink=0.4, perturb=0.1)
    assert same_places(found)
    for name in WHERE:
        wanted = 0.4 * np.asarray(old[name], np.float64) + 0.1 * np.asarray(new[name], np.float64)
        assert found[name].dtype == old[name].dtype and np.abs(wanted).max() > 0.2
        np.testing.assert_allclose(np.asarray(found[name], np.float64), wanted, rtol=2 ** -8 if name == "half" else 1e-6, atol=1e-6)


def test_the_ends_of_the_range():
    old, new = jax.device_put(fresh(jax.random.key(0)), WHERE), fresh(jax.random.key(1))
    kept, renewed = shrink_and_perturb(old, new, shrink=1, perturb=0), shrink_and_perturb(old, new, shrink=0, perturb=1)
    for name in WHERE:
        assert np.array_equal(kept[name], old[name]) and np.array_equal(renewed[name], new[name])


def test_moments_are_reset_where_they_lie():
    params = jax.device_put(fresh(jax.random.key(0)), WHERE)
    tx = standard_promotion(optax.with_extra_args_support(optax.adam(0.1)))
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    renewed = made_like(tx.init, state, params)
    assert np.asarray(state[0].mu["w"]).any() and state[0].count == 1
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(renewed))
    assert same_places(renewed[0].mu) and same_places(renewed[0].nu)


@pytest.mark.parametrize("shrink, perturb, says", [(1.5, 0.1, "shrink=1.5"), (-0.1, 0.1, "shrink=-0.1"), (0.5, -1, "perturb=-1")])
def test_what_is_refused(shrink, perturb, says):
    with pytest.raises(InputError, match=says):
        shrink_and_perturb({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, shrink=shrink, perturb=perturb)

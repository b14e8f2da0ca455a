"""Each epoch is a permutation of its own, whichever way it is made."""

import numpy as np
import pytest

from jaxmem.data import order
from jaxmem.data.order import shuffled

WAYS = pytest.mark.parametrize("few", [100, 2 ** 22], ids=["grain", "sort"])


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    monkeypatch.setattr(order, "FEW", request.getfixturevalue("few") if "few" in request.fixturenames else order.FEW)


@WAYS
@pytest.mark.parametrize("rows", [1, 2, 10, 257, 1000, 4097, 20_000, 65_536, 65_537])
def test_an_epoch_has_every_row_once(rows, few):
    row_at = shuffled(rows, seed=3)
    for epoch in (0, 5) if rows < 10_000 else (2,):
        found = [row_at(k) for k in range(epoch * rows, (epoch + 1) * rows)]
        assert {type(row) for row in found} == {int}
        np.testing.assert_array_equal(np.sort(found), np.arange(rows))


@WAYS
def test_seeds_and_epochs_have_orders_of_their_own(few):
    rows = 10_000
    beginnings = {(seed, epoch): tuple(shuffled(rows, seed)(epoch * rows + k) for k in range(100))
                  for seed in (0, 1, 2) for epoch in (0, 1, 2)}
    assert len(set(beginnings.values())) == 9
    # and little in common: of 100 places two orders share about 100 / rows
    flat = list(beginnings.values())
    assert max(sum(x == y for x, y in zip(a, b, strict=True)) for i, a in enumerate(flat) for b in flat[:i]) < 5
    assert tuple(shuffled(rows, 1)(k) for k in range(100)) == beginnings[1, 0]


@WAYS
def test_rows_are_spread_over_the_epoch(few):
    row_at = shuffled(10_000, seed=0)
    places = np.array([row_at(k) for k in range(1000)])
    assert np.histogram(places, 4, (0, 10_000))[0] == pytest.approx([250] * 4, abs=60)


def test_neighbours_of_few_rows_are_strangers():
    row_at = shuffled(10_000, seed=0)
    places = np.array([row_at(k) for k in range(10_000)])
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.03  # the standard deviation of chance is 0.01


@pytest.mark.parametrize("rows,first,second", [
    (10, [0, 4, 9, 7, 1], [0, 6, 2, 1, 3]),
    (2 ** 30, [889079000, 944469393, 631114554, 690715191, 68813646], [391520847, 393375598, 387196021, 389048660, 366099987]),
])
def test_the_order_is_the_same_on_every_machine_and_with_every_release(rows, first, second):
    row_at = shuffled(rows, seed=3)
    assert [row_at(k) for k in range(5)] == first and [row_at(rows + k) for k in range(5)] == second

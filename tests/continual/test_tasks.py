"""Sequences of tasks: who has which rows, and what was done to them."""

import numpy as np
import pytest

from jaxmem.continual import tasks
from jaxmem.spec import InputError


def rows(counts=(10, 20, 15, 5), shape=(4, 6, 1), seed=0):
    """Inputs whose first value says which row they are."""
    labels = np.repeat(np.arange(len(counts)), counts)
    inputs = np.random.default_rng(seed).uniform(size=(len(labels), *shape)).astype(np.float32)
    inputs.reshape(len(labels), -1)[:, 0] = np.arange(len(labels))
    return inputs, labels


def ids(labelled):
    return labelled[0].reshape(len(labelled[0]), -1)[:, 0].astype(int).tolist()


def test_every_class_gives_its_share_to_the_test():
    train, test = tasks.split(*rows(), held_out=0.2, seed=3)
    assert np.bincount(test[1]).tolist() == [2, 4, 3, 1] and np.bincount(train[1]).tolist() == [8, 16, 12, 4]
    assert sorted(ids(train) + ids(test)) == list(range(50))
    labels = rows()[1]
    for part in (train, test):
        assert part[1].tolist() == labels[ids(part)].tolist()  # rows kept their labels
        assert ids(part) != sorted(ids(part))  # and are not by class
    assert ids(tasks.split(*rows(), seed=3)[1]) == ids(test)
    assert sorted(ids(test)) != sorted(ids(tasks.split(*rows(), seed=4)[1]))  # other rows, not the same in another order


def test_a_class_too_small_to_split_is_refused():
    with pytest.raises(InputError, match="class 1 has 1 rows"):
        tasks.split(*rows((10, 1)))
    with pytest.raises(InputError, match="held_out=1"):
        tasks.split(*rows(), held_out=1)


def test_class_incremental_tasks_part_the_rows():
    train, test = tasks.split(*rows())
    first, second = tasks.sequence("0+2|3", train, test)
    assert (first.name, first.classes, second.classes) == ("0+2", (0, 2), (3,))
    assert set(first.train[1]) == set(first.test[1]) == {0, 2} and len(first.train[1]) == 20 and len(second.test[1]) == 1
    assert sorted(tasks.joined([first, second])[1].tolist()) == sorted([0] * 8 + [2] * 12 + [3] * 4)


@pytest.mark.parametrize("text, says", [("0+9", "no row has class 9; the data's are 0, 1, 2, 3"), ("0+1|1", "class 1 is in more than one"),
                                        ("0+x", "expected whole numbers joined by \\+, not '0\\+x'"), ("", "whole numbers"),
                                        ("permute:3", "did you mean permuted"), ("permuted:0", "at least 1"), ("rotated:", "numbers")])
def test_bad_texts(text, says):
    with pytest.raises(InputError, match=says):
        tasks.sequence(text, rows(), rows())


def test_permuted_tasks_have_one_order_each():
    train, test = rows(), rows(seed=1)
    found = tasks.sequence("permuted:3", train, test, seed=5)
    assert np.array_equal(found[0].train[0], train[0]) and [one.classes for one in found] == [(0, 1, 2, 3)] * 3
    for one in found[1:]:
        flat, given = one.train[0].reshape(50, -1), train[0].reshape(50, -1)
        order = [int(np.flatnonzero((given == column[:, None]).all(0))[0]) for column in flat.T]  # where each column came from
        assert sorted(order) == list(range(24)) and order != list(range(24))
        assert np.array_equal(one.test[0].reshape(50, -1), test[0].reshape(50, -1)[:, order])  # the test's rows in the same
    assert not np.array_equal(found[1].train[0], found[2].train[0])


def test_rotated_tasks():
    square = rows(shape=(5, 5, 2))
    none, quarter, half = tasks.sequence("rotated:0+90+180", square, square)
    assert np.array_equal(none.train[0], square[0]) and quarter.name == "90°"
    np.testing.assert_allclose(quarter.train[0], np.rot90(square[0], 1, axes=(1, 2)), atol=1e-4)  # counter-clockwise
    np.testing.assert_allclose(half.train[0], np.rot90(square[0], 2, axes=(1, 2)), atol=1e-4)
    with pytest.raises(InputError, match="expected images"):
        tasks.sequence("rotated:10", (np.zeros((4, 7)), np.zeros(4, int)), square)

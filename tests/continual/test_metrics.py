"""The numbers that follow from an accuracy matrix, worked out by hand."""

import numpy as np
import pytest

from jaxmem.continual import metrics

#          on task 0    1    2
MATRIX = [[0.90, 0.20, 0.10],
          [0.95, 0.80, 0.40],
          [0.60, 0.70, 0.75]]
BEFORE = [0.10, 0.15, 0.05]


def test_by_hand():
    assert metrics.average_accuracy(MATRIX) == pytest.approx((0.60 + 0.70 + 0.75) / 3)
    assert metrics.final_accuracy(MATRIX, [100, 100, 200]) == pytest.approx((60 + 70 + 150) / 400)
    # task 0 was best after task 1, 0.95; task 1 after its own turn, 0.80; the last one has had no time to be forgotten
    assert metrics.forgetting(MATRIX) == pytest.approx((0.35 + 0.10) / 2)
    assert metrics.backward_transfer(MATRIX) == pytest.approx((-0.30 - 0.10) / 2)
    # task 1 just before its turn 0.20, task 2 0.40
    assert metrics.forward_transfer(MATRIX, BEFORE) == pytest.approx((0.20 - 0.15 + 0.40 - 0.05) / 2)
    assert metrics.learning_accuracy(MATRIX) == pytest.approx((0.90 + 0.80 + 0.75) / 3)


def test_forgetting_may_be_negative():
    assert metrics.forgetting([[0.5, 0.0], [0.7, 0.9]]) == pytest.approx(-0.2)


def test_what_a_single_task_says_nothing_about_is_unknown():
    assert metrics.forgetting([[0.9]]) is metrics.backward_transfer([[0.9]]) is metrics.forward_transfer([[0.9]], [0.1]) is None
    assert metrics.average_accuracy([[0.9]]) == 0.9


@pytest.mark.parametrize("matrix", [[[0.1, 0.2]], np.zeros((0, 0)), [0.1]])
def test_a_matrix_that_is_none(matrix):
    with pytest.raises(ValueError, match="accuracy matrix"):
        metrics.average_accuracy(matrix)

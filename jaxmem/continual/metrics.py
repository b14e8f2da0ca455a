"""Accuracy over a sequence of tasks, and what follows from it.

The accuracy matrix A [tasks, tasks] in 0..1: row i is after training on task i, column j is task j's test rows. T is the number of tasks.
"""

from collections.abc import Sequence

import numpy as np

Matrix = Sequence[Sequence[float]] | np.ndarray


def final_accuracy(matrix: Matrix, test_rows: Sequence[int]) -> float:
    """Of all test rows together, after the last task."""
    return float(np.average(_square(matrix)[-1], weights=test_rows))


def average_accuracy(matrix: Matrix) -> float:
    """Mean over tasks after the last one (Lopez-Paz and Ranzato, arXiv 1706.08840, eq. 2)."""
    return float(_square(matrix)[-1].mean())


def forgetting(matrix: Matrix) -> float | None:
    """How far each earlier task fell from its best, in the mean (Chaudhry et al., arXiv 1801.10112); None for a single task."""
    a = _square(matrix)
    return float(np.mean([a[j:-1, j].max() - a[-1, j] for j in range(len(a) - 1)])) if len(a) > 1 else None


def backward_transfer(matrix: Matrix) -> float | None:
    """How much later tasks changed the earlier ones, in the mean (arXiv 1706.08840, eq. 3); None for a single task."""
    a = _square(matrix)
    return float(np.mean([a[-1, j] - a[j, j] for j in range(len(a) - 1)])) if len(a) > 1 else None


def forward_transfer(matrix: Matrix, before: Sequence[float] | np.ndarray) -> float | None:
    """How much better than untrained each task is before its turn, in the mean (arXiv 1706.08840, eq. 4); None for a single task.

    `before` [T]: accuracy of the untrained model. With classes that come one task at a time it is about minus that accuracy: no model
    names a class that it never saw. It says something where the classes stay.
    """
    a = _square(matrix)
    return float(np.mean([a[j - 1, j] - before[j] for j in range(1, len(a))])) if len(a) > 1 else None


def learning_accuracy(matrix: Matrix) -> float:
    """Each task right after its own turn, in the mean: how well new things are learned."""
    return float(np.diagonal(_square(matrix)).mean())


def _square(matrix: Matrix) -> np.ndarray:
    a = np.asarray(matrix, np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not len(a):
        raise ValueError(f"expected an accuracy matrix [tasks, tasks], not {a.shape}")
    return a

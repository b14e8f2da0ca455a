"""A softmax regression in float64 NumPy, written from the formulas: loss, gradients, Fisher information, and the data it is tried on."""

import numpy as np

INPUTS, CLASSES = 6, 4


def problem(rows=48, seed=0):
    """f32 [rows, 6] with a mean for each class, and labels, as many of each class; far from separable."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % CLASSES
    centres = rng.normal(size=(CLASSES, INPUTS))
    return (centres[labels] + rng.normal(size=(rows, INPUTS))).astype(np.float32), labels.astype(np.int32)


def logits(w, b, x):
    return np.asarray(x, np.float64) @ w + b


def probabilities(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def entropy_slope(z, labels):
    """d(cross-entropy of each row)/d(its logits)."""
    return probabilities(z) - np.eye(z.shape[-1])[labels]


def back(x, slopes):
    """The gradients of w and b from slopes [rows, classes] that already hold each row's share of the loss."""
    return np.asarray(x, np.float64).T @ slopes, slopes.sum(0)


def fisher(w, b, x):
    """Exact: d log p_y / d w_ik = x_i (1[y = k] - p_k), and E_y of its square is x_i^2 p_k (1 - p_k)."""
    x = np.asarray(x, np.float64)
    p = probabilities(logits(w, b, x))
    return (x ** 2).T @ (p * (1 - p)) / len(x), (p * (1 - p)).mean(0)


def empirical_fisher(w, b, x, labels):
    slopes = entropy_slope(logits(w, b, x), labels)
    return (np.asarray(x, np.float64) ** 2).T @ slopes ** 2 / len(x), (slopes ** 2).mean(0)

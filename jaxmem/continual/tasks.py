"""Sequences of classification tasks made from one labelled data set.

Class-incremental: each task brings new classes. Domain-incremental: the classes stay and the inputs change, by a permutation of the
input values or a rotation of the images. The kinds of scenario are those of van de Ven and Tolias (arXiv 1904.07734).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxmem import spec
from jaxmem.spec import InputError

Labelled = tuple[np.ndarray, np.ndarray]  # inputs [rows, ...], int32 labels [rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on for a while, and what is then asked. `classes` are those that its rows have, ascending."""

    name: str
    classes: tuple[int, ...]
    train: Labelled
    test: Labelled


def sequence(text: str, train: Labelled, test: Labelled, *, seed: int = 0) -> list[Task]:
    """`0+1|2+3|4`: classes by task; `permuted:5`: five tasks; `rotated:0+30+60`: a task an angle, in degrees. Raises InputError."""
    kind, numbers = parse(text)
    if kind == "permuted":
        return permuted(train, test, tasks=numbers[0], seed=seed)
    return rotated(train, test, degrees=numbers) if kind == "rotated" else class_incremental(train, test, numbers)


def parse(text: str) -> tuple[str, list]:
    """The kind and its numbers: `("classes", [(0, 1), (2, 3)])`, `("permuted", [5])`, `("rotated", [0.0, 30.0])`. Raises InputError."""
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        return "classes", parse_groups(text)
    if kind == "permuted":
        numbers = _numbers(rest, int, text)
        if len(numbers) != 1:
            raise InputError(f"tasks {text!r}: expected one number of tasks, as in permuted:5")
        return kind, numbers
    if kind == "rotated":
        return kind, _numbers(rest, float, text)
    raise InputError(f"tasks {text!r}: unknown kind {kind!r}{spec.nearest(kind, ('permuted', 'rotated'))}; or classes, as in 0+1|2+3")


def parse_groups(text: str) -> list[tuple[int, ...]]:
    """`0+1|2+3` -> [(0, 1), (2, 3)]."""
    return [tuple(_numbers(group, int, text)) for group in text.split("|")]


def _numbers[N: (int, float)](text: str, kind: type[N], whole: str) -> list[N]:
    try:
        return [kind(part) for part in text.split("+")]
    except ValueError:
        raise InputError(f"tasks {whole!r}: expected {'whole numbers' if kind is int else 'numbers'} joined by +, not {text!r}") from None


def split(inputs: np.ndarray, labels: np.ndarray, *, held_out: float = 0.2, seed: int = 0) -> tuple[Labelled, Labelled]:
    """(train, test). Every class gives the same share of its rows to the test, so that tasks of as many classes are as long."""
    if not 0 < held_out < 1:
        raise InputError(f"held_out={held_out}: expected a share between 0 and 1")
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(labels), bool)
    for one in np.unique(labels):
        rows = np.flatnonzero(labels == one)
        count = round(len(rows) * held_out)
        if not 0 < count < len(rows):
            raise InputError(f"class {one} has {len(rows)} rows: too few to hold out {held_out:g} of them")
        chosen[rng.permutation(rows)[:count]] = True
    order = rng.permutation(len(labels))
    kept, out = order[~chosen[order]], order[chosen[order]]
    return (inputs[kept], labels[kept].astype(np.int32)), (inputs[out], labels[out].astype(np.int32))


def class_incremental(train: Labelled, test: Labelled, groups: Sequence[Sequence[int]]) -> list[Task]:
    """One task for each group of classes; labels stay as they are. Raises InputError for a class that is unknown, or in two groups."""
    known = np.unique(train[1]).tolist()
    given = [one for group in groups for one in group]
    for one in given:
        if one not in known:
            raise InputError(f"tasks: no row has class {one}; the data's are {', '.join(map(str, known))}")
        if given.count(one) > 1:
            raise InputError(f"tasks: class {one} is in more than one task")
    return [Task(name="+".join(map(str, group)), classes=tuple(sorted(group)), train=of_classes(train, group), test=of_classes(test, group))
            for group in groups]


def of_classes(rows: Labelled, classes: Sequence[int]) -> Labelled:
    kept = np.isin(rows[1], list(classes))
    return rows[0][kept], rows[1][kept]


def permuted(train: Labelled, test: Labelled, *, tasks: int, seed: int = 0) -> list[Task]:
    """The input values in another order in each task after the first, all rows of a task in one (Goodfellow et al., arXiv 1312.6211)."""
    if tasks < 1:
        raise InputError(f"permuted:{tasks}: expected at least 1 task")
    size = int(np.prod(train[0].shape[1:]))
    orders = [np.arange(size), *(np.random.default_rng([seed, i]).permutation(size) for i in range(1, tasks))]

    def moved(rows: Labelled, order: np.ndarray) -> Labelled:
        return rows[0].reshape(len(rows[0]), size)[:, order].reshape(rows[0].shape), rows[1]
    return [Task(name=f"permutation {i}", classes=_classes(train), train=moved(train, order), test=moved(test, order))
            for i, order in enumerate(orders)]


def rotated(train: Labelled, test: Labelled, *, degrees: Sequence[float]) -> list[Task]:
    """Images [rows, H, W, C] turned counter-clockwise about their centre, linear in between, zeros from outside."""
    from scipy import ndimage  # type: ignore[import-untyped]

    if train[0].ndim != 4:
        raise InputError(f"rotated: expected images [rows, height, width, channels], not rows of shape {train[0].shape[1:]}")

    def turned(rows: Labelled, angle: float) -> Labelled:
        return ndimage.rotate(rows[0], angle, axes=(2, 1), reshape=False, order=1).astype(rows[0].dtype) if angle else rows[0], rows[1]
    return [Task(name=f"{angle:g}°", classes=_classes(train), train=turned(train, angle), test=turned(test, angle)) for angle in degrees]


def _classes(rows: Labelled) -> tuple[int, ...]:
    return tuple(np.unique(rows[1]).tolist())


def joined(tasks: Sequence[Task]) -> Labelled:
    """The training rows of all of them."""
    return np.concatenate([one.train[0] for one in tasks]), np.concatenate([one.train[1] for one in tasks])

"""Small real problems: those that learned optimizers are meta-trained on, and those that say what they are worth.

A task is a data set, split once and for all, and a multilayer perceptron without mesh or framework: parameters are one flat dict of
arrays and the loss is a function, so that `vmap` runs many of them in one program.

What is held out of what: none of the five networks of `HELD_OUT` is in `FAMILIES`, and two of them are larger than any there. Segment
and Milton are data that no family has. The three MNIST tasks are images that family mnist8 also has, but MNIST is split alike at every
size, so no test image of theirs is a training or validation image anywhere.

D features, C classes, N rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.data import images, tables
from jaxmem.data.corpora import find_corpus
from jaxmem.spec import InputError, nearest

Params = dict[str, jax.Array]
Rows = tuple[np.ndarray, np.ndarray]  # f32 [N, D] or, of text, int32 [N, characters]; int32 [N]

TENTHS = (7, 8)  # of the rows: where train ends and where valid ends; the rest is test
ALPHABET = " abcdefghijklmnopqrstuvwxyz.,"
BLOCK = 1000  # characters that stay together when text is split
BLOCKS = 300  # of a text, at most


class Parts(NamedTuple):
    train: Rows
    valid: Rows
    test: Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """`widths` of the perceptron, inputs first and classes last. Text goes in as characters, `alphabet` of them: each as a one-hot
    vector, or, with an `embedding`, as a learned vector of that many numbers; `widths[0]` counts all of them together."""

    name: str
    train: Rows
    valid: Rows
    test: Rows
    widths: tuple[int, ...]
    alphabet: int | None = None
    embedding: int | None = None

    @property
    def parameters(self) -> int:
        embedded = (self.alphabet or 0) * (self.embedding or 0)
        return embedded + sum((a + 1) * b for a, b in zip(self.widths, self.widths[1:], strict=False))

    def init(self, key: jax.Array) -> Params:
        """Weights `w0 b0 w1 b1 ...`, matrices (in, out): normals of deviation 1 / sqrt(in), zero biases; `embed` (alphabet, embedding) of
        deviation 1."""
        keys = jax.random.split(key, len(self.widths))
        params = {}
        for i, (a, b) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            params[f"w{i}"] = jax.random.normal(keys[i], (a, b), jnp.float32) / np.float32(np.sqrt(a))
            params[f"b{i}"] = jnp.zeros((b,), jnp.float32)
        if self.alphabet and self.embedding:
            params["embed"] = jax.random.normal(keys[-1], (self.alphabet, self.embedding), jnp.float32)
        return params

    def logits(self, params: Params, inputs: jax.Array) -> jax.Array:
        """[N, D] -> f32 [N, C], ReLU between the layers."""
        x = inputs
        if self.alphabet:
            x = params["embed"][x] if self.embedding else jax.nn.one_hot(x, self.alphabet, dtype=jnp.float32)
            x = x.reshape(x.shape[0], -1)
        for i in range(len(self.widths) - 1):
            x = x @ params[f"w{i}"] + params[f"b{i}"][None]
            x = jax.nn.relu(x) if i < len(self.widths) - 2 else x
        return x

    def loss(self, params: Params, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        """f32 []: mean cross-entropy in nats."""
        return optax.softmax_cross_entropy_with_integer_labels(self.logits(params, inputs), labels).mean()

    def accuracy(self, params: Params, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        """f32 []: part of the rows whose largest logit is the label's."""
        return (self.logits(params, inputs).argmax(-1) == labels).mean(dtype=jnp.float32)


# ---------------------------------------------------------------- data

def split(rows: int) -> list[np.ndarray]:
    """Row numbers of train, valid and test: a shuffle that depends on the number of rows alone (NumPy keeps this stream for good)."""
    order = np.random.RandomState(0).permutation(rows)
    return np.split(order, [rows * end // 10 for end in TENTHS])


def dealt(inputs: np.ndarray, labels: np.ndarray) -> Parts:
    return Parts(*((inputs[part], labels[part]) for part in split(len(labels))))


def distinct(inputs: np.ndarray, labels: np.ndarray) -> Rows:
    """The rows in their order, each once: a repeated one would stand in training and test (segment repeats 224)."""
    kept = np.sort(np.unique(inputs, axis=0, return_index=True)[1])
    return inputs[kept], labels[kept]


def standardised(found: tables.Table) -> Parts:
    """Each feature with the mean and deviation of its training rows taken out."""
    inputs, labels = found
    own = inputs[split(len(labels))[0]].astype(np.float64)
    return dealt(((inputs - own.mean(0)) / np.maximum(own.std(0), 1e-6)).astype(np.float32), labels)


def resized(pictures: np.ndarray, size: int) -> np.ndarray:
    """[N, H, H, 1] -> f32 [N, size * size]: every new pixel is the mean over the area it covers."""
    old = pictures.shape[1]
    edges = np.arange(size + 1) * old / size
    pixels = np.arange(old)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)  # [size, H], of each old pixel
    area = (np.clip(covered, 0, None) * size / old).astype(np.float32)
    return np.einsum("ah,nhw,bw->nab", area, pictures[..., 0], area, optimize=True).reshape(len(pictures), -1)


def characters(raw: bytes) -> np.ndarray:
    """int32 [characters]: letters in lower case, full stops and commas; whatever else stands between them is one space."""
    places = np.full(256, 0, np.int32)
    for i, one in enumerate(ALPHABET):
        places[ord(one)] = places[ord(one.upper())] = i
    found = places[np.frombuffer(raw, np.uint8)]
    return found[(found != 0) | (np.roll(found, 1) != 0)]


def windows(text: str, context: int) -> Parts:
    """`context` characters and the one that follows, for each place of each block of a text. Blocks are dealt to train, valid and test
    whole, so that no row of one overlaps a row of another."""
    found = characters(b" ".join(content for _, content in find_corpus(text).documents()))
    blocks = found[:len(found) // BLOCK * BLOCK].reshape(-1, BLOCK)
    blocks = blocks[np.random.RandomState(0).permutation(len(blocks))[:BLOCKS]]
    own = [np.lib.stride_tricks.sliding_window_view(blocks[part], context + 1, axis=1) for part in split(len(blocks))]
    return Parts(*((rows[..., :-1].reshape(-1, context), rows[..., -1].reshape(-1)) for rows in own))


def perceptron(name: str, widths: tuple[int, ...], parts: Parts, alphabet: int | None = None, embedding: int | None = None) -> Task:
    return Task(name=name, widths=widths, train=parts.train, valid=parts.valid, test=parts.test, alphabet=alphabet, embedding=embedding)


def mnist(name: str, size: int, *hidden: int) -> Task:
    pictures, labels = images.mnist5k()
    return perceptron(name, (size * size, *hidden, 10), dealt(resized(pictures, size), labels))


def digits(name: str, *hidden: int) -> Task:
    pictures, labels = images.digits()
    return perceptron(name, (64, *hidden, 10), dealt(resized(pictures, 8), labels))


def turned(name: str, *hidden: int) -> Task:
    """By how many quarters a digit was turned: four rows of each image, which stay together."""
    def four(upright: np.ndarray) -> Rows:
        rows = [resized(np.rot90(upright, turns, axes=(1, 2)), 8) for turns in range(4)]
        return np.concatenate(rows), np.repeat(np.arange(4, dtype=np.int32), len(upright))
    return perceptron(name, (64, *hidden, 4), Parts(*(four(pictures) for pictures, _ in dealt(*images.digits()))))


def table(name: str, found: Callable[[], tables.Table], *hidden: int) -> Task:
    inputs, labels = distinct(*found())
    return perceptron(name, (inputs.shape[1], *hidden, int(labels.max()) + 1), standardised((inputs, labels)))


def text(name: str, source: str, context: int, *hidden: int, embedding: int | None = None) -> Task:
    symbols = len(ALPHABET)
    return perceptron(name, (context * (embedding or symbols), *hidden, symbols), windows(source, context), symbols, embedding)


# ---------------------------------------------------------------- which there are

def once(make: Callable[..., Task], name: str, *more: object, **options: object) -> tuple[str, Callable[[], Task]]:
    """A task that is made when it is first asked for."""
    return name, functools.cache(functools.partial(make, name, *more, **options))


FAMILIES: dict[str, Callable[[], Task]] = dict((
    once(digits, "digits", 16),
    once(mnist, "mnist8", 8, 16),
    once(text, "shakespeare3", "shakespeare", 3, 32),
    once(table, "breast_cancer", tables.breast_cancer, 16),
    # beyond the four that meta-training begins with
    once(digits, "digits_deep", 24, 24),
    once(turned, "digits_turned", 24),
    once(table, "wine", tables.wine, 16),
    once(text, "pydoc4", "pydoc", 4, 48, embedding=8),
    once(text, "shakespeare5", "shakespeare", 5, 24, 24, embedding=8),
    once(text, "python3", "python", 3, 32),
))
FIRST_FAMILIES = ("digits", "mnist8", "shakespeare3", "breast_cancer")
HELD_OUT: dict[str, Callable[[], Task]] = dict((
    once(mnist, "mnist8_deep", 8, 32, 32),
    once(mnist, "mnist14", 14, 64),
    once(mnist, "mnist28", 28, 128),
    once(table, "segment", tables.segment, 32),
    once(text, "milton4", "milton", 4, 64),
))


def find(name: str) -> Task:
    """Raises InputError for an unknown name, and for a data set whose package is not installed."""
    known = FAMILIES | HELD_OUT
    if name not in known:
        raise InputError(f"no task is called {name!r}{nearest(name, known)}")
    return known[name]()

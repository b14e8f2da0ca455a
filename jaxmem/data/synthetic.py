"""A language that can be learned exactly: a fixed Markov chain over the vocabulary, with a known entropy.

Tokens stand on a ring in a random order. After each comes, with probabilities 1/2, 1/4, 1/8 and 1/8, the one at one of four fixed
distances. So a model that has learned the chain has a loss of 1.75 bits, 1.2130 nats, a token, and no model has less; one that
knows nothing has log(vocabulary). A row is a sum along the ring: no loop over tokens.

S sequence, V vocabulary.
"""

import functools
import math

import numpy as np

from jaxmem.data.rows import Data, Row, Split, fingerprint, text_fields
from jaxmem.spec import InputError

CHOICES = np.array([0, 0, 0, 0, 1, 1, 2, 3])
ENTROPY_NATS = 1.75 * math.log(2)
ROWS = {"train": 2 ** 30, "eval": 2 ** 10}  # the shuffle counts rows in 32 bits
SMALLEST_VOCAB = 8


def open_synthetic(*, seq: int, vocab: int, split: Split) -> Data:
    """Rows of one document each; no row of one split is a row of the other."""
    if vocab < SMALLEST_VOCAB:
        raise InputError(f"synthetic data needs a vocabulary of {SMALLEST_VOCAB} tokens or more, and the model has vocab={vocab}")
    ring, distances = chain(vocab)
    return Data(name="synthetic", kind="synthetic", rows=ROWS[split], fields=text_fields(seq),
                fingerprint=fingerprint({"synthetic": 1, "seq": seq, "vocab": vocab, "split": split}),
                row=functools.partial(_row, ring, distances, seq, split),
                described=f"synthetic: a random Markov chain over {vocab} tokens, {ROWS[split]} rows of {seq}; "
                          f"the lowest loss is {ENTROPY_NATS:.4f} nats a token")


def chain(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(the token at each place of the ring [V], the four distances in order of their probability)."""
    # raw bits and a sort: their stream is fixed for good, that of numpy's permutations is not
    ring = np.argsort(np.random.PCG64(0).random_raw(vocab), kind="stable").astype(np.int32)
    return ring, np.argsort(np.random.PCG64(1).random_raw(vocab), kind="stable")[:4]


def _row(ring: np.ndarray, distances: np.ndarray, seq: int, split: Split, row: int) -> Row:
    if not 0 <= row < ROWS[split]:
        raise IndexError(f"row {row} of {ROWS[split]}")
    raw = np.random.PCG64([row, 0 if split == "train" else 1]).random_raw(seq + 1)
    moves = distances[CHOICES[raw >> np.uint64(61)]]
    moves[0] = raw[0] % np.uint64(len(ring))
    tokens = ring[np.cumsum(moves) % len(ring)]
    return {"tokens": tokens[:-1], "targets": tokens[1:], "segment_ids": np.ones(seq, np.int32),
            "positions": np.arange(seq, dtype=np.int32)}

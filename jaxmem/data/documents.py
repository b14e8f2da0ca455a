"""Documents as one array of tokens, and the choice of those that are held out for evaluation."""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

HELD_OUT = 1 / 20  # of the tokens, or of the images


@dataclass(frozen=True)
class Documents:
    """Document d is tokens[offsets[d]:offsets[d + 1]]; `tokens` uint16 or uint32, `offsets` int64 [documents + 1]. None is empty."""

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    def only(self, chosen: np.ndarray) -> "Documents":
        """Those where `chosen` (bool [documents]) is true, in their order."""
        sizes = np.diff(self.offsets)
        return Documents(self.tokens[np.repeat(chosen, sizes)], np.concatenate([[0], np.cumsum(sizes[chosen])]))


def join(documents: Iterable[np.ndarray], *, wide: bool) -> Documents:
    """Documents one after another; empty ones are left out. `wide`: a token may be 65536 or more. Two or four bytes a token."""
    tokens, offsets = array("I" if wide else "H"), array("q", [0])
    dtype = np.dtype(np.uint32 if wide else np.uint16)
    for document in documents:
        if len(document):
            tokens.frombytes(np.ascontiguousarray(document, dtype).view(np.uint8).data)
            offsets.append(len(tokens))
    return Documents(np.frombuffer(tokens, dtype), np.frombuffer(offsets, np.int64))


def digest(content: np.ndarray) -> int:
    """64 bits of a hash of the content."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(content).view(np.uint8).data, digest_size=8).digest(), "little")


def held_out(digests: np.ndarray, sizes: np.ndarray, budget: int) -> np.ndarray:
    """bool [items]: items of `budget` in total at most, chosen by their content alone, so that neither their order nor their names
    matter, and equal items are on the same side."""
    order = np.argsort(digests, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(digests[order]) != 0])
    used, chosen = 0, np.zeros(len(sizes), bool)
    for start, stop in zip(starts, np.r_[starts[1:], len(order)], strict=True):
        equal = order[start:stop]
        if used + sizes[equal].sum() <= budget:
            used += int(sizes[equal].sum())
            chosen[equal] = True
        if used > 0.95 * budget:
            break
    return chosen


def split_documents(documents: Documents, *, at_least: int) -> dict[str, Documents]:
    """`{"train", "eval"}`: whole documents of about a twentieth of the tokens, and of `at_least` tokens where half of all allows it,
    are held out. Where whole documents do not come near it, the tail of the longest (and of its copies) is, too."""
    sizes, offsets = np.diff(documents.offsets), documents.offsets
    total = len(documents.tokens)
    budget = max(int(total * HELD_OUT), min(at_least, total // 2))
    digests = np.array([digest(documents.tokens[a:b]) for a, b in zip(offsets[:-1], offsets[1:], strict=True)], np.uint64)
    chosen = held_out(digests, sizes, budget)
    missing = budget - int(sizes[chosen].sum())
    if missing > budget // 2:
        rest = np.where(chosen, 0, sizes)
        copies = np.flatnonzero(digests == digests[rest.argmax()])
        tail = min(max(missing // len(copies), 1), int(sizes[copies[0]]) - 1)
        if tail:
            # a boundary more in each: its head trains, and its tail is a document of its own
            offsets = np.insert(offsets, copies + 1, offsets[copies + 1] - tail)
            chosen = np.insert(chosen, copies + 1, True)
    whole = Documents(documents.tokens, offsets)
    return {"train": whole.only(~chosen), "eval": whole.only(chosen)}

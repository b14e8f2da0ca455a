"""Documents laid end to end and cut into rows.

A token's target is the next token of its document, also where the row ends between them; the last token of a document has none.
So every token but the first of each document is a target exactly once in an epoch, whatever the row's length.
The last row of an epoch ends in padding: it is not filled from the next epoch.

S sequence.
"""

import numpy as np

from jaxmem.data.documents import Documents
from jaxmem.data.rows import IGNORED, Row


def row_count(documents: Documents, seq: int) -> int:
    return -(-len(documents.tokens) // seq)


def pack(documents: Documents, seq: int, row: int) -> Row:
    """Row `row` of `row_count`: tokens, targets, segment_ids, positions, each int32 [S]. O(S + log documents).

    Segments count from 1; padding is segment 0 with token 0, position 0 and no target. Positions restart in each document and in
    each row, so that a learned table needs S of them.
    """
    if not 0 <= row < row_count(documents, seq):
        raise IndexError(f"row {row} of {row_count(documents, seq)}")
    tokens, offsets = documents.tokens, documents.offsets
    start = row * seq
    stop = min(start + seq, len(tokens))
    first = np.searchsorted(offsets, start, side="right") - 1
    last = np.searchsorted(offsets, stop, side="left")  # documents first .. last - 1 have a token in this row
    begins = np.maximum(offsets[first:last], start) - start
    ends = offsets[first + 1:last + 1] - start  # of the last one possibly past the row
    sizes = np.minimum(ends, stop - start) - begins

    out = {name: np.zeros(seq, np.int32) for name in ("tokens", "segment_ids", "positions")}
    out["targets"] = np.full(seq, IGNORED, np.int32)
    used = stop - start
    following = tokens[start + 1:stop + 1]
    out["tokens"][:used] = tokens[start:stop]
    out["targets"][:len(following)] = following
    out["targets"][ends[ends <= used] - 1] = IGNORED
    out["segment_ids"][:used] = np.repeat(np.arange(1, last - first + 1), sizes)
    out["positions"][:used] = np.arange(used) - np.repeat(begins, sizes)
    return out

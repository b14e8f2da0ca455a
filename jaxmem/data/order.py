"""The order of rows: one endless sequence of epochs, each a permutation of all rows of its own, with access to any place of it.

Up to `FEW` rows an epoch's permutation is made at once, from a sort of random numbers, and held. Beyond that grain's shuffle finds
the row at a place without holding anything. It is not used for fewer, for (grain 0.2.18)
* it walks through a range of 2^16 numbers or more until it meets one that is a row: 12 us a row for a million rows, 50 for a
  thousand, 2600 for ten;
* its four rounds leave neighbours near each other;
* where rows - 1 is a power of four, one row comes twice and the last one never.
"""

import functools
from collections.abc import Callable

import numpy as np

from jaxmem.spec import InputError

FEW = 2 ** 22  # half a second and 32 MiB an epoch
LIMIT = 2 ** 32  # grain counts rows in 32 bits


def shuffled(rows: int, seed: int) -> Callable[[int], int]:
    """A function from a place k >= 0 of the sequence to a row, 0 <= row < `rows`. Places e * rows ... (e + 1) * rows - 1 are epoch e.
    Any thread may call it."""
    if not 0 <= seed < LIMIT:
        raise InputError(f"seed={seed}: the data's shuffle takes 0 to {LIMIT - 1}")
    if rows >= LIMIT:
        raise InputError(f"the data has {rows} rows, and its shuffle takes fewer than {LIMIT}")
    if rows > FEW and (rows - 1) & (rows - 2):
        import grain  # defines absl flags when imported

        endless = grain.MapDataset.range(rows).seed(seed).shuffle().repeat()
        endless[0]  # grain sets itself up at the first use, which must not be in two threads
        return endless.__getitem__

    @functools.lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        # raw bits and a sort: their stream is fixed for good, that of numpy's permutations is not
        return np.argsort(np.random.PCG64([seed, epoch]).random_raw(rows), kind="stable")

    def row_at(k: int) -> int:
        epoch, place = divmod(k, rows)
        return int(permutation(epoch)[place])
    return row_at

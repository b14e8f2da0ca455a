"""Global batches in a fixed order, read ahead and put on the devices of this process.

The order is one endless sequence of rows: epoch after epoch, each a shuffle of all rows. Batch p is rows p * batch ... p * batch +
batch - 1 of it. So a position says everything, and depends on the data, the batch and the seed alone: another mesh or another number
of processes goes on with the same batches. Each process reads the rows that its own devices hold, each of them once.

B batch.
"""

import bisect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmem.data.order import shuffled
from jaxmem.data.rows import Data, Row
from jaxmem.spec import InputError, nearest

Index = tuple[slice, ...]  # a device's part of a global array, [B, ...]
Parts = Mapping[str, Collection[Index]]  # field -> the different parts that some devices hold
Held = dict[str, dict[Index, np.ndarray]]  # their content


class Batches:
    """Iterates `(position, {field: jax.Array [B, ...]})` from `start` on, for ever. Close it (or use `with`): it has a thread.

    `shardings` names the fields that are wanted. `skip` has position ranges, both ends included, that are left out. Up to `prefetch`
    batches beyond the one that was taken last are read and placed ahead, by one thread: rows come from memory, and a second thread would
    only share the interpreter with it. 0 reads each when it is asked for.
    """

    def __init__(self, data: Data, *, batch: int, seed: int, shardings: Mapping[str, Sharding], start: int = 0,
                 skip: Sequence[tuple[int, int]] = (), prefetch: int = 2):
        import grain  # defines absl flags when imported

        self.data, self.batch = data, batch
        self._shardings = dict(shardings)
        self._parts = addressable(data, batch, shardings)
        self._row_at = data.order(seed) if data.order else shuffled(data.rows, seed)
        self._thread: threading.Thread | None = None
        self._closed = False
        skip = sorted(skip)
        positions = grain.MapDataset.range(sys.maxsize).map(lambda i: kept_position(i, start, skip))
        self._batches = iter(positions.map(self._read).to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))

    def __iter__(self) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        return self

    def __next__(self) -> tuple[int, dict[str, jax.Array]]:
        if self._closed:
            raise StopIteration
        return next(self._batches)

    def epoch_of(self, position: int) -> int:
        """The epoch, from 0, of the batch's first row."""
        return position * self.batch // self.data.rows

    def row_numbers(self, position: int) -> list[int]:
        """Which rows of the data make up a batch, in order."""
        return [self._row_at(k) for k in range(position * self.batch, (position + 1) * self.batch)]

    def global_rows(self, position: int) -> dict[str, np.ndarray]:
        """The whole batch in this process' memory, {field: [B, ...]}."""
        rows = [self.data.row(number) for number in self.row_numbers(position)]
        return {name: np.stack([row[name] for row in rows]) for name in self._shardings}

    def parts_of(self, position: int, parts: Parts) -> Held:
        """Parts of a batch, in this process' memory; a row is read once, and none that is in no part."""
        return read_parts(lambda row: self.data.row(self._row_at(position * self.batch + row)), parts, self.batch)

    def close(self) -> None:
        """Ends the thread, and waits for that. Iteration is over then."""
        if not self._closed:
            self._closed = True
            self._batches.close()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()  # grain asks it to end, and does not wait

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, position: int) -> tuple[int, dict[str, jax.Array]]:
        self._thread = threading.current_thread()
        return position, place(self.data, self.batch, self._shardings, self.parts_of(position, self._parts))


def eval_batches(data: Data, batch: int, shardings: Mapping[str, Sharding], limit: int | None = None) -> Iterator[dict[str, jax.Array]]:
    """Every row once, in order, as {field: jax.Array [B, ...]}; `limit` batches at most. The last is filled up with rows without
    targets."""
    parts = addressable(data, batch, shardings)
    count = -(-data.rows // batch)
    for position in range(count if limit is None else min(limit, count)):
        def read(row: int, first: int = position * batch) -> Row:
            return data.row(first + row) if first + row < data.rows else data.empty_row()
        yield place(data, batch, shardings, read_parts(read, parts, batch))


def kept_position(i: int, start: int, skip: Sequence[tuple[int, int]]) -> int:
    """The i-th position from `start` on that no range of `skip` (sorted, ends included) holds."""
    position, free = start + i, start  # `free`: below it everything is accounted for
    for first, last in skip:
        first = max(first, free)
        if position < first:
            break
        if last >= first:
            position += last - first + 1
            free = last + 1
    return position


# ---------------------------------------------------------------- from rows to devices

def addressable(data: Data, batch: int, shardings: Mapping[str, Sharding]) -> Parts:
    """What the devices of this process hold. Raises InputError for a field that the data does not have."""
    if batch < 1:
        raise InputError(f"batch={batch}: a batch has one row or more")
    for name in shardings:
        if name not in data.fields:
            raise InputError(f"the program takes {name!r}, and {data.name} has {', '.join(data.fields)}{nearest(name, data.fields)}")
    shapes = {name: (batch, *data.fields[name][0]) for name in shardings}
    return {name: {index for index in sharding.addressable_devices_indices_map(shapes[name]).values() if index is not None}
            for name, sharding in shardings.items()}


def read_parts(read: Callable[[int], Row], parts: Parts, batch: int) -> Held:
    """The parts, from `read`: a function from row of the batch to row. It is called once for each row that a part has."""
    wanted = sorted({row for places in parts.values() for index in places for row in range(*index[0].indices(batch))})
    rows = [read(row) for row in wanted]
    out: Held = {}
    for name, places in parts.items():
        out[name] = {}
        for index in places:
            first, last, _ = index[0].indices(batch)
            held = slice(bisect.bisect_left(wanted, first), bisect.bisect_left(wanted, last))  # all rows between are there
            out[name][index] = np.stack([row[name] for row in rows[held]])[(slice(None), *index[1:])]
    return out


def place(data: Data, batch: int, shardings: Mapping[str, Sharding], held: Held) -> dict[str, jax.Array]:
    """Global arrays from the parts of this process; no process waits for another."""
    out: dict[str, jax.Array] = {}
    for name, sharding in shardings.items():
        shape, dtype = data.fields[name]
        part = held[name].__getitem__
        out[name] = jax.make_array_from_callback((batch, *shape), sharding, part, dtype=dtype)  # type: ignore[arg-type]
    return out

"""Several sources of data in one stream, each with an exact share of the rows: replay of old data while new data is learned, or a blend.

    text:python=0.75+text:shakespeare=0.25      two sources, by `+`
    text:python+text:shakespeare=1/20           sources without a share divide what the others leave
    text:python=1+text:shakespeare=0            a share of 0 is evaluated and never trained on

Which source a place of the endless sequence of rows belongs to is a function of the place and the seed alone, as everything about the
order of rows is: a resume needs a position and nothing else, on any mesh. A block of places has each source's share exactly, spread so
evenly that among the first m places of the stream no source is further from its share of m than the number of sources, plus one.
Each source's rows come in the order in which that source alone would give them.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from jaxmem.data.order import shuffled
from jaxmem.data.rows import Data, Split, fingerprint
from jaxmem.spec import InputError

KINDS = ("text:", "images:", "synthetic")
BETWEEN = re.compile(r"\+(?=\s*(?:" + "|".join(KINDS) + "))")
SHARE = re.compile(r"(?P<source>.*)=(?P<share>[0-9]+/[0-9]+|[0-9]*\.?[0-9]+)\s*")
PLACES = 1024  # of a block, at least
FINEST = 100_000  # of a block, at most


def is_mixture(text: str) -> bool:
    return BETWEEN.search(text) is not None


def parse(text: str) -> list[tuple[str, Fraction]]:
    """[(what `open_data` takes, share)]; the shares add up to 1. Raises InputError."""
    found: list[tuple[str, Fraction | None]] = []
    for part in BETWEEN.split(text):
        given = SHARE.fullmatch(part.strip())
        found.append((given["source"], _share(given["share"], text)) if given else (part.strip(), None))
    names = [name for name, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"data {text}: {twice[0]} comes {names.count(twice[0])} times; give it one share")
    total = sum((share for _, share in found if share is not None), Fraction(0))
    open_ended = sum(share is None for _, share in found)
    if total > 1 or (total < 1 and not open_ended):
        raise InputError(f"data {text}: the shares add up to {float(total):g}, expected 1; as shares of their sum they are "
                         + "+".join(f"{name}={share / total}" for name, share in found if share is not None and total))
    if total == 1 and open_ended:
        name = next(name for name, share in found if share is None)
        raise InputError(f"data {text}: nothing is left for {name}; give it a share, 0 to evaluate it alone")
    shares = [(name, (1 - total) / open_ended if share is None else share) for name, share in found]
    if (places := math.lcm(*(share.denominator for _, share in shares))) > FINEST:
        raise InputError(f"data {text}: shares in parts of {places}; parts of {FINEST} are the finest, as in "
                         + "+".join(f"{name}={share.limit_denominator(1000)}" for name, share in shares))
    return shares


def _share(text: str, where: str) -> Fraction:
    over, slash, under = text.partition("/")
    if slash and not int(under):
        raise InputError(f"data {where}: {text} divides by zero")
    return Fraction(text)


def mixture(sources: Sequence[tuple[str, Fraction, Data]], *, split: Split) -> Data:
    """One `Data` of all of them: its rows are theirs, one source after another, and its `order` draws by share.

    An epoch is counted as so many rows as they have together. Raises InputError for sources whose rows are of different shapes.
    """
    first_name, _, first = sources[0]
    for name, _, data in sources:
        if data.fields != first.fields:
            raise InputError(f"{first_name} and {name} cannot be mixed: {_fields(first)}, and {_fields(data)}")
    begins = np.cumsum([0, *(data.rows for _, _, data in sources)])

    def row(i: int) -> dict[str, np.ndarray]:
        which = int(np.searchsorted(begins, i, side="right")) - 1
        if not 0 <= which < len(sources):
            raise IndexError(f"row {i} of {begins[-1]}")
        return sources[which][2].row(i - int(begins[which]))
    shares = [share for _, share, _ in sources]
    parts = "; ".join(f"{float(share):.4g} of the rows from {data.described}" for _, share, data in sources)
    return Data(name="+".join(name for name, _, _ in sources), kind=first.kind, rows=int(begins[-1]), fields=first.fields, row=row,
                fingerprint=fingerprint({"mixture": 1, "split": split, "shares": [str(share) for share in shares],
                                         "sources": [data.fingerprint for _, _, data in sources]}),
                described=f"a mixture: {parts}", order=functools.partial(order, shares, [data.rows for _, _, data in sources]),
                sources=tuple((name, float(share), data) for name, share, data in sources))


def order(shares: Sequence[Fraction], rows: Sequence[int], seed: int) -> Callable[[int], int]:
    """A function from a place k >= 0 to a row of the sources laid one after another."""
    source_at = sequence(shares, seed)
    begins = np.cumsum([0, *rows])
    own = [shuffled(count, seed) for count in rows]

    def row_at(k: int) -> int:
        which, place = source_at(k)
        return int(begins[which]) + own[which](place)
    return row_at


def sequence(shares: Sequence[Fraction], seed: int) -> Callable[[int], tuple[int, int]]:
    """A function from a place k >= 0 to (which source, how many of that source came before)."""
    finest = math.lcm(*(share.denominator for share in shares))
    places = finest * -(-PLACES // finest)
    counts = [int(share * places) for share in shares]
    source = np.repeat(np.arange(len(shares)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])

    @functools.lru_cache(maxsize=4)
    def block(number: int) -> np.ndarray:
        # the i-th of a source's n stands somewhere in the i-th n-th of the block; raw bits, because their stream is fixed for good
        drawn = (np.random.PCG64([seed, number, 1]).random_raw(places) >> np.uint64(11)) * 2.0 ** -53
        return np.argsort((rank + drawn) / np.repeat(counts, counts), kind="stable")

    def at(k: int) -> tuple[int, int]:
        number, place = divmod(k, places)
        i = block(number)[place]
        return int(source[i]), number * counts[source[i]] + int(rank[i])
    return at


def parts(data: Data) -> tuple[tuple[str, float, Data], ...]:
    """What is evaluated by itself: the sources of a mixture, or the data."""
    return data.sources or ((data.name, 1.0, data),)


def _fields(data: Data) -> str:
    return f"{data.name} has " + ", ".join(f"{name}{list(shape)}" for name, (shape, _) in data.fields.items())

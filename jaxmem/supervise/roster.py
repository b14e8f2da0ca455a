"""Who takes part in the next attempt: processes that keep failing are counted as lost, and come back after a while."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxmem.spec import InputError


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """When a lost process is back: `seconds` after its loss, or at the start after `attempts` more; both None is never."""

    seconds: float | None = None
    attempts: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Rejoin":
        """`""` never, `"60"` or `"60s"` seconds, `"2attempts"`."""
        if not text:
            return cls()
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)s?", text):
            return cls(seconds=float(match[1]))
        if (match := re.fullmatch(r"(\d+) ?attempts?", text)) and int(match[1]):
            return cls(attempts=int(match[1]))
        raise InputError(f"--rejoin_after={text}: expected seconds, as in 60, or a number of attempts, as in 2attempts")


def parse_losses(text: str, processes: int) -> dict[int, int]:
    """`"2@1,3@4"` -> {process: the attempt from which it is lost}. Raises `InputError`."""
    losses = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        if not (match := re.fullmatch(r"(\d+)@(\d+)", item)):
            raise InputError(f"--lose={text}: expected PROCESS@ATTEMPT, as in 1@2")
        if int(match[1]) >= processes:
            raise InputError(f"--lose={text}: the processes are 0 to {processes - 1}")
        losses[int(match[1])] = int(match[2])
    return losses


@dataclass(kw_only=True)
class Roster:
    """`lost_after` failures in a row lose a process; None loses nobody. Times are of one clock, in seconds; attempts count from 0."""

    processes: int
    lost_after: int | None
    rejoin: Rejoin = Rejoin()
    losses: Mapping[int, int] = field(default_factory=dict)
    _failures: Counter[int] = field(default_factory=Counter)
    _lost: dict[int, tuple[float, int]] = field(default_factory=dict)
    _made: set[int] = field(default_factory=set)

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(n for n in range(self.processes) if n not in self._lost)

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(sorted(self._lost))

    def begin(self, attempt: int, now: float) -> tuple[int, ...]:
        """An attempt begins: takes back those whose time has come, and returns them."""
        back = tuple(n for n, (since, at) in sorted(self._lost.items()) if self._is_back(since, at, attempt, now))
        self.take_back(back)
        for process, at in self.losses.items():
            if attempt >= at and process not in self._made:
                self._made.add(process)
                self._lost[process] = (now, attempt)
        return back

    def failed(self, culprits: Iterable[int], attempt: int, now: float) -> tuple[int, ...]:
        """The attempt ended because of `culprits` (perhaps nobody is known); returns those who are lost from now on."""
        culprits = set(culprits)
        for process in self.present:
            self._failures[process] = self._failures[process] + 1 if process in culprits else 0
        gone = tuple(n for n in sorted(culprits) if self.lost_after is not None and self._failures[n] >= self.lost_after)
        self._lost |= {n: (now, attempt + 1) for n in gone}
        return gone

    def take_back(self, processes: Iterable[int]) -> None:
        for process in processes:
            self._lost.pop(process, None)
            self._failures[process] = 0

    def rejoin_at(self) -> float | None:
        """When the next lost process is back; None if no clock says it."""
        if self.rejoin.seconds is None or not self._lost:
            return None
        return min(since for since, _ in self._lost.values()) + self.rejoin.seconds

    def _is_back(self, since: float, at: int, attempt: int, now: float) -> bool:
        if self.rejoin.seconds is not None:
            return now >= since + self.rejoin.seconds
        return self.rejoin.attempts is not None and attempt >= at + self.rejoin.attempts

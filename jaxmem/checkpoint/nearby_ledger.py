"""How many bytes a restore read from where."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["local", "peer", "remote"]


@dataclass(kw_only=True)
class Reads:
    """What one process read, by tier: logical bytes, which add up to those of its distinct shards, and wall seconds."""

    local_bytes: int = 0
    peer_bytes: int = 0
    remote_bytes: int = 0
    verify_s: float = 0.0  # reading its own store for the checksums; then local_s is a copy out of memory
    local_s: float = 0.0
    peer_s: float = 0.0
    remote_s: float = 0.0
    notes: list[str] = field(default_factory=list)  # damaged pieces, processes that did not answer

    def count(self, tier: Tier, count_bytes: int) -> None:
        setattr(self, f"{tier}_bytes", getattr(self, f"{tier}_bytes") + count_bytes)

    @contextlib.contextmanager
    def timed(self, what: Tier | Literal["verify"]) -> Iterator[None]:
        start = time.monotonic()
        yield
        setattr(self, f"{what}_s", getattr(self, f"{what}_s") + time.monotonic() - start)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """`processes[i]` is what process i read. In the whole run each missing byte is read from shared storage once, so `remote_bytes`
    are those of the slices that lived only where they were lost."""

    step: int
    state_bytes: int  # every leaf once
    processes: tuple[Reads, ...]

    @property
    def local_bytes(self) -> int:
        return sum(p.local_bytes for p in self.processes)

    @property
    def peer_bytes(self) -> int:
        return sum(p.peer_bytes for p in self.processes)

    @property
    def remote_bytes(self) -> int:
        return sum(p.remote_bytes for p in self.processes)

    @property
    def notes(self) -> list[str]:
        return [f"process {i}: {note}" for i, p in enumerate(self.processes) for note in p.notes]

    def __str__(self) -> str:
        return (f"step {self.step}: {self.local_bytes:,} bytes from local disks, {self.peer_bytes:,} from other processes, "
                f"{self.remote_bytes:,} from shared storage (the state has {self.state_bytes:,})")

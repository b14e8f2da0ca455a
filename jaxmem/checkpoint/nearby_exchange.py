"""What every process must know of every other before a restore, through jax.distributed's key-value store."""

import base64
import itertools
import socket
import threading
import zlib
from typing import Protocol

import jax
import orbax.checkpoint as ocp


class Exchange(Protocol):
    """Called by every process in the same order, it gives each one the texts of all, by process. Nobody gets past it alone."""

    host: str | None  # this process's address for the others; None: there are none

    def __call__(self, text: str) -> list[str]: ...


class Alone:
    """One process."""

    host: str | None = None

    def __call__(self, text: str) -> list[str]:
        return [text]


class ThroughJax:
    """The processes of jax.distributed. One for each `name` in a process; names are the same in every process. `host`: this machine's
    address for the others; by default the one from which it reaches the coordinator."""

    def __init__(self, name: str = "nearby", *, host: str | None = None, timeout_s: float = 600) -> None:
        from jax._src import distributed  # the coordinator that was found for a cluster is nowhere else

        self._name, self._timeout_ms, self._turn = name, int(timeout_s * 1000), itertools.count()
        self._client = ocp.multihost.get_jax_distributed_client()
        self.host: str | None = host or address_towards(str(distributed.global_state.coordinator_address))

    def __call__(self, text: str) -> list[str]:
        prefix = f"jaxmem/{self._name}/{next(self._turn)}"
        packed = base64.b85encode(zlib.compress(text.encode())).decode()
        self._client.key_value_set(f"{prefix}/{jax.process_index()}", packed)
        found = [self._client.blocking_key_value_get(f"{prefix}/{p}", self._timeout_ms) for p in range(jax.process_count())]
        return [zlib.decompress(base64.b85decode(value)).decode() for value in found]


class AmongThreads:
    """One of several emulated processes, a thread each; `texts` and `barrier` are shared by all."""

    host: str | None = "127.0.0.1"

    def __init__(self, process: int, texts: list[str], barrier: threading.Barrier) -> None:
        self._process, self._texts, self._barrier = process, texts, barrier

    def __call__(self, text: str) -> list[str]:
        self._texts[self._process] = text
        self._barrier.wait()
        found = list(self._texts)
        self._barrier.wait()
        return found


def among_threads(count: int, timeout_s: float = 60) -> list[AmongThreads]:
    texts, barrier = [""] * count, threading.Barrier(count, timeout=timeout_s)
    return [AmongThreads(process, texts, barrier) for process in range(count)]


def exchange_of_this_run() -> Exchange:
    return ThroughJax() if jax.process_count() > 1 else Alone()


def address_towards(peer: str) -> str:
    """The address of this machine from which `peer` (HOST:PORT) is reached. Nothing is sent."""
    host, _, port = peer.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]

"""Many hosts: how many processes take part, which one this is, where they meet; then `jax.distributed`.

Flags come first, then what the launcher left in the environment: Open MPI, SLURM, TPU hosts, a JobSet. jax's own detection is left
to do what it alone can (TPU metadata, mpi4py, the Kubernetes API); SLURM is read here, because jax gives each SLURM task one GPU,
which is wrong for one task a host. jax is imported by `start` and `leave` only.
"""

import ipaddress
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxmem import roll_call
from jaxmem.cluster import Found, found_in
from jaxmem.roll_call import StartError, split_address
from jaxmem.spec import InputError

__all__ = ["Settings", "StartError", "leave", "settings", "start"]

START_TIMEOUT_S = 900.0  # hosts of one job start minutes apart: images are pulled, file systems are cold
HEARTBEAT_TIMEOUT_S = 300.0  # of a live but busy host; who really died is seen by the launcher, and who hangs by the watchdog
SHUTDOWN_TIMEOUT_S = 120.0
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How this process joins the others.

    source: where it was read. processes, process: how many, and which this is, from 0; None where jax finds out (`automatic`).
    coordinator: HOST:PORT at which process 0 listens; None where jax finds out.
    hosts: on how many hosts; None is unknown. local_devices: which GPUs of this host are this process's; None is all.
    """

    source: str
    processes: int | None = None
    process: int | None = None
    coordinator: str | None = None
    hosts: int | None = None
    local_devices: tuple[int, ...] | None = None
    automatic: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S

    @property
    def loopback(self) -> bool:
        return self.coordinator is not None and _is_loopback(split_address(self.coordinator)[0])


def settings(environ: Mapping[str, str], *, coordinator: str | None = None, processes: int | None = None, process: int | None = None,
             timeout_s: float | None = None, resolve: Callable[[str], list[str]] | None = None) -> Settings | None:
    """What the flags and the environment say; None for a run of one process. Raises `InputError` when they do not fit together.

    `coordinator="auto"` leaves everything to jax, as on TPU VMs, whose environment says nothing. `resolve` (host -> addresses) is
    for tests.
    """
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InputError(f"--start_timeout={timeout_s:g}: seconds, above 0 (default {START_TIMEOUT_S:g})")
    wait_s = START_TIMEOUT_S if timeout_s is None else timeout_s
    if processes is not None and processes < 1:
        raise InputError(f"--processes={processes}: at least 1")
    if coordinator == AUTO:
        if processes is not None or process is not None:
            raise InputError("--coordinator=auto leaves the numbers to jax: --processes and --process have no meaning beside it")
        return Settings(source="jax", automatic=True, start_timeout_s=wait_s)
    if coordinator is not None:
        try:
            split_address(coordinator)
        except ValueError as error:
            raise InputError(f"--coordinator={coordinator}: {error}, as in node1:1234") from None
    if processes == 1:
        if process:
            raise InputError(f"--process={process} of --processes=1: the only process is 0")
        return None
    found = found_in(environ)
    if found is None and coordinator is None and processes is None and process is None:
        return None
    found = found or Found(source="flags")
    if coordinator is None and processes is None and process is None:
        if found.problem:
            raise InputError(found.problem)
        if found.automatic:
            return Settings(source=found.source, processes=found.processes, process=found.process, hosts=found.hosts, automatic=True,
                            start_timeout_s=wait_s)
    n = found.processes if processes is None else processes
    k = found.process if process is None else process
    where = coordinator or found.coordinator
    if missing := [flag for flag, value in (("--coordinator=HOST:PORT", where), ("--processes=N", n), ("--process=K", k)) if value is None]:
        raise InputError(_missing(missing, found))
    assert where is not None and n is not None and k is not None
    if not 0 <= k < n:
        raise InputError(f"process {k} of {n} processes: the numbers are 0 to {n - 1}{_origin(found, processes, process)}")
    joined = Settings(source="flags" if process is not None else found.source, processes=n, process=k, coordinator=where, hosts=found.hosts,
                      local_devices=found.local_devices, start_timeout_s=wait_s)
    _refuse_loopback(joined, found, resolve or _addresses)
    return joined


def start(joined: Settings | None, *, cpu_devices: int | None = None) -> None:
    """Join the others; before anything asks jax for its devices. `cpu_devices` emulates that many here, for runs on CPU.

    Raises `StartError` when they do not come together in `start_timeout_s`; jax itself would abort the process.
    """
    import jax

    if cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if joined is None:
        return
    if cpu_devices is not None:
        _keep_stdout()
    wait_s = math.ceil(joined.start_timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    for what in ("local", "global"):  # the wait for the others' devices has a limit of its own, of minutes
        jax.config.update(f"jax_cpu_get_{what}_topology_timeout_minutes", math.ceil(wait_s / 60))
    waits: dict[str, Any] = {"initialization_timeout": wait_s, "heartbeat_timeout_seconds": math.ceil(joined.heartbeat_timeout_s),
             "shutdown_timeout_seconds": math.ceil(joined.shutdown_timeout_s)}
    if joined.automatic:
        text = f"still waiting for the other processes of this run ({joined.source}), for up to {wait_s} s; {roll_call.LENGTHEN}"
        notice = threading.Timer(60.0, print, [text], {"file": sys.stderr, "flush": True})  # jax aborts without saying what to do
        notice.daemon = True
        notice.start()
        try:
            jax.distributed.initialize(**waits)
        except (RuntimeError, ValueError) as error:
            raise StartError(f"jax could not join the processes of this run ({joined.source}): {error}. Give --coordinator=HOST:PORT "
                             f"--processes=N --process=K; {roll_call.LENGTHEN} (now {wait_s} s)") from error
        finally:
            notice.cancel()
        return
    assert joined.coordinator is not None and joined.processes is not None and joined.process is not None
    roll_call.meet(joined.coordinator, processes=joined.processes, process=joined.process, timeout_s=joined.start_timeout_s,
                   loopback=joined.loopback)
    port = split_address(joined.coordinator)[1]
    jax.distributed.initialize(
        joined.coordinator, joined.processes, joined.process, cluster_detection_method="deactivate",
        local_device_ids=None if cpu_devices is not None or joined.local_devices is None else list(joined.local_devices),
        coordinator_bind_address=f"127.0.0.1:{port}" if joined.process == 0 and joined.loopback else None, **waits)


def _keep_stdout() -> None:
    """Gloo's C++ writes lines to stdout, several threads into one another; a program's stdout is its own, so they go to stderr."""
    before = sys.stdout
    if before is not sys.__stdout__ or before is None or before.fileno() != 1:
        return  # a notebook, or somebody who captures it
    before.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(own, "w", encoding=before.encoding, errors=before.errors, buffering=1 if os.isatty(own) else -1)


def leave(status: int, *, together: bool) -> NoReturn:
    """End this process of several with `status`, whatever the others do.

    A plain exit waits at jax's shutdown barrier for processes that may never come, and then aborts with another status. With
    `together` (every process of the run is about to end) it waits there, so that none finds its coordinator gone.
    """
    if "jax" in sys.modules and together:
        import jax

        jax.distributed.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone, or it was closed
            pass
    os._exit(status)


def _missing(missing: list[str], found: Found) -> str:
    if found.problem:
        return found.problem
    where = "and no SLURM, Open MPI, JobSet or TPU environment says them" if found.source == "flags" else f"{found.source} does not say it"
    return f"several processes need --coordinator=HOST:PORT --processes=N --process=K; missing: {', '.join(missing)}, {where}"


def _origin(found: Found, processes: int | None, process: int | None) -> str:
    of = [f"{name} is from {'the flag' if given is not None else found.source}"
          for name, given in (("--processes", processes), ("--process", process))]
    return f" ({' and '.join(of)})"


def _refuse_loopback(joined: Settings, found: Found, resolve: Callable[[str], list[str]]) -> None:
    """A coordinator that each host looks for on itself. On one host that is well; with several, they never meet."""
    if joined.hosts is None or joined.hosts < 2 or joined.coordinator is None:
        return
    host, port = split_address(joined.coordinator)
    if not _is_loopback(host):
        # Some distributions let a host's own name be 127.0.1.1 on that host alone, which is well.
        own = {name.partition(".")[0].lower() for name in (socket.gethostname(), found.host or "") if name}
        if host.partition(".")[0].lower() in own or not any(map(_is_loopback, resolve(host))):
            return
    better = f"; {found.source} would have {found.coordinator}" if found.coordinator and found.coordinator != joined.coordinator else ""
    raise InputError(f"--coordinator={joined.coordinator} is this host itself, and {joined.hosts} hosts take part: give the name or "
                     f"address of process 0's host, as in --coordinator=node1:{port}{better}")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        name = host.lower().rstrip(".")
        return name in ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback") or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def _addresses(host: str) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:  # not known yet: names of pods appear late, and jax waits for them
        return []

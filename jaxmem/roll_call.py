"""Everyone is here: processes meet at the coordinator's port before `jax.distributed` starts there.

jax ends a process with SIGABRT, and words about another task, when somebody does not arrive. So process 0 first listens on the same
port itself, counts who comes and, when the time is up, tells all of them who is missing. No jax.
"""

import contextlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

LENGTHEN = "--start_timeout=SECONDS waits longer"
_PORT_FREES_S = 30.0  # a run that has just ended may hold the port for a moment
_ANSWER_S = 5.0  # process 0 began to count later than the others began to wait
_LONGEST_LINE = 4096


class StartError(RuntimeError):
    """The processes did not come together. The message is complete: who, where, how long, and which flag waits longer."""


def split_address(address: str) -> tuple[str, int]:
    """`"node1:1234"`, `"[fd00::1]:1234"` -> host without brackets, port. Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address stands in brackets, as in [fd00::1]:1234")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError("expected HOST:PORT with a port of 1 to 65535")
    return host, int(port)


def meet(coordinator: str, *, processes: int, process: int, timeout_s: float, loopback: bool = False,
         say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True), every_s: float = 60.0) -> None:
    """Return when all `processes` have come to `coordinator`; raises `StartError` after `timeout_s`.

    `loopback` makes process 0 listen for processes of this host alone. While it waits it says who is missing every `every_s`.
    """
    if process == 0:
        _count(coordinator, processes, timeout_s, loopback, say, every_s)
    else:
        _come(coordinator, processes, process, timeout_s)


def numbers(found: Iterable[int], most: int = 8) -> str:
    """`1, 4-6, 9`: at most `most` ranges, then how many are left."""
    ranges: list[list[int]] = []
    for n in sorted(found):
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:most])
    left = sum(b - a + 1 for a, b in ranges[most:])
    return f"{text} and {left} more" if left else text


def _count(coordinator: str, processes: int, timeout_s: float, loopback: bool, say: Callable[[str], None], every_s: float) -> None:
    begun = said = time.monotonic()
    host, port = split_address(coordinator)
    here: dict[int, socket.socket] = {}
    heard: dict[socket.socket, bytes] = {}
    told: list[socket.socket] = []  # whoever said a number hears how it ends
    problem = None
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        listener = stack.enter_context(_listen(host if loopback else "", port, coordinator, min(timeout_s, _PORT_FREES_S)))
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        while problem is None and not _everyone(here, processes):
            now = time.monotonic()
            missing = numbers(set(range(1, processes)) - set(here))
            text = f"{len(here) + 1} of {processes} processes arrived at {coordinator}; missing: {missing}"
            if now - begun > timeout_s:
                problem = f"{text}. Gave up after {timeout_s:g} s; look at what the missing ones printed, or {LENGTHEN}"
            elif now - said > every_s:
                say(f"{text} (waiting for up to {timeout_s:g} s)")
                said = now
            for key, _ in selector.select(timeout=min(0.2, timeout_s)):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        connection, _ = listener.accept()
                        stack.enter_context(connection)
                        connection.setblocking(False)
                        heard[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                hello = _hear(connection, heard)
                if hello is None:
                    continue
                selector.unregister(connection)
                if isinstance(hello.get("process"), int) and isinstance(hello.get("processes"), int):  # else a stranger
                    told.append(connection)
                    problem = problem or _wrong(hello, here, processes)
                    here[hello["process"]] = connection
        for connection in told:
            _send(connection, {"problem": problem})
    if problem:
        raise StartError(problem)


def _everyone(here: dict[int, socket.socket], processes: int) -> bool:
    """All are here, and still are: one that ended while it waited has to come again."""
    if len(here) < processes - 1:
        return False
    for number in [n for n, connection in here.items() if _gone(connection)]:
        del here[number]
    return len(here) == processes - 1


def _wrong(hello: dict[str, Any], here: dict[int, socket.socket], processes: int) -> str | None:
    number, of = hello["process"], hello["processes"]
    if of != processes:
        return f"process {number} was started as one of {of} processes and process 0 as one of {processes}"
    if number == 0 or (number in here and not _gone(here[number])):
        return f"two processes arrived as process {number}; each needs a number of its own, 0 to {processes - 1}"
    return None


def _come(coordinator: str, processes: int, process: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    host, port = split_address(coordinator)
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, 10.0)) as connection:
                _send(connection, {"process": process, "processes": processes})
                answer = _answer(connection, deadline + _ANSWER_S)
        except OSError as error:
            reason = f": {error.strerror or error}"
            time.sleep(min(0.2, left))
            continue
        if answer is None:  # process 0 ended, or something else listens there
            reason = ": it answers, and closes the connection without a word"
            time.sleep(min(0.5, left))
        elif answer.get("problem"):
            raise StartError(str(answer["problem"]))
        else:
            return
    raise StartError(f"process {process} of {processes} waited {timeout_s:g} s for process 0 at {coordinator}{reason}. Is process 0 "
                     f"running, and may this host reach that port? {LENGTHEN}")


def _answer(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    heard = {connection: b""}
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            found = _hear(connection, heard)
        except TimeoutError:
            break
        if found is not None:
            return found or None
    raise TimeoutError("it is there, but the others are not")


def _hear(connection: socket.socket, heard: dict[socket.socket, bytes]) -> dict[str, Any] | None:
    """One whole line of JSON; an empty dict from someone who closed or talks of something else; None while more is to come."""
    try:
        data = connection.recv(_LONGEST_LINE)
    except BlockingIOError:
        return None
    except TimeoutError:
        raise
    except OSError:
        return {}
    heard[connection] += data
    if data and b"\n" not in heard[connection] and len(heard[connection]) < _LONGEST_LINE:
        return None
    try:
        found = json.loads(heard[connection])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _send(connection: socket.socket, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(line).encode() + b"\n")


def _gone(connection: socket.socket) -> bool:
    """The other end closed: a process that was started again comes twice, and may."""
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listen(host: str, port: int, coordinator: str, patience_s: float) -> socket.socket:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if not host and socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartError(f"process 0 cannot listen at {coordinator}: {error.strerror}; another port is given as "
                                 "--coordinator=HOST:PORT, the same in every process") from None
            time.sleep(0.2)

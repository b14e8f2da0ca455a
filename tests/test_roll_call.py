"""Processes meet, or are told who is missing: threads stand for the processes."""

import concurrent.futures
import contextlib
import json
import socket
import time

import pytest

from jaxmem.roll_call import StartError, meet, numbers, split_address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(*calls: dict, coordinator: str, timeout_s: float = 10.0) -> list[str | None]:
    """What each call ends with: None, or the error's text."""

    def one(call: dict) -> str | None:
        call = {"timeout_s": timeout_s, "loopback": True, "say": lambda text: None} | call
        time.sleep(call.pop("after", 0))
        try:
            return meet(coordinator, **call)
        except StartError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_everyone_comes_in_any_order(host):
    calls = [{"process": 2, "processes": 4}, {"process": 0, "processes": 4, "after": 0.3}, {"process": 3, "processes": 4},
             {"process": 1, "processes": 4, "after": 0.5}]
    assert together(*calls, coordinator=f"{host}:{free_port()}") == [None] * 4


def test_every_interface_listens_when_hosts_differ():
    port = free_port()
    calls = [{"process": n, "processes": 2, "loopback": False} for n in (0, 1)]
    assert together(*calls, coordinator=f"127.0.0.1:{port}") == [None, None]


def test_the_missing_are_named_to_all_who_came():
    said: list[str] = []
    coordinator = f"127.0.0.1:{free_port()}"
    calls = [{"process": 0, "processes": 6, "timeout_s": 1.0, "say": said.append, "every_s": 0.3}, {"process": 4, "processes": 6}]
    ended = together(*calls, coordinator=coordinator)
    assert ended[0] == ended[1]
    assert ended[0] is not None
    assert ended[0].startswith(f"2 of 6 processes arrived at {coordinator}; missing: 1-3, 5. Gave up after 1 s")
    assert "--start_timeout=SECONDS" in ended[0]
    assert said[0] == f"2 of 6 processes arrived at {coordinator}; missing: 1-3, 5 (waiting for up to 1 s)"


def test_process_zero_never_comes():
    coordinator = f"127.0.0.1:{free_port()}"
    [ended] = together({"process": 1, "processes": 2, "timeout_s": 0.5}, coordinator=coordinator)
    assert ended is not None
    assert ended.startswith(f"process 1 of 2 waited 0.5 s for process 0 at {coordinator}: Connection refused")
    assert "--start_timeout=SECONDS" in ended


def test_two_with_one_number_and_two_ideas_of_how_many():
    coordinator = f"127.0.0.1:{free_port()}"
    calls = [{"process": 0, "processes": 3}, {"process": 1, "processes": 3}, {"process": 1, "processes": 3, "after": 0.3}]
    assert together(*calls, coordinator=coordinator) == ["two processes arrived as process 1; each needs a number of its own, 0 to 2"] * 3
    coordinator = f"127.0.0.1:{free_port()}"
    calls = [{"process": 0, "processes": 2}, {"process": 1, "processes": 4}]
    assert together(*calls, coordinator=coordinator) == ["process 1 was started as one of 4 processes and process 0 as one of 2"] * 2


def test_strangers_and_those_who_left_do_not_count():
    port = free_port()
    coordinator = f"127.0.0.1:{port}"

    def stranger(text: bytes) -> socket.socket:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port))
                connection.sendall(text)
                return connection
            time.sleep(0.02)
        raise AssertionError("nobody listens")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        zero = pool.submit(together, {"process": 0, "processes": 3}, coordinator=coordinator)
        with stranger(b""):  # says nothing and stays
            stranger(b"GET / HTTP/1.1\r\n\r\n").close()
            stranger(b'{"process": "x"}\n').close()
            stranger(json.dumps({"process": 1, "processes": 3}).encode() + b"\n").close()  # came, and ended while it waited for 2
            time.sleep(0.5)
            two = pool.submit(together, {"process": 2, "processes": 3}, coordinator=coordinator)
            time.sleep(0.5)
            assert not zero.done()
            assert together({"process": 1, "processes": 3}, coordinator=coordinator) == [None]
            assert zero.result(10) == two.result(10) == [None]


def test_a_port_that_is_taken(monkeypatch):
    monkeypatch.setattr("jaxmem.roll_call._PORT_FREES_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        coordinator = f"127.0.0.1:{other.getsockname()[1]}"
        [ended] = together({"process": 0, "processes": 2}, coordinator=coordinator)
    assert ended is not None
    assert ended.startswith(f"process 0 cannot listen at {coordinator}: ")
    assert "another port" in ended


def test_addresses():
    assert split_address("node1:1234") == ("node1", 1234)
    assert split_address("[fd00::1]:65535") == ("fd00::1", 65535)
    for wrong in ("node1", "node1:", ":1234", "node1:0", "node1:65536", "node1:port", "fd00::1:1234", ""):
        with pytest.raises(ValueError):
            split_address(wrong)


def test_numbers_are_short_however_many_are_missing():
    assert numbers([3, 1, 2, 7]) == "1-3, 7"
    assert numbers(range(0, 100, 2), most=3) == "0, 2, 4 and 47 more"
    assert numbers([]) == ""

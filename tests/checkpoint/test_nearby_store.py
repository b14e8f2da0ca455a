"""A process's own shards on its disk: whole steps only, damage found by the piece, old ones pruned; and served to others."""

import os
import pathlib
import socket
import urllib.error
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.checkpoint import nearby_server
from jaxmem.checkpoint import nearby_store as store
from jaxmem.checkpoint.nearby_server import fetch, parse_box, serving, text_of
from jaxmem.checkpoint.nearby_store import Shards

W = np.arange(24, dtype=np.float32).reshape(4, 6)


def leaves(add: float = 0) -> dict[str, Shards]:
    w = W + np.float32(add)
    return {"params/w": Shards((4, 6), [(((0, 2), (0, 6)), w[:2]), (((2, 4), (0, 6)), w[2:])]),
            "params/half": Shards((3,), [(((1, 3),), np.asarray(jnp.array([1.5, -2], jnp.bfloat16)))]),
            "step": Shards((), [((), np.int32(7))])}


def damage(path: pathlib.Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_what_is_written_is_read(tmp_path):
    assert store.write_step(tmp_path, 7, "a", leaves()) == 24 * 4 + 2 * 2 + 4
    held = store.open_step(tmp_path, 7, "a")
    assert held.damaged == ()
    assert held.boxes() == {"params/w": [((0, 2), (0, 6)), ((2, 4), (0, 6))], "params/half": [((1, 3),)], "step": [()]}
    np.testing.assert_array_equal(held.read("params/w", ((2, 4), (1, 5))), W[2:4, 1:5])
    half = held.read("params/half", ((2, 3),))
    assert half.dtype == jnp.bfloat16 and half.tolist() == [-2]
    assert held.read("step", ()).shape == () and held.read("step", ()) == 7
    for path, box in (("params/w", ((1, 3), (0, 6))), ("nothing", ())):  # in two pieces; unknown
        with pytest.raises(LookupError):
            held.read(path, box)


def test_another_step_or_another_content_is_not_held(tmp_path):
    store.write_step(tmp_path, 7, "a", leaves())
    for step, content in ((8, "a"), (7, "b")):
        held = store.open_step(tmp_path, step, content)
        assert held.pieces == () and held.damaged == ()


@pytest.mark.parametrize("offset, hit, intact", [(0, "params/w[0:2, 0:6]", 3), (128, "params/half[1:3]", 3), (195, "step[]", 3)])
def test_a_flipped_bit_costs_its_piece(tmp_path, offset, hit, intact):
    store.write_step(tmp_path, 7, "a", leaves())
    damage(tmp_path / "step.7" / "data", offset)
    held = store.open_step(tmp_path, 7, "a")
    assert len(held.pieces) == intact and len(held.damaged) == 1 and hit in held.damaged[0]
    assert hit.partition("[")[0] == "params/w" or hit.partition("[")[0] not in held.boxes()


def test_a_short_file_costs_the_pieces_past_its_end(tmp_path):
    store.write_step(tmp_path, 7, "a", leaves())
    os.truncate(tmp_path / "step.7" / "data", 100)
    held = store.open_step(tmp_path, 7, "a")
    assert held.boxes() == {"params/w": [((0, 2), (0, 6))]} and len(held.damaged) == 3
    os.truncate(tmp_path / "step.7" / "data", 0)
    assert store.open_step(tmp_path, 7, "a").pieces == ()


@pytest.mark.parametrize("offset", [0, 30, -2])
def test_a_damaged_index_costs_the_step(tmp_path, offset):
    store.write_step(tmp_path, 7, "a", leaves())
    damage(tmp_path / "step.7" / "index.json", offset)
    held = store.open_step(tmp_path, 7, "a")
    assert held.pieces == () and len(held.damaged) == 1 and "index.json" in held.damaged[0]


def test_a_missing_data_file_costs_the_step(tmp_path):
    store.write_step(tmp_path, 7, "a", leaves())
    (tmp_path / "step.7" / "data").unlink()
    held = store.open_step(tmp_path, 7, "a")
    assert held.pieces == () and "FileNotFoundError" in held.damaged[0]


def test_a_write_that_fails_or_is_killed_leaves_what_was_there(tmp_path, monkeypatch):
    store.write_step(tmp_path, 7, "a", leaves())

    def full(*_):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.write_step(tmp_path, 8, "a", leaves())
        with pytest.raises(OSError, match="No space left"):
            store.write_step(tmp_path, 7, "b", leaves(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step.7"]
    assert len(store.open_step(tmp_path, 7, "a").pieces) == 4
    (tmp_path / "step.9.writing").mkdir()  # of a process that was killed
    (tmp_path / "step.9.writing" / "index.json").write_text("")
    assert store.steps(tmp_path) == [7]
    store.write_step(tmp_path, 7, "b", leaves(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step.7"]
    np.testing.assert_array_equal(store.open_step(tmp_path, 7, "b").read("params/w", ((0, 1), (0, 6))), W[:1] + np.float32(1))


def test_the_last_committed_steps_stay_and_later_ones_too(tmp_path):
    for step in (1, 2, 3, 4, 5):
        store.write_step(tmp_path, step, "a", leaves())
        if step not in (3, 5):  # 3 failed on shared storage, 5 is on its way
            store.mark_committed(tmp_path, step, 2)
    assert store.steps(tmp_path) == [2, 4, 5]
    store.mark_committed(tmp_path, 5, 2)
    assert store.steps(tmp_path) == [4, 5]
    store.mark_committed(tmp_path, 9, 2)  # nothing was kept of it
    assert store.steps(tmp_path) == [4, 5]


def test_boxes_over_tcp(tmp_path):
    store.write_step(tmp_path, 7, "a", leaves())
    held = store.open_step(tmp_path, 7, "a")
    with serving(held.read, "127.0.0.1") as address:
        np.testing.assert_array_equal(fetch(address, "params/w", ((2, 4), (1, 5)), np.dtype("float32")), W[2:4, 1:5])
        assert fetch(address, "step", (), np.dtype("int32")) == 7
        assert fetch(address, "params/half", ((1, 2),), jnp.dtype("bfloat16")).tolist() == [1.5]
        for path, box, dtype in (("params/v", (), "int32"), ("params/w", ((1, 3), (0, 6)), "float32"), ("step", (), "int64")):
            with pytest.raises(OSError, match="answered"):
                fetch(address, path, box, np.dtype(dtype))
    with pytest.raises(OSError):
        fetch(address, "step", (), np.dtype("int32"))


def test_strangers_get_nothing(tmp_path):
    with serving(lambda path, box: W, "127.0.0.1") as address:
        where, _, token = address.partition("/")
        query = "?leaf=params/w&box=0:4,0:6"
        with urllib.request.urlopen(f"http://{where}/{token}{query}") as answer:
            assert answer.read() == W.tobytes()
        for path in ("", f"wrong{query}", f"{token[:-1]}{query}", f"../{token}{query}", f"{token}", f"{token}?box=x&leaf=y"):
            with pytest.raises(urllib.error.HTTPError, match="404") as error:
                urllib.request.urlopen(f"http://{where}/{path}")
            error.value.close()
        for method in ("POST", "PUT", "DELETE"):
            with pytest.raises(urllib.error.HTTPError, match="501") as error:
                urllib.request.urlopen(urllib.request.Request(f"http://{where}/{token}{query}", method=method, data=b""))
            error.value.close()
    with serving(lambda path, box: W, "127.0.0.1") as other:
        assert other.partition("/")[2] != token


def kernel_has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("network", ["stand-in", *(["kernel"] if kernel_has_ipv6() else [])])
def test_over_ipv6(network, monkeypatch):
    """Brackets and all; where the kernel has no IPv6, ::1 leads to 127.0.0.1."""
    if network == "stand-in":
        bind, find = socket.socket.bind, socket.getaddrinfo
        monkeypatch.setattr(socket, "AF_INET6", socket.AF_INET)
        monkeypatch.setattr(socket.socket, "bind", lambda self, where: bind(self, ("127.0.0.1", where[1])))
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **how: find("127.0.0.1" if host == "::1" else host, *more, **how))
    with serving(lambda path, box: W, "::1") as address:
        assert address.startswith("[::1]:")
        np.testing.assert_array_equal(fetch(address, "w", ((0, 4), (0, 6)), W.dtype), W)


def test_damage_on_the_way_is_noticed(monkeypatch):
    with serving(lambda path, box: W, "127.0.0.1") as address:
        sums = iter([1, 2])  # the sender's and the receiver's
        monkeypatch.setattr(nearby_server.zlib, "crc32", lambda raw: next(sums))
        with pytest.raises(OSError, match="damaged on the way"):
            fetch(address, "w", ((0, 4), (0, 6)), W.dtype)


def test_text_of_boxes():
    for box in ((), ((0, 4),), ((2, 4), (10, 30))):
        assert parse_box(text_of(box)) == box

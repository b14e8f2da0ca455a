"""What --rehearsal says, and what it refuses with the nearest choice that works."""

import pytest

from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal, row_bytes
from jaxmem.resident import name_rehearsal, rehearsal_bytes
from jaxmem.spec import InputError
from jaxmem.workload import Workload


def test_it_prints_as_it_parses():
    for text in ("r=16,capacity=4096", "r=14,capacity=1000,policy=replace,candidates=14,every=2,memory=pinned_host,classes=10"):
        assert str(Rehearsal.parse(text)) == text


@pytest.mark.parametrize("text, message", [
    ("r=16", "capacity missing"),
    ("", "r and capacity missing"),
    ("rows=16", "unknown field 'rows'"),
    ("r=16,capacity=64,policy=reservor", "did you mean reservoir"),
    ("r=16,capacity=64,memory=host", "pinned_host"),
    ("r=16,capacity=many", "expected a whole number"),
])
def test_what_does_not_parse(text, message):
    with pytest.raises(InputError, match=message):
        Rehearsal.parse(text)


@pytest.mark.parametrize("text, batch, shards, message", [
    ("r=14,capacity=64", 64, 8, r"r\(14\) is not a multiple of the 8 shards; nearest: r=16"),
    ("r=16,capacity=64", 64, 8, r"16 rows is not a multiple of 8\^2 = 64, .*nearest: every=4, or r=64 with every=1"),
    ("r=8,capacity=100", 64, 1, None),
    ("r=8,capacity=100,every=8", 64, 8, r"capacity\(100\) is not a multiple of 8 shards \* 1 classes = 8; nearest: capacity=96"),
    ("r=8,capacity=80,every=8,classes=10", 60, 8, r"batch\(60\) is not a multiple of the 8 shards; nearest: 64"),
    ("r=8,capacity=64,candidates=4", 64, 1, "candidates=4 is for policy=replace"),
    ("r=8,capacity=64,policy=replace", 64, 1, r"takes candidates, from 1 to batch\(64\); a quarter of the batch is candidates=16"),
    ("r=8,capacity=64,policy=replace,candidates=65", 64, 1, "it is 65"),
    ("r=0,capacity=64", 64, 1, "r=0: at least 1"),
])
def test_what_does_not_fit_the_mesh(text, batch, shards, message):
    found = Rehearsal.parse(text).problems(batch=batch, shards=shards)
    if message is None:
        assert found == []
    else:
        with pytest.raises(InputError, match=message):
            raise InputError("\n".join(found))


@pytest.mark.parametrize("r, every, shards", [(16, 1, 8), (8, 3, 8), (48, 1, 8), (12, 5, 4), (6, 7, 6)])
def test_the_nearest_choice_is_one(r, every, shards):
    """Every `every` and `r` that a message names is accepted, and no smaller change of `every` would have been."""
    found = Rehearsal(r=r, capacity=shards, every=every)
    [message] = found.problems(batch=shards, shards=shards)
    words = message.partition("nearest: ")[2]
    named_every = int(words.split("every=")[1].split(",")[0])
    named_r = int(words.split("or r=")[1].split()[0])
    assert Rehearsal(r=r, capacity=shards, every=named_every).problems(batch=shards, shards=shards) == []
    assert Rehearsal(r=named_r, capacity=shards, every=1).problems(batch=shards, shards=shards) == []
    distance = abs(named_every - every)
    assert all(Rehearsal(r=r, capacity=shards, every=other).problems(batch=shards, shards=shards)
               for other in range(max(every - distance + 1, 1), every + distance))


def test_the_closed_forms():
    found = Rehearsal.parse("r=16,capacity=640,every=8,classes=10,policy=replace,candidates=14")
    assert found.probability(56) == 0.25
    assert found.slots(8) == 8 and found.rows_per_pair(8) == 2
    assert found.buffer_bytes(100, 8) == 8000 and found.device_bytes(100, 8) == 8000 + 2 * 1600
    host = Rehearsal.parse("r=16,capacity=640,every=8,memory=pinned_host")
    assert host.device_bytes(100, 8) == 2 * 1600 and host.buffer_bytes(100, 8) == 8000
    assert row_bytes(Workload.parse(model="gpt2", batch=8, seq=128)) == 4 * 128 * 4
    assert row_bytes(Workload.parse(model="mlp-mnist", batch=8)) == 785 * 4
    assert row_bytes(Workload.parse(model="mlp-mnist,image_dtype=uint8", batch=8)) == 784 + 4


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_a_check_names_the_bytes_of_the_buffer(memory):
    """What lies beside a program is the optimizer's state and the buffer; a check tells them apart and their sum stays."""
    workload, plan = Workload.parse(model="gpt2", batch=16, seq=128), Plan.parse("fsdp=8")
    rehearsal = Rehearsal(r=8, capacity=800, every=8, memory=memory)
    here = (100 if memory == "device" else 0) * 2048 + 2 * 8 * 2048  # 2048 bytes a row: four int32 fields of 128
    assert rehearsal_bytes(rehearsal, workload, plan) == here and rehearsal_bytes(None, workload, plan) == 0
    check = {"composition": [{"kind": "params", "module": None, "bytes": 70}, {"kind": "opt_state", "module": "optimizer (resident)",
                                                                               "bytes": here + 50}],
             "timeline": [{"points": [{"by_kind": {"opt_state": here + 30, "params": 9}}, {"by_kind": {"opt_state": here, "other": 4}}]}],
             "host_bytes": None, "warnings": []}
    name_rehearsal(check, rehearsal, workload, plan, parse_topology("h100:8"))
    assert {(part["kind"], part["module"]): part["bytes"] for part in check["composition"]} == {
        ("params", None): 70, ("opt_state", "optimizer (resident)"): 50, ("other", "rehearsal (resident)"): here}
    assert [point["by_kind"] for point in check["timeline"][0]["points"]] == [
        {"opt_state": 30, "params": 9, "other": here}, {"other": 4 + here}]
    assert check["host_bytes"] == (None if memory == "device" else 100 * 2048 * 8)
    [note] = check["warnings"]
    assert "batch of 16 rows, 8 of them drawn" in note and ("a copy on a GPU's host" in note) == (memory == "pinned_host")

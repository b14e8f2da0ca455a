"""Rehearsal's programs compiled for accelerators that are not here: in place, one exchange, and where a GPU's host pays."""

import json
import os
import subprocess
import sys

import pytest

from jaxmem.hardware import parse_topology
from jaxmem.targets.devices import environment

CODE = """
import json, sys
import numpy as np
from jaxmem.data.rehearsal import programs
from jaxmem.hardware import parse_topology
from jaxmem.hlo.collectives import OPCODES, collectives_of
from jaxmem.hlo.parse import parse
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal
from jaxmem.sharding import make_mesh
from jaxmem.targets.child import memory_of
from jaxmem.targets.devices import described_devices

mesh = make_mesh(Plan(data=8), described_devices(parse_topology(sys.argv[1])))
rehearsal = Rehearsal(r=16, capacity=8 * 1000, every=4, memory=sys.argv[2], classes=10)
fields = {"images": ((224, 224, 3), np.dtype(np.uint8)), "labels": ((), np.dtype(np.int32))}
for name, program in programs.build(rehearsal, fields, mesh, batch=64, labels="labels").items():
    if name != "init":
        done = program.lower().compile()
        module = parse(done.as_text())
        traffic = [(one.opcode, one.size, one.sent_bytes) for computation in module.computations.values() for i in computation.instructions
                   if i.opcode.removesuffix("-start") in OPCODES for one in collectives_of(module, i)]
        print(json.dumps({"program": name, "traffic": traffic} | memory_of(done)))
"""
ROW = 224 * 224 * 3 + 4
SHARD = 1000 * ROW


@pytest.mark.long
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("topology", ["v5e-8", "h100:8"])
def test_in_place_and_one_exchange(topology, memory):
    """150 MB of images a device: an update and a draw alias them and need some rows beside. 8 rows a device travel in a draw."""
    env = os.environ | environment(parse_topology(topology), ()) | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", CODE, topology, memory], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["program"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert found["draw"]["traffic"] == [["all-to-all", 8, 8 * (ROW + 4) * 7 / 8]]
    assert found["join"]["traffic"] == found["insert"]["traffic"] == []
    for name in ("insert", "draw"):
        one = found[name]
        host, own = one["host_alias_bytes"], one["alias_bytes"]
        assert (host if memory == "pinned_host" else own) >= SHARD and (own if memory == "pinned_host" else host) < SHARD / 10
        assert one["temp_bytes"] < SHARD / 10
        copies = topology == "h100:8" and memory == "pinned_host" and name == "insert"  # XLA on GPU: a limit that the docs name
        assert (one["host_temp_bytes"] >= SHARD) == copies and (copies or one["host_temp_bytes"] < SHARD / 10)

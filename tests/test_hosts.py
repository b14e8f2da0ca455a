"""Who takes part: flags, then the environment; refusals; and real processes that come together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jaxmem.hosts import Settings, settings
from jaxmem.spec import InputError

SLURM = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2",
         "SLURM_NNODES": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
GKE_TPU = {"TPU_WORKER_HOSTNAMES": "a-0,a-1", "TPU_WORKER_ID": "1"}


def read(environ: dict[str, str] | None = None, addresses: tuple[str, ...] = (), **flags) -> Settings | None:
    return settings(environ or {}, resolve=lambda host: list(addresses), **flags)


def joined(environ: dict[str, str] | None = None, addresses: tuple[str, ...] = (), **flags) -> Settings:
    found = read(environ, addresses, **flags)
    assert found is not None
    return found


def refused(environ: dict[str, str] | None = None, addresses: tuple[str, ...] = (), **flags) -> str:
    with pytest.raises(InputError) as error:
        read(environ, addresses, **flags)
    return str(error.value)


def test_one_process_needs_nothing():
    assert read() is None
    assert read(processes=1) is None
    assert read(SLURM, processes=1) is None
    assert "--process=1 of --processes=1" in refused(processes=1, process=1)


def test_flags_come_first():
    found = joined(SLURM, coordinator="head:4000", processes=8, process=3)
    assert (found.source, found.coordinator, found.processes, found.process, found.hosts) == ("flags", "head:4000", 8, 3, 2)
    found = joined(SLURM, coordinator="head:4000")
    assert (found.source, found.coordinator, found.processes, found.process) == ("SLURM", "head:4000", 2, 1)
    found = joined(SLURM)
    assert (found.source, found.coordinator, found.processes, found.process) == ("SLURM", f"node1:{61440 + 77}", 2, 1)
    found = joined(GKE_TPU)
    assert (found.source, found.processes, found.process, found.coordinator, found.automatic) == ("TPU hosts", 2, 1, None, True)
    found = joined(GKE_TPU, coordinator="a-0:4000")
    assert (found.processes, found.process, found.coordinator, found.automatic) == (2, 1, "a-0:4000", False)
    assert joined(coordinator="auto").automatic


def test_time_outs_are_settings_made_for_a_cold_start():
    found = joined(SLURM)
    assert found.start_timeout_s >= 600
    assert found.heartbeat_timeout_s >= 100
    assert joined(SLURM, timeout_s=5.5).start_timeout_s == 5.5
    assert joined(GKE_TPU, timeout_s=5.5).start_timeout_s == 5.5
    assert joined(coordinator="auto", timeout_s=5.5).start_timeout_s == 5.5
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        assert "--start_timeout" in refused(SLURM, timeout_s=wrong)


@pytest.mark.parametrize(("environ", "flags", "parts"), [
    ({}, {"processes": 2}, ["--coordinator=HOST:PORT, --process=K"]),
    ({}, {"coordinator": "a:1"}, ["--processes=N, --process=K"]),
    ({}, {"coordinator": "a:1", "processes": 2, "process": 2}, ["process 2 of 2", "0 to 1"]),
    ({}, {"coordinator": "a:1", "processes": 2, "process": -1}, ["process -1 of 2"]),
    ({}, {"processes": 0}, ["--processes=0", "at least 1"]),
    (SLURM | {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, {"processes": 2},
     ["process 3 of 2", "--processes is from the flag and --process is from SLURM"]),
    ({}, {"coordinator": "nowhere", "processes": 2, "process": 0}, ["--coordinator=nowhere", "HOST:PORT"]),
    ({}, {"coordinator": "fd00::1:4000", "processes": 2, "process": 0}, ["brackets"]),
    ({}, {"coordinator": "auto", "processes": 2}, ["--coordinator=auto"]),
    ({name: value for name, value in SLURM.items() if "STEP" not in name}, {}, ["SLURM_NTASKS=2", "srun", "--processes=1"]),
])
def test_what_does_not_fit_together(environ, flags, parts):
    message = refused(environ, **flags)
    for part in parts:
        assert part in message


LOOPBACKS = ["127.0.0.1", "127.1.2.3", "localhost", "LOCALHOST.", "localhost.localdomain", "ip6-localhost", "[::1]", "0.0.0.0", "[::]",
             "[::ffff:127.0.0.1]"]


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_loopback_coordinator_for_several_hosts_is_refused(host):  # user report 22
    message = refused(SLURM, coordinator=f"{host}:4000")
    assert "2 hosts take part" in message
    assert f"--coordinator={host}:4000 is this host itself" in message
    assert "SLURM would have node1:" in message
    for one_host in ({}, SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1"}):
        found = joined(one_host, coordinator=f"{host}:4000", processes=2, process=1)
        assert found.loopback


def test_a_name_that_is_this_host_to_every_host_is_refused_too():
    assert "2 hosts take part" in refused(SLURM, ("127.0.0.1",), coordinator="training:4000")
    assert "2 hosts take part" in refused(SLURM, ("10.0.0.1", "::1"), coordinator="training:4000")
    assert joined(SLURM, ("10.0.0.1",), coordinator="training:4000").coordinator == "training:4000"
    assert joined(SLURM, (), coordinator="training:4000")  # not known yet: pods' names appear late
    own = socket.gethostname()  # a host's own name is 127.0.1.1 on some distributions, on that host alone
    assert joined(SLURM, ("127.0.1.1",), coordinator=f"{own}:4000")
    assert joined(SLURM | {"SLURMD_NODENAME": "n7"}, ("127.0.1.1",), coordinator="n7.cluster:4000")
    jobset = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "host", "JOB_COMPLETION_INDEX": "1", "NNODES": "2"}
    assert "2 hosts" in refused(jobset, coordinator="127.0.0.1:4000")
    assert "2 hosts" in refused(GKE_TPU, coordinator="localhost:4000")
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert "2 hosts" in refused(mpi, coordinator="localhost:4000")
    assert joined(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, coordinator="localhost:4000").hosts == 1


# ---- real processes ----

JOIN = """
import os, sys
from jaxmem import hosts
try:
    joined = hosts.settings(os.environ, timeout_s=float(sys.argv[1]))
    hosts.start(joined, cpu_devices=4)
except hosts.StartError as error:
    print(error, file=sys.stderr)
    sys.exit(9)
"""
SUM = JOIN + """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert (jax.process_count(), jax.process_index(), jax.local_device_count()) == (2, int(os.environ["SLURM_PROCID"]), 4)
mesh = Mesh(np.array(jax.devices()), ("d",))
rows = jax.make_array_from_callback((8,), NamedSharding(mesh, P("d")), lambda index: np.arange(8.0, dtype=np.float32)[index] + 1)
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))(rows)
print(total.addressable_shards[0].data[0], flush=True)
hosts.leave(0, together=True)
"""
LEAVE = JOIN + """
import time
if os.environ["SLURM_PROCID"] == "1":
    hosts.leave(76, together=False)
time.sleep(60)
"""


@contextlib.contextmanager
def slurm_tasks(code: str, *numbers: int, timeout_s: float = 60.0) -> Iterator[list[subprocess.Popen[str]]]:
    """Tasks of a SLURM step of two on this host, as srun would start them."""
    with socket.socket() as probe:  # the coordinator's port follows from the job: take a job whose port is free
        while True:
            probe.bind(("127.0.0.1", 0))
            job = probe.getsockname()[1] % 4096
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 61440 + job)):
                break
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1",
            "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
            "SLURMD_NODENAME": "localhost"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "XLA_FLAGS"))}
    tasks = [subprocess.Popen([sys.executable, "-c", code, str(timeout_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=clean | step | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "JAX_PLATFORMS": "cpu"})
             for n in numbers]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()
            task.communicate()


def test_two_slurm_tasks_of_four_devices_sum_over_eight():
    with slurm_tasks(SUM, 0, 1) as tasks:
        ended = [task.communicate(timeout=120) for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0], ended
    assert [out for out, _ in ended] == ["36.0\n", "36.0\n"]  # and nothing of Gloo's


@pytest.mark.parametrize("here", [0, 1])
def test_a_task_that_never_arrives_is_an_error_and_no_abort(here):
    with slurm_tasks(JOIN, here, timeout_s=1.0) as [task]:
        _, err = task.communicate(timeout=60)
        assert task.returncode == 9, err
    wanted = "1 of 2 processes arrived at localhost:{}; missing: 1. Gave up after 1 s" if here == 0 else \
        "process 1 of 2 waited 1 s for process 0 at localhost:{}"
    port = err.partition("localhost:")[2].partition(";" if here == 0 else ":")[0]
    assert wanted.format(port) in err
    assert "--start_timeout=SECONDS waits longer" in err


def test_a_process_that_must_end_waits_for_nobody():
    with slurm_tasks(LEAVE, 0, 1) as [zero, one]:
        one.communicate(timeout=60)
        assert one.returncode == 76
        assert zero.poll() is None
        zero.send_signal(signal.SIGKILL)

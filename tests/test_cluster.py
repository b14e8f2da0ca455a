"""Environments of launchers, as they leave them."""

import importlib.util

import pytest

from jaxmem import cluster
from jaxmem.cluster import found_in, hosts_of
from jaxmem.spec import InputError

SLURM = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2",
         "SLURM_STEP_NODELIST": "node[003-005,9]", "SLURM_STEP_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_NODEID": "2",
         "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURMD_NODENAME": "node005"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
JOBSET = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "host", "JOB_COMPLETION_INDEX": "3", "NNODES": "16"}


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """The packages that `find_spec` finds."""
    names: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)
    return names


@pytest.mark.parametrize(("nodelist", "hosts"), [
    ("node001", ["node001"]),
    ("node001,host2", ["node001", "host2"]),
    ("node[003-005,9],gpu1", ["node003", "node004", "node005", "node9", "gpu1"]),
    ("node[098-101]", ["node098", "node099", "node100", "node101"]),
    ("node[8-11]", ["node8", "node9", "node10", "node11"]),
    ("rack[1-2]n[01,03]-ib", ["rack1n01-ib", "rack1n03-ib", "rack2n01-ib", "rack2n03-ib"]),
    ("a-1,b[2]", ["a-1", "b2"]),
    ("gpu-a[0-1].cluster.local,10.0.0.7", ["gpu-a0.cluster.local", "gpu-a1.cluster.local", "10.0.0.7"]),
])
def test_slurm_node_lists(nodelist, hosts):
    assert hosts_of(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "node[", "node[1-]", "node[a-b]", "node[]", "node 1"])
def test_a_node_list_that_is_none(nodelist):
    with pytest.raises(InputError, match="--coordinator=HOST:PORT"):
        hosts_of(nodelist)


def test_slurm():
    found = found_in(SLURM)
    assert found is not None
    assert (found.source, found.processes, found.process, found.hosts, found.host) == ("SLURM", 4, 2, 4, "node005")
    assert found.coordinator == f"node003:{61440 + 123456 % 4096}"
    assert found.local_devices is None  # one task a host has all of its GPUs, where jax would give it one
    ports = {found_in(SLURM | {"SLURM_STEP_ID": str(step)}).coordinator for step in range(20)}  # type: ignore[union-attr]
    assert len(ports) == 20
    large = found_in(SLURM | {"SLURM_JOB_ID": "4294901759"})
    assert large is not None and large.coordinator is not None
    assert 61440 <= int(large.coordinator.rpartition(":")[2]) < 65536


def test_slurm_variables_of_a_batch_script_are_not_a_run():
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")} | {"SLURM_PROCID": "0"}
    found = found_in(batch)
    assert found is not None and found.problem is not None
    assert "srun" in found.problem and "--processes=1" in found.problem
    assert found.processes is None and found.process is None
    assert found_in(batch | {"SLURM_NTASKS": "1"}) is None
    assert found_in(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert found_in({name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NNODES")}) is None


@pytest.mark.parametrize(("changes", "devices"), [
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_LOCALID": "3", "SLURM_GPUS_ON_NODE": "8"}, (3,)),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (4, 5, 6, 7)),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)", "SLURM_GPUS_ON_NODE": "8"}, None),  # this is the third node
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "3", "SLURM_GPUS_ON_NODE": "8"}, None),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, None),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_LOCALID": "1"}, (1,)),
])
def test_gpus_of_a_slurm_task(changes, devices):
    found = found_in(SLURM | changes)
    assert found is not None
    assert found.local_devices == devices


def test_open_mpi(installed):
    found = found_in(OPEN_MPI | SLURM)  # mpirun inside a SLURM job
    assert found is not None
    assert (found.source, found.processes, found.process, found.hosts, found.automatic) == ("Open MPI", 8, 5, 2, False)
    assert found.problem is not None and "--coordinator=HOST:PORT" in found.problem
    for more in ({"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}, {}):
        if not more:
            installed.add("mpi4py")
        found = found_in(OPEN_MPI | more)
        assert found is not None
        assert found.automatic and found.problem is None
    assert found_in(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None


def test_tpu_hosts():
    gke = {"TPU_WORKER_HOSTNAMES": "a-0,a-1,a-2,a-3", "TPU_WORKER_ID": "2"}
    found = found_in(gke)
    assert found is not None
    assert (found.processes, found.process, found.hosts, found.automatic) == (4, 2, 4, True)
    found = found_in(gke | {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2"})
    assert found is not None
    assert (found.processes, found.process) == (12, 10)
    assert found_in({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None


def test_jobset(installed):
    found = found_in(JOBSET)
    assert found is not None
    assert (found.processes, found.process, found.hosts) == (16, 3, 16)
    assert found.coordinator == f"run-host-0-0.run:{cluster.COORDINATOR_PORT}"
    found = found_in(JOBSET | {"JAX_COORDINATOR_ADDRESS": "other-0.svc", "JAX_COORDINATOR_PORT": "55"})
    assert found is not None and found.coordinator == "other-0.svc:55"
    unsaid = {name: value for name, value in JOBSET.items() if name != "NNODES"} | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    found = found_in(unsaid)
    assert found is not None and found.problem is not None and "NNODES" in found.problem
    installed.add("kubernetes")
    found = found_in(unsaid)
    assert found is not None and found.automatic and found.problem is None
    assert found_in({"JOB_COMPLETION_INDEX": "3"}) is None  # an indexed job may as well be a sweep of single runs
    assert found_in(JOBSET | {"NNODES": "1", "JOB_COMPLETION_INDEX": "0"}) is None


def test_no_launcher_and_nonsense():
    assert found_in({}) is None
    with pytest.raises(InputError, match="SLURM_PROCID=two"):
        found_in(SLURM | {"SLURM_PROCID": "two"})

"""What a launcher left in the environment about the processes of a run: Open MPI, SLURM, TPU hosts, a JobSet. No jax.

Read in the order in which jax looks: mpirun inside a SLURM job is Open MPI's run.
"""

import importlib.util
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxmem.spec import InputError

COORDINATOR_PORT = 8482  # of TPU and JobSet runs, whose hosts are their own
_SLURM_PORTS = (61440, 4096)  # first, how many: above Linux's range of ports that it gives out by itself


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of a run of several processes; None is not said. `host` is this host's name, `hosts` how many there are.

    automatic: jax finds out by itself. problem: why this environment cannot be used as it is, and what to do.
    """

    source: str
    processes: int | None = None
    process: int | None = None
    coordinator: str | None = None
    hosts: int | None = None
    host: str | None = None
    local_devices: tuple[int, ...] | None = None
    automatic: bool = False
    problem: str | None = None


def found_in(environ: Mapping[str, str]) -> Found | None:
    """None where no launcher is seen, or it started one process. Raises `InputError` for a variable that is no number."""
    for look in (_open_mpi, _slurm, _tpu, _jobset):
        if found := look(environ):
            return None if found.processes == 1 else found
    return None


# ---- Open MPI ----

def _open_mpi(environ: Mapping[str, str]) -> Found | None:
    processes, process = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    if processes is None or process is None:
        return None
    on_this_host = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Before version 5 mpirun names its own host; from 5 on only MPI itself can tell.
    automatic = "OMPI_MCA_orte_hnp_uri" in environ or importlib.util.find_spec("mpi4py") is not None
    problem = None if automatic else ("Open MPI does not say where process 0 is: give --coordinator=HOST:PORT with the name of process 0's "
                                      "host, the same in every process (or install mpi4py, and it is found)")
    return Found(source="Open MPI", processes=processes, process=process, automatic=automatic, problem=problem,
                 hosts=None if not on_this_host else -(-processes // on_this_host))


# ---- SLURM ----

def _slurm(environ: Mapping[str, str]) -> Found | None:
    job, process = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_PROCID")
    processes = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if job is None or process is None or processes is None:
        return None
    if "SLURM_STEP_NODELIST" not in environ:  # the batch script itself, or a shell: the variables are there, the other tasks are not
        return None if processes == 1 else Found(source="SLURM", hosts=_number(environ, "SLURM_NNODES"), problem=(
            f"SLURM_NTASKS={processes}, but srun did not start this process: start it as srun jaxmem train ..., or give --processes=1 "
            "for a run of one process"))
    nodes = hosts_of(environ["SLURM_STEP_NODELIST"])
    first, count = _SLURM_PORTS
    port = first + (job + 997 * (_number(environ, "SLURM_STEP_ID") or 0)) % count  # steps of one job do not meet each other
    return Found(source="SLURM", processes=processes, process=process, coordinator=f"{nodes[0]}:{port}",
                 hosts=_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or len(nodes), host=environ.get("SLURMD_NODENAME"),
                 local_devices=_slurm_gpus(environ))


def hosts_of(nodelist: str) -> list[str]:
    """`"node[003-005,9],gpu1"` -> `["node003", "node004", "node005", "node9", "gpu1"]`. Raises `InputError`."""
    if not re.fullmatch(r"(?:[^\[\]\s]|\[[^\[\]]+\])+", nodelist):
        raise InputError(f"the list of SLURM nodes {nodelist!r} is not understood; give --coordinator=HOST:PORT")
    found: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", item)  # text, inside of brackets, text, ...
        choices = [_range(inside, nodelist) if i % 2 else [inside] for i, inside in enumerate(pieces)]
        found += ["".join(parts) for parts in itertools.product(*choices)]
    return found


def _range(inside: str, nodelist: str) -> list[str]:
    """`"003-005,9"` -> `["003", "004", "005", "9"]`; the width of the first number is kept."""
    found = []
    for part in inside.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise InputError(f"the list of SLURM nodes {nodelist!r} is not understood; give --coordinator=HOST:PORT")
        first, last = match[1], match[2] or match[1]
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _slurm_gpus(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """This task's share of the host's GPUs; None is all that it sees: one task a host, or SLURM already bound them."""
    node, local = _number(environ, "SLURM_NODEID") or 0, _number(environ, "SLURM_LOCALID")
    tasks = [int(count) for text in environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1")).split(",")
             for count, _, times in [text.rstrip(")").partition("(x")] for _ in range(int(times or 1))]
    here = tasks[node] if node < len(tasks) else tasks[-1]
    if here == 1 or local is None:
        return None
    visible = len([gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()])
    on_node = _number(environ, "SLURM_GPUS_ON_NODE")
    if visible == 1 or (visible and on_node and visible < on_node):
        return None
    gpus = visible or on_node or here
    share = gpus // here if gpus % here == 0 else 1
    return tuple(range(local * share, (local + 1) * share))


# ---- TPU hosts of GKE; a TPU VM's environment says nothing, so there it is --coordinator=auto ----

def _tpu(environ: Mapping[str, str]) -> Found | None:
    names = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not names:
        return None
    hosts, slices = len(names.split(",")), _number(environ, "MEGASCALE_NUM_SLICES") or 1
    worker = _number(environ, "TPU_WORKER_ID")
    process = None if worker is None else worker + hosts * (_number(environ, "MEGASCALE_SLICE_ID") or 0)
    return Found(source="TPU hosts", processes=hosts * slices, process=process, hosts=hosts * slices, automatic=True)


# ---- JobSet ----

def _jobset(environ: Mapping[str, str]) -> Found | None:
    """The variables that `launch.gke` sets; pod names are JOBSET-JOB-0-INDEX, and the JobSet's service resolves them."""
    names = [environ.get(name) for name in ("JOBSET_NAME", "REPLICATED_JOB_NAME")]
    process, processes = _number(environ, "JOB_COMPLETION_INDEX"), _number(environ, "NNODES")
    if None in names or process is None:
        return None
    automatic = processes is None and "KUBERNETES_SERVICE_HOST" in environ and importlib.util.find_spec("kubernetes") is not None
    problem = None if processes is not None or automatic else (
        f"JOBSET_NAME={names[0]} says a JobSet, but NNODES does not say how many pods it has: set NNODES in the manifest, or give "
        "--processes=N (1 for a run of this pod alone)")
    where = environ.get("JAX_COORDINATOR_ADDRESS") or f"{names[0]}-{names[1]}-0-0.{names[0]}"
    port = _number(environ, "JAX_COORDINATOR_PORT") or COORDINATOR_PORT
    return Found(source="JobSet", processes=processes, process=process, coordinator=where if ":" in where else f"{where}:{port}",
                 hosts=processes, automatic=automatic, problem=problem)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set."""
    for name in names:
        if value := environ.get(name, "").strip():
            if not value.isdecimal():
                raise InputError(f"{name}={value} in the environment: expected a whole number")
            return int(value)
    return None

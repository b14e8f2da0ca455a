"""Training in several processes, as a cluster starts them; and what a watchdog, a supervisor and a full disk make of it."""

import concurrent.futures
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import training
from small_disk import on_a_small_disk

PLAN = "data=4,fsdp=2,compute=f32"


def start(arguments: list[str], environ: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "jaxmem", "train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"} | environ)


def finish(processes: list[subprocess.Popen], timeout_s: float = 200) -> list[tuple[int, str, str]]:
    try:  # all at once: one whose pipe is full would wait for its reader
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            outputs = list(pool.map(lambda p: p.communicate(timeout=timeout_s), processes))
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, *out) for p, out in zip(processes, outputs, strict=True)]


def slurm(process: int, job: int) -> dict[str, str]:
    """What `srun --ntasks=2` on one node leaves in the environment of a task."""
    host = socket.gethostname()
    return {"SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_PROCID": str(process),
            "SLURM_LOCALID": str(process), "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODELIST": host,
            "SLURM_JOB_NODELIST": host, "SLURM_STEP_NODELIST": host, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
            "SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}


def test_two_processes_under_slurm_train_as_one_does(tmp_path):
    """2 processes x 4 devices, gloo: the losses of one process of 8 devices; each reads its own rows; one of them writes."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert training.train_here(alone, plan=PLAN, steps=8) == 0
    job = 4_000_000 + os.getpid() % 90_000
    done = finish([start(training.arguments(together, plan=PLAN, steps=8, print_hash=True), slurm(k, job)) for k in range(2)])
    assert [code for code, _, _ in done] == [0, 0], done
    mine, reference = ([line["loss"] for line in training.metrics(run)] for run in (together, alone))
    assert len(mine) == 8
    np.testing.assert_allclose(mine, reference, rtol=2e-5)
    assert done[0][1].splitlines()[-1].startswith("state sha256:") and "sha256" not in done[1][1]
    [event] = training.events(together, "start")
    assert (event["processes"], event["devices"]) == (2, 8)


@pytest.mark.long
def test_a_hung_process_ends_the_run_by_name(tmp_path):
    """jax#38503, marin#8534: one live but stuck process hangs all, without a word."""
    out = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = training.arguments(out, plan=PLAN, fault="hang:step=6,process=1", watchdog=20)
    done = finish([start([*flags, f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={k}"], {}) for k in range(2)])
    assert [code for code, _, _ in done] == [76, 76]
    [first, *_] = training.events(out, "watchdog")
    assert first["missing"] == [1]
    assert "process 1" in done[0][2]
    assert "before_step" in (out / "logs" / "stacks.1.txt").read_text()  # where it hangs


@pytest.mark.long
def test_a_save_that_fails_in_one_process_fails_in_all(tmp_path):
    """Only process 1 cannot write: both say so, go on training, and end alike."""
    out = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [*training.arguments(out, plan=PLAN, steps=6, checkpoint_every=3, watchdog=20), f"--coordinator=127.0.0.1:{port}",
             "--processes=2"]
    small_files = "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
    run = "import runpy, sys; sys.argv[0] = 'jaxmem'; runpy.run_module('jaxmem', run_name='__main__')"
    processes = [subprocess.Popen([sys.executable, "-c", (small_files if k == 1 else "") + run, "train", *flags, f"--process={k}"],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}) for k in range(2)]
    done = finish(processes, 400)
    assert [code for code, _, _ in done] == [70, 70], done
    assert [line["step"] for line in training.metrics(out)] == list(range(1, 7))
    assert "process 1" in done[0][2] and "was not written" in done[0][2] and "could not be saved" in done[0][2]


@pytest.mark.long
def test_a_full_disk_loses_nothing(tmp_path):
    """The save that finds no room fails with a clear line, training goes on, and the next save works; the final state is as ever."""
    small = tmp_path / "small"
    small.mkdir()
    flags = training.arguments(small / "run", print_hash=True, fault="fill_disk:step=3;slow:step=5,seconds=0.5,steps=2")
    done = on_a_small_disk(small, 24, sys.executable, "-m", "jaxmem", "train", *flags, timeout_s=240, JAX_PLATFORMS="cpu",
                           after=f"cp -r {small}/run/logs {small}/run/metrics.jsonl {tmp_path}")
    whole = training.train_apart(tmp_path / "whole", print_hash=True)
    assert done.returncode == 0, done.stderr
    assert "was not written" in done.stderr and "training goes on" in done.stderr
    assert done.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert training.events(tmp_path, "commit_failed")
    assert [line["step"] for line in training.metrics(tmp_path)] == list(range(1, 17))


@pytest.mark.long
def test_random_faults_in_four_processes(repository, tmp_path):
    """The short form of `experiments.benchmarks.chaos`: it ends with 1 unless the final state is bitwise that of the undisturbed run."""
    done = subprocess.run([sys.executable, "-m", "experiments.benchmarks.chaos", "--faults=7", "--elastic_kills=1", "--steps=48",
                           f"--out={tmp_path / 'chaos'}"], cwd=repository, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise equal to the undisturbed run" in done.stdout


@pytest.mark.long
def test_resident_memory_is_flat_over_a_hundred_saves(tmp_path):
    """The soak: what a process holds after twenty saves and after a hundred differs by less than a few copies of its small state."""
    out = tmp_path / "run"
    code = ("import json, sys, psutil, training, pathlib; from jaxmem.checkpoint import store; held = []; real = store.Store.save\n"
            "def save(self, step, *a, **k):\n"
            "    real(self, step, *a, **k); held.append(psutil.Process().memory_info().rss)\n"
            "store.Store.save = save\n"
            "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"
            "assert training.train_here(pathlib.Path(sys.argv[1]), steps=400, checkpoint_every=4, data='synthetic') == 0\n"
            "print(json.dumps(held))")
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, timeout=600,
                          env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.dirname(__file__)})
    assert done.returncode == 0, done.stderr[-3000:]
    held = json.loads(done.stdout.splitlines()[-1])
    assert len(held) == 100
    early, late = np.median(held[15:25]), np.median(held[-10:])
    print(f"resident after 20 saves {early / 2**20:.0f} MiB, after 100 {late / 2**20:.0f} MiB")
    assert late - early < 24 * 2**20

"""Bring up the devices and processes of a run, and see that they are what was asked for."""

import os

import jax
from jax.experimental import multihost_utils

from jaxmem import hosts
from jaxmem.hardware import Topology
from jaxmem.spec import InputError
from jaxmem.targets import cache


def start(topology: Topology, place: hosts.Settings | None) -> int:
    """Join the other processes (`place`; None: there are none) and return this one's number. `cpu:N` is emulated, each process its share.

    What was compiled is kept across restarts, unless JAX_COMPILATION_CACHE_DIR says otherwise. Raises InputError, hosts.StartError.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache.root() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    processes = place.processes if place is not None and place.processes else 1
    emulated = topology.devices if topology.chip.kind == "cpu" else None
    if emulated is not None and emulated % processes:
        raise InputError(f"{topology} cannot be shared by {processes} processes; nearest: cpu:{max(1, emulated // processes) * processes}")
    hosts.start(place, cpu_devices=emulated // processes if emulated is not None else None)
    check_devices(topology)
    return jax.process_index()


def check_devices(topology: Topology) -> None:
    """Raises InputError unless the devices that are here are as many, and of the kind, that `topology` has."""
    devices = jax.devices()
    kind = devices[0].platform
    if len(devices) != topology.devices or kind != topology.chip.kind:
        raise InputError(f"--topology={topology} has {topology.devices} {topology.chip.kind.upper()} devices, and here are {len(devices)}: "
                         f"{devices[0].device_kind} ({kind.upper()}); --topology=cpu:N emulates any number on a CPU")
    if other := other_chip(topology.chip.name, topology.chip.kind, devices[0].device_kind):
        raise InputError(f"--topology={topology} is of {topology.chip.name}, and here is {devices[0].device_kind!r} (a {other})")


# What TPUs call themselves (jax's `device_kind`); GPUs have the name of the chip in theirs.
TPU_KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
GPU_NAMES = ("a100", "a6000", "h100", "h200", "b200", "b300", "gb200", "gb300", "v100")


def other_chip(name: str, kind: str, says: str) -> str | None:
    """Which other chip `says`, a device's own name, is of; None where it is `name` or is not known."""
    if kind == "tpu":
        found = [chip for chip, word in TPU_KINDS.items() if says == word]
    else:
        word = says.lower().replace(" ", "")
        found = sorted((chip for chip in GPU_NAMES if chip in word), key=len)[-1:]
    own = name if kind == "tpu" else name.split("-")[0]
    return found[0] if found and kind != "cpu" and found[0] != own else None


def meet(name: str) -> None:
    """Every process waits here for every other."""
    multihost_utils.sync_global_devices(name)

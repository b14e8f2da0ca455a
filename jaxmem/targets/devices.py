"""Devices of a topology that is not here, for compiling only."""

import os
from collections.abc import Sequence

from jaxmem.hardware import Topology
from jaxmem.targets.flags import GPU_REQUIRED


def environment(topology: Topology, flags: tuple[str, ...], dump_dir: str | None = None) -> dict[str, str]:
    """Environment variables that a process must have before it imports jax to compile for `topology`."""
    kind = topology.chip.kind
    env = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if kind == "tpu":
        env |= {"TPU_SKIP_MDS_QUERY": "1",  # a metadata query hangs where there is no metadata server
                "TPU_WORKER_HOSTNAMES": "localhost",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process dies on libtpu's lock file
                "TPU_LOG_DIR": "disabled", "TPU_MIN_LOG_LEVEL": "2", "TF_CPP_MIN_LOG_LEVEL": "1",
                "LIBTPU_INIT_ARGS": " ".join(flags), "XLA_FLAGS": ""}
    elif kind == "gpu":
        dump = (f"--xla_dump_to={dump_dir}", "--xla_dump_hlo_as_text=true", "--xla_dump_hlo_pass_re=none") if dump_dir else ()
        env |= {"XLA_FLAGS": " ".join((*GPU_REQUIRED, *flags, *dump)), "TF_CPP_MIN_LOG_LEVEL": "1",
                "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    else:
        env |= {"XLA_FLAGS": " ".join((f"--xla_force_host_platform_device_count={topology.devices}", *flags))}
    return env


def described_devices(topology: Topology) -> Sequence:
    """JAX devices of `topology`: compile-only for TPU and GPU, emulated for CPU. Needs `environment` to be in force."""
    import jax
    if topology.chip.kind == "cpu":
        return jax.devices("cpu")[:topology.devices]
    from jax.experimental import topologies
    if topology.chip.kind == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=topology.libtpu_name, **topology.libtpu_kwargs).devices
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    from jaxmem.targets.gpu_target_config import target_config
    return topologies.get_topology_desc("", platform="cuda", target_config=target_config(topology.chip.name),
                                        topology=topology.gpu_shape).devices

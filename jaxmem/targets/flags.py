"""Named compiler flag sets of each chip: `flags=default|none|NAME` of a plan. They change the schedule, so they belong to every key.

Sources: the v5e and v5p default sets are those that MaxText publishes with its measured configurations
(AI-Hypercomputer/maxtext at e591f30c, configs/tpu/{v5e,v5p}), less one that the current compiler refuses on v5p. The GPU set
is the one that MaxText's and JAX-Toolbox's GPU training scripts share, as far as this compiler accepts it.
"""

from jaxmem import spec
from jaxmem.hardware import Topology
from jaxmem.spec import InputError

_ASYNC_COLLECTIVE_FUSION = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
)
_V5E = (*_ASYNC_COLLECTIVE_FUSION, "--xla_enable_async_all_gather=true")
_V5P = (*_ASYNC_COLLECTIVE_FUSION, "--xla_tpu_megacore_fusion_allow_ags=false", "--xla_enable_async_collective_permute=true",
        "--xla_tpu_enable_ag_backward_pipelining=true")
# MaxText's host-offload set for Trillium (AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py): copies to and from the host run
# beside the computation. Compiling takes about three times as long with it.
_OFFLOAD = (
    "--xla_tpu_enable_all_experimental_scheduler_features=true",
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true",
    "--xla_tpu_host_transfer_overlap_limit=24",
    "--xla_tpu_aggressive_opt_barrier_removal=ENABLED",
    "--xla_lhs_prioritize_async_depth_over_stall=ENABLED",
    "--xla_tpu_enable_ag_backward_pipelining=true",
    "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED",
    "--xla_should_add_loop_invariant_op_in_chain=ENABLED",
    "--xla_max_concurrent_host_send_recv=100",
    "--xla_tpu_scheduler_percent_shared_memory_limit=100",
    "--xla_latency_hiding_scheduler_rerun=2",
)
_GPU = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    # without a device Triton's matmul tiles are not autotuned and absurd; library calls are what a large bf16 matmul gets on a real one
    "--xla_gpu_enable_triton_gemm=false",
    # a loop body cannot overlap its own first gather: these start the next layer's one iteration early
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
    "--xla_gpu_all_gather_combine_threshold_bytes=1073741824",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=1073741824",
    "--xla_gpu_all_reduce_combine_threshold_bytes=134217728",
)

# aborts without it: a scalar all-reduce's Triton kernel cannot be built for a described GPU (jaxlib 0.12.0.1)
GPU_REQUIRED = ("--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false",)

FLAG_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "v4": {"default": ()},
    "v5e": {"default": _V5E},
    "v5p": {"default": _V5P},
    # a larger scoped VMEM makes 2048-wide attention blocks possible and code generation many times slower; blocks here are 512 wide
    "v6e": {"default": (), "offload": _OFFLOAD, "vmem96": ("--xla_tpu_scoped_vmem_limit_kib=98304",)},
    "tpu7x": {"default": ()},
    "gpu": {"default": _GPU},
    "cpu": {"default": ()},
}


def flags_for(name: str, topology: Topology, extra: str = "") -> tuple[str, ...]:
    """The compiler's flags for a plan's `flags=name` on a topology, then the words of `extra`."""
    chip = topology.chip
    sets = {"none": (), **FLAG_SETS.get(chip.name, FLAG_SETS.get(chip.kind, {"default": ()}))}
    if name not in sets:
        raise InputError(f"plan: flags={name}: {chip.name} has {', '.join(sets)}{spec.nearest(name, sets)}")
    more = tuple(extra.translate(spec.DASHES).split())
    for flag in more:
        if not flag.startswith("--") or "=" not in flag:
            raise InputError(f"--compiler_flags: {flag!r} is not of the form --name=value")
    names = {flag.partition("=")[0] for flag in more}
    return tuple(f for f in sets[name] if f.partition("=")[0] not in names) + more

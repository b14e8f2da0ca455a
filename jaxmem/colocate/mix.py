"""A mix of runs, compiled: what each of its programs takes on a part of the devices and on MIG slices, ready for `packing`.

Bytes are the compiler's (compile), seconds are predicted from the compiled schedule (estimate).
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from jaxmem.chips import CHIPS
from jaxmem.colocate import packing, slices
from jaxmem.colocate.fitting import Tried, line, try_runs
from jaxmem.colocate.parts import part_of
from jaxmem.hardware import Topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.verdict import usable
from jaxmem.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """`count` runs of one workload that differ in what is an input of its programs: seed, learning rate, clip, data."""

    workload: Workload
    count: int

    @classmethod
    def parse(cls, text: str) -> "Runs":
        """`8*model=gpt2,batch=4,seq=1024`, or one run without the number."""
        found = re.fullmatch(r"\s*(?:(\d+)\s*[*x]\s*)?(model=.*)", text, re.DOTALL)
        if not found or found[1] is not None and int(found[1]) < 1:
            raise InputError(f"runs {text!r}: expected COUNT*WORKLOAD, as in 8*model=gpt2,batch=4,seq=1024")
        return cls(workload=Workload.parse_line(found[2]), count=int(found[1] or 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """programs: the runs as `packing` takes them. parts: how many runs the topology has devices for. usable_bytes: of a device."""

    programs: list[packing.Program]
    profiles: list[slices.Profile]
    parts: int
    usable_bytes: int
    backend: str


def compiled(mix: Sequence[Runs], plan: Plan, topology: Topology, *, mem_fraction: float = 0.75, timeout_s: float = 1800,
             with_slices: bool = True, progress: Callable[[str], None] = lambda line: None) -> Mix:
    """Compiles the train step of each workload with one run and with two on one part, and `with_slices` with one on the smallest MIG slice
    that may hold it. Raises InputError, also for a run that does not fit at all."""
    if topology.devices % plan.devices:
        raise InputError(f"{plan.product()} uses {plan.devices} devices a run, which do not divide the {topology.devices} of {topology}")
    limit, _ = usable(topology, mem_fraction)
    if limit is None:
        raise InputError(f"{topology} has no memory of its own to share out; give a TPU or a GPU, as in v5e-8 or h100:1")
    parts = topology.devices // plan.devices
    part = part_of(topology, parts)
    profiles = slices_of(topology, mem_fraction) if plan.devices == 1 and with_slices else []
    programs, backend = [], ""
    for i, runs in enumerate(mix):
        def tried(n: int, where: Topology, runs: Runs = runs) -> Tried:
            return try_runs(runs.workload, plan, where, n, mem_fraction=mem_fraction, timeout_s=timeout_s, progress=progress)[0]
        one = tried(1, part)
        if not one.fits or one.peak_bytes is None:
            raise InputError(f"{runs.workload}: a single run does not fit {part} under plan {str(plan) or 'default'}: "
                             f"{one.reason or f'{one.peak_bytes} bytes, and {limit} are usable'}")
        two = tried(2, part)
        fixed = round((line([one, two]) or (0.0, 0.0))[0])
        backend = one.backend or backend
        seconds: dict[str, float | None] = {}
        size = one.peak_bytes
        for profile in (p for p in profiles if p.usable_bytes >= one.peak_bytes):
            on_slice = tried(1, Topology(chip=CHIPS[profile.chip], shape=(1, 1)))
            if on_slice.fits and on_slice.peak_bytes is not None:
                seconds[profile.name], size = on_slice.step_s, on_slice.peak_bytes
                break
        programs.append(packing.Program(
            name=f"{runs.workload.model_name}-{i}" if repeated(mix, runs) else runs.workload.model_name, count=runs.count,
            fixed_bytes=fixed, each_bytes=one.peak_bytes - fixed, first_s=one.step_s,
            more_s=two.step_s - one.step_s if two.step_s is not None and one.step_s is not None else None, slices=seconds,
            slice_bytes=size))
    return Mix(programs=programs, profiles=profiles, parts=parts, usable_bytes=limit, backend=backend)


def repeated(mix: Sequence[Runs], runs: Runs) -> bool:
    return sum(other.workload.model_name == runs.workload.model_name for other in mix) > 1


def slices_of(topology: Topology, mem_fraction: float) -> list[slices.Profile]:
    """The MIG slices of the topology's GPU with what is usable of each."""
    found: dict[str, int] = {}
    for chip in CHIPS.values():
        if chip.parent == topology.chip.name:
            limit, _ = usable(Topology(chip=chip, shape=(1, 1)), mem_fraction)
            found |= {chip.name: limit} if limit else {}
    return slices.profiles_of(topology.chip, found)


def arrangements(mix: Mix) -> list[packing.Arrangement]:
    """Every way, possible or not."""
    return [packing.one_after_another(mix.programs, mix.parts, mix.usable_bytes),
            packing.shared(mix.programs, mix.parts, mix.usable_bytes),
            packing.sliced(mix.programs, mix.parts, mix.profiles, mix.usable_bytes)]

"""A mix of runs, compiled: what each of its programs takes on a part of the devices and on MIG slices, ready for `packing`.

Bytes are the compiler's (compile), seconds are predicted from the compiled schedule (estimate). The line through one run and two may be far
too low for many, so what is recommended is compiled before it is told.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Literal

from jaxmem.chips import CHIPS
from jaxmem.colocate import packing, slices
from jaxmem.colocate.fitting import Tried, try_runs
from jaxmem.colocate.parts import part_of, parts_for
from jaxmem.hardware import Topology
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.verdict import usable
from jaxmem.workload import Workload

REARRANGED = 4  # times at most


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
    parts = parts_for(plan, topology)
    limit, _ = usable(topology, mem_fraction)
    if limit is None:
        raise InputError(f"{topology} has no memory of its own to share out; give a TPU or a GPU, as in v5e-8 or h100:1")
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
        needs = needed(two, limit)  # a refusal counts too, or two runs would be placed where they were seen not to fit
        fixed = 2 * one.peak_bytes - needs if needs is not None else 0
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


# ---------------------------------------------------------------- the recommendation, compiled

@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """mix: with the lines that were mended. verified: each program of the recommendation was compiled with the most runs that a device has
    of it (or on its slice) and takes no more than was counted with. problem: why a recommendation was withdrawn."""

    mix: Mix
    ways: list[packing.Arrangement]
    advice: packing.Advice
    verified: bool
    problem: str | None = None


def recommended(mix: Mix, runs: Sequence[Runs], plan: Plan, topology: Topology, *,
                prefer: Literal["throughput", "isolation"] = "throughput", mem_fraction: float = 0.75, timeout_s: float = 1800,
                progress: Callable[[str], None] = lambda line: None) -> Checked:
    """The recommendation for a `compiled` mix, whose `runs` these are. A program of more than two runs on a device is compiled with as
    many; where it takes more than its line says, the line goes through one run and that, and the mix is arranged again, REARRANGED times
    at most."""
    part = part_of(topology, mix.parts)
    seen: dict[tuple[str, int], Tried] = {}
    mended: list[str] = []
    for rearranged in range(REARRANGED + 1):
        ways = arrangements(mix)
        advice = packing.recommend(ways, prefer=prefer)
        advice = dataclasses.replace(advice, reasons=[*advice.reasons, *mended])
        best = advice.best
        if best is None or best.how != "vmapped":
            return Checked(mix=mix, ways=ways, advice=advice, verified=best is not None and on_compiled_slices(best, mix))
        programs, found = [], []
        for program, own in zip(mix.programs, runs, strict=True):
            n = max((count for device in best.devices for name, count in device if name == program.name), default=0)
            if n > 2:  # one and two are on the line
                key = program.name, n
                try:
                    if key not in seen:
                        seen[key] = try_runs(own.workload, plan, part, n, mem_fraction=mem_fraction, timeout_s=timeout_s,
                                             progress=progress)[0]
                except RuntimeError as error:  # neither fits nor does not: no figures, no time left
                    return withdrawn(mix, ways, mended, f"{n} runs of {program.name} in one program could not be compiled: {error}")
                needs = needed(seen[key], mix.usable_bytes)
                if needs is None:
                    return withdrawn(mix, ways, mended, f"the compiler gave no peak for {n} runs of {program.name} in one program")
                if needs > program.bytes(n):
                    found.append(f"{n} runs of {program.name} in one program take {needs} bytes"
                                 f"{'' if needs == seen[key].peak_bytes else ' or more'} (compile), not {program.bytes(n)} as the line "
                                 "from other numbers of runs says")
                    program = through(program, n, needs)
            programs.append(program)
        if not found:
            return Checked(mix=mix, ways=ways, advice=advice, verified=True)
        if rearranged < REARRANGED:
            mended += found
            for text in found:
                progress(f"{text}; arranged again")
            mix = dataclasses.replace(mix, programs=programs)
    return withdrawn(mix, ways, mended, f"arranged {REARRANGED} times anew, and still {'; '.join(found)}; jaxmem pack --largest says how "
                                        "many runs of one workload fit")


def needed(tried: Tried, usable_bytes: int) -> int | None:
    """What it takes, in bytes; of a refusal at least more than there is, also where the compiler gave no number. None: unknown."""
    return tried.peak_bytes if tried.fits else max(tried.peak_bytes or 0, usable_bytes + 1)


def through(program: packing.Program, runs: int, peak_bytes: int) -> packing.Program:
    """With the line through one run, as it is, and `peak_bytes` of `runs`; rounded up, so that it says no less there."""
    one = program.bytes(1)
    each = -((one - peak_bytes) // (runs - 1))
    return dataclasses.replace(program, each_bytes=each, fixed_bytes=one - each)


def on_compiled_slices(best: packing.Arrangement, mix: Mix) -> bool:
    """Whether each run is on a slice that it was compiled for; on whole parts, one at a time, each was."""
    compiled_for = {f"{one.name}@{name}" for one in mix.programs for name in one.slices}
    return best.how != "mig" or all(what in compiled_for for device in best.devices for what, _ in device)


def withdrawn(mix: Mix, ways: Sequence[packing.Arrangement], mended: Sequence[str], problem: str) -> Checked:
    """Nothing is recommended; the reasons still tell the other ways."""
    ways = [packing.Arrangement(how=one.how, problem=problem) if one.how == "vmapped" else one for one in ways]
    reasons = [*packing.recommend(ways).reasons, *mended]
    return Checked(mix=mix, ways=ways, advice=packing.Advice(best=None, reasons=reasons), verified=False, problem=problem)

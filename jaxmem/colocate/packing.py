"""Which way to share devices suits a mix of small runs: one program for many (`vmapped`), devices of their own (`parts`), MIG slices.
No jax: bytes and seconds in, arrangements out.

A program's memory is `fixed_bytes + n * each_bytes` for n runs in it, its step `first_s + (n - 1) * more_s`: the line through one run and
two, both compiled. Different programs on one device take turns, so their seconds add up, and all of them are resident, so their bytes do.
A *round* is one step of every run; the arrangement with the shortest round has the highest throughput.

Rigid against flexible: a MIG slice has a size of a short list and a place of another, and what its run does not use nobody can.
Placement here is greedy (largest first), which the tests hold against every possible arrangement of small mixes.

A. Robroek et al., arXiv 2209.06018, for sharing; R. Graham, "Bounds on multiprocessing timing anomalies" (1969), for largest first.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxmem.chips import CHIPS, Chip
from jaxmem.spec import InputError, nearest

# https://docs.nvidia.com/datacenter/tesla/mig-user-guide (2026-12), `nvidia-smi mig -lgipp`: (compute sevenths, memory eighths) -> where an
# instance may begin, in memory eighths. Two instances never share an eighth, and then their sevenths fit too.
STARTS = {(1, 1): (0, 1, 2, 3, 4, 5, 6), (1, 2): (0, 2, 4, 6), (2, 2): (0, 2, 4), (3, 4): (0, 4), (4, 4): (0,), (7, 8): (0,)}
How = Literal["one_after_another", "vmapped", "parts", "mig"]
GiB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A MIG slice: `eighths` of the GPU's memory, beginning at one of `starts`; `usable_bytes` of it are a program's."""

    chip: str
    eighths: int
    starts: tuple[int, ...]
    usable_bytes: int

    @property
    def name(self) -> str:
        return self.chip.partition("-mig-")[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """`count` runs of one program, a run on one part of the devices. Seconds are None where nothing predicts them.

    slices: MIG profile -> seconds of a step of one run there, for the profiles that it fits in; `slice_bytes`: what it takes there.
    """

    name: str
    count: int
    fixed_bytes: int
    each_bytes: int
    first_s: float | None = None
    more_s: float | None = None
    slices: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    slice_bytes: int = 0

    def bytes(self, runs: int) -> int:
        return self.fixed_bytes + runs * self.each_bytes if runs else 0

    def seconds(self, runs: int) -> float | None:
        if self.first_s is None or (runs > 1 and self.more_s is None):
            return None if runs else 0.0
        return self.first_s + (runs - 1) * (self.more_s or 0.0) if runs else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """devices: for each that is used, (what, runs) pairs; `what` is a program's name, for MIG with its slice behind an @.

    round_s: seconds until every run has made a step. used_bytes, held_bytes: of all devices that are used. problem: why it cannot be.
    """

    how: How
    devices: tuple[tuple[tuple[str, int], ...], ...] = ()
    round_s: float | None = None
    used_bytes: int = 0
    held_bytes: int = 0
    problem: str | None = None

    @property
    def waste(self) -> float | None:
        """The part of the held devices' usable memory that no run uses."""
        return 1 - self.used_bytes / self.held_bytes if self.held_bytes else None


def profiles_of(gpu: Chip, usable: Mapping[str, int]) -> list[Profile]:
    """The MIG slices of a GPU from small to large; `usable`: chip name of a slice -> bytes. Empty where it has none."""
    out = []
    for chip in CHIPS.values():
        if chip.parent == gpu.name and chip.hbm_bytes_per_s and gpu.hbm_bytes_per_s and chip.name in usable:
            eighths = round(8 * chip.hbm_bytes_per_s / gpu.hbm_bytes_per_s)
            sevenths = int(chip.name.partition("-mig-")[2].partition("g")[0])
            out.append(Profile(chip=chip.name, eighths=eighths, starts=STARTS[sevenths, eighths], usable_bytes=usable[chip.name]))
    return sorted(out, key=lambda one: (one.eighths, -len(one.starts), one.usable_bytes))


# ---------------------------------------------------------------- memory alone: how many devices hold a mix

def flexible(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` by device, first fit of the largest first. Raises InputError for one that no device holds."""
    if sizes and max(sizes) > capacity:
        raise InputError(f"a run needs {max(sizes)} bytes and a device has {capacity}")
    bins: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        home = next((one for one in bins if sum(sizes[j] for j in one) + sizes[i] <= capacity), None)
        if home is None:
            bins.append(home := [])
        home.append(i)
    return bins


def rigid(sizes: Sequence[int], profiles: Sequence[Profile]) -> list[list[tuple[int, Profile, int]]]:
    """By GPU, (index of `sizes`, its slice, where that begins): each in the smallest slice that holds it, the largest first, at the last
    free place, which keeps the large ones' places free. Raises InputError for one that no slice holds."""
    gpus: list[list[tuple[int, Profile, int]]] = []
    own = {}
    for i, size in enumerate(sizes):
        own[i] = next((one for one in profiles if one.usable_bytes >= size), None)
        if own[i] is None:
            raise InputError(f"a run needs {size} bytes and the largest slice has {max((p.usable_bytes for p in profiles), default=0)}")
    for i, profile in sorted(own.items(), key=lambda one: (-one[1].eighths, len(one[1].starts)) if one[1] else (0, 0)):
        assert profile is not None
        for gpu in [*gpus, None]:
            if gpu is None:
                gpus.append(gpu := [])
            start = next((s for s in reversed(profile.starts) if free(gpu, s, profile.eighths)), None)
            if start is not None:
                gpu.append((i, profile, start))
                break
    return gpus


def free(gpu: Sequence[tuple[int, Profile, int]], start: int, eighths: int) -> bool:
    return all(start + eighths <= other or other + profile.eighths <= start for _, profile, other in gpu)


# ---------------------------------------------------------------- arrangements on a number of devices

def one_after_another(programs: Sequence[Program], devices: int, usable: int) -> Arrangement:
    """The control: a device holds one run at a time, whichever device is free takes the longest that waits."""
    if problem := too_large(programs, usable):
        return Arrangement(how="one_after_another", problem=problem)
    runs = sorted((one for one in programs for _ in range(one.count)), key=lambda one: -(one.first_s or 0.0))
    loads = [0.0] * min(devices, len(runs))
    held: list[list[Program]] = [[] for _ in loads]
    for one in runs:
        i = min(range(len(loads)), key=lambda i: (loads[i], len(held[i])))
        loads[i] += one.first_s or 0.0
        held[i].append(one)
    known = all(one.first_s is not None for one in runs)
    return Arrangement(how="one_after_another", devices=tuple(tuple((one.name, 1) for one in own) for own in held),
                       round_s=max(loads) if known else None, used_bytes=sum(max(one.bytes(1) for one in own) for own in held),
                       held_bytes=usable * len(loads))


def shared(programs: Sequence[Program], devices: int, usable: int) -> Arrangement:
    """All runs resident, runs of one program in one program a device. Each run, the longest first, goes where the longest device stays
    shortest, then where it adds least; `parts` if no device has more than one run.

    Greedy by single runs would never start the second device for a run whose first costs more than it adds elsewhere, which is right.
    """
    if problem := too_large(programs, usable):
        return Arrangement(how="vmapped", problem=problem)
    order = sorted((one for one in programs for _ in range(one.count)), key=lambda one: (-(one.first_s or 0.0), -one.each_bytes, one.name))
    by_name = {one.name: one for one in programs}
    held: list[dict[str, int]] = [{} for _ in range(devices)]

    def load(own: Mapping[str, int]) -> float:
        return sum(by_name[name].seconds(n) or 0.0 for name, n in own.items())

    def room(own: Mapping[str, int]) -> int:
        return usable - sum(by_name[name].bytes(n) for name, n in own.items())
    for one in order:
        choices = []
        for i, own in enumerate(held):
            new = own | {one.name: own.get(one.name, 0) + 1}
            if room(new) >= 0:
                longest = max(load(new), *(load(other) for j, other in enumerate(held) if j != i), 0.0)
                choices.append((longest, load(new) - load(own), room(own) - room(new), i))
        if not choices:
            needs = sum(one.bytes(one.count) for one in programs)
            return Arrangement(how="vmapped", problem=f"all of them need about {needs / GiB:.2f} GiB beside each other, and "
                                                      f"{devices} x {usable / GiB:.2f} GiB are usable")
        i = min(choices)[3]
        held[i][one.name] = held[i].get(one.name, 0) + 1
    used = [own for own in held if own]
    known = all(by_name[name].seconds(n) is not None for own in used for name, n in own.items())
    return Arrangement(how="vmapped" if any(sum(own.values()) > 1 for own in used) else "parts",
                       devices=tuple(tuple(sorted(own.items())) for own in used), round_s=max(map(load, used)) if known else None,
                       used_bytes=sum(usable - room(own) for own in used), held_bytes=usable * len(used))


def sliced(programs: Sequence[Program], devices: int, profiles: Sequence[Profile], usable: int) -> Arrangement:
    """A MIG slice a run."""
    if not profiles:
        return Arrangement(how="mig", problem="these devices have no MIG slices")
    runs = [one for one in programs for _ in range(one.count)]
    try:
        gpus = rigid([one.slice_bytes or one.bytes(1) for one in runs], profiles)
    except InputError as error:
        return Arrangement(how="mig", problem=str(error))
    if len(gpus) > devices:
        return Arrangement(how="mig", problem=f"{len(runs)} runs with a slice each need {len(gpus)} GPUs, and here are {devices}")
    seconds = [runs[i].slices.get(profile.name) for gpu in gpus for i, profile, _ in gpu]
    known = [one for one in seconds if one is not None]
    return Arrangement(how="mig", devices=tuple(tuple((f"{runs[i].name}@{profile.name}", 1) for i, profile, _ in gpu) for gpu in gpus),
                       round_s=max(known) if len(known) == len(seconds) else None,
                       used_bytes=sum(one.slice_bytes or one.bytes(1) for one in runs), held_bytes=usable * len(gpus))


def too_large(programs: Sequence[Program], usable: int) -> str | None:
    worst = max(programs, key=lambda one: one.bytes(1))
    return f"a run of {worst.name} needs {worst.bytes(1)} bytes and a device has {usable}" if worst.bytes(1) > usable else None


# ---------------------------------------------------------------- the recommendation

@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    best: Arrangement | None
    reasons: list[str]


def recommend(arrangements: Sequence[Arrangement], *, prefer: Literal["throughput", "isolation"] = "throughput") -> Advice:
    """The shortest round; where seconds are unknown, the fewest devices. `isolation`: only what keeps a run's memory and faults its own."""
    if prefer not in ("throughput", "isolation"):
        raise InputError(f"prefer={prefer}: throughput or isolation{nearest(prefer, ('throughput', 'isolation'))}")
    reasons = [f"{one.how}: not possible: {one.problem}" for one in arrangements if one.problem]
    able = [one for one in arrangements if not one.problem]
    if prefer == "isolation":
        reasons += [f"{one.how}: runs in one program share its memory and its faults" for one in able if one.how == "vmapped"]
        able = [one for one in able if one.how != "vmapped"]
    if not able:
        return Advice(best=None, reasons=reasons)
    timed = all(one.round_s is not None for one in able)
    simple = ("parts", "vmapped", "mig", "one_after_another")
    best = min(able, key=lambda one: (one.round_s if timed else 0.0, len(one.devices), simple.index(one.how)))
    control = next((one for one in able if one.how == "one_after_another"), None)
    for one in able:
        text = f"{one.how}: {len(one.devices)} device{'s' if len(one.devices) != 1 else ''}"
        if one.round_s is not None:
            text += f", a step of every run in {one.round_s:.3g} s"
            if control is not None and one is not control and control.round_s:
                text += f", {control.round_s / one.round_s:.2f} times the throughput of one after another"
        if one.how != "one_after_another" and one.waste is not None:
            text += f"; {100 * one.waste:.0f}% of the usable memory stays unused"
        reasons.append(text)
    if not timed:
        reasons.append("seconds are not known for all of them, so the fewest devices decide")
    return Advice(best=best, reasons=reasons)

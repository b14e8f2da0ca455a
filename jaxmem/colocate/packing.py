"""Which way to share devices suits a mix of small runs: one program for many (`vmapped`), devices of their own (`parts`), MIG slices.
No jax: bytes and seconds in, arrangements out.

A program's memory is `fixed_bytes + n * each_bytes` for n runs in it, its step `first_s + (n - 1) * more_s`: the line through one run and
two, both compiled. Different programs on one device take turns, so their seconds add up, and all of them are resident, so their bytes do.
A *round* is one step of every run; the arrangement with the shortest round has the highest throughput.

Placement is greedy (longest first) with improvements, which the tests hold against every possible assignment of small mixes.

A. Robroek et al., arXiv 2209.06018, for sharing; R. Graham, "Bounds on multiprocessing timing anomalies" (1969), for largest first.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxmem.colocate.slices import Profile, rigid
from jaxmem.spec import InputError, nearest

Way = Literal["vmapped", "parts", "one_after_another"]  # in which one process trains runs
WAYS: tuple[Way, ...] = ("vmapped", "parts", "one_after_another")
How = Literal[Way, "mig"]
PREFER = ("throughput", "isolation")
Held = dict[str, int]  # what a device holds: program -> runs
GiB = 2**30


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
    """All runs resident, runs of one program in one program a device; `parts` if no device has more than one run.

    Each run, the longest first, goes where the longest device stays shortest, then where it adds least; then runs are moved and exchanged
    between devices as long as that makes the longest shorter.
    """
    if problem := too_large(programs, usable):
        return Arrangement(how="vmapped", problem=problem)
    held = placed(programs, devices, usable)
    if held is None:
        needs = sum(one.bytes(one.count) for one in programs)
        return Arrangement(how="vmapped", problem=f"all of them need about {needs / GiB:.2f} GiB beside each other, and "
                                                  f"{devices} x {usable / GiB:.2f} GiB are usable")
    by_name = {one.name: one for one in programs}
    used = [own for own in improved(held, by_name, usable) if own]
    known = all(by_name[name].seconds(n) is not None for own in used for name, n in own.items())
    return Arrangement(how="vmapped" if any(sum(own.values()) > 1 for own in used) else "parts",
                       devices=tuple(tuple(sorted(own.items())) for own in used),
                       round_s=max(seconds(own, by_name) for own in used) if known else None,
                       used_bytes=sum(taken(own, by_name) for own in used), held_bytes=usable * len(used))


def seconds(own: Held, programs: Mapping[str, Program]) -> float:
    return sum(programs[name].seconds(n) or 0.0 for name, n in own.items())


def taken(own: Held, programs: Mapping[str, Program]) -> int:
    return sum(programs[name].bytes(n) for name, n in own.items())


def placed(programs: Sequence[Program], devices: int, usable: int) -> list[Held] | None:
    """None where a run finds no room."""
    by_name = {one.name: one for one in programs}
    held: list[Held] = [{} for _ in range(devices)]
    loads = [0.0] * devices
    for one in sorted((one for one in programs for _ in range(one.count)),
                      key=lambda one: (-(one.first_s or 0.0), -one.each_bytes, one.name)):
        top = sorted(loads)[-2:]
        choices = []
        for i, own in enumerate(held):
            new = changed(own, one.name, 1)
            if taken(new, by_name) <= usable:
                others = top[0] if loads[i] == top[-1] else top[-1]
                then = seconds(new, by_name)
                choices.append((max(then, others if devices > 1 else 0.0), then - loads[i], taken(new, by_name), i))
        if not choices:
            return None
        i = min(choices)[3]
        held[i] = changed(held[i], one.name, 1)
        loads[i] = seconds(held[i], by_name)
    return held


def improved(held: list[Held], programs: Mapping[str, Program], usable: int) -> list[Held]:
    """From the longest device, one run or all of a program move to another, in exchange for none, one or all of another program."""
    held = list(held)
    for _ in range(100):
        loads = [seconds(own, programs) for own in held]
        i = max(range(len(held)), key=loads.__getitem__)
        best: tuple[float, int, Held, Held] | None = None
        for j in (j for j in range(len(held)) if j != i):
            for gone, n in ((name, n) for name, count in held[i].items() for n in {1, count}):
                for back, m in [("", 0), *((name, m) for name, count in held[j].items() if name != gone for m in {1, count})]:
                    here = changed(changed(held[i], gone, -n), back, m)
                    there = changed(changed(held[j], gone, n), back, -m)
                    longest = max(seconds(here, programs), seconds(there, programs))
                    fits = max(taken(here, programs), taken(there, programs)) <= usable
                    if fits and longest < loads[i] * (1 - 1e-9) and (best is None or longest < best[0]):
                        best = longest, j, here, there
        if best is None:
            return held
        held[i], held[best[1]] = best[2], best[3]
    return held


def changed(own: Held, name: str, more: int) -> Held:
    """With `more` runs of a program."""
    out = {**own, name: own.get(name, 0) + more} if more else dict(own)
    return {key: n for key, n in out.items() if n}


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
    if prefer not in PREFER:
        raise InputError(f"prefer={prefer}: throughput or isolation{nearest(prefer, PREFER)}")
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

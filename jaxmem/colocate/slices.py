"""How many devices hold a mix by memory alone: shared freely, or cut into MIG slices. No jax.

Rigid against flexible: a MIG slice has a size of a short list and a place of another, and what its run does not use nobody can. Both are
packed largest first, which the tests hold against every possible arrangement of small mixes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxmem.chips import CHIPS, Chip
from jaxmem.spec import InputError

# https://docs.nvidia.com/datacenter/tesla/mig-user-guide (2026-12), `nvidia-smi mig -lgipp`: (compute sevenths, memory eighths) -> where an
# instance may begin, in memory eighths. Two instances never share an eighth, and then their sevenths fit too.
STARTS = {(1, 1): (0, 1, 2, 3, 4, 5, 6), (1, 2): (0, 2, 4, 6), (2, 2): (0, 2, 4), (3, 4): (0, 4), (4, 4): (0,), (7, 8): (0,)}


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


def profiles_of(gpu: Chip, usable: Mapping[str, int]) -> list[Profile]:
    """The MIG slices of a GPU from small to large; `usable`: chip name of a slice -> bytes. Empty where it has none."""
    out = []
    for chip in CHIPS.values():
        if chip.parent == gpu.name and chip.hbm_bytes_per_s and gpu.hbm_bytes_per_s and chip.name in usable:
            eighths = round(8 * chip.hbm_bytes_per_s / gpu.hbm_bytes_per_s)
            sevenths = int(chip.name.partition("-mig-")[2].partition("g")[0])
            out.append(Profile(chip=chip.name, eighths=eighths, starts=STARTS[sevenths, eighths], usable_bytes=usable[chip.name]))
    return sorted(out, key=lambda one: (one.eighths, -len(one.starts), one.usable_bytes))


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

"""What this machine has: accelerators that JAX can use, and versions. Nothing here imports jax.

A machine with libtpu or the CUDA plugin but no accelerator is the normal case for jaxmem: both are installed to compile for
targets that are elsewhere. JAX would try to open each of them and complain. So commands call `quiet` before jax is imported:
it names the platforms that are really here, and changes nothing when the user chose or when nothing would complain.
"""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Literal

from jaxmem import __version__

Accelerator = Literal["tpu", "cuda", "rocm"]

# Also what JAX itself looks for before it opens CUDA, so a GPU that is missed here is one that JAX would not use.
# https://github.com/jax-ml/jax/blob/main/jax/_src/hardware_utils.py (2026-10): NVIDIA device files, Google's PCI ids.
_NVIDIA_FILES = ("dev/nvidiactl", "dev/nvidia[0-9]*", "dev/dxg")
_GOOGLE_PCI_VENDOR = "0x1ae0"
_TPU_PCI_DEVICES = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c"}

_DISTRIBUTIONS = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "flax": ("flax",),
    "optax": ("optax",),
    "orbax": ("orbax-checkpoint",),
    "libtpu": ("libtpu", "libtpu-nightly"),
    "cuda_plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "cuda_pjrt": ("jax-cuda13-pjrt", "jax-cuda12-pjrt"),
}


def versions() -> dict[str, str | None]:
    """Versions of Python and of what the numbers depend on; None is not installed."""
    own: dict[str, str | None] = {"python": platform.python_version(), "jaxmem": __version__}
    return own | {name: _version(*names) for name, names in _DISTRIBUTIONS.items()}


def versions_text() -> str:
    """`python 3.12.1, jaxmem 0.1.0, jax 0.12.0.1, ...`: of all that is installed."""
    return ", ".join(f"{name} {version}" for name, version in versions().items() if version)


def accelerators(root: str = "/", environ: Mapping[str, str] = os.environ) -> tuple[Accelerator, ...]:
    """The accelerators that this machine shows, by its device files; `root` is for tests."""
    found: list[Accelerator] = []
    if _any(root, "dev/accel[0-9]*") or _tpu_on_pci(root):
        found.append("tpu")
    if _any(root, *_NVIDIA_FILES) and environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        found.append("cuda")
    if _any(root, "dev/kfd"):
        found.append("rocm")
    return tuple(found)


def plugins() -> tuple[str, ...]:
    """The platforms, other than the CPU, that the installed jax would try: `tpu`, `cuda`, `rocm`, or another plugin's name."""
    found = ["tpu"] if _version(*_DISTRIBUTIONS["libtpu"]) or importlib.util.find_spec("libtpu") else []
    for entry in importlib.metadata.entry_points(group="jax_plugins"):
        name = next((known for known in ("cuda", "rocm") if known in entry.name), entry.name)
        if name not in found:
            found.append(name)
    return tuple(found)


def platforms(environ: Mapping[str, str], present: Iterable[Accelerator], installed: Iterable[str]) -> str | None:
    """The value that JAX_PLATFORMS should have, or None to leave it alone.

    Left alone when the user chose, when a plugin is installed that is not known here, and when every plugin has its device.
    """
    present, installed = tuple(present), tuple(installed)
    if "JAX_PLATFORMS" in environ or "JAX_PLATFORM_NAME" in environ:
        return None
    if not set(installed) <= {"tpu", "cuda", "rocm"}:
        return None
    usable = [name for name in present if name in installed]
    if not usable:
        return "cpu"
    return None if len(usable) == len(installed) else ",".join([*usable, "cpu"])


def quiet(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make JAX open only what is here. Without effect once jax is imported, for jax reads the variable then."""
    if "jax" in sys.modules:
        return
    value = platforms(environ, accelerators(environ=environ), plugins())
    if value is not None:
        environ["JAX_PLATFORMS"] = value


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _any(root: str, *patterns: str) -> bool:
    return any(glob.glob(os.path.join(glob.escape(root), pattern)) for pattern in patterns)


def _tpu_on_pci(root: str) -> bool:
    for vendor in pathlib.Path(root, "sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _GOOGLE_PCI_VENDOR:
                if vendor.with_name("device").read_text().strip() in _TPU_PCI_DEVICES:
                    return True
        except OSError:  # a device that goes away while we look
            continue
    return False

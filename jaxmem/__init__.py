"""Know before you launch: does a JAX program fit a TPU or GPU topology, how fast is it, and what limits it.

    jaxmem check --model=llama3-8b --plan="fsdp=64,remat=block" --topology=v5p-128 --batch=64 --seq=8192

or, for any function that jits, `jaxmem.check(fn, *abstract_args, topology="v5p-128")`.

Importing this package imports nothing else: names below load their module when they are first used, so the parts that need
no jax (hardware, costs, readers of compiled text) stay without it.
"""

import importlib
import typing

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from jaxmem.hardware import parse_topology as parse_topology
    from jaxmem.plan import Plan as Plan
    from jaxmem.spec import InputError as InputError
    from jaxmem.targets.foreign import mesh as mesh
    from jaxmem.verdict import check as check
    from jaxmem.verdict import check_workload as check_workload
    from jaxmem.workload import Workload as Workload

_HOME = {
    "InputError": "jaxmem.spec",
    "Plan": "jaxmem.plan",
    "Workload": "jaxmem.workload",
    "check": "jaxmem.verdict",
    "check_workload": "jaxmem.verdict",
    "mesh": "jaxmem.targets.foreign",
    "parse_topology": "jaxmem.hardware",
}
__all__ = ["InputError", "Plan", "Workload", "check", "check_workload", "mesh", "parse_topology"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

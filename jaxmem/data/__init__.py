"""Rows to train on: where they come from, how text is packed into them, and how they reach the devices.

Names load their module on first use.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from jaxmem.data.batches import Batches as Batches
    from jaxmem.data.batches import eval_batches as eval_batches
    from jaxmem.data.opening import open_data as open_data
    from jaxmem.data.opening import open_for as open_for
    from jaxmem.data.rows import Data as Data

_HOME = {
    "Batches": "jaxmem.data.batches",
    "Data": "jaxmem.data.rows",
    "eval_batches": "jaxmem.data.batches",
    "open_data": "jaxmem.data.opening",
    "open_for": "jaxmem.data.opening",
}
__all__ = ["Batches", "Data", "eval_batches", "open_data", "open_for"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

"""What each instruction of a TPU program costs."""
from collections.abc import Mapping
from typing import Any

from jaxmem.hardware import Topology
from jaxmem.hlo.parse import Module
from jaxmem.hlo.speed import FREE, Speed, replay, speed_of


def predict(module: Module, topology: Topology, mesh: Mapping[str, Any] | None) -> Speed:
    """See `speed.predict`."""
    return speed_of(replay(module, lambda instruction, computation: FREE))

"""State that stays on the device while a program runs that does not take it: evaluation sees the parameters, and the optimizer's
state lies beside it all the same."""

from jaxmem.cost.memory import state_bytes
from jaxmem.plan import Plan
from jaxmem.workload import Workload


def resident_bytes(workload: Workload, plan: Plan, program: str) -> int:
    """Bytes on one device, in closed form (estimate): optimizer state during `eval` and `gradients`, nothing elsewhere."""
    return state_bytes(workload, plan).opt_state if program in ("eval", "gradients") else 0

"""Whether a traced program calls back into Python on the host."""

from typing import Any


def has_callbacks(traced: Any) -> bool:
    """Whether host callbacks run inside: their memory and time are outside of what the compiler sees."""
    import jax.extend.core

    def inside(jaxpr: Any) -> bool:
        for equation in jaxpr.eqns:
            if "callback" in equation.primitive.name or equation.primitive.name in ("outside_call", "debug_print"):
                return True
            for value in equation.params.values():
                for item in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(item, "jaxpr", item)
                    if isinstance(inner, jax.extend.core.Jaxpr) and inside(inner):
                        return True
        return False
    return inside(traced.jaxpr.jaxpr)

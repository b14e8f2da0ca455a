"""What a byte of device memory is for: the closed vocabulary of the check's `kind`, in the order in which charts stack it.

The colours were chosen for distance in CIELAB, also as people with protanopia, deuteranopia and tritanopia see them
(`tests/report/test_kinds.py` measures it): the state of training is blue to green, activations are yellow to red, communication
is violet and the rest is grey.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind. `label` is for people; `light` and `dark` are fills on a light and on a dark page; `ansi` a terminal style."""

    name: str
    label: str
    light: str
    dark: str
    ansi: str


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="params", label="parameters", light="#0a62bd", dark="#335caa", ansi="blue"),
        Kind(name="opt_state", label="optimizer state", light="#43c9fd", dark="#74c4fd", ansi="cyan"),
        Kind(name="gradients", label="gradients", light="#0d9f54", dark="#13964f", ansi="green"),
        Kind(name="saved", label="saved activations", light="#fdb825", dark="#f09800", ansi="yellow"),
        Kind(name="recomputed", label="recomputed", light="#fbe589", dark="#f4e56a", ansi="yellow"),
        Kind(name="activations", label="other activations", light="#b93012", dark="#d21728", ansi="red"),
        Kind(name="logits", label="logits", light="#ef75c6", dark="#ca8eb3", ansi="magenta"),
        Kind(name="collective", label="collective buffers", light="#6f2878", dark="#9e82fc", ansi="magenta"),
        Kind(name="workspace", label="workspace", light="#5e6572", dark="#696a6e", ansi="white"),
        Kind(name="batch", label="batch", light="#7cc976", dark="#b0f5a4", ansi="green"),
        Kind(name="rng", label="random state", light="#817566", dark="#988f80", ansi="white"),
        Kind(name="output", label="outputs", light="#37422b", dark="#33620e", ansi="green"),
        Kind(name="padding", label="padding", light="#c5c7c8", dark="#d9e4ed", ansi="white"),
        Kind(name="other", label="other", light="#a29e8f", dark="#c1bbb1", ansi="white"),
    )
}
UNATTRIBUTED = Kind(name="unattributed", label="unattributed", light="#e5eff6", dark="#424242", ansi="dim")


def kind_of(name: str | None) -> Kind:
    """The kind by name; bytes of a kind that is not known are unattributed."""
    return KINDS.get(name or "", UNATTRIBUTED)

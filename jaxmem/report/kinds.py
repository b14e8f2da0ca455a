"""What a byte of device memory is for: the closed vocabulary of the check's `kind`, in the order in which charts stack it.

The colours were chosen for distance in CIELAB, also as people with protanopia, deuteranopia and tritanopia see them (`tests/report/test_kinds.py`
measures it): the state of training is blue to green, what the backward pass needs is orange to red, communication and the rest are violet and grey.
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


KINDS: dict[str, Kind] = {kind.name: kind for kind in (
    Kind(name="params", label="parameters", light="#1f4e9e", dark="#3f74cf", ansi="blue"),
    Kind(name="opt_state", label="optimizer state", light="#5aa5e8", dark="#7fc0f5", ansi="cyan"),
    Kind(name="gradients", label="gradients", light="#0a8f74", dark="#1fa68a", ansi="green"),
    Kind(name="saved", label="saved activations", light="#f0a202", dark="#f2ae2e", ansi="yellow"),
    Kind(name="recomputed", label="recomputed", light="#f7dd7d", dark="#f7e6a1", ansi="yellow"),
    Kind(name="activations", label="other activations", light="#cf4a1d", dark="#e0602f", ansi="red"),
    Kind(name="logits", label="logits", light="#e58fb8", dark="#eba3c6", ansi="magenta"),
    Kind(name="collective", label="collective buffers", light="#6b3fa0", dark="#8d63c4", ansi="magenta"),
    Kind(name="workspace", label="workspace", light="#7d8794", dark="#8a95a3", ansi="white"),
    Kind(name="batch", label="batch", light="#a9d18e", dark="#b9dca0", ansi="green"),
    Kind(name="rng", label="random state", light="#8a7a5c", dark="#a8976f", ansi="white"),
    Kind(name="output", label="outputs", light="#4d5b2f", dark="#6f8046", ansi="green"),
    Kind(name="padding", label="padding", light="#cfd6de", dark="#d5dbe2", ansi="white"),
    Kind(name="other", label="other", light="#a89f97", dark="#5d636b", ansi="white"),
)}
UNATTRIBUTED = Kind(name="unattributed", label="unattributed", light="#e6e9ee", dark="#39404a", ansi="dim")


def kind_of(name: str | None) -> Kind:
    """The kind by name; bytes of a kind that is not known are unattributed."""
    return KINDS.get(name or "", UNATTRIBUTED)

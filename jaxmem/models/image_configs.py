"""Which classifier of images: an MLP or a vision transformer, their sizes and the parameters they have. No jax here.

Shape letters: P pixel values that go into one matrix (of a patch, or of the whole image), D embed, F mlp, N heads, H head size,
V classes, L layers, S patches.
"""

import dataclasses
import math
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ImageDtype = Literal["f32", "uint8"]
Dims = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """Flattened image -> `layers` hidden layers of width `mlp` -> class scores. Every matrix has a bias."""

    height: int
    width: int
    channels: int
    classes: int
    layers: int
    mlp: int
    activation: Activation = "relu"
    image_dtype: ImageDtype = "f32"  # of a batch's images: f32 in 0..1, or bytes, a quarter of the memory

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def seq(self) -> int:
        """What counts as tokens of an image: an MLP takes it whole."""
        return 1

    @property
    def parameters(self) -> int:
        return count(mlp_shapes(self))

    @property
    def embedding_parameters(self) -> int:
        """Parameters that multiply nothing: none."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig:
    """A vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929): pre-norm blocks with full attention over patches, learned
    positions, biases, and a mean over the patches in place of a class token (Beyer et al. 2022, arXiv 2205.01580)."""

    height: int
    width: int
    channels: int
    patch: int
    classes: int
    layers: int
    embed: int
    heads: int
    mlp: int
    activation: Activation = "gelu"
    norm_eps: float = 1e-6
    image_dtype: ImageDtype = "f32"  # of a batch's images: f32 in 0..1, or bytes, a quarter of the memory

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def seq(self) -> int:
        """Patches of an image: its tokens."""
        patch = max(self.patch, 1)  # a patch of 0 is refused with the other problems
        return (self.height // patch) * (self.width // patch)

    @property
    def pixels(self) -> int:
        """Values of one patch."""
        return self.patch * self.patch * self.channels

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def parameters(self) -> int:
        block = 4 * self.embed * (self.embed + 1) + self.mlp * (2 * self.embed + 1) + self.embed + 4 * self.embed
        ends = (self.pixels + 1 + self.seq) * self.embed + 2 * self.embed + (self.embed + 1) * self.classes
        return self.layers * block + ends

    @property
    def embedding_parameters(self) -> int:
        """Parameters that multiply nothing: the positions, which are added."""
        return self.seq * self.embed


ImageConfig = MlpConfig | VitConfig

IMAGE_MODELS: dict[str, ImageConfig] = {
    # For the CPU: scikit-learn's digits are 8 x 8, MNIST's 28 x 28.
    "mlp": MlpConfig(height=8, width=8, channels=1, classes=10, layers=2, mlp=128),
    "mlp-mnist": MlpConfig(height=28, width=28, channels=1, classes=10, layers=1, mlp=128),
    "vit-tiny": VitConfig(height=8, width=8, channels=1, patch=2, classes=10, layers=2, embed=64, heads=4, mlp=128),
    "vit-mnist": VitConfig(height=28, width=28, channels=1, patch=7, classes=10, layers=4, embed=64, heads=4, mlp=128),
    # The sizes of arXiv 2106.10270 (Ti, S) and 2010.11929 (B, L) at 224 x 224.
    "vit-ti16": VitConfig(height=224, width=224, channels=3, patch=16, classes=1000, layers=12, embed=192, heads=3, mlp=768),
    "vit-s16": VitConfig(height=224, width=224, channels=3, patch=16, classes=1000, layers=12, embed=384, heads=6, mlp=1536),
    "vit-b16": VitConfig(height=224, width=224, channels=3, patch=16, classes=1000, layers=12, embed=768, heads=12, mlp=3072),
    "vit-l16": VitConfig(height=224, width=224, channels=3, patch=16, classes=1000, layers=24, embed=1024, heads=16, mlp=4096),
}


def count(shapes: Dims) -> int:
    return sum(math.prod(shape) for shape, _ in shapes.values())


def hidden_dims(layer: int) -> tuple[str, str]:
    """Dims of hidden layer `layer`'s matrix: from the pixels to `mlp`, then to and fro between `mlp` and `embed`, so that the matrices
    are split by columns and by rows in turn (arXiv 1909.08053) and two of them need one sum over `tensor`."""
    return ("pixels" if layer == 0 else ("embed", "mlp")[layer % 2], ("mlp", "embed")[layer % 2])


def mlp_shapes(c: MlpConfig) -> Dims:
    """`{path: (shape, dims)}` of an MLP's parameters."""
    size = {"pixels": c.height * c.width * c.channels, "mlp": c.mlp, "embed": c.mlp, "vocab": c.classes}
    dims: dict[str, tuple[str, ...]] = {}
    for layer in range(c.layers):
        into, outof = hidden_dims(layer)
        dims |= {f"hidden_{layer}/weights": (into, outof), f"hidden_{layer}/bias": (outof,)}
    dims |= {"head/weights": (hidden_dims(c.layers - 1)[1], "vocab"), "head/bias": ("vocab",)}
    return {path: (tuple(size[d] for d in names), names) for path, names in dims.items()}


def patch_shapes(c: VitConfig) -> Dims:
    """`{path: (shape, dims)}` of what a vision transformer has before and after its blocks."""
    size = {"pixels": c.pixels, "embed": c.embed, "positions": c.seq, "vocab": c.classes}
    dims = {"patches/weights": ("pixels", "embed"), "patches/bias": ("embed",), "positions": ("positions", "embed"),
            "final_norm/scale": ("embed",), "final_norm/bias": ("embed",), "head/weights": ("embed", "vocab"), "head/bias": ("vocab",)}
    return {path: (tuple(size[d] for d in names), names) for path, names in dims.items()}


def image_problems(c: ImageConfig) -> list[str]:
    """Everything that makes `c` nonsense, with the numbers and what would work."""
    whole = [f.name for f in dataclasses.fields(c) if isinstance(getattr(c, f.name), int)]
    found = [f"model: {name}={getattr(c, name)}: expected at least 1" for name in whole if getattr(c, name) <= 0]
    if not found and c.classes < 2:
        found.append(f"model: classes={c.classes}: expected at least 2, for one class says nothing")
    if found or isinstance(c, MlpConfig):
        return found
    for name in ("height", "width"):
        size = getattr(c, name)
        if size % c.patch:
            legal = sorted(sorted((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - c.patch))[:3])
            near = max(1, round(size / c.patch)) * c.patch
            found.append(f"model: {name}={size} is not a multiple of patch={c.patch}; nearest: {name}={near}, "
                         f"or patch={', '.join(map(str, legal))}")
    if c.embed % c.heads:
        legal = sorted(sorted((d for d in range(1, c.embed + 1) if c.embed % d == 0), key=lambda d: abs(d - c.heads))[:3])
        found.append(f"model: embed={c.embed} is not a multiple of heads={c.heads}; nearest heads that work: {', '.join(map(str, legal))}")
    if not 0 < c.norm_eps < math.inf:
        found.append(f"model: norm_eps={c.norm_eps}: expected a finite number above 0")
    return found

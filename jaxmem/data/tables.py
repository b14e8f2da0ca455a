"""Small tables of numbers with classes, for tasks that take a second."""

import csv
import functools
import importlib.metadata
import io
import pathlib
import zipfile

import numpy as np

from jaxmem.data.rows import missing, optional

Table = tuple[np.ndarray, np.ndarray]  # f32 [rows, features] as they are in the source, int32 [rows]


@functools.cache
def breast_cancer() -> Table:
    """569 tumours, 30 features, 2 classes (Wisconsin), from scikit-learn."""
    found = optional("sklearn.datasets", "scikit-learn", "breast_cancer").load_breast_cancer()
    return found.data.astype(np.float32), found.target.astype(np.int32)


@functools.cache
def wine() -> Table:
    """178 wines, 13 features, 3 cultivars, from scikit-learn."""
    found = optional("sklearn.datasets", "scikit-learn", "wine").load_wine()
    return found.data.astype(np.float32), found.target.astype(np.int32)


@functools.cache
def segment() -> Table:
    """2310 image segments, 18 features, 7 classes in alphabetical order, from the package river (its file is read, not imported)."""
    try:
        [path] = [path for path in importlib.metadata.files("river") or [] if path.name == "segment.csv.zip"]
    except importlib.metadata.PackageNotFoundError:
        raise missing("segment", "river") from None
    with zipfile.ZipFile(io.BytesIO(pathlib.Path(path.locate()).read_bytes())) as archive:
        [name] = archive.namelist()
        rows = list(csv.DictReader(io.StringIO(archive.read(name).decode())))
    classes = sorted({row["category"] for row in rows})
    features = np.array([[float(value) for key, value in row.items() if key != "category"] for row in rows], np.float32)
    return features, np.array([classes.index(row["category"]) for row in rows], np.int32)

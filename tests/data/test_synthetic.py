"""The synthetic chain: what it says of itself, and that it can be learned."""

import math

import numpy as np
import pytest

from jaxmem.data import open_data
from jaxmem.spec import InputError


@pytest.mark.parametrize("vocab", [8, 40])
def test_after_each_token_come_four_others_with_the_probabilities_it_claims(vocab):
    data = open_data("synthetic", seq=2000, vocab=vocab)
    counts = np.zeros((vocab, vocab))
    for number in range(100):
        row = data.row(number)
        np.add.at(counts, (row["tokens"], row["targets"]), 1)
    assert (counts.sum(1) > 0.8 * 200_000 / vocab).all()  # every token is met about equally often
    probabilities = np.sort(counts / counts.sum(1, keepdims=True), axis=1)[:, ::-1]
    assert np.abs(probabilities[:, :4] - [0.5, 0.25, 0.125, 0.125]).max() < 0.04
    assert (probabilities[:, 4:] == 0).all()
    seen = probabilities[:, :4]
    entropy = (counts.sum(1) / counts.sum()) @ -(seen * np.log(seen)).sum(1)
    assert entropy == pytest.approx(1.75 * math.log(2), rel=5e-3)
    assert f"{1.75 * math.log(2):.4f} nats" in data.described


def test_rows_are_one_document_with_targets_that_are_the_next_tokens():
    row = open_data("synthetic", seq=16, vocab=64).row(3)
    assert row["targets"][:-1].tolist() == row["tokens"][1:].tolist()
    assert row["segment_ids"].tolist() == [1] * 16 and row["positions"].tolist() == list(range(16))
    assert {values.dtype for values in row.values()} == {np.dtype(np.int32)}


def test_rows_differ_from_each_other_and_between_the_splits_and_never_from_themselves():
    train, held = (open_data("synthetic", seq=32, vocab=64, split=split) for split in ("train", "eval"))
    rows = [tuple(data.row(i)["tokens"].tolist()) for data in (train, held) for i in (0, 1, 2, data.rows - 1)]
    assert len(set(rows)) == 8
    again = open_data("synthetic", seq=32, vocab=64)
    assert rows[1] == tuple(again.row(1)["tokens"].tolist()) and again.fingerprint == train.fingerprint != held.fingerprint


def test_the_chain_is_the_same_on_every_machine():
    assert open_data("synthetic", seq=8, vocab=64).row(0)["tokens"].tolist() == GOLDEN


def test_errors():
    with pytest.raises(InputError, match="vocabulary of 8 tokens or more, and the model has vocab=7"):
        open_data("synthetic", seq=8, vocab=7)
    with pytest.raises(InputError, match="synthetic takes nothing after it"):
        open_data("synthetic:5", seq=8, vocab=64)
    with pytest.raises(InputError, match="seq=0: a row has one token or more"):
        open_data("synthetic", seq=0, vocab=64)
    with pytest.raises(IndexError):
        open_data("synthetic", seq=8, vocab=64, split="eval").row(1024)


GOLDEN = [34, 19, 31, 43, 45, 8, 29, 4]

"""What is held out: about a twentieth, by content, and never part of training."""

import numpy as np
import pytest

from jaxmem.data.documents import join, split_documents


def lists(documents):
    return [documents.tokens[a:b].tolist() for a, b in zip(documents.offsets[:-1], documents.offsets[1:], strict=True)]


def some(count, size, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size + k % 7).astype(np.uint16) for k in range(count)]


def test_a_twentieth_of_whole_documents_is_held_out():
    documents = some(400, 50)
    parts = split_documents(join(documents, wide=False), at_least=16)
    train, held = lists(parts["train"]), lists(parts["eval"])
    whole = [d.tolist() for d in documents]
    assert [d for d in whole if d in train] == train and [d for d in whole if d in held] == held  # whole, in their order
    assert sorted(train + held) == sorted(whole)
    assert 0.04 < sum(map(len, held)) / sum(map(len, whole)) <= 0.05


def test_the_choice_is_by_content_not_by_order_or_number():
    documents = some(200, 50)
    held = lists(split_documents(join(documents, wide=False), at_least=1)["eval"])
    backwards = lists(split_documents(join(documents[::-1], wide=False), at_least=1)["eval"])
    assert held == backwards[::-1]


def test_equal_documents_are_on_one_side():
    for seed in range(20):  # in some of them the budget ends between two copies
        documents = some(100, 50, seed)
        parts = split_documents(join(documents * 3, wide=False), at_least=1)
        train, held = ({tuple(d) for d in lists(parts[name])} for name in ("train", "eval"))
        assert len(held) >= 3 and not train & held
        assert len(train | held) == 100


@pytest.mark.parametrize("size,at_least,tail", [(1000, 1, 50), (1000, 128, 128), (100, 128, 50), (4, 128, 2)])
def test_of_one_document_the_tail_is_held_out(size, at_least, tail):
    parts = split_documents(join([np.arange(size, dtype=np.uint16)], wide=False), at_least=at_least)
    assert lists(parts["train"]) == [list(range(size - tail))]
    assert lists(parts["eval"]) == [list(range(size - tail, size))]


def test_where_no_document_is_small_enough_the_tail_of_the_longest_is_held_out_and_of_its_copies():
    short, long = np.arange(100, dtype=np.uint16), np.arange(1000, 1200, dtype=np.uint16)
    parts = split_documents(join([long, short, long], wide=False), at_least=1)
    # 5% of 500 tokens is 25: 12 of each copy, so that no copy trains on what another one holds out
    assert lists(parts["train"]) == [list(range(1000, 1188)), list(range(100)), list(range(1000, 1188))]
    assert lists(parts["eval"]) == [list(range(1188, 1200))] * 2

"""Rows of packed documents, against a packer that does one token at a time, and against the documents they came from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.data.documents import join
from jaxmem.data.packing import pack, row_count


def packed_slowly(documents, seq):
    """Rows as lists, from (token, target, which document) one after another."""
    stream = [(token, document[k + 1] if k + 1 < len(document) else -1, d)
              for d, document in enumerate(documents) for k, token in enumerate(document)]
    rows = []
    for begin in range(0, len(stream), seq):
        row, segment, position, before = [], 0, 0, None
        for token, target, d in stream[begin:begin + seq]:
            segment, position = (segment, position + 1) if d == before else (segment + 1, 0)
            row.append((token, target, segment, position))
            before = d
        rows.append(row + [(0, -1, 0, 0)] * (seq - len(row)))
    return rows


def as_arrays(documents):
    return join([np.array(d, np.uint32) for d in documents], wide=False)


lists = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=12), min_size=1, max_size=12)


@given(lists, st.integers(1, 17))
def test_rows_are_those_of_the_slow_packer(documents, seq):
    packed = as_arrays(documents)
    expected = packed_slowly(documents, seq)
    assert row_count(packed, seq) == len(expected)
    for number, row in enumerate(expected):
        found = pack(packed, seq, number)
        for k, name in enumerate(("tokens", "targets", "segment_ids", "positions")):
            assert found[name].dtype == np.int32
            np.testing.assert_array_equal(found[name], [entry[k] for entry in row], err_msg=name)


@given(lists, st.integers(1, 17))
def test_documents_come_back_and_every_token_but_their_first_is_a_target_once(documents, seq):
    packed = as_arrays(documents)
    rows = [pack(packed, seq, number) for number in range(row_count(packed, seq))]
    pieces, targets = [], []
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            assert np.ptp(np.flatnonzero(inside)) == inside.sum() - 1  # one stretch
            np.testing.assert_array_equal(row["positions"][inside], np.arange(inside.sum()))
            pieces.append(row["tokens"][inside].tolist())
        targets += row["targets"][row["targets"] >= 0].tolist()
    assert sum(pieces, []) == sum(documents, [])
    assert targets == sum((document[1:] for document in documents), [])
    # a cut is where a document or a row ends, and nowhere else
    ends = set(np.cumsum([len(d) for d in documents]).tolist())
    total = max(ends)
    assert set(np.cumsum([len(p) for p in pieces]).tolist()) == ends | set(range(seq, total, seq))


def test_the_attention_mask_of_a_row_joins_only_tokens_of_one_document():
    documents = [[10, 11, 12], [20], [30, 31, 32, 33, 34]]
    owner = np.array([0, 0, 0, 1, 2, 2, 2, 2, 2, -1])  # of each place in two rows of five; -1 is padding
    packed = as_arrays(documents)
    for number in range(2):
        ids = pack(packed, 5, number)["segment_ids"]
        mine = owner[5 * number:5 * number + 5]
        np.testing.assert_array_equal(ids[:, None] == ids[None, :], mine[:, None] == mine[None, :])


def test_padding_is_a_segment_of_its_own_without_targets():
    row = pack(as_arrays([[7, 8, 9]]), 5, 0)
    assert {name: values.tolist() for name, values in row.items()} == {
        "tokens": [7, 8, 9, 0, 0], "targets": [8, 9, -1, -1, -1], "segment_ids": [1, 1, 1, 0, 0], "positions": [0, 1, 2, 0, 0]}


def test_a_row_that_ends_inside_a_document_has_the_next_row_s_first_token_as_its_last_target():
    packed = as_arrays([[1, 2, 3, 4]])
    assert [pack(packed, 2, i)["targets"].tolist() for i in (0, 1)] == [[2, 3], [4, -1]]


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_outside_are_refused(row):
    with pytest.raises(IndexError, match=f"row {row} of 2"):
        pack(as_arrays([[1, 2, 3, 4]]), 2, row)


@pytest.mark.parametrize("wide,bytes_a_token", [(False, 2), (True, 4)])
def test_tokens_are_held_in_two_or_four_bytes(wide, bytes_a_token):
    found = join([np.array([1, 2], np.uint32), np.array([], np.uint32), np.array([65535], np.uint32)], wide=wide)
    assert found.tokens.itemsize == bytes_a_token and found.tokens.tolist() == [1, 2, 65535]
    assert found.offsets.tolist() == [0, 2, 3]  # the empty one is left out

"""Mixtures: exact shares, an order that is a function of place and seed alone, losses by source."""

import hashlib
import math
from fractions import Fraction

import jax
import numpy as np
import pytest
import training
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.checkpoint.store import committed_steps, read_meta
from jaxmem.continual import mixing
from jaxmem.data import Batches, open_data
from jaxmem.data.order import shuffled
from jaxmem.data.rows import Data, text_fields
from jaxmem.spec import InputError


def counting(name: str, rows: int, first: int) -> Data:
    """Rows that say who they are: every token of row i is first + i."""
    fields = text_fields(4)
    return Data(name=name, kind="synthetic", rows=rows, fields=fields, fingerprint=hashlib.sha256(name.encode()).hexdigest(),
                row=lambda i: {key: np.full(4, first + i, np.int32) for key in fields}, described=name)


NEW, OLD, RARE = counting("new", 700, 0), counting("old", 90, 10_000), counting("rare", 11, 20_000)
BLEND = [("new", Fraction(3, 4), NEW), ("old", Fraction(6, 25), OLD), ("rare", Fraction(1, 100), RARE)]


def test_spellings():
    assert mixing.parse("text:python=0.75+text:shakespeare=0.25") == [("text:python", Fraction(3, 4)), ("text:shakespeare", Fraction(1, 4))]
    assert mixing.parse("text:a+b.txt=1/3 + synthetic") == [("text:a+b.txt", Fraction(1, 3)), ("synthetic", Fraction(2, 3))]
    assert mixing.parse("text:x,tokenizer=t.json+text:y,tokenizer=t.json=.05+synthetic") == [
        ("text:x,tokenizer=t.json", Fraction(19, 40)), ("text:y,tokenizer=t.json", Fraction(1, 20)), ("synthetic", Fraction(19, 40))]
    assert mixing.parse("text:a=1+text:b=0") == [("text:a", 1), ("text:b", 0)]
    assert not mixing.is_mixture("text:a+b.txt") and not mixing.is_mixture("text:a=0.5")


@pytest.mark.parametrize("text, part", [
    ("text:a=0.5+text:b=0.2", "add up to 0.7.*text:a=5/7"), ("text:a=0.9+text:b=0.2", "add up to 1.1"),
    ("text:a=1+text:b", "nothing is left for text:b"),
    ("text:a=0.5+text:a=0.5", "comes 2 times"), ("text:a=0.1234567+text:b", "parts of 10000000"), ("text:a=1/0+text:b", "divides by zero"),
    ("text:a=0+text:b=0", "add up to 0, expected 1")])
def test_wrong_spellings(text, part):
    with pytest.raises(InputError, match=part):
        mixing.parse(text)


@pytest.mark.parametrize("shares", [(1, 3), (19, 1), (1, 1, 1), (75, 24, 1), (997, 3), (1, 0)], ids=str)
def test_shares_are_exact_and_even(shares):
    """Of each block exactly the share, and after every place of two blocks no further from it than sources + 1."""
    total = sum(shares)
    at = mixing.sequence([Fraction(share, total) for share in shares], seed=3)
    places = total * -(-mixing.PLACES // total)
    drawn = np.array([at(k) for k in range(2 * places)])
    for which, share in enumerate(shares):
        mine = drawn[:, 0] == which
        assert mine[:places].sum() == mine[places:].sum() == share * places // total
        np.testing.assert_array_equal(drawn[mine, 1], np.arange(mine.sum()))  # the n-th draw of a source is its own place n
        so_far = np.abs(np.cumsum(mine) - np.arange(1, 2 * places + 1) * share / total)
        assert so_far.max() <= len(shares) + 1
    # it is no fixed pattern: a device that holds one row of the batch sees every source
    if min(shares) >= 0.05 * total:
        for row in range(8):
            assert set(drawn[row::8, 0]) == set(range(len(shares)))


def test_blocks_and_seeds_differ():
    shares = [Fraction(1, 4), Fraction(3, 4)]
    one, other = (np.array([mixing.sequence(shares, seed)(k)[0] for k in range(2048)]) for seed in (0, 1))
    assert (one != other).mean() > 0.2 and (one[:1024] != one[1024:]).mean() > 0.2  # independent ones would differ in 3/8 of the places


def test_each_source_comes_in_its_own_order():
    mixed = mixing.mixture(BLEND, split="train")
    rows = [mixed.order(7)(k) for k in range(4000)]
    found = [mixed.row(row)["tokens"][0] for row in rows]
    for (_, _, data), first in zip(BLEND, (0, 10_000, 20_000), strict=True):
        own = [token - first for token in found if first <= token < first + 10_000]
        alone = shuffled(data.rows, 7)
        assert own == [alone(k) for k in range(len(own))]
    assert set(np.unique([token for token in found if token >= 20_000], return_counts=True)[1]) == {3, 4}  # forty draws of eleven rows


def test_a_row_outside_is_refused():
    mixed = mixing.mixture(BLEND, split="train")
    assert mixed.rows == 801 and mixed.row(800)["tokens"][0] == 20_010 and mixed.row(790)["tokens"][0] == 20_000
    for row in (-1, 801):
        with pytest.raises(IndexError):
            mixed.row(row)


def test_batches_depend_on_place_and_seed_alone():
    """From the middle, on another mesh, with batches left out: the same global batches as one device sees from the start."""
    mixed = mixing.mixture(BLEND, split="train")
    whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("a",)), P())
    split = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")), P(("a", "b")))

    def tokens(sharding, **more):
        with Batches(mixed, batch=16, seed=5, shardings={"tokens": sharding}, **more) as batches:
            return {position: np.asarray(batch["tokens"])[:, 0] for (position, batch), _ in zip(batches, range(9), strict=False)}
    from_start, from_middle = tokens(whole), tokens(split, start=4, skip=[(6, 6)])
    assert list(from_middle) == [4, 5, 7, 8, 9, 10, 11, 12, 13]
    for position in (4, 5, 7, 8):
        np.testing.assert_array_equal(from_middle[position], from_start[position])
    assert all((rows >= 10_000).any() and (rows < 10_000).any() for rows in from_start.values())


def test_sources_of_other_shapes_are_refused():
    with pytest.raises(InputError, match="cannot be mixed"):
        open_data("synthetic=0.5+images:digits=0.5", seq=8, vocab=257)


def test_the_fingerprint_knows_shares_and_sources():
    texts = {mixing.mixture([("new", share, NEW), ("old", 1 - share, other)], split=split).fingerprint
             for share in (Fraction(1, 2), Fraction(1, 4)) for other in (OLD, RARE) for split in ("train", "eval")}
    assert len(texts) == 8


# ---------------------------------------------------------------- in a run

pytestmark = pytest.mark.usefixtures("compiled_once")


def test_a_run_reports_each_source_and_resumes_to_the_same_state(tmp_path):
    letters = tmp_path / "letters.txt"
    letters.write_text("".join(chr(97 + i * i % 26) for i in range(3000)))
    blend = {"data": f"synthetic=0.75+text:{letters}=0.25", "steps": "10", "eval_every": 5, "eval_batches": 2, "print_hash": True,
             "topology": "cpu:8", "plan": "data=8", "model": "decoder-tiny,layers=1,embed=32,mlp=32", "seq": 16}
    assert training.train_here(tmp_path / "whole", **blend) == 0
    lines = training.metrics(tmp_path / "whole", "eval")
    assert [line["step"] for line in lines] == [5, 10]
    for line in lines:
        assert set(line["by_source"]) == {"synthetic", f"text:{letters}"}
        losses = list(line["by_source"].values())
        assert line["loss"] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1], rel=1e-12)
        assert abs(losses[0] - losses[1]) > 0.05

    # an evaluated-only source changes nothing of what is trained, and an evaluation alone says the same
    assert training.train_here(tmp_path / "alone", **blend | {"data": "synthetic"}) == 0
    assert training.train_here(tmp_path / "watched", **blend | {"data": f"synthetic=1+text:{letters}=0"}) == 0
    assert training.final_hash(tmp_path / "alone") == training.final_hash(tmp_path / "watched") != training.final_hash(tmp_path / "whole")
    alone, watched = (training.metrics(tmp_path / name, "eval") for name in ("alone", "watched"))
    assert [line["loss"] for line in alone] == [line["by_source"]["synthetic"] for line in watched] == [line["loss"] for line in watched]
    assert "by_source" not in alone[0] and math.isfinite(alone[0]["loss"])

    # stopped in the middle and gone on
    assert training.train_here(tmp_path / "stopped", **blend, fault="term:step=7") == 75
    assert training.train_here(tmp_path / "stopped", **blend) == 0
    assert training.final_hash(tmp_path / "stopped") == training.final_hash(tmp_path / "whole")
    step = committed_steps(tmp_path / "stopped" / "checkpoints")[-1]
    assert read_meta(tmp_path / "stopped" / "checkpoints" / str(step))["position"] == 10
    with pytest.raises(InputError, match="another configuration"):
        training.train_here(tmp_path / "stopped", **blend | {"data": f"synthetic=0.5+text:{letters}=0.5"})

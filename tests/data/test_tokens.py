"""Text through a tokenizer file: a small BPE, trained here."""

import sys

import pytest
import tokenizers

from jaxmem.data import open_data
from jaxmem.spec import InputError

LINES = [f"document {i}: the quick brown fox {'jumps ' * (i % 4)}over the lazy dog, grüßt €{i}.\n" for i in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("tokens")
    for number, line in enumerate(LINES):
        (top / f"{number:03}.txt").write_text(line)
    return top


def train_bpe(*, special=("<unk>", "</s>"), post=None):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=list(special), show_progress=False,
                                                                       initial_alphabet=alphabet))
    if post:
        ids = [(name, tokenizer.token_to_id(name)) for name in special]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=post, special_tokens=ids)
    return tokenizer


def documents(text, **kwargs):
    """Every document's ids, from rows so long that one is enough."""
    out = []
    for split in ("train", "eval"):
        data = open_data(text, seq=20_000, vocab=kwargs.get("vocab", 512), split=split)
        assert data.rows == 1
        row = data.row(0)
        out += [row["tokens"][row["segment_ids"] == segment].tolist() for segment in range(1, row["segment_ids"].max() + 1)]
    return out


def test_documents_come_back_through_the_tokenizer(folder, tmp_path):
    tokenizer = train_bpe()
    tokenizer.enable_truncation(5)  # both are for other uses of the file
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = documents(f"text:{folder},tokenizer={tmp_path}/tokenizer.json")
    end = tokenizer.token_to_id("</s>")
    assert {ids[-1] for ids in found} == {end} and all(end not in ids[:-1] for ids in found)
    assert sorted(tokenizer.decode(ids) for ids in found) == sorted(LINES)
    assert sum(map(len, found)) < 0.5 * sum(len(line.encode()) for line in LINES)  # it is the merges that are used
    assert documents(f"text:{folder},tokenizer={tmp_path}") == found  # the folder of a tokenizer.json


def test_tokens_that_the_tokenizer_adds_itself_are_added_once(folder, tmp_path):
    train_bpe(special=("<s>", "</s>"), post="<s> $A </s>").save(str(tmp_path / "t.json"))
    found = documents(f"text:{folder},tokenizer={tmp_path}/t.json")
    assert {(ids[0], ids[-1]) for ids in found} == {(0, 1)}
    assert all(ids.count(0) == ids.count(1) == 1 for ids in found)


def test_the_end_token_can_be_named_or_be_absent(folder, tmp_path):
    train_bpe(special=("<stop>",)).save(str(tmp_path / "t.json"))
    assert all(0 not in ids for ids in documents(f"text:{folder},tokenizer={tmp_path}/t.json"))
    assert {ids[-1] for ids in documents(f"text:{folder},tokenizer={tmp_path}/t.json,end=<stop>")} == {0}
    with pytest.raises(InputError, match="has no token '<stopp>' to end a document; did you mean <stop>?"):
        documents(f"text:{folder},tokenizer={tmp_path}/t.json,end=<stopp>")


def test_ids_do_not_depend_on_how_many_documents_go_through_at_once(folder, tmp_path, monkeypatch):
    train_bpe().save(str(tmp_path / "t.json"))
    at_once = documents(f"text:{folder},tokenizer={tmp_path}/t.json")
    monkeypatch.setattr("jaxmem.data.tokens.AT_ONCE_BYTES", 200)
    assert documents(f"text:{folder},tokenizer={tmp_path}/t.json") == at_once


def test_the_fingerprint_sees_the_tokenizer(folder, tmp_path):
    train_bpe().save(str(tmp_path / "a.json"))
    train_bpe(special=("</s>", "<unk>")).save(str(tmp_path / "b.json"))
    same_ids = train_bpe()
    same_ids.enable_truncation(9)
    same_ids.save(str(tmp_path / "c.json"))
    names = [f"text:{folder}", *(f"text:{folder},tokenizer={tmp_path}/{name}.json" for name in "abc")]
    assert len({open_data(name, seq=64, vocab=512).fingerprint for name in names}) == 4


def test_errors(folder, tmp_path, monkeypatch):
    train_bpe().save(str(tmp_path / "t.json"))
    name = f"text:{folder},tokenizer={tmp_path}/t.json"
    with pytest.raises(InputError, match=r"has 320 tokens, and the model vocab=257: --model=\.\.\.,vocab=320"):
        open_data(name, seq=8, vocab=257)
    assert open_data(name, seq=8, vocab=320).rows
    with pytest.raises(InputError, match=r"tokenizer=.*/tt.json: no such file or folder; did you mean t.json\?"):
        open_data(f"text:{folder},tokenizer={tmp_path}/tt.json", seq=8, vocab=512)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match=r"broken.json: not a file of the tokenizers library"):
        open_data(f"text:{folder},tokenizer={tmp_path}/broken.json", seq=8, vocab=512)
    (tmp_path / "latin.txt").write_bytes(b"gr\xfc\xdft")
    with pytest.raises(InputError, match=r"latin.txt: byte 2 \(0xfc\) is not UTF-8, which a tokenizer needs; without tokenizer="):
        open_data(f"text:{tmp_path}/latin.txt,tokenizer={tmp_path}/t.json", seq=8, vocab=512)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(InputError, match="the tokenizer cannot read this text: .*[Mm]issing"):
        open_data(f"text:{folder},tokenizer={tmp_path}/words.json", seq=8, vocab=512)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"needs tokenizers, which is not installed: pip install 'jaxmem\[data\]'"):
        open_data(name, seq=8, vocab=512)

"""Text from names, files, folders and globs, in bytes; what goes into the fingerprint; what is refused."""

import json
import pathlib
import sys

import numpy as np
import pytest

from jaxmem.data import open_data
from jaxmem.spec import InputError

TEXTS = {"b.txt": "a second text\n" * 5, "a.md": "# a first text\n" * 4, "deeper/c.py": "x = 3  # grüß\n" * 6}


def segments(data):
    """Every document's bytes, from the rows."""
    out, previous = [], -1
    for number in range(data.rows):
        row = data.row(number)
        for segment in range(1, row["segment_ids"].max() + 1):
            piece = row["tokens"][row["segment_ids"] == segment].tolist()
            if segment == 1 and previous >= 0:  # the row before went on into this one
                out[-1] += piece
            else:
                out.append(piece)
        previous = row["targets"][-1]
    return out


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x00\xff")
    (tmp_path / "texts" / ".hidden").mkdir()
    (tmp_path / "texts" / ".hidden" / "d.txt").write_text("not this")
    (tmp_path / "texts" / "empty.txt").write_text("")
    return tmp_path / "texts"


def both(text, **kwargs):
    return [open_data(text, split=split, **kwargs) for split in ("train", "eval")]


def test_every_file_of_a_folder_is_a_document_in_the_order_of_names(folder):
    train, held = both(f"text:{folder}", seq=8, vocab=257)
    found = [segments(train), segments(held)]
    # small files: the tail of the longest is held out
    longest = max(TEXTS.values(), key=lambda text: len(text.encode())).encode()
    tail = found[1][0]
    expected = [[*TEXTS[name].encode(), 256] for name in ("a.md", "b.txt", "deeper/c.py")]
    assert found[0] == [d if bytes(d[:-1]) != longest else d[:-len(tail)] for d in expected]
    assert found[1] == [[*longest, 256][-len(tail):]] and len(tail) == 229 // 20


def test_a_jsonl_file_has_a_document_a_line(tmp_path):
    texts = [f"line {i} " + "grüß " * (i % 5) for i in range(300)]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n")
    train, held = both(f"text:{path}", seq=64, vocab=300)
    found = segments(train) + segments(held)
    assert sorted(found) == sorted([*text.encode(), 256] for text in texts)
    assert "300 documents" in train.described


def test_a_glob_takes_what_it_matches(folder):
    train, held = both(f"text:{folder}/**/*.*d", seq=8, vocab=256)  # a.md alone, and 256 tokens have none that ends a document
    assert bytes(sum(segments(train) + segments(held), [])) == TEXTS["a.md"].encode()


def test_bytes_need_no_decoding(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 2)
    train, held = both(f"text:{tmp_path}/a.txt", seq=100, vocab=257)
    assert sum(segments(train) + segments(held), []) == [*range(256), *range(256), 256]


def test_the_fingerprint_is_of_content_and_settings_and_not_of_the_place(folder, tmp_path):
    def of(path, seq=8, vocab=257, split="train"):
        return open_data(f"text:{path}", seq=seq, vocab=vocab, split=split).fingerprint

    first = of(folder)
    moved = folder.rename(tmp_path / "moved")
    assert of(moved) == first
    different = {first, of(moved, seq=9), of(moved, vocab=256), of(moved, split="eval")}
    (moved / "a.md").write_text("# A first text\n" * 4)
    different.add(of(moved))
    assert len(different) == 5


def test_pydoc_is_always_there_and_is_english():
    train, held = both("text:pydoc", seq=512, vocab=512)
    tokens = [np.concatenate([data.row(i)["tokens"] for i in range(data.rows)]) for data in (train, held)]
    assert len(tokens[0]) > 700_000 and 0.03 < len(tokens[1]) / len(tokens[0]) < 0.06
    text = bytes(tokens[0][tokens[0] < 256].astype(np.uint8)).decode(errors="replace").lower()
    words = text.split()
    assert sum(word in {"the", "a", "of", "to", "is", "in", "and", "that", "for", "if"} for word in words) / len(words) > 0.15


@pytest.mark.parametrize("text,message", [
    ("txt:pydoc", "unknown data 'txt:pydoc'; did you mean text?"),
    ("pydoc", "unknown data 'pydoc'; did you mean text:pydoc?"),
    ("digits", "did you mean images:digits?"),
    ("sinthetic", "did you mean synthetic?"),
    ("text:", "a name (pydoc, python, milton, shakespeare) or a path is missing"),
    ("text:pydocs", "text:pydocs: no such file or folder; did you mean pydoc?"),
    ("text:pydoc,tokeniser=x", "unknown field 'tokeniser'; did you mean tokenizer?"),
    ("text:pydoc,tokenizer=", "tokenizer needs one value"),
    ("text:pydoc,tokenizer=x,tokenizer=y", "tokenizer needs one value"),
    ("text:pydoc,end=</s>", "there is no tokenizer="),
    ("text:{folder}/b.text", "no such file or folder; did you mean b.txt?"),
    ("text:{folder}/deper/c.py", "there is no {folder}/deper; did you mean deeper?"),
    ("text:{folder}/*.rst", "no file is matched"),
    ("text:{folder}/.hidden/../.nothing", "no such file or folder"),
    ("text:{folder}/empty.txt", "is empty"),
    ("text:{folder}/nothing", "no .txt, .md, .py, .jsonl file is in this folder"),
    ("text:{folder}/one.txt", "2 tokens in 1 documents are too few to train on some"),
    ("text:{folder}/bad.jsonl", "bad.jsonl:2: not a line of JSON"),
    ("text:{folder}/list.jsonl", 'list.jsonl:1: expected an object with a string "text", got a list'),
    ("text:{folder}/keys.jsonl", "got an object with 'body'"),
    ("text:{folder}/half.jsonl", "half.jsonl:1: character 1 of its text is half of a surrogate pair"),
])
def test_errors(folder, text, message):
    (folder / "nothing").mkdir()
    (folder / "one.txt").write_text("x")
    (folder / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "keys.jsonl").write_text('{"body": "x"}\n')
    (folder / "half.jsonl").write_text('{"text": "x\\ud800"}\n')
    with pytest.raises(InputError) as found:
        open_data(text.replace("{folder}", str(folder)), seq=8, vocab=257)
    assert message.replace("{folder}", str(folder)) in str(found.value)


def test_a_vocabulary_without_the_bytes_is_refused():
    with pytest.raises(InputError, match=r"needs a vocabulary of 256.*has vocab=255: --model=\.\.\.,vocab=257"):
        open_data("text:pydoc", seq=8, vocab=255)


def test_a_python_without_its_documentation(monkeypatch):
    from jaxmem.data import corpora

    corpora._pydoc.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match="needs the standard library's pydoc_data"):
        open_data("text:pydoc", seq=8, vocab=257)


def test_a_path_may_have_commas(tmp_path):
    path = pathlib.Path(tmp_path / "a,b.txt")
    path.write_text("hello " * 10)
    assert open_data(f"text:{path}", seq=8, vocab=257).rows == 7  # 61 tokens, of which 8 are held out

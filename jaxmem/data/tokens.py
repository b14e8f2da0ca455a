"""Bytes of a document -> token ids: the bytes themselves, or a Hugging Face `tokenizers` file."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem.data.corpora import existing
from jaxmem.data.rows import optional
from jaxmem.spec import InputError, nearest

BYTES = 256
END_OF_DOCUMENT = 256  # the token after the bytes
# what published tokenizers call the token that ends a document, most specific first
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[EOS]", "[SEP]")
AT_ONCE_BYTES = 4_000_000  # of text, through a tokenizer's threads


@dataclass(frozen=True)
class Tokenizer:
    """`encode` takes (where, bytes) of documents and yields the ids of each, with its end token if there is one. `size`: ids are
    below it. `settings` goes into the data's fingerprint."""

    name: str
    size: int
    settings: dict[str, object]
    encode: Callable[[Iterable[tuple[str, bytes]]], Iterator[np.ndarray]]


def byte_tokenizer(vocab: int) -> Tokenizer:
    """0..255, and 256 at the end of a document where the model's vocabulary has it."""
    if vocab < BYTES:
        raise InputError(f"text in bytes needs a vocabulary of {BYTES}, and one more for the end of a document; the model has "
                         f"vocab={vocab}: --model=...,vocab={BYTES + 1}")
    end = [END_OF_DOCUMENT] if vocab > END_OF_DOCUMENT else []

    def encode(documents):
        for _, content in documents:
            if content:
                yield np.concatenate([np.frombuffer(content, np.uint8).astype(np.uint16), np.array(end, np.uint16)])
    return Tokenizer("byte", BYTES + len(end), {"tokens": "bytes", "end": end}, encode)


def file_tokenizer(path: str, vocab: int, end: str | None) -> Tokenizer:
    """A `tokenizer.json`, or the folder of one. Its own special tokens are added, and its end token (`end`, or the one it has of
    END_NAMES) where its rules did not add it. Truncation and padding of the file are switched off."""
    found = existing(path, "tokenizer=")
    file = found / "tokenizer.json" if found.is_dir() else found
    library = optional("tokenizers", "tokenizers", f"tokenizer={path}")
    try:
        content = file.read_bytes()
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exceptions
        raise InputError(f"tokenizer {file}: not a file of the tokenizers library: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if size > vocab:
        raise InputError(f"the tokenizer {file} has {size} tokens, and the model vocab={vocab}: --model=...,vocab={size}")
    if end is not None and end not in ids:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        raise InputError(f"the tokenizer {file} has no token {end!r} to end a document{nearest(end, special)}")
    end = end or next((name for name in END_NAMES if name in ids), None)
    settings: dict[str, object] = {"tokens": hashlib.sha256(content).hexdigest(), "end": end}
    return Tokenizer(f"{file.name} ({size} tokens)", size, settings, lambda documents: _encode(tokenizer, ids.get(end), documents))


def _encode(tokenizer: Any, end: int | None, documents: Iterable[tuple[str, bytes]]) -> Iterator[np.ndarray]:
    waiting: list[str] = []
    size = 0

    def encoded():
        try:
            found = tokenizer.encode_batch_fast(waiting)
        except Exception as error:  # the library raises plain Exceptions
            raise InputError(f"the tokenizer cannot read this text: {error}") from None
        for one in found:
            ids = one.ids
            if end is not None and ids and ids[-1] != end:
                ids.append(end)
            yield np.array(ids, np.uint32)
    for where, content in documents:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: byte {error.start} (0x{content[error.start]:02x}) is not UTF-8, which a tokenizer needs; "
                             "without tokenizer= any bytes can be read") from None
        if text:
            waiting.append(text)
            size += len(content)
        if size >= AT_ONCE_BYTES:
            yield from encoded()
            waiting, size = [], 0
    yield from encoded()

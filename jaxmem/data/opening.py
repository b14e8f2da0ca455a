"""`--data` -> rows: `synthetic`, `text:NAME_OR_PATH[,tokenizer=FILE[,end=TOKEN]]`, `images:NAME`, or a mixture, `A=0.75+B=0.25`."""

import functools

from jaxmem.continual import mixing
from jaxmem.data.corpora import CORPORA, find_corpus
from jaxmem.data.documents import join, split_documents
from jaxmem.data.images import IMAGES, open_images
from jaxmem.data.packing import pack, row_count
from jaxmem.data.rows import Data, Split, fingerprint, text_fields
from jaxmem.data.synthetic import open_synthetic
from jaxmem.data.tokens import byte_tokenizer, file_tokenizer
from jaxmem.models.configs import DecoderConfig
from jaxmem.models.image_configs import ImageDtype
from jaxmem.spec import DASHES, InputError, nearest
from jaxmem.workload import Workload

USAGE = "--data is synthetic, text:NAME_OR_PATH[,tokenizer=FILE] or images:NAME"
OPTIONS = ("tokenizer", "end")


def open_for(workload: Workload, text: str, *, split: Split = "train") -> Data:
    """`open_data` as the workload's model takes it; its fields are `workload.rows`. Raises InputError also for data of another kind,
    shape or number of classes."""
    m = workload.model
    if isinstance(m, DecoderConfig):
        data = open_data(text, seq=workload.seq, vocab=m.vocab, split=split)
    else:
        sources = [source for source, _ in mixing.parse(text)] if mixing.is_mixture(text) else [text]
        if tokens := [source for source in sources if source.strip().partition(":")[0] in ("text", "synthetic")]:
            raise InputError(f"--data={tokens[0]} gives tokens, and {workload.model_name} takes {', '.join(workload.rows)}; "
                             f"there are {', '.join(f'images:{name}' for name in IMAGES)}")
        data = open_data(text, seq=workload.seq, vocab=m.outputs, split=split, images=workload.rows["images"][0], classes=m.classes,
                         image_dtype=m.image_dtype)
    if set(data.fields) != set(workload.rows):
        raise InputError(f"--data={text} gives {', '.join(data.fields)}, and {workload.model_name} takes {', '.join(workload.rows)}")
    return data


def open_data(text: str, *, seq: int, vocab: int, split: Split = "train", images: tuple[int, ...] | None = None,
              classes: int | None = None, image_dtype: ImageDtype = "f32") -> Data:
    """Rows of `seq` tokens for a model of `vocab` tokens, or images (which need neither, and must be [H, W, C] = `images` in at most
    `classes` classes if these are given). `split="eval"` is about a twentieth, held out by content: never part of "train". All of it
    is held in memory, two or four bytes a token. Raises InputError for what is unknown, missing, empty, or does not fit the model."""
    if mixing.is_mixture(text):
        found = [(one, share, open_data(one, seq=seq, vocab=vocab, split=split, images=images, classes=classes, image_dtype=image_dtype))
                 for one, share in mixing.parse(text)]
        return mixing.mixture(found, split=split)
    kind, colon, rest = text.strip().partition(":")
    if kind == "synthetic" and not colon:
        return open_synthetic(seq=_positive(seq), vocab=vocab, split=split)
    if kind == "text":
        return open_text(rest, seq=_positive(seq), vocab=vocab, split=split)
    if kind == "images":
        return open_images(rest.translate(DASHES), split=split, expected=images, classes=classes, dtype=image_dtype)
    if kind == "synthetic":
        raise InputError(f"data {text!r}: synthetic takes nothing after it; {USAGE}")
    known = {**dict.fromkeys(CORPORA, "text:"), **dict.fromkeys(IMAGES, "images:")}
    where = f"; did you mean {known[kind]}{kind}?" if kind in known else nearest(kind, ["synthetic", "text", "images"])
    raise InputError(f"unknown data {text!r}{where}\n{USAGE}")


def open_text(text: str, *, seq: int, vocab: int, split: Split) -> Data:
    path, options = _options(text)
    if not path:
        raise InputError(f"data 'text:{text}': a name ({', '.join(CORPORA)}) or a path is missing; {USAGE}")
    corpus = find_corpus(path)
    tokenizer = file_tokenizer(options["tokenizer"], vocab, options.get("end")) if "tokenizer" in options else byte_tokenizer(vocab)
    everything = join(tokenizer.encode(corpus.documents()), wide=tokenizer.size > 2 ** 16)
    if not everything.count:
        raise InputError(f"{corpus.name}: {corpus.described} is empty")
    documents = split_documents(everything, at_least=seq)[split]
    if len(documents.tokens) <= documents.count:
        raise InputError(f"{corpus.name}: {len(everything.tokens)} tokens in {everything.count} documents are too few to train on some "
                         "and evaluate on others")
    rows = row_count(documents, seq)
    return Data(name=corpus.name, kind="text", rows=rows, fields=text_fields(seq), row=functools.partial(pack, documents, seq),
                fingerprint=fingerprint({"text": 1, "seq": seq, "split": split, **tokenizer.settings},
                                        everything.tokens.data, everything.offsets.data),
                described=f"{corpus.name}: {corpus.described}; {documents.count} of {everything.count} documents"
                          f"{', held out' if split == 'eval' else ''}; {len(documents.tokens)} {tokenizer.name} tokens in {rows} rows "
                          f"of {seq}")


def _options(text: str) -> tuple[str, dict[str, str]]:
    """`"a,b.txt,tokenizer=t.json"` -> ("a,b.txt", {"tokenizer": "t.json"}): a path may have commas, options come last."""
    path, options = text.strip(), {}
    while "," in path and "=" in path.rpartition(",")[2]:
        path, _, item = path.rpartition(",")
        name, _, value = item.partition("=")
        name = name.strip()
        if name not in OPTIONS or not value or name in options:
            problem = f"unknown field {name!r}{nearest(name, OPTIONS)}" if name not in OPTIONS else f"{name} needs one value"
            raise InputError(f"data text:{text}: {problem}")
        options[name] = value.strip()
    if "end" in options and "tokenizer" not in options:
        raise InputError(f"data text:{text}: end={options['end']} is a tokenizer's token, and there is no tokenizer=; bytes end with "
                         "token 256")
    return path, options


def _positive(seq: int) -> int:
    if seq < 1:
        raise InputError(f"seq={seq}: a row has one token or more")
    return seq

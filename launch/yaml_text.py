"""A manifest as YAML text, which any YAML reader gives back as it was. Strings that could be taken for something else are quoted."""

import json
import re
from collections.abc import Mapping, Sequence

type Value = str | int | bool | Mapping[str, Value] | Sequence[Value]

# Letters first, and none of YAML's own signs: never a number, a date, or the start of something. No words that mean true or null.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./+-]*(?:/[A-Za-z0-9_./+-]+)*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def dump(value: Value) -> str:
    """A block of text that ends with a line's end."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Value) -> list[str]:
    if isinstance(value, Mapping):
        return [line for name, inner in value.items() for line in _entry(f"{_scalar(name)}:", inner)] or ["{}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [line for inner in value for line in _item(inner)] or ["[]"]
    return [_scalar(value)]


def _entry(head: str, inner: Value) -> list[str]:
    if isinstance(inner, Mapping | Sequence) and not isinstance(inner, str) and inner:
        indent = "  " if isinstance(inner, Mapping) else ""
        return [head, *(indent + line for line in _lines(inner))]
    return [f"{head} {_lines(inner)[0]}"]


def _item(inner: Value) -> list[str]:
    first, *rest = _lines(inner)
    return [f"- {first}", *("  " + line for line in rest)]


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # A JSON string is a YAML string, but YAML has more ends of lines, and no pairs of surrogates.
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", json.dumps(text, ensure_ascii=False))

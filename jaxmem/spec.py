"""Text <-> flat dataclass: `"preset,field=value"`, one line in, the same line out.

The grammar, used for models, optimizers and plans alike: fields are separated by commas, a list inside a value by `+`,
alternatives of a sweep by `|`. No nesting, ever. Unknown names are errors that quote the nearest known one.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping

DASHES = str.maketrans({c: "-" for c in "‐‑‒–—―−"})


class InputError(ValueError):
    """What the user gave cannot be used. The message is complete: commands print it alone and exit with status 2."""


def nearest(name: str, names: Iterable[str], *, limit: int = 3) -> str:
    """`"; did you mean a or b?"`, or the full list when it is short, or an empty string."""
    names = sorted(set(names))
    close = difflib.get_close_matches(name.lower(), names, n=limit, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 40 else ""


def _plain(hint: object) -> tuple[object, ...]:
    """The alternatives of a type hint: `int | None` -> (int, NoneType)."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)


def _value(hint: object, text: str, where: str) -> object:
    kinds = _plain(hint)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        if kind is types.NoneType:
            continue
        if typing.get_origin(kind) is typing.Literal:
            choices = typing.get_args(kind)
            for choice in choices:
                if text == str(choice):
                    return choice
            raise InputError(f"{where}={text}: expected {'|'.join(map(str, choices))}{nearest(text, map(str, choices))}")
        if kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            raise InputError(f"{where}={text}: expected true or false")
        if kind in (int, float):
            try:
                number = kind(text)  # type: ignore[operator]
            except ValueError:
                if len([k for k in kinds if k is not types.NoneType]) == 1:
                    raise InputError(f"{where}={text}: expected {'a whole number' if kind is int else 'a number'}") from None
                continue
            if not math.isfinite(number):  # float() reads "nan" and "inf", which are no sizes, rates or factors
                raise InputError(f"{where}={text}: expected a finite number")
            return number
        if typing.get_origin(kind) is tuple:
            return tuple(filter(None, text.split("+")))
        if kind is str:
            return text
    raise InputError(f"{where}={text}: not understood")


def fields_from(cls: type, items: Iterable[str], what: str, *, aliases: Mapping[str, str] | None = None) -> dict[str, object]:
    """`["layers=4", ...]` -> field values of dataclass `cls`."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.init]
    values: dict[str, object] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = (aliases or {}).get(name.strip(), name.strip())
        if name not in names:
            raise InputError(f"{what}: unknown field {name!r}{nearest(name, names)}")
        if not equals or not text.strip():
            raise InputError(f"{what}: field {name!r} needs a value, as in {name}=...")
        if name in values:
            raise InputError(f"{what}: field {name!r} is given twice")
        values[name] = _value(hints[name], text.strip(), f"{what}: {name}")
    return values


def split(text: str) -> list[str]:
    """Comma-separated items, typographic dashes made plain, blanks dropped."""
    return [item.strip() for item in text.translate(DASHES).split(",") if item.strip()]


def parse[T](cls: type[T], text: str, *, what: str) -> T:
    """`"fsdp=16,tensor=4"` -> `cls`; errors name `what` and the nearest field."""
    return cls(**fields_from(cls, split(text), what))


def parse_preset[T](presets: Mapping[str, T], text: str, *, what: str) -> T:
    """`"llama3-8b,layers=4"` -> the preset with fields replaced."""
    items = split(text)
    if not items or "=" in items[0]:
        raise InputError(f"{what} {text!r}: begins with a name{nearest(items[0].partition('=')[0] if items else '', presets)}")
    name, *rest = items
    if name not in presets:
        raise InputError(f"unknown {what} {name!r}{nearest(name, presets)}")
    base = presets[name]
    return dataclasses.replace(base, **fields_from(type(base), rest, f"{what} {name}"))  # type: ignore[type-var]


def show(value: object) -> str:
    """One field's value as `parse` reads it."""
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return "none" if value is None else str(value)


def differences(value: object, base: object) -> list[str]:
    """`field=value` for each field of dataclass `value` that differs from `base`."""
    return [f"{f.name}={show(getattr(value, f.name))}" for f in dataclasses.fields(value)  # type: ignore[arg-type]
            if f.init and getattr(value, f.name) != getattr(base, f.name)]


def alternatives(text: str) -> list[str]:
    """A sweep: `"remat=none|block,zero=1|3"` -> every combination, in order; a preset may vary too, `"gpt2|gpt2-xl,layers=2"`."""
    out = [""]
    for item in split(text):
        name, equals, value = item.partition("=") if "=" in item else ("", "", item)
        out = [(f"{head}," if head else "") + name + equals + choice for head in out for choice in value.split("|")]
    return out

"""The arguments of one verb: absl flags in a set of the verb's own, forgiving of what word processors do to a dash.

A verb is a module with a docstring (its help), `define(flags)` and `run(flags, words) -> exit status`. Its flags exist only while
it runs, so importing a verb adds nothing to the flags of the program that imports it.
"""

import re
from collections.abc import Iterable, Sequence

from absl import flags as absl_flags

from jaxmem.spec import DASHES, InputError, nearest

_QUOTES = "“”„‟‘’‚‛«»"
_FLAG = re.compile(r"[-‐‑‒–—―−]+([A-Za-z][\w‐‑‒–—―−-]*)(=.*)?", re.DOTALL)
_ILLEGAL = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_METAVARS = {"int": "=N", "float": "=X", "bool": ""}


def plain(argument: str) -> str:
    """A flag as it was meant: `—model=“x”` -> `--model=x`, `--mem-fraction` -> `--mem_fraction`; other words unchanged."""
    match = _FLAG.fullmatch(argument)
    if not match:
        return argument
    value = match[2] or ""
    if value:
        value = "=" + value[1:].strip(_QUOTES)
    return "--" + match[1].translate(DASHES).replace("-", "_") + value


def parse(flags: absl_flags.FlagValues, arguments: Iterable[str]) -> list[str]:
    """Set `flags` from `arguments` and return the words that are no flags. Raises `InputError`."""
    flags.set_gnu_getopt(True)  # words may stand before, between and after flags
    try:
        return list(flags(["jaxmem", *map(plain, arguments)])[1:])
    except absl_flags.UnrecognizedFlagError as error:
        name = f"--{error.flagname}"
        raise InputError(f"unknown flag {name}{nearest(name, [f'--{known}' for known in flags])}") from None
    except absl_flags.IllegalFlagValueError as error:
        if match := _ILLEGAL.fullmatch(str(error)):
            name, value, reason = match.groups()
            kind = flags[name].flag_type()
            bound = reason.startswith(value)  # "0 is not a positive integer" says it well; "invalid literal for int()" does not
            raise InputError(f"--{name}={value}: {reason if bound else f'expected {_EXPECTED.get(kind, kind)}'}") from None
        raise InputError(str(error)) from None
    except absl_flags.Error as error:  # a value that is missing, mostly
        raise InputError(str(error)) from None


def help_text(verb: str, docstring: str, flags: absl_flags.FlagValues) -> str:
    """What `jaxmem VERB --help` prints."""
    lines = [f"jaxmem {verb}: {docstring.strip()}", ""]
    if len(flags):
        heads = {name: f"  --{name}{_METAVARS.get(flags[name].flag_type(), '=TEXT')}" for name in flags}
        width = max(map(len, heads.values())) + 2
        lines.append("Flags:")
        for name, head in heads.items():
            default = flags[name].default
            text = f"{default:g}" if isinstance(default, float) else str(default)
            shown = "" if default in (None, False, "") else f" (default {text})"
            lines += _wrapped(head.ljust(width), (flags[name].help or "") + shown, width)
        lines.append("")
    return "\n".join(lines)


def no_words(words: Sequence[str], verb: str) -> None:
    """Refuse words where a verb takes flags alone."""
    if words:
        hint = f"; flags are written --name=value, as in --{words[0]}" if re.fullmatch(r"\w+=.*", words[0], re.DOTALL) else ""
        raise InputError(f"{verb} takes flags only, not {words[0]!r}{hint}")


def _wrapped(head: str, text: str, indent: int, width: int = 100) -> list[str]:
    lines, line = [], head
    for word in text.split():
        if len(line) + len(word) + 1 > width and line.strip() and len(line) > indent:
            lines.append(line.rstrip())
            line = " " * indent
        line += word + " "
    return [*lines, line.rstrip()]

"""what changed between two checks.

  jaxmem check ... --json > a.json
  jaxmem check ... --json > b.json
  jaxmem diff a.json b.json
"""

import json
import pathlib

from absl import flags as absl_flags

from jaxmem.spec import InputError


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_boolean("json", False, "print one JSON object", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    if len(words) != 2:
        raise InputError(f"diff takes two files, as in jaxmem diff a.json b.json; {len(words)} given")
    from jaxmem.report import diff

    before, after = map(read, words)
    difference = diff.diff(before, after)
    print(json.dumps(difference, indent=1) + "\n" if flags.json else diff.render(difference), end="")
    return 0


def read(path: str) -> dict:
    """A check that `jaxmem check --json` printed. Raises `InputError` for what is none."""
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); write it with jaxmem check ... --json > {path}") from None
    if not isinstance(value, dict) or "verdict" not in value or "schema" not in value:
        raise InputError(f"{path} is not a check; write it with jaxmem check ... --json > {path}")
    return value

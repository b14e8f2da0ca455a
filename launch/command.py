"""The two halves of a launcher's command line: its own flags, then `--`, then those of `jaxmem train`; and how commands are shown."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from absl import flags as absl_flags

from jaxmem.cli import arguments
from jaxmem.cli import train as train_verb
from jaxmem.runs.settings import Settings, check
from jaxmem.spec import InputError


def halves(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Before and after the first `--`."""
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1:]


def given(words: Sequence[str]) -> tuple[absl_flags.FlagValues, set[str]]:
    """The flags of `jaxmem train`, and the names of those that are given. Raises `InputError`."""
    flags = absl_flags.FlagValues()
    train_verb.define(flags)
    arguments.no_words(arguments.parse(flags, words), "train")
    return flags, {name for name in flags if flags[name].present}


def train_settings(words: Sequence[str]) -> tuple[Settings, set[str]]:
    """What `jaxmem train` makes of its flags, and the names of those that are given. Raises `InputError`, before it waits in a queue."""
    flags, names = given(words)
    settings = train_verb.read_settings(flags)
    check(settings)
    return settings, names


def shown(argv: Sequence[str], *, indent: str = "  ") -> str:
    """A command that a shell reads back as it is, one flag a line where it is long."""
    line = shlex.join(argv)
    if len(line) <= 100:
        return line
    head = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    return f" \\\n{indent}".join([shlex.join(argv[:head]), *map(shlex.quote, argv[head:])])


def hand_over(argv: Sequence[str], *, missing: str, text: str | None = None) -> int:
    """Run a command of this machine's and return its status; `text` goes to its stdin. `missing` says how to get it."""
    if shutil.which(argv[0]) is None:
        raise InputError(f"--run needs {argv[0]}, which is not on the PATH: {missing}; without --run the text is printed, to use elsewhere")
    return subprocess.run(argv, input=text, text=True, check=False).returncode


def run(docstring: str, define: Callable[[absl_flags.FlagValues], None], launch: Callable[[absl_flags.FlagValues, list[str]], int],
        words: Sequence[str], name: str) -> int:
    """Parse, launch, and turn what was wrong with the input into one message and status 2."""
    own, train = halves(words)
    flags = absl_flags.FlagValues()
    define(flags)
    if "--help" in own or "-h" in own:
        text = arguments.help_text(name, docstring, flags)
        sys.stdout.write(text.replace(f"jaxmem {name}: ", f"python -m {name}: ", 1))
        return 0
    try:
        if stray := arguments.parse(flags, own):
            raise InputError(f"{stray[0]!r} is no flag of {name}; flags of jaxmem train stand after --")
        return launch(flags, train)
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2

"""`jaxmem VERB --flag=value ...`: finds the verb, runs it, and turns what went wrong into one message and an exit status."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from absl import flags as absl_flags

from jaxmem import __version__, environment
from jaxmem.cli import arguments
from jaxmem.spec import InputError, nearest

VERBS = {
    "check": "does it fit a topology, where does the memory go, how fast is a step, what to change",
    "train": "run what was checked, and survive: data, checkpoints, faults, resume",
    "meta-train": "find the numbers of a learned optimizer on small tasks",
    "export": "a run's parameters as safetensors, in a Hugging Face layout or in jaxmem's own",
    "pack": "how small runs share devices: one program for many, parts, MIG slices; how many fit",
    "diff": "what changed between two checks",
    "interval": "how often to write a checkpoint: from its size, the storage, the failure rate",
    "runs": "the runs of a folder: list them, or compare some side by side",
    "results": "records of experiments: list, filter, arrange, export as CSV",
    "report": "a run as one HTML page: curves, what happened, memory, goodput",
    "models": "presets with their parameters",
    "topologies": "chips and topology names, with figures and their sources",
    "cache": "compiled programs that are kept: list or clear",
    "doctor": "what is installed, which targets work, what is missing and how to get it",
}

INPUT, INTERNAL, INTERRUPTED, PIPE = 2, 70, 130, 141
TRACEBACK = "JAXMEM_TRACEBACK"


def usage() -> str:
    width = max(map(len, VERBS)) + 2
    return "\n".join([
        "jaxmem: know before you launch a JAX program on a TPU or GPU topology.",
        "",
        "  jaxmem check --model=llama3-8b --plan=fsdp=64,remat=block --topology=v5p-128 --batch=64 --seq=8192",
        "",
        "Verbs (jaxmem VERB --help for the flags):",
        *(f"  {verb:<{width}}{summary}" for verb, summary in VERBS.items()),
        "",
        "Exit status: 0 done, fits or tight; 2 bad input; 3 does not fit; 4 unknown; 70 internal error.",
        "",
    ])


def main(argv: Sequence[str]) -> int:
    """Run one command, given without the program's name, and return its exit status."""
    words = [arguments.plain(word) for word in argv]
    verb = words[0] if words else ""
    try:
        if not words:
            sys.stderr.write(usage())
            return INPUT
        if verb == "--version":
            print(f"jaxmem {__version__}")
            return 0
        if verb in ("--help", "--h", "help"):
            if len(words) == 1:
                sys.stdout.write(usage())
                return 0
            verb, words = words[1], [words[1], "--help"]
        if verb.startswith("-"):
            raise InputError(f"the verb comes first, as in jaxmem check {verb}; verbs: {', '.join(VERBS)}")
        if verb not in VERBS:
            raise InputError(f"unknown verb {verb!r}{nearest(verb, VERBS)}")
        status = _run(verb, words[1:], list(argv[1:]))
        sys.stdout.flush()
        return status
    except InputError as error:
        print(f"jaxmem{' ' + verb if verb in VERBS else ''}: {error}", file=sys.stderr)
        return INPUT
    except KeyboardInterrupt as interrupt:
        print(f"\njaxmem: interrupted{'; ' + str(interrupt) if str(interrupt) else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` or a pager, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        else:
            message = str(error).strip().splitlines()
            print(f"jaxmem {verb}: internal error: {type(error).__name__}{': ' + message[0] if message else ''}\n"
                  f"This is a defect of jaxmem. {TRACEBACK}=1 in the environment shows where it happened.", file=sys.stderr)
        return INTERNAL


def _run(verb: str, plain: list[str], given: list[str]) -> int:
    environment.quiet()  # before anything can import jax
    module = importlib.import_module(f"jaxmem.cli.{verb.replace('-', '_')}")
    flags = absl_flags.FlagValues()
    module.define(flags)
    if "--help" in plain or "-h" in given:
        sys.stdout.write(arguments.help_text(verb, module.__doc__ or "", flags))
        return 0
    return module.run(flags, arguments.parse(flags, given))


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))

"""the runs of a folder: list them, or compare some side by side.

  jaxmem runs                          every run under runs/, the newest first
  jaxmem runs FOLDER ...               those under other folders
  jaxmem runs compare RUN RUN ...      differences of configuration, loss, speed, memory and goodput

Everything is read from the files of the runs. Losses, speed and memory are measured, unless a head
says compile or estimate.
"""

import json
import math
import pathlib
import sys

from absl import flags as absl_flags

from jaxmem.spec import InputError

DEFAULT = "runs"


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_boolean("json", False, "print one JSON object", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    if words and words[0] == "compare":
        return _compare(flags, words[1:])
    from jaxmem.report.run_terminal import render_list
    from jaxmem.runs.summary import find_runs, read_summary

    for word in words:
        if not pathlib.Path(word).is_dir():
            near = "; jaxmem runs compare RUN RUN compares" if word in ("comapre", "diff", "compear", "cmp") else ""
            raise InputError(f"{word}: {'is a file' if pathlib.Path(word).exists() else 'no such folder'}{near}")
    found = {path.resolve(): path for word in words or [DEFAULT] for path in find_runs(pathlib.Path(word))}
    runs = [read_summary(path) for path in found.values()]
    runs.sort(key=lambda one: (one.damaged is not None, one.status != "running", math.inf if one.age_s is None else one.age_s, one.folder))
    if flags.json:
        print(json.dumps({"runs": [run.as_json() for run in runs]}, indent=1))
    elif runs:
        sys.stdout.write(render_list(runs))
    else:
        print(f"no runs under {', '.join(words) or DEFAULT}; jaxmem train --out={DEFAULT}/NAME makes one")
    return 0


def _compare(flags: absl_flags.FlagValues, words: list[str]) -> int:
    from jaxmem.report.run_terminal import render_comparison
    from jaxmem.runs.compare import compare
    from jaxmem.runs.reading import read_run
    from jaxmem.runs.summary import require_run

    if len(words) < 2:
        raise InputError(f"compare takes two runs or more, as in jaxmem runs compare runs/a runs/b; {len(words)} given")
    found = compare([read_run(require_run(word)) for word in words])
    print(json.dumps(found.as_json(), indent=1) + "\n" if flags.json else render_comparison(found), end="")
    return 0

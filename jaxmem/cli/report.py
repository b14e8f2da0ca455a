"""a run as one HTML page: curves, what happened, memory, goodput.

  jaxmem report runs/a                     writes runs/a/report.html
  jaxmem report runs/a --out=page.html     elsewhere
  jaxmem report runs/a --curve=loss.svg    the loss curve alone too, as a drawing for documents

The page is made from the run's files, also while the run goes on.
"""

import pathlib

from absl import flags as absl_flags

from jaxmem.spec import InputError


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_string("out", None, "the page's file; by default report.html in the run's folder", flag_values=flags)
    absl_flags.DEFINE_string("curve", None, "also write the loss curve to this SVG file", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    from jaxmem.report.run_page import render, render_svg_curve
    from jaxmem.runs.summary import require_run

    if len(words) != 1:
        raise InputError(f"report takes one run, as in jaxmem report runs/a; {len(words)} given")
    folder = require_run(words[0])
    out = pathlib.Path(flags.out) if flags.out else folder / "report.html"
    try:
        out.write_text(render(folder), encoding="utf-8")
        print(out)
        if flags.curve:
            render_svg_curve(folder, pathlib.Path(flags.curve))
            print(flags.curve)
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    return 0

"""a run's parameters as safetensors, in a Hugging Face layout or in jaxmem's own.

  jaxmem export --run=runs/first --out=weights
  jaxmem export --run=runs/first --step=200 --layout=llama --dtype=bf16 --out=weights

The folder has config.json and files of 5 GB at most, and appears when it is complete.
transformers loads the layouts llama, gpt2, qwen2 and qwen3; jaxmem train --init_from=FOLDER
begins from any. Runs on the CPU, also beside a run that is going on.
"""

import os
import pathlib

from absl import flags as absl_flags

from jaxmem.cli import arguments
from jaxmem.report.units import bytes_text
from jaxmem.spec import InputError


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_string("run", "", "the run's folder", flag_values=flags)
    absl_flags.DEFINE_integer("step", None, "a committed step (default: the latest)", lower_bound=0, flag_values=flags)
    absl_flags.DEFINE_string("layout", "", "llama, gpt2, qwen2, qwen3 or jaxmem (default: the first of these that can hold the model)",
                             flag_values=flags)
    absl_flags.DEFINE_string("dtype", "", "f32, bf16 or f16, rounded to nearest (default: as it was trained)", flag_values=flags)
    absl_flags.DEFINE_string("out", "", "the folder to make", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    arguments.no_words(words, "export")
    if missing := [name for name in ("run", "out") if not flags[name].value]:
        raise InputError(f"export needs {' and '.join(f'--{name}=FOLDER' for name in missing)}")
    folder = pathlib.Path(str(flags["run"].value))
    if not (folder / "checkpoints").is_dir():
        raise InputError(f"--run={folder} is no run: it has no folder checkpoints")
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU's memory is its run's
    from jaxmem.checkpoint.formats import write
    from jaxmem.checkpoint.formats.config_json import not_held
    from jaxmem.checkpoint.formats.layouts import LAYOUTS
    from jaxmem.checkpoint.formats.saved import saved_params

    saved = saved_params(folder / "checkpoints", flags.step)
    model = saved.workload.model
    layout = flags.layout or next(name for name in LAYOUTS if not not_held(name, model))
    out = write(flags.out, model, saved.params, layout=layout, dtype=flags.dtype or None, max_positions=saved.workload.seq)
    files = sorted(out.glob("*.safetensors"))
    print(f"step {saved.step} of {folder}: {model.parameters:,} parameters, layout {layout}, "
          f"{bytes_text(sum(file.stat().st_size for file in files))} in {len(files)} file{'s' * (len(files) > 1)}: {out}")
    return 0

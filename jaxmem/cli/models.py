"""presets with their parameters.

  jaxmem models                        every preset
  jaxmem models llama3                 those whose name contains a word
  jaxmem models llama3-8b,layers=4     one preset with fields changed

Parameters count every trained number, a tied table once.
"""

import dataclasses
import json

from absl import flags as absl_flags

from jaxmem import spec
from jaxmem.cli.tables import print_table
from jaxmem.models.configs import MODELS, DecoderConfig
from jaxmem.report.cells import Column
from jaxmem.report.units import scaled_text


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_boolean("json", False, "print one JSON object with every field of each preset", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    chosen = _chosen(words)
    if flags.json:
        print(json.dumps({name: {"parameters": config.parameters} | dataclasses.asdict(config)
                          for name, config in chosen.items()}, indent=1))
        return 0
    numbers = ("parameters", "", "layers", "embed", "heads", "kv", "head dim", "mlp", "vocab")
    columns = [Column(head="model", keep="middle", least=12), *(Column(head=head, align="right") for head in numbers)]
    print_table(columns, [
        [name, f"{config.parameters:,}", scaled_text(config.parameters), str(config.layers), str(config.embed), str(config.heads),
         str(config.kv_heads), str(config.head_dim), str(config.mlp), str(config.vocab)]
        for name, config in chosen.items()])
    return 0


def _chosen(words: list[str]) -> dict[str, DecoderConfig]:
    if not words:
        return MODELS
    chosen: dict[str, DecoderConfig] = {}
    for word in words:
        if "," in word:
            chosen[word] = spec.parse_preset(MODELS, word, what="model")
            continue
        found = {name: config for name, config in MODELS.items() if word.lower().translate(spec.DASHES) in name}
        if not found:
            raise spec.InputError(f"no model has {word!r} in its name{spec.nearest(word, MODELS)}")
        chosen |= found
    return chosen

"""presets with their parameters.

  jaxmem models                        every preset
  jaxmem models llama3                 those whose name contains a word
  jaxmem models llama3-8b,layers=4     one preset with fields changed

Parameters count every trained number, a tied table once.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from absl import flags as absl_flags

from jaxmem import spec
from jaxmem.cli.tables import print_table
from jaxmem.models.configs import MODELS, DecoderConfig, ModelConfig, VitConfig
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
    decoders = {name: config for name, config in chosen.items() if isinstance(config, DecoderConfig)}
    images = {name: config for name, config in chosen.items() if not isinstance(config, DecoderConfig)}
    if decoders:
        _print(("layers", "embed", "heads", "kv", "head dim", "mlp", "vocab"), {
            name: (config.parameters, config.layers, config.embed, config.heads, config.kv_heads, config.head_dim, config.mlp, config.vocab)
            for name, config in decoders.items()})
    if decoders and images:
        print()
    if images:
        _print(("layers", "embed", "heads", "mlp", "classes", "image", "patch"), {
            name: (config.parameters, config.layers, *((config.embed, config.heads) if isinstance(config, VitConfig) else ("-", "-")),
                   config.mlp, config.classes, f"{config.height}x{config.width}x{config.channels}",
                   config.patch if isinstance(config, VitConfig) else "-")
            for name, config in images.items()})
    return 0


def _print(heads: tuple[str, ...], rows: Mapping[str, tuple[Any, ...]]) -> None:
    """One table; a row is its parameters and what `heads` names."""
    columns = [Column(head="model", keep="middle", least=12), *(Column(head=head, align="right") for head in ("parameters", "", *heads))]
    print_table(columns, [[name, f"{parameters:,}", scaled_text(parameters), *map(str, sizes)]
                          for name, (parameters, *sizes) in rows.items()])


def _chosen(words: list[str]) -> dict[str, ModelConfig]:
    if not words:
        return MODELS
    chosen: dict[str, ModelConfig] = {}
    for word in words:
        if "," in word:
            chosen[word] = spec.parse_preset(MODELS, word, what="model")
            continue
        found = {name: config for name, config in MODELS.items() if word.lower().translate(spec.DASHES) in name}
        if not found:
            raise spec.InputError(f"no model has {word!r} in its name{spec.nearest(word, MODELS)}")
        chosen |= found
    return chosen

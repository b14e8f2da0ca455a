"""The flags of an experiment as its command would have them."""

from absl import flags as absl_flags

from jaxmem import experiment


def flags_of(question: experiment.Experiment, **values: object) -> absl_flags.FlagValues:
    out = absl_flags.FlagValues()
    experiment.define(out, question)
    out(["x", *(f"--{name}={value}" for name, value in values.items())])
    return out

"""find the numbers of a learned optimizer on small tasks.

  jaxmem meta-train --out=runs/celo
  jaxmem meta-train --out=runs/small_fc --rule=small_fc --minutes=10

By evolution strategies: every meta-step unrolls some small problems for a stretch under perturbed
weights and follows the change of their validation loss. The same command again resumes the run in
--out. The weights are in OUT/weights.npz; --optimizer=learned,weights=OUT/weights.npz uses them in
check and train.

Exit status: 0 done or the minutes are over, 2 bad input, 75 saved on SIGTERM or Ctrl-C and stopped.
"""

import dataclasses
import hashlib
import pathlib
import sys
from typing import Any, cast

from absl import flags as absl_flags

from jaxmem import environment
from jaxmem.cli import arguments
from jaxmem.hardware import parse_topology
from jaxmem.optim.configs import LEARNED_WEIGHTS
from jaxmem.runs import folder as folders
from jaxmem.spec import InputError, nearest


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text, whole, number = absl_flags.DEFINE_string, absl_flags.DEFINE_integer, absl_flags.DEFINE_float
    text("out", "runs/meta", "the run's folder", **f)
    text("rule", "celo", "celo, small_fc or small_fc_nominal", **f)
    text("estimator", "pes", "pes, es (truncated) or full_es", **f)
    text("objective", "loss", "of the validation loss: loss, or log_loss", **f)
    number("difference_limit", 1.0, "where the difference of the two copies is clipped", **f)
    whole("iterations", 2300, "meta-steps in all", **f)
    number("minutes", None, "stop after so many minutes of meta-steps, compiling aside; the same command goes on", **f)
    whole("seed", 0, "of everything that is drawn", **f)
    text("families", "first", "tasks by comma, or first (four of them), or all", **f)
    whole("tasks", 8, "problems of each family in a meta-step", **f)
    whole("truncation", 50, "inner steps of a meta-step", **f)
    text("lengths", "100:2000", "SHORTEST:LONGEST problem in inner steps, log-uniform between them", **f)
    text("learning_rates", None, "LOW:HIGH peak of a problem's rate, log-uniform (default: what the rule needs)", **f)
    number("sigma", 0.01, "deviation of the perturbations", **f)
    number("outer_lr", 1e-3, "Adam's learning rate, cosine to zero over the iterations", **f)
    text("begin_from", None, "a file of weights to begin from (default: untrained); a resume does not need it", **f)
    number("checkpoint_s", 60.0, "seconds between checkpoints", **f)
    text("topology", "cpu:2", "cpu:N, emulated here, or what this machine is; problems are split over its devices", **f)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    arguments.no_words(words, "meta-train")
    from jaxmem.optim.learned.meta import recipe, tasks
    from jaxmem.optim.learned.meta import run as meta_run
    from jaxmem.optim.learned.meta.es import ESTIMATORS
    from jaxmem.report import meta_curve
    from jaxmem.running import starting

    if flags.rule not in LEARNED_WEIGHTS:
        raise InputError(f"--rule={flags.rule}: expected {', '.join(LEARNED_WEIGHTS)}{nearest(flags.rule, LEARNED_WEIGHTS)}")
    if flags.estimator not in ESTIMATORS:
        raise InputError(f"--estimator={flags.estimator}: expected {', '.join(ESTIMATORS)}{nearest(flags.estimator, ESTIMATORS)}")
    if flags.objective not in recipe.OBJECTIVES:
        raise InputError(f"--objective={flags.objective}: expected {' or '.join(recipe.OBJECTIVES)}")
    if flags.minutes is not None and not flags.minutes > 0:
        raise InputError(f"--minutes={flags.minutes:g}: expected more than 0")
    named = {"first": tasks.FIRST_FAMILIES, "all": tuple(tasks.FAMILIES)}
    families = named.get(flags.families) or tuple(filter(None, (part.strip() for part in flags.families.split(","))))
    meta_run.check_families(families)
    rates = _range(flags, "learning_rates", float) if flags.learning_rates else recipe.LEARNING_RATES[cast(Any, flags.rule)]
    asked = recipe.Recipe(
        rule=cast(Any, flags.rule), estimator=cast(Any, flags.estimator), objective=cast(Any, flags.objective),
        families=families, difference_limit=flags.difference_limit, tasks=flags.tasks,
        truncation=flags.truncation, lengths=_range(flags, "lengths", int), learning_rates=rates, sigma=flags.sigma,
        iterations=flags.iterations, outer_lr=flags.outer_lr, seed=flags.seed)
    topology = parse_topology(flags.topology)
    recipe.check(asked, topology.devices)
    out = pathlib.Path(flags.out)
    begin_from = pathlib.Path(flags.begin_from) if flags.begin_from else None
    config = {"verb": "meta-train", "steps": asked.iterations, "topology": str(topology),
              "begin_from": str(begin_from) if begin_from else None,
              "begin_from_sha256": _sha256(begin_from, out) if begin_from else None} | _plain(dataclasses.asdict(asked))
    folders.refuse_other(out, config, elastic=False)
    if folders.finished(out, asked.iterations) is not None:
        print(f"{out} is finished: all {asked.iterations} meta-steps are done; weights: {out}/weights.npz", file=sys.stderr)
        return 0
    lock = folders.Lock(out)
    try:
        folder = folders.open_folder(out, config, environment.versions(), elastic=False)
        starting.start(topology, None)
        curve = meta_curve.Live(out, asked.iterations, sys.stderr)
        try:
            return meta_run.meta_train(asked, folder, meta_run.Budget(minutes=flags.minutes, checkpoint_s=flags.checkpoint_s),
                                       begin_from=begin_from, show=curve.show)
        finally:
            curve.close()
    finally:
        lock.release()


def _sha256(begin_from: pathlib.Path, out: pathlib.Path) -> str | None:
    """Of the file. Where it is gone and a checkpoint has the weights: what the run in `out` says it was. Raises InputError."""
    from jaxmem.checkpoint.store import committed_steps

    try:
        return hashlib.sha256(begin_from.read_bytes()).hexdigest()
    except OSError as error:
        if not committed_steps(out / "checkpoints"):
            raise InputError(f"--begin_from={begin_from}: {error.strerror}") from None
        return (folders.read_config(out) or {}).get("begin_from_sha256")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, so that a repeated command is seen to be the same."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _range(flags: absl_flags.FlagValues, name: str, kind: type) -> Any:
    text = str(flags[name].value)
    low, colon, high = text.partition(":")
    try:
        return kind(low), kind(high if colon else low)
    except ValueError:
        raise InputError(f"--{name}={text}: expected LOW:HIGH, as in {flags[name].default or '0.001:0.03'}") from None

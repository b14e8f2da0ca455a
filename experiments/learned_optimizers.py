"""Does the learned optimizer beat tuned ones on tasks it never saw?

Command:  `python -m experiments.learned_optimizers --out=runs/learned` (about 15 minutes on two quiet cores; stop it and start it again
          at will). `--weights=FILE|FILE` judges weights of your own, several meta-seeds say.
Expected: of two meta-seeds one has a lower mean test loss than Adam with a tuned learning rate on 4 of the 5 tasks, the other on 3.
          Both lose on text, and on all five to AdamW with its weight decay tuned as well. Untrained, the rule is below Adam on none.

Protocol: five tasks whose networks meta-training does not have. Rows are split 70/10/20 into train, valid and test. Every method
trains 1000 steps on batches of 64, with a cosine to zero, from three seeds that give all methods the same first parameters and the
same batches. The configuration with the lowest mean validation loss is chosen; its test loss is reported.

Methods: `adam` has its learning rate tuned over 5 values; `adamw` over the same 5 with 4 weight decays (20 configurations); `untrained`
is the learned rule with its initial numbers, its learning rate tuned over 5 values; `learned` is the same with trained numbers, and
no other configuration. Adam and AdamW are optax's. `untrained+wd` and `learned+wd` have AdamW's 4 weight decays as well. `learned+bf16`
and `learned+int8` keep their momenta in fewer bits, from the same seeds: what they lose to `learned` is what that costs.

Intervals: 95% over the seeds, Student's t; ratios are taken seed by seed, so that what a seed does to every method cancels. They say
nothing of the rows that happen to be in the test part.
"""

import collections
import functools
import hashlib
import importlib.resources
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem import experiment
from jaxmem.records import Found, Point, Record
from jaxmem.report import experiment_page as page
from jaxmem.report import experiment_ratios as ratios
from jaxmem.report.experiment_page import Cell, Column, Figure, Line, Table
from jaxmem.spec import InputError, nearest, show
from jaxmem.tabulate import Interval, interval

# as in jaxmem.optim.learned.meta.tasks, which knows jax
TASKS = {"mnist8_deep": "64-32-32-10", "mnist14": "196-64-10", "mnist28": "784-128-10", "segment": "18-32-7", "milton4": "116-64-29"}
ADAM_LRS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DECAYS = (0.03, 0.1, 0.3, 1.0)
# of a rule whose step has a root mean square of one, and of one that has its own size at 1
RULE_LRS = {"celo": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "small_fc": (0.1, 0.3, 1.0, 3.0, 10.0), "small_fc_nominal": (0.1, 0.3, 1.0, 3.0, 10.0)}
METHODS = {"adam": "Adam", "adamw": "AdamW", "untrained": "untrained", "learned": "learned", "untrained+wd": "untrained+wd",
           "learned+wd": "learned+wd", "learned+bf16": "learned, momenta in bf16",
           "learned+int8": "learned, momenta in int8"}
DEFAULT = "adam|adamw|untrained|learned"
SHIPPED = "shipped"
UNUSED = "not used: every task has its own network"
FLAGS = {
    "tasks": ("|".join(TASKS), "which of them, by |"),
    "methods": (DEFAULT, f"which of {', '.join(METHODS)}, by |"),
    "weights": (SHIPPED, "files of trained numbers, by |; empty for none"),
    "rule": ("celo", f"whose numbers they are: {', '.join(RULE_LRS)}"),
    "steps": ("1000", "of training"),
    "inner_seeds": ("3", "runs of each configuration, all in one program"),
    "refine": ("0", "learning rates tried between each two of the list, for every method"),
    "batch": ("64", "rows a step"),
    "topology": ("cpu:1", "a single device here"),
    "model": ("", UNUSED), "optimizer": ("", "not used: see --methods"), "seq": ("", UNUSED), "plan": ("", UNUSED),
}


# ---------------------------------------------------------------- the grid

def grid(flags: absl_flags.FlagValues) -> list[Point]:
    """Tasks x methods, and x weights where the method has them."""
    if flags.sweep:
        raise InputError("--sweep: this experiment has --tasks, --methods, --weights, --steps and --inner_seeds in its place")
    numbers = {name: experiment.whole(name, getattr(flags, name), least) for name, least in
               (("steps", 1), ("inner_seeds", 1), ("batch", 1), ("refine", 0))}
    if flags.rule not in RULE_LRS:
        raise InputError(f"--rule={flags.rule}: unknown{nearest(flags.rule, RULE_LRS)}")
    tasks, methods = chosen("tasks", flags.tasks, TASKS), chosen("methods", flags.methods, METHODS)
    files = [(name, digest(name, flags.rule)) for name in filter(None, flags.weights.split("|"))] if any(map(trained, methods)) else []
    points = []
    for task in tasks:
        for method in methods:
            plain = method.partition("+")[0]
            rule = {} if plain.startswith("adam") else {"rule": flags.rule}
            lrs = refined(RULE_LRS[flags.rule] if rule else ADAM_LRS, numbers["refine"])
            decays = DECAYS if method == "adamw" or method.endswith("+wd") else (0.0,)
            for weights in files if trained(method) else [None]:
                points.append(Point(
                    workload=f"model=perceptron-{TASKS[task]},optimizer={method},batch={numbers['batch']},seq=1", topology=flags.topology,
                    plan="", seeded=False, settings={
                        "task": task, "method": method, "steps": numbers["steps"], "inner_seeds": numbers["inner_seeds"],
                        "batch_rows": numbers["batch"], "lrs": show(lrs), "decays": show(decays), **rule,
                        **({"refine": numbers["refine"]} if numbers["refine"] else {}),
                        **({"weights": weights[0], "weights_sha256": weights[1]} if weights else {})}))
    return points


def trained(method: str) -> bool:
    return method.startswith("learned")


def chosen(flag: str, text: str, known: Iterable[str]) -> list[str]:
    names = [name for name in text.split("|") if name]
    for name in names:
        if name not in known:
            raise InputError(f"--{flag}: unknown {name!r}{nearest(name, known)}")
    if not names:
        raise InputError(f"--{flag} is empty; expected some of {'|'.join(known)}")
    return names


def refined(lrs: Sequence[float], between: int) -> tuple[float, ...]:
    """With `between` more from each to the next, evenly spaced in their logarithm, to three digits."""
    parts = between + 1
    inside = [float(f"{low * (high / low) ** (i / parts):.3g}") for low, high in zip(lrs, lrs[1:], strict=False) for i in range(parts)]
    return *inside, lrs[-1]


def path_of(weights: str, rule: str) -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("jaxmem"))) / "optim/learned/trained" / f"{rule}.npz" if weights == SHIPPED \
        else pathlib.Path(weights)


def digest(weights: str, rule: str) -> str:
    try:
        return hashlib.sha256(path_of(weights, rule).read_bytes()).hexdigest()[:16]
    except OSError as error:
        hint = f"; none ship for rule {rule}: give --weights=FILE, or --weights= for the other methods alone" if weights == SHIPPED else ""
        raise InputError(f"--weights={weights}: {error.strerror or error}{hint}") from None


# ---------------------------------------------------------------- one point

def run(point: Point) -> Found:
    from jaxmem.optim.learned.meta import tasks
    from jaxmem.optim.learned.meta.evaluate import Configuration, evaluate
    from jaxmem.running import measured

    s = point.settings
    task = tasks.find(s["task"])
    lrs, decays = ([float(x) for x in s[name].split("+")] for name in ("lrs", "decays"))
    configurations = [Configuration(lr=lr, weight_decay=decay) for decay in decays for lr in lrs]
    found = evaluate(task, optimizer(s), configurations, steps=s["steps"], batch=s["batch_rows"], seeds=s["inner_seeds"])
    values: dict[str, tuple[Any, Any]] = {
        "test_loss": (interval(found.test_losses).mean, "measure"), "test_losses": (list(found.test_losses), "measure"),
        "test_accuracy": (interval(found.test_accuracies).mean, "measure"),
        "test_accuracies": (list(found.test_accuracies), "measure"),
        "valid_loss": (found.valid_loss, "measure"), "valid_losses": (list(found.valid_losses), "measure"),
        "lr": (found.chosen.lr, "measure"), "weight_decay": (found.chosen.weight_decay, "measure"),
        "edge": (edge(found.chosen.lr, lrs), "measure"), "configurations": (len(configurations), "estimate"),
        "parameters": (task.parameters, "estimate"), "data_sha256": (data_digest(task), "measure")}
    return Found(values=values, backend=measured.backend())


def optimizer(settings: Any) -> Any:
    """(schedule, weight decay) -> the method's optax transformation."""
    import jax
    import optax

    from jaxmem.optim.learned import weights
    from jaxmem.optim.learned.celo import scale_by_celo
    from jaxmem.optim.learned.nominal import scale_by_small_fc_nominal
    from jaxmem.optim.learned.small_fc import scale_by_small_fc

    method = settings["method"]
    if method == "adam":
        return lambda schedule, weight_decay: optax.adam(schedule)
    if method == "adamw":
        return lambda schedule, weight_decay: optax.adamw(schedule, weight_decay=weight_decay)
    rule = settings["rule"]
    make = {"celo": scale_by_celo, "small_fc": scale_by_small_fc, "small_fc_nominal": scale_by_small_fc_nominal}[rule]
    numbers = weights.load(path_of(settings["weights"], rule), rule) if trained(method) else weights.initial(rule, jax.random.key(0))
    decayed = method.endswith("+wd")
    moments = next((kind for kind in ("bf16", "int8") if method.endswith(f"+{kind}")), "f32")
    return lambda schedule, weight_decay: optax.chain(
        make(numbers, moments=moments), optax.add_decayed_weights(weight_decay) if decayed else optax.identity(),
        optax.scale_by_learning_rate(schedule))


def edge(lr: float, lrs: Sequence[float]) -> str:
    """Whether a better learning rate may lie outside of what was tried."""
    return "lowest tried" if lr == min(lrs) else "highest tried" if lr == max(lrs) else "inside"


def data_digest(task: Any) -> str:
    found = hashlib.sha256()
    for inputs, labels in (task.train, task.valid, task.test):
        found.update(inputs.tobytes())
        found.update(labels.tobytes())
    return found.hexdigest()[:16]


# ---------------------------------------------------------------- tables and figure, from the records

CHOSEN = (
    Column(name="method_name", head="method"), Column(name="configurations", head="configurations", unit="count"),
    Column(name="lr", head="learning rate"), Column(name="edge", head="of those tried"), Column(name="weight_decay", head="weight decay"),
    Column(name="valid", head="valid loss"), Column(name="loss", head="test loss", unit="loss"),
    Column(name="accuracy", head="test accuracy", unit="percent"), Column(name="to_adam", head="loss vs Adam", unit="times"))
VERSUS = (Column(name="method_name", head="method"), *(Column(name=name, head=f"below {METHODS[name]}") for name in
                                                      ("adam", "adamw", "untrained")))


def pages(records: Sequence[Record]) -> dict[str, str]:
    """The page, the figure, and the tables as Markdown and CSV."""
    every = [one for one in records if one["status"] == "done"]
    same = collections.Counter(map(protocol, every)).most_common(1)[0][0] if every else ()
    ordered = [one for one in every if protocol(one) == same]
    ordered.sort(key=lambda one: ([*METHODS, one["settings"]["method"]].index(one["settings"]["method"]), label(one)))
    done = {(one["settings"]["task"], label(one)): one for one in ordered}
    labels = list(dict.fromkeys(map(label, ordered)))
    found = dict.fromkeys(task for task, _ in done)
    tasks = [*(task for task in TASKS if task in found), *(task for task in found if task not in TASKS)]
    said = f"Mean cross-entropy in nats at the chosen configuration, lower is better; {same[0]} steps, {same[1]} seeds." if same else ""
    if len(ordered) < len(every):
        said += f" {len(every) - len(ordered)} records with other steps, seeds, batches or learning rates are left out."
    loss = [{"task": Cell(value=task), "network": Cell(value=TASKS.get(task))} |
            {own: Cell(value=over_seeds(done[task, own], "test_losses"), source="measure") for own in labels if (task, own) in done}
            for task in tasks]
    tables = [
        Table(title="Test loss", lead=said, lines=loss, columns=(
            Column(name="task", head="task"), Column(name="network", head="network"),
            *(Column(name=own, head=own, unit="loss") for own in labels))),
        Table(title="On how many tasks", lead="Tasks on which the mean test loss is lower. Clearly: the whole interval of the ratio lies "
              "on that side of 1.", columns=VERSUS, lines=counted(done, tasks, labels)),
        *(Table(title=f"{task}, {TASKS.get(task)}", lead=size(done, task), columns=CHOSEN, lines=details(done, task, labels))
          for task in tasks)]
    rows = [ratios.Row(title=task, marks={own: ratio(done, task, own, METHODS["adam"]) for own in labels if own != METHODS["adam"]})
            for task in tasks]
    heading, axis = "Test loss as a multiple of Adam's (learning rate tuned)", "test loss / Adam's; left of 1 is better"
    figure = Figure(heading=heading, lead="Bars are 95% intervals over the seeds, of ratios taken seed by seed.", file="learned.svg",
                    draw=functools.partial(ratios.drawing, heading, axis, rows))
    return page.files("Learned optimizers on tasks they never saw", __doc__ or "", [figure], tables, records)


def protocol(one: Record) -> tuple[int, ...]:
    return tuple(one["settings"].get(name, 0) for name in ("steps", "inner_seeds", "batch_rows", "refine"))


def label(one: Record) -> str:
    """The method's name, with the weights where there are some: the folder of a file `weights.npz`, else the file's own name."""
    s = one["settings"]
    name = METHODS.get(s["method"], s["method"])
    if "weights" not in s:
        return name
    path = pathlib.PurePath(s["weights"])
    return f"{name} ({path.parent.name if path.stem == 'weights' and path.parent.name else path.stem})"


def over_seeds(one: Record, name: str) -> Interval:
    return interval(one["values"][name])


def ratio(done: dict[tuple[str, str], Record], task: str, own: str, base: str) -> Interval | None:
    """Of test losses, seed by seed; None where one of them is missing or has other data."""
    a, b = done.get((task, own)), done.get((task, base))
    if a is None or b is None or a["values"]["data_sha256"] != b["values"]["data_sha256"]:
        return None
    return interval([x / y for x, y in zip(a["values"]["test_losses"], b["values"]["test_losses"], strict=True)])


def counted(done: dict[tuple[str, str], Record], tasks: Sequence[str], labels: Sequence[str]) -> list[Line]:
    out = []
    for own in labels:
        line: Line = {"method_name": Cell(value=own)}
        for base in ("adam", "adamw", "untrained"):
            found = [one for task in tasks if METHODS[base] != own and (one := ratio(done, task, own, METHODS[base]))]
            if found:
                below, above = (sum(one.half_width is not None and sign * (one.mean - 1) > one.half_width for one in found)
                                for sign in (-1, 1))
                lower = f"{sum(one.mean < 1 for one in found)} of {len(found)}"
                line[base] = Cell(value=f"{lower} ({below} clearly; {above} clearly not)", source="measure")
        out.append(line)
    return out


def size(done: dict[tuple[str, str], Record], task: str) -> str:
    found = {one["values"]["parameters"] for (name, _), one in done.items() if name == task}
    return f"{' or '.join(f'{one:,}' for one in sorted(found))} parameters."


def details(done: dict[tuple[str, str], Record], task: str, labels: Sequence[str]) -> list[Line]:
    out = []
    for own in labels:
        if (one := done.get((task, own))) is None:
            continue
        values, sources = one["values"], one["sources"]
        line = {name: Cell(value=values.get(name), source=sources.get(name)) for name in ("configurations", "lr", "edge", "weight_decay")}
        line |= {"method_name": Cell(value=own), "valid": Cell(value=f"{values['valid_loss']:.4f}", source="measure"),
                 "loss": Cell(value=over_seeds(one, "test_losses"), source="measure"),
                 "accuracy": Cell(value=over_seeds(one, "test_accuracies"), source="measure")}
        if own != METHODS["adam"] and (to_adam := ratio(done, task, own, METHODS["adam"])):
            line["to_adam"] = Cell(value=to_adam, source="measure")
        out.append(line)
    return out


EXPERIMENT = experiment.Experiment(name="learned_optimizers", module="experiments.learned_optimizers", doc=__doc__ or "", grid=grid,
                                   pages=pages, flags=FLAGS)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, sys.argv[1:]))

"""How far are predicted step times from published ones?

Command: `python -m experiments.benchmarks.predicted_speed` (seconds: reads the stored programs of tests/fixtures/speed)
         `... --programs=compile` compiles every row anew for its target (minutes a row), `--store` keeps the trimmed programs,
         `--fit` fits the constants again, `--docs=docs/speed.md` writes the page.
Expected: a table with every row's error, the leave-one-out error beside it, median at most 10%, worst at most 20%.

The rows are MaxText's measurements of MaxText's own programs; the programs compiled here are jaxmem's with the same model, batch,
mesh, recomputation and attention algorithm, by today's compiler. What differs between the two is part of the error.
"""
import dataclasses
import gzip
import json
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Sequence

from absl import app, flags

from jaxmem.cost.calibration import CONSTANTS, TPU, Calibration
from jaxmem.cost.flops import mfu, model_flops
from jaxmem.hardware import Topology, parse_topology
from jaxmem.hlo import speed_tpu
from jaxmem.hlo.parse import Module, parse
from jaxmem.hlo.speed import Speed
from jaxmem.plan import Plan
from jaxmem.workload import Workload

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "speed"

_PROGRAMS = flags.DEFINE_enum("programs", "stored", ["stored", "compile"], "where the compiled programs come from")
_STORE = flags.DEFINE_bool("store", False, "keep the compiled programs, trimmed, as fixtures")
_FIT = flags.DEFINE_bool("fit", False, "fit the constants over all rows and print them")
_DOCS = flags.DEFINE_string("docs", None, "write the page here")
_ONLY = flags.DEFINE_string("only", None, "names of rows, by comma")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement and the program that stands for it."""
    name: str
    workload: Workload
    plan: Plan
    topology: Topology
    published_s: float
    source: str
    module: Module
    mesh: dict
    backend: str
    versions: dict

    def predict(self, constants: Calibration) -> Speed:
        return speed_tpu.predict(self.module, self.topology, self.mesh, constants)

    def error(self, constants: Calibration) -> float:
        """Predicted over published, less one."""
        step_s = self.predict(constants).step_s
        if step_s is None:
            raise ValueError(f"{self.name}: no prediction: {self.predict(constants).warnings}")
        return step_s / self.published_s - 1


def published_seconds(workload: Workload, topology: Topology, figures: dict) -> float:
    """Step seconds from TFLOP/s a chip or tokens/s a device, by the convention of the README."""
    if figures.get("tokens_per_s_per_device"):
        return workload.tokens / (figures["tokens_per_s_per_device"] * topology.devices)
    return model_flops(workload) / topology.chips / (figures["tflops_per_chip"] * 1e12)


def load(figures: dict, folder: pathlib.Path = FIXTURES) -> Row:
    workload, topology = Workload.parse(**figures["workload"]), parse_topology(figures["topology"])
    stored = json.loads((folder / f"{figures['name']}.json").read_text())
    text = gzip.decompress((folder / f"{figures['name']}.hlo.txt.gz").read_bytes()).decode()
    plan = Plan.parse(figures["plan"], devices=topology.devices)
    return Row(name=figures["name"], workload=workload, topology=topology, plan=plan, module=parse(text),
               published_s=published_seconds(workload, topology, figures), source=figures["source"], **stored)


def published(only: str | None = None) -> list[dict]:
    rows = json.loads((FIXTURES / "published.json").read_text())["rows"]
    return [row for row in rows if only is None or row["name"] in only.split(",")]


# --- stored programs

_METADATA = re.compile(r', metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}')
_CONFIG = re.compile(r", backend_config=\{.*$", re.M)
_TABLES = re.compile(r"^(HloModule[^\n]*\n).*?(?=^%|^ENTRY)", re.M | re.S)


def trim(text: str) -> str:
    """The text without what no prediction reads: sources, kernels' bodies, most of the backend's configurations."""
    def config(match: re.Match[str]) -> str:
        cycles = re.search(r'"estimated_cycles":"?(\d+)', match.group())
        return f', backend_config={{"estimated_cycles":"{cycles.group(1)}"}}' if cycles else ""
    return _CONFIG.sub(config, _METADATA.sub("", _TABLES.sub(r"\1\n", text)))


def store(figures: dict, result: dict, text: str, folder: pathlib.Path = FIXTURES) -> None:
    """Writes NAME.hlo.txt.gz and NAME.json; the time stamp is left out so that the same program gives the same bytes."""
    trimmed = trim(text)
    topology = parse_topology(figures["topology"])
    whole, short = (speed_tpu.predict(parse(one), topology, result["mesh"]).step_s for one in (text, trimmed))
    if whole != short:
        raise ValueError(f"{figures['name']}: trimming changed the prediction from {whole} to {short}")
    (folder / f"{figures['name']}.hlo.txt.gz").write_bytes(gzip.compress(trimmed.encode(), 9, mtime=0))
    kept = {"mesh": {key: result["mesh"][key] for key in ("axes", "places")}, "backend": result["backend"],
            "versions": {key: result["versions"][key] for key in ("jax", "libtpu")}}
    (folder / f"{figures['name']}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


def compile_row(figures: dict) -> tuple[dict, str]:
    """(result, HLO text) of the row's train program, compiled for its target or from the cache."""
    from jaxmem.targets.compile import Request, compile_programs
    from jaxmem.targets.flags import flags_for
    workload, topology = Workload.parse(**figures["workload"]), parse_topology(figures["topology"])
    plan = Plan.parse(figures["plan"], devices=topology.devices)
    request = Request(spec={"kind": "workload", "workload": str(workload), "plan": str(plan)}, programs=("train",),
                      topology=topology, flags=flags_for(plan.flags, topology))
    artifact = compile_programs(request, progress=lambda line: print(line, file=sys.stderr, flush=True))["train"]
    text = artifact.text("hlo")
    if text is None:
        raise SystemExit(f"{figures['name']}: {artifact.result['status']}: {artifact.result['reason']}")
    return artifact.result, text


# --- fitting

def fit(rows: Sequence[Row], start: Calibration = TPU) -> Calibration:
    """The constants inside their physical ranges with the least sum of squared log ratios, each searched in turn."""
    def loss(constants: Calibration) -> float:
        return sum(math.log1p(row.error(constants)) ** 2 for row in rows)
    best = start
    for scale in (0.3, 0.15, 0.08, 0.04, 0.02, 0.01):
        for name, constant in CONSTANTS.items():
            value = getattr(best, name)
            tried = [dataclasses.replace(best, **{name: min(constant.high, max(constant.low + 1e-3, value * factor))})
                     for factor in (1 - scale, 1 - scale / 2, 1.0, 1 + scale / 2, 1 + scale)]
            best = min(tried, key=loss)
    return dataclasses.replace(best, **{name: round(getattr(best, name), 3) for name in CONSTANTS})


def leave_one_out(rows: Sequence[Row]) -> dict[str, float]:
    """Error of each row under constants fitted without it."""
    return {row.name: row.error(fit([other for other in rows if other is not row])) for row in rows}


# --- output

def table(rows: Sequence[Row], left_out: dict[str, float] | None) -> list[str]:
    lines = ["| row | plan | published s (measure, MaxText) | predicted s (compile) | error | left out | MFU predicted | limits, s |",
             "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        speed = row.predict(TPU)
        assert speed.step_s is not None and speed.seconds_by_limit is not None
        limits = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in speed.seconds_by_limit.items() if value >= 0.005)
        out = f"{left_out[row.name]:+.1%}" if left_out else "-"
        rate = mfu(row.workload, row.topology, speed.step_s)
        lines.append(f"| {row.name} | `{row.plan}` on `{row.topology}` | {row.published_s:.2f} | {speed.step_s:.2f} | "
                     f"{row.error(TPU):+.1%} | {out} | {rate:.1%} | {limits} |")
    return lines


def summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median {statistics.median(sizes):.1%}, worst {max(sizes):.1%} over {len(sizes)} rows"


def main(argv: Sequence[str]) -> None:
    del argv
    figures = published(_ONLY.value)
    if _PROGRAMS.value == "compile":
        for one in figures:
            result, text = compile_row(one)
            if _STORE.value:
                store(one, result, text)
    rows = [load(one) for one in figures]
    if _FIT.value:
        fitted = fit(rows)
        print("fitted:", fitted, "|", summary([row.error(fitted) for row in rows]))
    left_out = leave_one_out(rows)
    lines = table(rows, left_out)
    print("\n".join(lines))
    print("all rows:", summary([row.error(TPU) for row in rows]), "| left out:", summary(list(left_out.values())))
    if _DOCS.value:
        pathlib.Path(_DOCS.value).write_text(page(rows, left_out))


def page(rows: Sequence[Row], left_out: dict[str, float]) -> str:
    """docs/speed.md."""
    constants = [f"| `{name}` | {getattr(TPU, name):g} | ({constant.low:g}, {constant.high:g}] | {constant.meaning} |"
                 for name, constant in CONSTANTS.items()]
    backends = sorted({f"{row.backend}, jax {row.versions['jax']}, libtpu {row.versions['libtpu']}" for row in rows})
    return "\n".join([
        "# Predicted speed", "",
        "Written by `python -m experiments.benchmarks.predicted_speed --docs=docs/speed.md`. Published seconds are measurements by",
        "MaxText's authors of MaxText's own programs; predictions are made from jaxmem's programs, compiled for the target",
        f"({'; '.join(backends)}), without running them. Nothing here was measured by jaxmem.", "",
        "## TPU: error over the published rows", "", *table(rows, left_out), "",
        f"With the constants below: {summary([row.error(TPU) for row in rows])}. Leave-one-out (each row predicted with constants fitted on the",
        f"others): {summary(list(left_out.values()))}.", "",
        "## Constants", "", "| constant | value | physical range | meaning |", "|---|---|---|---|", *constants, "",
        "They are global: no row, model or chip has one of its own. Everything else is from data sheets (`jaxmem/chips.py`).", "",
        "## Sources of the published figures", "", *[f"* {row.name}: {row.source}" for row in rows], "",
        *METHOD.read_text().splitlines()] if METHOD.exists() else []) + "\n"


METHOD = pathlib.Path(__file__).with_name("predicted_speed.md")

if __name__ == "__main__":
    app.run(main)

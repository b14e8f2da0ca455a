"""How far are predicted step times from published ones?

Command: `python -m experiments.benchmarks.predicted_speed` (seconds: reads the stored programs of tests/fixtures/speed)
         `... --programs=compile` compiles every row anew for its target (minutes a row), `--store` keeps the trimmed programs,
         `--fit` fits the constants again, `--docs=docs/speed.md` writes the page.
Expected: a table with every row's error, the leave-one-out error beside it, median at most 10%, worst at most 20%.

The rows are MaxText's measurements of MaxText's own programs; the programs compiled here are jaxmem's with the same model, batch,
mesh, recomputation and attention algorithm, by today's compiler. What differs between the two is part of the error.
"""
import dataclasses
import functools
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
from jaxmem.hlo.parse import parse
from jaxmem.hlo.speed import Speed
from jaxmem.plan import Plan
from jaxmem.workload import Workload

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "speed"

# the tests import several of these modules into one process, hence the overrides
_PROGRAMS = flags.DEFINE_enum("programs", "stored", ["stored", "compile"], "where the programs come from", allow_override=True)
_STORE = flags.DEFINE_bool("store", False, "keep the compiled programs, trimmed, as fixtures", allow_override=True)
_FIT = flags.DEFINE_bool("fit", False, "fit the constants over all rows and print them", allow_override=True)
_DOCS = flags.DEFINE_string("docs", None, "write the page here", allow_override=True)
_ONLY = flags.DEFINE_string("only", None, "names of rows, by comma", allow_override=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement and the program that stands for it."""
    name: str
    workload: Workload
    plan: Plan
    topology: Topology
    published_s: float
    source: str
    reader: speed_tpu.Reader
    backend: str
    versions: dict

    def predict(self, constants: Calibration) -> Speed:
        return self.reader.speed(constants)

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
    return Row(name=figures["name"], workload=workload, topology=topology, plan=plan, source=figures["source"],
               published_s=published_seconds(workload, topology, figures), backend=stored["backend"], versions=stored["versions"],
               reader=speed_tpu.Reader(parse(text), topology, stored["mesh"]))


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
    @functools.cache
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

def table(rows: Sequence[Row], left_out: dict[str, float]) -> list[str]:
    lines = ["| row | plan | published s | predicted s | error | left out | MFU | limits, s |",
             "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        speed = row.predict(TPU)
        assert speed.step_s is not None and speed.seconds_by_limit is not None
        limits = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in speed.seconds_by_limit.items()
                           if value >= 0.005)
        lines.append(f"| {row.name} | `{row.plan}` on `{row.topology}` | {row.published_s:.2f} | {speed.step_s:.2f} | "
                     f"{row.error(TPU):+.1%} | {left_out[row.name]:+.1%} | "
                     f"{mfu(row.workload, row.topology, speed.step_s):.1%} | {limits} |")
    return lines


def summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median {statistics.median(sizes):.1%}, worst {max(sizes):.1%} over {len(sizes)} rows"


PAGE = """# Predicted speed

Written by `python -m experiments.benchmarks.predicted_speed --docs=docs/speed.md`. GPU: [gpu_speed.md](gpu_speed.md).

* *published s* is a **measure** by MaxText's authors of MaxText's own programs.
* *predicted s*, *MFU* and *limits* come from a **compile** of jaxmem's program of the same model, batch, mesh and recomputation
  ({backends}), without running it. Nothing on this page was measured by jaxmem.
* *left out*: the error when the constants are fitted on the other rows alone.

## TPU: error over the published rows

{table}

With the constants below: {summary}. Left out: {left_out}.

## Constants

| constant | value | physical range | meaning |
|---|---|---|---|
{constants}

They are global: no row, model or chip has one of its own. All other figures are from data sheets (`jaxmem/chips.py`).

## How a TPU step is predicted

1. The optimized HLO is a schedule. It is replayed instruction by instruction; a loop's body counts its trip count's times, a
   conditional its slowest branch. An unknown trip count makes the step unknown.
2. An instruction takes at least its roofline: the larger of FLOPs at the peak and bytes at HBM's bandwidth. The compiler's
   `estimated_cycles` over the clock are usually more; `estimate_share` of what they are more is added. Without an estimate the
   roofline stands alone.
3. Attention kernels have no estimate. Their shapes and block sizes stand in the call: matrix and vector unit take turns, the
   exponential unit works beside the vector unit, HBM beside all; nothing is fitted.
4. A collective takes its bytes over all torus links that its group spans, by the devices' coordinates, plus a latency for each
   hop; a group that spans slices crosses the network too. A host copy takes its bytes over the host's link.
5. What a started collective or copy does not hide behind the computation until the instruction that waits for it is exposed.
6. An operation is limited by math when its FLOPs at the peak take longer than its bytes at HBM's bandwidth, else by memory.

Not in it: input pipelines, stragglers, checkpoints, HBM contention between copies and computation, throttling.

## Sources of the published figures

{sources}
"""


def page(rows: Sequence[Row], left_out: dict[str, float]) -> str:
    """docs/speed.md."""
    constants = "\n".join(f"| `{name}` | {getattr(TPU, name):g} | ({constant.low:g}, {constant.high:g}] | {constant.meaning} |"
                          for name, constant in CONSTANTS.items())
    backends = sorted({f"{row.backend}, jax {row.versions['jax']}, libtpu {row.versions['libtpu']}" for row in rows})
    return PAGE.format(backends="; ".join(backends), table="\n".join(table(rows, left_out)), constants=constants,
                       summary=summary([row.error(TPU) for row in rows]), left_out=summary(list(left_out.values())),
                       sources="\n".join(f"* {row.name}: {row.source}" for row in rows))


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
    print("\n".join(table(rows, left_out)))
    print("all rows:", summary([row.error(TPU) for row in rows]), "| left out:", summary(list(left_out.values())))
    if _DOCS.value:
        pathlib.Path(_DOCS.value).write_text(page(rows, left_out))


if __name__ == "__main__":
    app.run(main)

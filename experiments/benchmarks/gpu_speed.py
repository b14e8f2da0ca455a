"""Where does the one published GPU step lie in the interval that is predicted for it?

Command: `python -m experiments.benchmarks.gpu_speed` (seconds: reads the stored programs of tests/fixtures/speed_gpu)
         `... --programs=compile` compiles them anew for h100:8x8 (minutes each), `--store` keeps them trimmed,
         `--docs=docs/gpu_speed.md` writes the page.
Expected: a line for each recomputation policy and attention kernel, the interval over those that fit, and where 7.908 s lies in it.

The measurement is NVIDIA's, of MaxText's llama2-70b on 8 hosts of 8 H100 (batch 128, sequence 4096, FSDP 64, bf16). Neither its
recomputation nor its attention kernel is stated, so both are varied. Nothing is fitted to it: it judges.
"""
import dataclasses
import gzip
import json
import pathlib
import re
import sys
from collections.abc import Sequence

from absl import app, flags

from jaxmem.cost.flops import mfu
from jaxmem.hardware import Topology, parse_topology
from jaxmem.hlo import speed_gpu
from jaxmem.hlo.kernel_work import AttentionKind
from jaxmem.hlo.parse import Module, parse
from jaxmem.hlo.speed import Speed
from jaxmem.plan import Plan
from jaxmem.workload import Workload

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "speed_gpu"
PUBLISHED_S = 7.908
SOURCE = "NVIDIA NGC catalog, MaxText Llama2 70B (DGXC Benchmarking) 25.01.1, last step of a sample log"
WORKLOAD = Workload.parse(model="llama2-70b", batch=128, seq=4096)
TOPOLOGY = parse_topology("h100:8x8")
POLICIES = {  # name -> remat
    "70b_block": "block",
    "70b_qkv": "save:query_proj+key_proj+value_proj",
}
KERNELS: tuple[AttentionKind, ...] = ("triton", "cudnn")
ENDS: tuple[speed_gpu.End, ...] = ("optimistic", "typical", "pessimistic")
USABLE = 0.92  # part of the card's memory that such runs hand to JAX; what needs more is no candidate

# the tests import several of these modules into one process, hence the overrides
_PROGRAMS = flags.DEFINE_enum("programs", "stored", ["stored", "compile"], "where the programs come from", allow_override=True)
_STORE = flags.DEFINE_bool("store", False, "keep the compiled programs, trimmed, as fixtures", allow_override=True)
_DOCS = flags.DEFINE_string("docs", None, "write the page here", allow_override=True)
_ONLY = flags.DEFINE_string("only", None, "names of programs, by comma", allow_override=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One compiled program that may be what was measured."""
    name: str
    remat: str
    module: Module
    mesh: dict
    peak_bytes: int
    versions: dict

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= USABLE * (TOPOLOGY.chip.hbm_bytes or 0)

    def predict(self, kernel: AttentionKind, end: speed_gpu.End = "typical") -> Speed:
        achieved = speed_gpu.achieved_by(TOPOLOGY.chip, end)
        return speed_gpu.predict(self.module, TOPOLOGY, self.mesh, achieved=achieved, attention=kernel)


def load(name: str) -> Candidate:
    about = json.loads((FIXTURES / f"{name}.json").read_text())
    text = gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode()
    return Candidate(name=name, remat=POLICIES[name], module=parse(text), mesh=about["mesh"], peak_bytes=about["peak_bytes"],
                     versions=about["versions"])


# --- stored programs

_KEPT = re.compile(r'"known_trip_count":\{"n":"\d+"\}|"dot_dimension_numbers":\{[^}]*\}|"operand_precision":\[[^\]]*\]'
                   r'|"is_sync":(?:true|false)|"mask_type":"\w+"|"intermediate_tensor_shape":\{.*?"dimensions":\[[^\]]*\]')
_CONFIG = re.compile(r", backend_config=\{.*$", re.M)
_METADATA = re.compile(r', metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}')
_FRONTEND = re.compile(r', frontend_attributes=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}')
_TABLES = re.compile(r"^(HloModule[^\n]*\n).*?(?=^%|^ENTRY)", re.M | re.S)
_LAYOUT = re.compile(r", entry_computation_layout=\{.*\}(?=, )")
_SPMD = re.compile(r", spmd_\w+=\{.*\}(?=, |$)")


def trim(text: str) -> str:
    """The text without what no prediction reads: sources, kernels' bodies, most of the backend's configurations."""
    def config(match: re.Match[str]) -> str:
        kept = ",".join(_KEPT.findall(match.group()))
        return f", backend_config={{{kept}}}" if kept else ""

    def metadata(match: re.Match[str]) -> str:
        kernel = re.search(r'[^"/]*/pallas_call"', match.group())
        return f', metadata={{op_name="{kernel.group()}}}' if kernel else ""
    head, _, body = _TABLES.sub(r"\1\n", text).partition("\n")
    head = _SPMD.sub("", _LAYOUT.sub("", head))
    return head + "\n" + _METADATA.sub(metadata, _FRONTEND.sub("", _CONFIG.sub(config, body)))


def store(name: str, result: dict, text: str, topology: Topology = TOPOLOGY, **about: object) -> None:
    """Writes NAME.hlo.gz and NAME.json; the time stamp is left out so that the same program gives the same bytes."""
    trimmed = trim(text)
    whole, short = (speed_gpu.predict(parse(one), topology, result["mesh"]) for one in (text, trimmed))
    if whole.step_s != short.step_s:
        raise ValueError(f"{name}: trimming changed the prediction from {whole.step_s} to {short.step_s}")
    (FIXTURES / f"{name}.hlo.gz").write_bytes(gzip.compress(trimmed.encode(), 9, mtime=0))
    kept = {"mesh": {"axes": result["mesh"]["axes"]}, "peak_bytes": result["memory"]["peak_bytes"],
            "versions": {key: result["versions"][key] for key in ("jax",)}, **about}
    (FIXTURES / f"{name}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


def compile_candidate(remat: str) -> tuple[dict, str]:
    """(result, HLO text) of the train program, compiled for the target or from the cache."""
    from jaxmem.targets.compile import Request, compile_programs
    from jaxmem.targets.flags import flags_for
    plan = Plan.parse(f"fsdp=64,remat={remat}", devices=TOPOLOGY.devices)
    request = Request(spec={"kind": "workload", "workload": str(WORKLOAD), "plan": str(plan)}, programs=("train",),
                      topology=TOPOLOGY, flags=flags_for(plan.flags, TOPOLOGY))
    artifact = compile_programs(request, progress=lambda line: print(line, file=sys.stderr, flush=True))["train"]
    text = artifact.text("hlo")
    if text is None:
        raise SystemExit(f"remat={remat}: {artifact.result['status']}: {artifact.result['reason']}")
    return artifact.result, text


# --- output

def table(candidates: Sequence[Candidate]) -> list[str]:
    lines = ["| remat | attention | peak GB | predicted s | rates at either end | against 7.908 s | MFU | limits, s |",
             "|---|---|---|---|---|---|---|---|"]
    for candidate in candidates:
        for kernel in KERNELS:
            found = {end: candidate.predict(kernel, end) for end in ENDS}
            speed = found["typical"]
            assert speed.step_s is not None and speed.seconds_by_limit is not None
            limits = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in speed.seconds_by_limit.items()
                               if value >= 0.005)
            lines.append(f"| `{candidate.remat}`{'' if candidate.fits else ' (does not fit)'} | {kernel} | "
                         f"{candidate.peak_bytes / 1e9:.1f} | {speed.step_s:.2f} | {found['optimistic'].step_s:.2f} to "
                         f"{found['pessimistic'].step_s:.2f} | {speed.step_s / PUBLISHED_S - 1:+.1%} | "
                         f"{mfu(WORKLOAD, TOPOLOGY, speed.step_s):.1%} | {limits} |")
    return lines


def interval(candidates: Sequence[Candidate], *ends: speed_gpu.End) -> tuple[float, float]:
    """Shortest and longest predicted step over the candidates that fit, both kernels, and the given ends of the rates' ranges."""
    steps = [candidate.predict(kernel, end).step_s for candidate in candidates if candidate.fits
             for kernel in KERNELS for end in ends]
    return min(step for step in steps if step is not None), max(step for step in steps if step is not None)


def verdict(candidates: Sequence[Candidate]) -> str:
    low, high = interval(candidates, "typical")
    lowest, highest = interval(candidates, *ENDS)
    where = "below" if PUBLISHED_S < low else "above" if PUBLISHED_S > high else "inside"
    outer = "inside" if lowest <= PUBLISHED_S <= highest else "outside"
    return (f"measured {PUBLISHED_S} s ({SOURCE}):\n"
            f"  {where} {low:.2f} to {high:.2f} s, what policies and kernels span at typical rates\n"
            f"  {outer} {lowest:.2f} to {highest:.2f} s, with every rate at "
            "either end of its published range")


def page(candidates: Sequence[Candidate]) -> str:
    """docs/gpu_speed.md."""
    typical = speed_gpu.achieved_by(TOPOLOGY.chip)
    rates = [f"| `{name}` | {getattr(typical, name):g} | {low:g} to {high:g} | {speed_gpu.FOUND[name]} |"
             for name, (low, high) in speed_gpu.RANGES.items()]
    versions = sorted({f"jax {candidate.versions['jax']}" for candidate in candidates})
    return "\n".join([
        "# Predicted speed on GPUs", "",
        "Written by `python -m experiments.benchmarks.gpu_speed --docs=docs/gpu_speed.md`. Predictions are made from programs",
        f"compiled for the target ({', '.join(versions)}) without one. Nothing here was measured by jaxmem.", "",
        "## llama2-70b on 8 hosts of 8 H100", "",
        "Batch 128, sequence 4096, FSDP over 64, bf16. Neither the recomputation nor the attention kernel of the measured",
        "program is stated, so both vary; `cudnn` costs the program's attention calls as if cuDNN made them. Peak memory,",
        "seconds and MFU are predicted from a compile.", "",
        *table(candidates), "", "```", verdict(candidates), "```", "",
        "What the model leaves out makes a real step longer: the slowest of 64 GPUs sets the pace, collectives take memory",
        "bandwidth and power from the kernels beside them, and the network is shared.", "",
        "## Rates", "",
        "Parts of the data sheet's figures (`jaxmem/chips.py`), the same for every program; the row above chose none.", "",
        "| rate | value | pessimistic to optimistic | found by |", "|---|---|---|---|", *rates, ""])


def main(argv: Sequence[str]) -> None:
    del argv
    names = [name for name in POLICIES if _ONLY.value is None or name in _ONLY.value.split(",")]
    if _PROGRAMS.value == "compile":
        for name in names:
            result, text = compile_candidate(POLICIES[name])
            if _STORE.value:
                store(name, result, text)
    candidates = [load(name) for name in names]
    print("\n".join(table(candidates)))
    print()
    print(verdict(candidates))
    if _DOCS.value:
        pathlib.Path(_DOCS.value).write_text(page(candidates))


if __name__ == "__main__":
    app.run(main)

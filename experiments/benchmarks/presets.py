"""Every preset on a topology that it fits: does it, with what headroom, how fast?

Command: `python -m experiments.benchmarks.presets` (minutes a row the first time, seconds from the cache; rows that are recorded are
         skipped, so it can be stopped and started again) `--only=llama3-8b,gpt2` `--docs=docs/presets.md` `--programs=train`
Expected: a table in which every row fits or is tight.
"""

import json
import pathlib
import sys

from absl import app, flags

from jaxmem import verdict
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.report.units import bytes_text
from jaxmem.spec import InputError
from jaxmem.workload import Workload

_ONLY = flags.DEFINE_list("only", [], "presets, by comma; all without")
_DOCS = flags.DEFINE_string("docs", None, "write the table here")
_PROGRAMS = flags.DEFINE_list("programs", ["init", "train", "eval", "save"], "which programs to check")
_RECORDS = flags.DEFINE_string("records", "docs/records/presets.jsonl", "one line a recorded check")

# preset -> topology, plan, global batch, sequence length
ROWS = {
    "decoder-tiny": ("v5e-4", "fsdp=4", 16, 256),
    "decoder-small": ("a100-40gb:2", "fsdp=2", 16, 256),
    "gpt2": ("a100-40gb:8", "fsdp=8,remat=block", 64, 1024),
    "gpt2-medium": ("h100-pcie:4", "fsdp=4,remat=block", 32, 1024),
    "gpt2-large": ("h100:8", "fsdp=8,remat=block", 64, 1024),
    "gpt2-xl": ("a100-80gb:8", "fsdp=8,remat=block", 32, 1024),
    "llama2-7b": ("a100-80gb:2x8", "fsdp=16,remat=block", 32, 4096),
    "llama2-13b": ("h100:4x8", "fsdp=32,remat=block", 64, 4096),
    "llama2-70b": ("h100:8x8", "fsdp=64,remat=block", 128, 4096),
    "llama3-8b": ("v5p-128", "fsdp=64,remat=block", 64, 8192),
    "llama3-70b": ("h200:8x8", "fsdp=64,remat=block,loss_chunks=8", 64, 8192),
    "llama3-405b": ("gb200:64x4", "fsdp=64,tensor=4,sequence=tensor,remat=block,loss_chunks=8", 64, 8192),
    "llama3.1-8b": ("h200:8", "fsdp=8,remat=block,loss_chunks=8", 8, 8192),
    "llama3.1-70b": ("b200:8x8", "fsdp=64,remat=block,loss_chunks=8", 64, 8192),
    "llama3.1-405b": ("v5p-1024", "fsdp=64,tensor=8,sequence=tensor,remat=block", 64, 8192),
    "mistral-7b": ("b300:8", "fsdp=8,remat=block", 16, 8192),
    "qwen3-0.6b": ("a6000:8", "fsdp=8,remat=block,loss_chunks=8", 8, 1024),
    "qwen3-1.7b": ("h100:8", "fsdp=8,remat=block,loss_chunks=8", 16, 4096),
    "qwen3-4b": ("h100:8", "fsdp=8,remat=block,loss_chunks=8", 8, 4096),
    "qwen3-8b": ("h200:8", "fsdp=8,remat=block,loss_chunks=8", 16, 4096),
    "qwen3-14b": ("b200:8", "fsdp=8,remat=block,loss_chunks=8", 16, 4096),
    "qwen3-32b": ("gb300:8x4", "fsdp=32,remat=block,loss_chunks=8", 32, 4096),
    "gemma2-2b": ("h100:8", "fsdp=8,remat=block,loss_chunks=8", 8, 4096),
    "gemma2-9b": ("h200:8", "fsdp=8,remat=block,loss_chunks=8", 8, 4096),
    "gemma2-27b": ("h200:4x8", "fsdp=32,remat=block,loss_chunks=8", 32, 4096),
    "gemma3-1b": ("h100:8", "fsdp=8,remat=block,loss_chunks=8", 8, 4096),
    "gemma3-4b": ("h100:8", "fsdp=8,remat=block,loss_chunks=8", 8, 4096),
    "gemma3-12b": ("b200:8", "fsdp=8,remat=block,loss_chunks=8", 8, 4096),
    "gemma3-27b": ("gb200:8x4", "fsdp=32,remat=block,loss_chunks=8", 32, 4096),
    "scale-16b": ("v5e-256", "fsdp=256,remat=block", 1536, 2048),
    "scale-32b": ("v5p-128", "fsdp=16,tensor=4,sequence=tensor,remat=dots", 384, 2048),
    "scale-64b": ("v5e-256", "fsdp=256,remat=block", 512, 2048),
    "scale-128b": ("v5p-256", "fsdp=16,tensor=8,sequence=tensor,remat=dots", 128, 2048),
    "scale-256b": ("v4-1024", "fsdp=64,tensor=8,sequence=tensor,remat=block", 256, 2048),
    "scale-512b": ("tpu7x-512", "fsdp=64,tensor=8,sequence=tensor,remat=block", 512, 2048),
    "mlp": ("v5e-4", "data=4,zero=1", 256, 1),
    "mlp-mnist": ("a100-40gb:2", "data=2,zero=1", 256, 1),
    "vit-tiny": ("v5e-4", "fsdp=4", 256, 16),
    "vit-mnist": ("a6000:2", "fsdp=2", 256, 16),
    "vit-ti16": ("a100-40gb:8", "data=8,zero=1", 1024, 196),
    "vit-s16": ("v5e-8", "fsdp=8,remat=block", 1024, 196),
    "vit-b16": ("h100:8", "fsdp=8,remat=block", 1024, 196),
    "vit-l16": ("v5p-16", "fsdp=8,remat=block", 512, 196),
}
KEPT = ("workload", "topology", "plan", "verdict", "usable_bytes", "peak_bytes", "headroom_bytes", "host_bytes", "worst_program", "step_s",
        "tokens_per_s", "mfu", "backend", "versions", "flags", "sources", "problems", "parameters")


def check(name: str) -> dict:
    topology_text, plan_text, batch, seq = ROWS[name]
    topology = parse_topology(topology_text)
    plan = Plan.parse(plan_text, devices=topology.devices)
    out = verdict.check_workload(Workload.parse(model=name, batch=batch, seq=seq), plan, topology, programs=tuple(_PROGRAMS.value))
    compile_s = sum(p["compile_s"] or 0 for p in out["programs"].values())
    return {"preset": name, "compile_s": compile_s, "programs": list(out["programs"])} | {k: out[k] for k in KEPT}


def table(records: dict[str, dict]) -> str:
    heads = ("preset", "parameters", "topology", "plan", "batch x seq", "verdict", "peak / usable a device", "worst program",
             "programs", "step (estimate)", "MFU", "compile, 2 shared cores")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in ROWS:
        if name not in records:
            continue
        r = records[name]
        _, plan, batch, seq = ROWS[name]
        peak = f"{bytes_text(r['peak_bytes'])} / {bytes_text(r['usable_bytes'])}"
        step = f"{r['step_s']:.3g} s" if r["step_s"] else "—"
        mfu = f"{100 * r['mfu']:.1f}%" if r["mfu"] else "—"
        cells = (name, f"{r['parameters']:,}", r["topology"], f"`{plan}`", f"{batch} x {seq}", r["verdict"].replace("_", " "), peak,
                 r["worst_program"], "all four" if len(r["programs"]) == 4 else " ".join(r["programs"]), step, mfu,
                 f"{r['compile_s']:.0f} s")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    path = pathlib.Path(_RECORDS.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = {r["preset"]: r for r in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    for name in _ONLY.value or ROWS:
        if name in records and not _ONLY.value:
            continue
        print(f"== {name}", file=sys.stderr, flush=True)
        try:
            records[name] = check(name)
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        with path.open("a") as out:
            out.write(json.dumps(records[name]) + "\n")
    text = table(records)
    print(text)
    if _DOCS.value:
        some = next(iter(records.values()))["versions"]
        versions = ", ".join(f"{k} {v}" for k, v in some.items() if v and k in ("jaxmem", "jax", "jaxlib", "libtpu", "cuda_pjrt"))
        pathlib.Path(_DOCS.value).write_text(
            "# Every preset on a topology that it fits\n\nWhat `python -m experiments.benchmarks.presets` recorded: memory is of the "
            f"compile for that target ({versions}), the step is a model's estimate from its schedule, nothing is a measurement.\n"
            "AdamW, f32 parameters, bf16 compute. Compile seconds are summed over the programs, on a machine that was busy with other "
            "work: an upper bound.\n\n" + text + "\n")


if __name__ == "__main__":
    app.run(main)

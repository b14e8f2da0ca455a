"""How much of the peak that the compiler reports do the live buffers of its schedule explain, and how much has a name?

Command:  `python -m experiments.benchmarks.attributed_peak tests/fixtures/hlo/* tests/fixtures/gpu/*.json` (seconds)
          TPU: any artifact folders (hlo.txt.gz and result.json; those of `jaxmem check` lie in its cache, see `jaxmem cache`).
          GPU: NAME.json, with NAME.hlo.txt.gz and NAME.buffers.txt.gz beside it.
Expected: live within 3% of reported (median) and within 8% (worst), at least 90% of the bytes with a kind and a module.

reported is `peak_memory_in_bytes`: the most bytes that are live at once. The compiler's two other figures are shown beside it,
as multiples of it. allocated is `total_allocation_bytes`, arguments, results and the packed heap: what the compiler holds against
the chip's capacity. sum is argument + output - alias + temp; libtpu's temp counts values of loop bodies more than once, so the
sum is an upper bound only. Where the peak lies in host memory or in VMEM (programs that need next to no HBM), reported is
allocated instead.
"""

import gzip
import json
import pathlib
import re
import statistics
from typing import Any

from absl import app, flags

from jaxmem.hlo import gpu_buffers
from jaxmem.hlo.liveness import FRAGMENTATION, timeline
from jaxmem.hlo.parse import parse
from jaxmem.hlo.timeline import Timeline

_DOCS = flags.DEFINE_string("docs", None, "write the page here", allow_override=True)
_FIXTURE = flags.DEFINE_string("fixture", None, "also write trimmed copies of the artifacts into this folder", allow_override=True)
# all that the readers of memory ask of a backend_config
_KEPT = re.compile(r'"aliasing_operands":\{"lists":\[(?:\{"indices":\[[^\]]*\]\},?)*\]\}|"known_trip_count":\{"n":"\d+"\}')
_UNREAD = re.compile(
    r", (?:frontend_attributes|sharding|channel_id|use_global_device_ids|replica_groups|window|dim_labels)"
    r"=(?:\{[^{}]*\}|[^,\s]+)(?=,|$)"
)


def live_bytes(line: Timeline) -> int:
    """The peak without the gaps of the packing."""
    return line.peak_bytes - sum(share.bytes for share in line.composition if share.module == FRAGMENTATION)


def summed(memory: dict[str, int]) -> int:
    return memory["argument_bytes"] + memory["output_bytes"] - (memory["alias_bytes"] or 0) + memory["temp_bytes"]


def reported_bytes(memory: dict[str, int]) -> int:
    """What the compiler says about HBM. Its `peak_bytes` is of the worst memory space, whichever that is."""
    peak, allocated = memory["peak_bytes"], memory.get("allocated_bytes")
    if allocated is None:
        return summed(memory) if any(memory.get(f"host_{part}_bytes") for part in ("argument", "output", "temp")) else peak
    return min(peak, allocated)


def gpu_row(path: pathlib.Path) -> dict[str, Any]:
    """The same of a program compiled for a GPU, from XLA's buffer assignment; reported is argument + output - alias + temp."""
    result = json.loads(path.read_text())
    buffers, text = (gzip.open(path.with_suffix(f".{kind}.txt.gz"), "rt").read() for kind in ("buffers", "hlo"))
    line = gpu_buffers.timeline(buffers, parse(text), result)
    reported = summed(result["memory"])
    named = 1 - line.unattributed_bytes / line.peak_bytes
    return {"name": f"{path.stem} {result.get('program')} {result.get('topology')}", "live": line.peak_bytes, "reported": reported,
            "error": line.peak_bytes / reported - 1, "allocated": None, "sum": 1.0, "named": named}


PAGE = """# What the peak is made of: attributed against reported

Written by `python -m experiments.benchmarks.attributed_peak tests/fixtures/hlo/* tests/fixtures/gpu/*.json --docs=docs/memory.md` from
stored programs, each **compile**d for its target (jax 0.12.0.1, libtpu 0.0.50.1, jax-cuda13-pjrt 0.12.0.1) and trimmed; nothing here is a
measurement. *Live* is the sum of the buffers that jaxmem finds live at the peak by replaying the schedule (TPU: the optimized HLO's; GPU:
XLA's buffer assignment and live ranges). *Reported* is the compiler's own figure: `peak_memory_in_bytes` on TPU, argument + output - alias
+ temp on GPU. *Sum* is argument + output - alias + temp over reported: on TPU it is an upper bound only, for libtpu's temp counts some
values of loop bodies more than once. *Named* bytes have a kind and a module.

| program, target | live | reported | error | named | sum / reported |
|---|---|---|---|---|---|
{rows}

{summary}
"""


def row(folder: pathlib.Path) -> tuple[dict[str, Any], Timeline]:
    result = json.loads((folder / "result.json").read_text())
    line = timeline(parse(gzip.open(folder / "hlo.txt.gz", "rt").read()), result)
    memory = result["memory"]
    reported = reported_bytes(memory)
    named = 1 - line.unattributed_bytes / line.peak_bytes
    return {
        "name": f"{folder.name} {result.get('program')} {result.get('topology')}",
        "live": live_bytes(line),
        "reported": reported,
        "error": live_bytes(line) / reported - 1,
        "allocated": memory["allocated_bytes"] / reported if memory.get("allocated_bytes") else None,
        "sum": summed(memory) / reported,
        "named": named,
    }, line


def _short(path: re.Match[str]) -> str:
    """No folder of the machine that compiled: libraries from `site-packages` on, own files with one folder."""
    _, library, rest = path[1].partition("/site-packages/")
    return f'"/site-packages/{rest}"' if library else '"/' + "/".join(path[1].split("/")[-2:]) + '"'


def trim(text: str) -> str:
    """The text without what no reader of memory needs: most attributes, layouts of the entry, folders of this machine."""
    text = re.sub(r"kernel_metadata=\{\n[^\n]*\n\}", "kernel_metadata={}", text)
    first, _, rest = text.partition("\n")
    first = re.sub(
        r", (?:entry_computation_layout|frontend_attributes|allow_spmd_sharding_propagation_to_\w+)=\{.*?\}(?=, [a-z_]+=|$)",
        "",
        first,
    )
    lines = [first]
    for line in rest.splitlines():
        line = re.sub(r'"(/[^"]*\.py)"', _short, line)
        head, found, config = line.partition(", backend_config=")
        kept = ",".join(_KEPT.findall(config)) if found else ""
        lines.append(_UNREAD.sub("", head) + (f", backend_config={{{kept}}}" if kept else ""))
    return "\n".join(lines) + "\n"


def write_fixture(folder: pathlib.Path, target: pathlib.Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    text = trim(gzip.open(folder / "hlo.txt.gz", "rt").read())
    (target / "hlo.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    result = json.loads((folder / "result.json").read_text())
    kept = ("schema", "program", "status", "memory", "arguments", "outputs", "backend", "versions", "topology", "about")
    (target / "result.json").write_text(
        json.dumps({key: result[key] for key in kept if key in result}, separators=(",", ":")) + "\n"
    )


def main(argv: list[str]) -> None:
    rows = []
    for folder in map(pathlib.Path, argv[1:]):
        if _FIXTURE.value:
            write_fixture(folder, pathlib.Path(_FIXTURE.value) / folder.name)
        found = gpu_row(folder) if folder.suffix == ".json" else row(folder)[0]
        rows.append(found)
        other = "  ".join(f"{key} {found[key]:.3f}" for key in ("allocated", "sum") if found[key] is not None)
        size = (
            f"live {found['live'] / 2**20:9.1f} MiB  reported {found['reported'] / 2**20:9.1f} MiB  error {found['error']:+7.2%}"
        )
        print(f"{found['name']:48s} {size}  named {found['named']:6.1%}  {other}", flush=True)
    errors = [abs(found["error"]) for found in rows]
    least = min(found["named"] for found in rows)
    summary = f"{len(rows)} programs: error median {statistics.median(errors):.2%}, worst {max(errors):.2%}; least named {least:.1%}"
    print(summary)
    if _DOCS.value:
        lines = (f"| {r['name']} | {r['live'] / 2**20:,.1f} MiB | {r['reported'] / 2**20:,.1f} MiB | {r['error']:+.2%} | "
                 f"{r['named']:.1%} | {r['sum']:.2f} |" for r in rows)
        pathlib.Path(_DOCS.value).write_text(PAGE.format(rows="\n".join(lines), summary=summary))


if __name__ == "__main__":
    app.run(main)

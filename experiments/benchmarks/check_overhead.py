"""What does a check cost over bare lowering and compiling of the same programs?

Command: `python -m experiments.benchmarks.check_overhead` (about two compiles of each case) `--cases=0,1`
Expected: for programs of 30 s and more, summed, cold cache: at most 10% over bare lower + compile.

Both run in fresh processes, one after the other, with one job, on the same machine; the ratio is of wall time, of processor time
of the processes too, since machines are shared. Bare: one process that imports jax, builds, lowers and compiles each program.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.targets.devices import environment
from jaxmem.targets.flags import flags_for

CASES = (
    ("llama3-8b", 64, 8192, "fsdp=64,remat=block", "v5p-128"),
    ("llama3-8b", 64, 8192, "fsdp=64,remat=block", "h100:8x8"),
)
_CASES = flags.DEFINE_list("cases", ["0", "1"], "which cases, by number")
_PROGRAMS = flags.DEFINE_string("programs", "init,train,eval,save", "which programs")

BARE = """
import sys
from jaxmem import step
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.targets.devices import described_devices
from jaxmem.workload import Workload
model, batch, seq, plan, topology, programs = sys.argv[1:]
where = parse_topology(topology)
built = step.build(Workload.parse(model=model, batch=batch, seq=seq), Plan.parse(plan), where, described_devices(where))
for name in programs.split(","):
    built[name].lower().compile()
"""


def timed(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """(wall, processor) seconds of a command and its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode not in (0, 3, 4):
        sys.exit(f"{command[:4]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: list[str]) -> None:
    del argv
    total = [0.0, 0.0, 0.0, 0.0]
    for number in map(int, _CASES.value):
        model, batch, seq, plan_text, where = CASES[number]
        topology = parse_topology(where)
        plan = Plan.parse(plan_text)
        flags_used = flags_for(plan.flags, topology)
        bare = timed([sys.executable, "-c", BARE, model, str(batch), str(seq), plan_text, where, _PROGRAMS.value],
                     environment(topology, flags_used))
        with tempfile.TemporaryDirectory() as folder:
            ours = timed([sys.executable, "-m", "jaxmem", "check", f"--model={model}", f"--batch={batch}", f"--seq={seq}",
                          f"--plan={plan_text}", f"--topology={where}", f"--programs={_PROGRAMS.value}", "--jobs=1",
                          f"--report={folder}/report.html"], {"JAXMEM_CACHE": folder})
        for i, value in enumerate((*bare, *ours)):
            total[i] += value
        print(f"{model} on {where}: bare {bare[0]:.1f} s wall, {bare[1]:.1f} s processor; check {ours[0]:.1f} s, {ours[1]:.1f} s; "
              f"ratio {ours[0] / bare[0]:.3f} wall, {ours[1] / bare[1]:.3f} processor", flush=True)
    print(f"together: ratio {total[2] / total[0]:.3f} wall, {total[3] / total[1]:.3f} processor (measure, this machine)")


if __name__ == "__main__":
    app.run(main)

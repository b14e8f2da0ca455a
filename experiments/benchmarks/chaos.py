"""Does a run end where it should, whatever happens to it on the way?

Command: `python -m experiments.benchmarks.chaos` (up to 45 minutes; `--faults=6 --elastic_kills=0` is the short form that is a test)
Expected: the disturbed run's final state is bitwise that of the undisturbed run on the same mesh; where processes are lost and the mesh
changes with them, the loss curve agrees within 1e-4, and what was lost is all that is read from shared storage; no clean-up by hand.

Four processes of two devices each, under the supervisor of `launch.local`. Faults are drawn at random: SIGKILL before a step and between
the flush and the commit of a checkpoint, SIGTERM, a process that hangs or is slow, damaged checkpoint files, NaN in the state. (A full disk
has a test of its own.) NaN leaves batches out, which must be those since the restored checkpoint; the undisturbed run is told to leave out
the same ones. Prints recovery times, from a process's end to the restored state, and goodput. All measured here.
"""

import json
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import app, flags

from jaxmem.report.run_terminal import render_goodput
from jaxmem.runs.folder import read_lines
from jaxmem.runs.goodput import goodput
from jaxmem.runs.reading import read_run

_FAULTS = flags.DEFINE_integer("faults", 50, "random faults on the same mesh")
_ELASTIC_KILLS = flags.DEFINE_integer("elastic_kills", 4, "kills after which the run goes on with one process fewer for a while")
_STEPS = flags.DEFINE_integer("steps", 300, "steps of a run")
_SEED = flags.DEFINE_integer("seed", 0, "of the faults")
_PROCESSES = flags.DEFINE_integer("processes", 4, "processes of two devices")
_WATCHDOG = flags.DEFINE_float("watchdog", 20.0, "seconds without a step that end an attempt")
_MINUTES = flags.DEFINE_float("minutes", 45.0, "for everything; what is not done then counts as failed")
_OUT = flags.DEFINE_string("out", None, "where the runs go (default: a temporary folder, removed at the end)")

MODEL = ["--model=decoder-tiny,layers=1", "--batch=24", "--seq=32", "--data=synthetic", "--lr=0.01", "--print_hash"]
# How often each kind is drawn. A kill, a hang and a SIGTERM end an attempt; the others do not.
KINDS = {"kill": 6, "kill in commit": 3, "term": 2, "hang": 2, "slow": 2, "corrupt": 3, "nan": 2}
DEADLINE = float("inf")  # of the monotonic clock
TOLERANCE = 1e-4  # relative, of the loss of one step, between meshes, in float32


def draw(count: int, steps: int, every: int, processes: int, seed: int) -> list[str]:
    """`count` faults in order of their steps, each on a step of its own. Those that need a checkpoint are on a multiple of `every`."""
    rng = random.Random(seed)
    names = list(KINDS)
    kinds = rng.choices(names, [KINDS[name] for name in names], k=count)
    if count >= len(names):
        kinds[:len(names)] = names  # each at least once
    plain = rng.sample([s for s in range(2, steps - 1) if s % every], count)
    saved = rng.sample(range(every, steps - every, every), min(count, len(range(every, steps - every, every))))
    out: list[tuple[int, str]] = []
    for kind in kinds:
        process = rng.randrange(processes)
        at = saved.pop() if kind in ("kill in commit", "corrupt") and saved else plain.pop()
        kind = kind if at % every == 0 or kind not in ("kill in commit", "corrupt") else "kill"
        text = {"kill": f"kill:step={at},process={process}", "kill in commit": f"kill:step={at},process={process},phase=commit",
                "term": f"term:step={at},process={process}", "hang": f"hang:step={at},process={process}",
                "slow": f"slow:step={at},process={process},seconds=0.2,steps=3", "nan": f"nan:step={at}",
                "corrupt": f"corrupt:step={at},how={rng.choice(['flip', 'truncate', 'delete'])}"}[kind]
        out.append((at, text))
        if kind == "corrupt":  # it is seen only when somebody reads it
            out.append((at, f"kill:step={at},phase=committed"))
    return [text for _, text in sorted(out)]


def launch(out: pathlib.Path, plan: str, *more: str, launcher: tuple[str, ...] = ()) -> None:
    """A run under the supervisor, to its end. A run that was asked to save and stop is started again, as a cluster would."""
    n = _PROCESSES.value
    command = [sys.executable, "-m", "launch.local", f"--processes={n}", "--devices=2", "--run", "--max_restarts=1000", "--backoff=0.1",
               "--grace=3", *launcher, "--", *MODEL, f"--plan={plan}", f"--steps={_STEPS.value}", f"--checkpoint_every={every()}",
               "--keep=last=3", "--max_rollbacks=1000", f"--watchdog={_WATCHDOG.value}", f"--out={out}", *more]
    log = out.parent / f"{out.name}.log"
    while True:
        with open(log, "ab") as file:
            try:
                status = subprocess.run(command, stdout=file, stderr=file, timeout=DEADLINE - time.monotonic()).returncode
            except subprocess.TimeoutExpired:
                sys.exit(f"{out.name} was not done after {_MINUTES.value} minutes; its log is {log}")
        if status == 0:
            return
        if status != 75:
            sys.exit(f"{out.name} ended with status {status}:\n" + "\n".join(log.read_text(errors='replace').splitlines()[-30:]))


def every() -> int:
    return max(2, _STEPS.value // 60)


def events(out: pathlib.Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(out / "logs" / "events.jsonl") if line.get("kind") in kinds]


def losses(out: pathlib.Path) -> list[float]:
    return [line["loss"] for line in read_lines(out / "metrics.jsonl") if line["kind"] == "train"]


def recoveries(out: pathlib.Path) -> list[float]:
    """Seconds from each failure, as the supervisor saw it, to the restored state of the next start."""
    found, died = [], None
    for event in events(out, "supervisor", "start"):
        if event["kind"] == "start":
            if died is not None:
                found.append(event["time"] - died)
            died = None
        elif "was killed" in event["text"] or "watchdog ended" in event["text"] or "ended with status" in event["text"]:
            died = event["time"]
    return found


def left_out_rightly(out: pathlib.Path) -> bool:
    """Each rollback left out the batches of the steps that it took back, counted from what was left out before."""
    before: set[int] = set()
    for event in events(out, "rollback"):
        first, last = event["skip"]
        if len(set(range(first, last + 1)) - before) != event["step"] - event["to"]:
            return False
        before |= set(range(first, last + 1))
    return True


def main(argv: list[str]) -> None:
    del argv
    global DEADLINE
    begun = time.monotonic()
    DEADLINE = begun + 60 * _MINUTES.value
    top = pathlib.Path(_OUT.value or tempfile.mkdtemp(prefix="jaxmem-chaos-"))
    top.mkdir(parents=True, exist_ok=True)
    plan = f"data={_PROCESSES.value},fsdp=2,compute=f32"

    faults = draw(_FAULTS.value, _STEPS.value, every(), _PROCESSES.value, _SEED.value)
    disturbed, whole, elastic = top / "disturbed", top / "undisturbed", top / "elastic"
    launch(disturbed, plan, f"--fault={';'.join(faults)}")
    skipped = json.loads((disturbed / "skips.json").read_text()) if (disturbed / "skips.json").exists() else []
    launch(whole, plan, *([f"--skip={','.join(f'{a}:{b}' for a, b in skipped)}"] if skipped else []))

    struck = events(disturbed, "fault")
    kinds: dict[str, int] = {}
    for text in {(e["text"], e.get("process") if not e["text"].startswith("nan") else 0) for e in struck}:
        kinds[text[0].partition(":")[0]] = kinds.get(text[0].partition(":")[0], 0) + 1
    hashes = [events(run, "end")[-1]["state_sha256"] for run in (disturbed, whole)]
    times = recoveries(disturbed)
    print(f"{_PROCESSES.value} processes x 2 devices, plan {plan}, {_STEPS.value} steps, a checkpoint every {every()} (measure, cpu)")
    print(f"faults that struck: {sum(kinds.values())} of {len(faults)}: {', '.join(f'{n} {k}' for k, n in sorted(kinds.items()))}")
    print(f"starts {len(events(disturbed, 'start'))}; damaged checkpoints passed over {len(events(disturbed, 'corrupt'))}; rollbacks "
          f"{len(events(disturbed, 'rollback'))}; steps done again {sum(e['steps'] for e in events(disturbed, 'dropped'))}")
    print(f"final state: {'bitwise equal to' if hashes[0] == hashes[1] else 'DIFFERENT FROM'} the undisturbed run")
    print(f"losses of every step equal: {losses(disturbed) == losses(whole)}")
    if times:
        print(f"recovery, from a process's end to the restored state: median {statistics.median(times):.1f} s, worst {max(times):.1f} s, "
              f"{len(times)} of them")
    run = read_run(disturbed)
    print(render_goodput(goodput(run.events, run.metrics)))
    left = sorted(p.name for p in (disturbed / "checkpoints").iterdir() if not p.name.isdigit() and not p.name.endswith(".damaged"))
    print(f"left over in checkpoints/: {', '.join(left) or 'nothing'}")
    good = hashes[0] == hashes[1] and left_out_rightly(disturbed) and not left and len({e["text"] for e in struck}) == len(set(faults))

    if _ELASTIC_KILLS.value:
        rng = random.Random(_SEED.value + 1)
        kills = sorted(rng.sample(range(5, _STEPS.value - 5), _ELASTIC_KILLS.value))
        launch(elastic, plan, f"--fault={';'.join(f'kill:step={s},process=1' for s in kills)}", f"--local_checkpoints={top / 'disks'}",
               launcher=("--elastic", "--lost_after=1", "--rejoin_after=20"))
        reference = whole
        if skipped:
            reference = top / "undisturbed-all-batches"
            launch(reference, plan)
        a, b = np.array(losses(elastic)), np.array(losses(reference))
        worst = float(np.max(np.abs(a - b) / np.abs(b)))
        sizes = [e["devices"] for e in events(elastic, "start")]
        print(f"elastic: {len(kills)} kills, devices of the starts {sizes}; largest relative difference of a step's loss {worst:.1e} "
              f"(tolerance {TOLERANCE:.0e})")
        for ledger in events(elastic, "ledger"):
            print(f"restored step {ledger['step']}: {ledger['local_bytes']} bytes from own disks, {ledger['peer_bytes']} from other "
                  f"survivors, {ledger['remote_bytes']} from shared storage; the state has {ledger['state_bytes']}")
        times = recoveries(elastic)
        print(f"elastic recovery: median {statistics.median(times):.1f} s, worst {max(times):.1f} s")
        good = good and len(a) == len(b) and worst < TOLERANCE and len(set(sizes)) > 1
    print(f"{'as expected' if good else 'NOT AS EXPECTED'}, {time.monotonic() - begun:.0f} s in all")
    if _OUT.value is None and good:
        shutil.rmtree(top)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    app.run(main)

"""run what was checked, and survive: data, checkpoints, faults, resume.

  jaxmem train --out=runs/first
  jaxmem train --model=decoder-tiny --plan=data=2,fsdp=2,tensor=2 --data=text:pydoc --out=runs/a

cpu:N emulates N devices on this machine; any other topology must be the one that is here. The same
command again resumes the run in --out, or says that it is finished. Many hosts: start the same
command on each; under SLURM, Open MPI, GKE or on TPU VMs nothing more is needed, elsewhere
--coordinator, --processes and --process say how to meet (python -m launch.local does, on one
machine).

Exit status: 0 done, 2 bad input, 70 internal error, 75 saved on SIGTERM or Ctrl-C and stopped (the
same command goes on), 76 ended by the watchdog, 77 rollbacks exhausted, 130 interrupted at once.
"""

import os
import pathlib
import re
import sys
import time
import traceback
from typing import Any

from absl import flags as absl_flags

from jaxmem import environment, schedules
from jaxmem.checkpoint.keep import Keep
from jaxmem.cli import arguments
from jaxmem.hardware import parse_topology
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal
from jaxmem.running import trackers
from jaxmem.runs import folder as folders
from jaxmem.runs import settings as settings_module
from jaxmem.runs import start_from
from jaxmem.runs.settings import SNAPSHOTS, Settings
from jaxmem.spec import InputError, nearest
from jaxmem.workload import Workload


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    text, whole, number, yes_no = (absl_flags.DEFINE_string, absl_flags.DEFINE_integer, absl_flags.DEFINE_float, absl_flags.DEFINE_boolean)
    text("model", "decoder-tiny", "preset and changes, as in llama3-8b,layers=4; jaxmem models lists them", **f)
    text("plan", "fsdp=*", "how it is split and what is recomputed, as in fsdp=16,tensor=4,remat=block", **f)
    text("topology", "cpu:8", "cpu:N, emulated here, or what this machine or cluster is: h100:16x8, v5p-128, ...", **f)
    text("optimizer", "adamw", "preset and changes, as in adamw,b2=0.95", **f)
    whole("batch", None, "sequences a step, over all devices (default: two a device)", lower_bound=1, **f)
    whole("seq", None, "tokens a sequence (default: 128; of images their patches)", lower_bound=1, **f)
    whole("steps", 200, "updates in all", **f)
    number("lr", 3e-3, "peak learning rate", **f)
    text("schedule", "cosine", "constant, linear, cosine, wsd, rsqrt or infinite, and changes, as in cosine,floor=0.1 or wsd,decay=0.2",
         **f)
    whole("warmup", None, "steps of linear rise to the peak (default: a twentieth of the steps)", **f)
    number("clip", 1.0, "largest global norm of the gradients", **f)
    whole("seed", 0, "of the parameters and of the order of the data", **f)
    text("data", "text:pydoc", "text:PATH_OR_NAME[,tokenizer=FILE], synthetic, images:NAME, or a mixture, as in "
         "text:a.txt=0.75+text:pydoc=0.25", **f)
    whole("eval_every", 0, "evaluate on held-out data after so many steps, and at the end (0: never)", **f)
    whole("eval_batches", 8, "batches of one evaluation at most", **f)
    whole("checkpoint_every", None, "steps between checkpoints (default: a tenth of the steps; 0: at the end only)", **f)
    text("keep", "last=2", "which checkpoints stay: last=2,best=1,every=1000", **f)
    text("snapshot", "async", "sync waits for the disk, async for the copy to the host, lazy copies during the next forward and backward "
         "pass (needs step=split in the plan)", **f)
    whole("snapshot_pool", 0, "bytes of pinned host memory that lazy snapshots may take in a process (0: one copy of its shards)", **f)
    text("out", "runs/train", "the run's folder", **f)
    number("spike", 8.0, "roll back when the loss stays this many robust deviations above the latest 50; "
           "0: only when it is not finite", **f)
    whole("max_rollbacks", 3, "roll back at most so often, then end with status 77", **f)
    text("skip", "", "positions of the data (batches) to leave out, as in 120:129,300:300", **f)
    text("fault", "", "break something on purpose, as in kill:step=12,process=1;nan:step=20", **f)
    whole("max_restarts", 0, "start again after a crash, so often at most", lower_bound=0, **f)
    number("watchdog", 600.0, "seconds without a step after which the run is ended with status 76", **f)
    text("profile", None, "STEP:N, write a trace of N steps to OUT/profile", **f)
    yes_no("print_hash", False, "end stdout with state sha256:... over the final parameters and optimizer state", **f)
    yes_no("elastic", False, "go on with a run that was started under another plan or topology", **f)
    text("local_checkpoints", "", "a folder on this machine's own disk: shards are kept there too, and restored from there first", **f)
    text("init_from", "", "a folder with Hugging Face weights to begin from", **f)
    text("start_from", "", "RUN[@STEP], another run's checkpoint to begin from, and how: optimizer=keep|reset, schedule=continue|restart, "
         "shrink=0.4,perturb=0.01, grow=true (for a larger --model)", **f)
    text("rehearsal", "", "keep rows that were trained on and train on some of them again beside each batch, as in r=16,capacity=4096 and "
         "policy=reservoir|replace, candidates, every, memory=device|pinned_host, classes", **f)
    text("log", "", "also write to tensorboard, wandb, mlflow (by comma)", **f)
    text("coordinator", None, "HOST:PORT of process 0, where no cluster says it; auto leaves it to jax", **f)
    whole("processes", None, "how many processes take part, where no cluster says it", lower_bound=1, **f)
    whole("process", None, "which of them this is, from 0", lower_bound=0, **f)
    number("start_timeout", 900.0, "seconds to wait for all processes to come up", **f)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    arguments.no_words(words, "train")
    settings = read_settings(flags)
    settings_module.check(settings)
    from jaxmem import hosts

    place = hosts.settings(os.environ, coordinator=flags.coordinator, processes=flags.processes, process=flags.process,
                           timeout_s=flags.start_timeout)
    # Before any process waits for the others: each of them sees for itself what is refused, and what is done already.
    folders.refuse_other(settings.out, settings.config(), elastic=settings.elastic)
    if (ended := folders.finished(settings.out, settings.steps)) is not None:
        if place is None or not place.process:
            print(f"{settings.out} is finished: step {ended['step']} of {settings.steps}", file=sys.stderr)
            if settings.print_hash and ended.get("state_sha256"):
                print(f"state sha256:{ended['state_sha256']}")
        return 0
    if flags.max_restarts:
        if place is not None:
            raise InputError("--max_restarts starts this one process again; several processes are restarted together, by their launcher")
        return _supervised(flags, settings)
    if place is None:
        return _alone(settings)
    try:
        status = _together(settings, place)
    except InputError as error:
        print(f"jaxmem train: {error}", file=sys.stderr)
        hosts.leave(2, together=False)
    except hosts.StartError as error:
        print(f"jaxmem train: {error}", file=sys.stderr)
        hosts.leave(70, together=False)
    except KeyboardInterrupt as interrupt:
        print(f"jaxmem train: interrupted; {interrupt}", file=sys.stderr)
        hosts.leave(130, together=False)
    except BaseException as error:
        if any(word in str(error) for word in ("Gloo", "coordination service", "heartbeat")):  # another process ended, and says why
            print(f"jaxmem train: another process of this run ended: {str(error).strip().splitlines()[0][:200]}", file=sys.stderr)
        else:
            traceback.print_exc()
        hosts.leave(70, together=False)
    hosts.leave(status, together=status != 70)


def _alone(settings: Settings) -> int:
    lock = folders.Lock(settings.out)
    try:
        folder = folders.open_folder(settings.out, settings.config(), environment.versions(), elastic=settings.elastic)
        from jaxmem.running import starting

        return _train(settings, folder, starting.start(settings.topology, None))
    finally:
        lock.release()


def _together(settings: Settings, place: Any) -> int:
    """One of several processes. The first holds the folder; what it refuses is refused before the others are waited for, where its
    number is known by then."""
    from jaxmem.running import starting

    process, lock, folder = place.process, None, None
    if process is None:
        process = starting.start(settings.topology, place)
    if process == 0:
        lock = folders.Lock(settings.out)
        folder = folders.open_folder(settings.out, settings.config(), environment.versions(), elastic=settings.elastic)
    if place.process is not None:
        starting.start(settings.topology, place)
    starting.meet("folder")
    status = _train(settings, folder or folders.join_folder(settings.out), process)
    if lock is not None:
        lock.release()
    return status


def _supervised(flags: absl_flags.FlagValues, settings: Settings) -> int:
    """The same command without --max_restarts, in a process that is started again when it dies."""
    from jaxmem.supervise.roster import Roster
    from jaxmem.supervise.supervisor import Layout, Patience, supervise

    given = [f"--{name}={flags[name].value}" for name in flags if flags[name].present and name != "max_restarts"]
    command = [sys.executable, "-m", "jaxmem", "train", *given]
    layout = Layout(present=(0,), devices=settings.topology.devices,
                    text=f"1 process, {settings.topology}, plan {str(settings.plan) or 'default'}")
    return supervise(lambda number, layout: command, lambda present: layout, Roster(processes=1, lost_after=None), settings.out,
                     Patience(max_restarts=flags.max_restarts))


def _train(settings: Settings, folder: folders.Folder, process: int) -> int:
    from jaxmem import train
    from jaxmem.report import run_page

    status = train.train(settings, folder)
    if process == 0:
        path = settings.out / "report.html"
        try:
            path.write_text(run_page.render(settings.out), encoding="utf-8")
        except OSError as error:  # a run is not lost over a page
            print(f"no report: {path}: {error.strerror or error}", file=sys.stderr)
        else:
            print(f"report: {path}", file=sys.stderr)
    return status


def read_settings(flags: absl_flags.FlagValues) -> Settings:
    """The flags as one value; raises InputError."""
    if flags.snapshot not in SNAPSHOTS:
        raise InputError(f"--snapshot={flags.snapshot}: expected {', '.join(SNAPSHOTS)}{nearest(flags.snapshot, SNAPSHOTS)}")
    Keep.parse(flags.keep)
    if not flags.out.strip():
        raise InputError("--out= is empty: give the run a folder, as in --out=runs/first")
    if "://" in flags.out:
        raise InputError(f"--out={flags.out} is an address; a run's folder is on a file system that every process sees (mount the bucket)")
    topology = parse_topology(flags.topology)
    plan = Plan.parse(flags.plan, devices=topology.devices)
    batch = flags.batch or 2 * topology.devices
    steps = flags.steps
    return Settings(
        workload=Workload.parse(model=flags.model, optimizer=flags.optimizer, batch=batch, seq=flags.seq, usual_seq=128),
        topology=topology, plan=plan,
        out=pathlib.Path(flags.out), data=flags.data, steps=steps, lr=flags.lr, schedule=schedules.parse(flags.schedule),
        schedule_text=flags.schedule, warmup=steps // 20 if flags.warmup is None else flags.warmup, clip=flags.clip, seed=flags.seed,
        eval_every=flags.eval_every, eval_batches=flags.eval_batches,
        checkpoint_every=max(1, steps // 10) if flags.checkpoint_every is None else flags.checkpoint_every, keep=flags.keep,
        snapshot=flags.snapshot, snapshot_pool=flags.snapshot_pool,
        spike=flags.spike, max_rollbacks=flags.max_rollbacks, fault=flags.fault, profile=_profile(flags.profile),
        print_hash=flags.print_hash, elastic=flags.elastic, watchdog_s=flags.watchdog, local_checkpoints=flags.local_checkpoints,
        init_from=flags.init_from, start_from=_start_from(flags.start_from),
        rehearsal=Rehearsal.parse(flags.rehearsal) if flags.rehearsal else None, started_at=time.time(),
        skip=_ranges(flags.skip), log=_trackers(flags.log))


def _start_from(text: str) -> str:
    if text:
        start_from.parse(text)
    return text


def _profile(text: str | None) -> tuple[int, int] | None:
    if not text:
        return None
    if not (match := re.fullmatch(r"(\d+):(\d+)", text)) or 0 in (found := (int(match[1]), int(match[2]))):
        raise InputError(f"--profile={text}: expected STEP:N, the first step and how many, as in 10:3")
    return found


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    out = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+):(\d+)", item)
        if not match or int(match[1]) > int(match[2]):
            raise InputError(f"--skip={text}: {item!r} is no range FIRST:LAST, as in 120:129")
        out.append((int(match[1]), int(match[2])))
    return tuple(sorted(out))


def _trackers(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    for name in names:
        if name not in settings_module.TRACKERS:
            raise InputError(f"--log={text}: unknown {name!r}{nearest(name, settings_module.TRACKERS)}")
    trackers.check(names)
    return names

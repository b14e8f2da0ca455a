"""What `jaxmem train` was asked for. No jax."""

import pathlib
from dataclasses import dataclass, replace
from typing import Literal

from jaxmem.hardware import Topology
from jaxmem.plan import Plan
from jaxmem.rehearsal import Rehearsal, shards_of
from jaxmem.runs.folder import Config
from jaxmem.schedules import Schedule
from jaxmem.spec import InputError
from jaxmem.workload import Workload

TRACKERS = ("tensorboard", "wandb", "mlflow")
Snapshot = Literal["sync", "async", "lazy"]
SNAPSHOTS: tuple[Snapshot, ...] = ("sync", "async", "lazy")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The three strings, the flags of the contract, and how this process takes part. `lr` is the peak; `schedule_text`, `keep` and
    `fault` are as typed; `profile` is (first step, how many) or None; seconds end in `_s`."""

    workload: Workload
    topology: Topology
    plan: Plan
    out: pathlib.Path
    data: str
    steps: int
    lr: float
    schedule: Schedule
    schedule_text: str
    warmup: int
    clip: float
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 8
    checkpoint_every: int = 0
    keep: str = "last=2"
    snapshot: Snapshot = "async"
    snapshot_pool: int = 0  # bytes of pinned host memory that lazy snapshots may take, a process; 0: one copy of its shards
    spike: float = 8.0
    max_rollbacks: int = 3
    fault: str = ""
    profile: tuple[int, int] | None = None
    print_hash: bool = False
    elastic: bool = False
    watchdog_s: float = 600.0
    local_checkpoints: str = ""
    init_from: str = ""
    start_from: str = ""  # RUN[@STEP][,field=value], as runs/start_from.py reads it
    rehearsal: Rehearsal | None = None
    skip: tuple[tuple[int, int], ...] = ()  # positions of the data that are left out: (first, last)
    log: tuple[str, ...] = ()
    started_at: float | None = None  # unix seconds: when the command began, before it loaded anything

    @property
    def program_workload(self) -> Workload:
        """What the programs are built for: the incoming rows and those of the rehearsal buffer."""
        return replace(self.workload, batch=self.workload.batch + self.rehearsal.r) if self.rehearsal else self.workload

    def problems(self) -> list[str]:
        out = []
        for name, least in (("steps", 1), ("warmup", 0), ("eval_every", 0), ("eval_batches", 1), ("checkpoint_every", 0), ("seed", 0),
                            ("snapshot_pool", 0), ("max_rollbacks", 0)):
            if getattr(self, name) < least:
                out.append(f"--{name}={getattr(self, name)}: at least {least}")
        if self.seed >= 2**32:
            out.append(f"--seed={self.seed}: less than 2^32")
        for name in ("lr", "clip", "watchdog_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                out.append(f"--{name.removesuffix('_s')}={value:g}: a finite number above 0")
        if not 0 <= self.spike < float("inf"):
            out.append(f"--spike={self.spike:g}: 0 (watch for NaN alone) or more")
        if self.warmup >= self.steps and self.warmup > 0:
            out.append(f"--warmup={self.warmup} leaves nothing of --steps={self.steps}; nearest: --warmup={self.steps - 1}")
        if self.init_from and self.start_from:
            out.append("--init_from and --start_from both say what to begin with; give one")
        if self.schedule.zero + self.warmup >= self.steps and self.schedule.zero:
            out.append(f"--schedule={self.schedule_text}: zero={self.schedule.zero} steps and --warmup={self.warmup} leave nothing of "
                       f"--steps={self.steps}")
        keep = dict(part.partition("=")[::2] for part in self.keep.split(","))
        if keep.get("best", "0").strip() not in ("0", "") and (
                not self.eval_every or not self.checkpoint_every or self.checkpoint_every % self.eval_every):
            out.append(f"--keep={self.keep} keeps the best by evaluation loss, which needs an evaluation at every checkpoint: --eval_every "
                       f"that divides --checkpoint_every={self.checkpoint_every} (now {self.eval_every})")
        if self.profile and self.profile[0] > self.steps:
            out.append(f"--profile={self.profile[0]}:{self.profile[1]}: the run has no step {self.profile[0]}, only {self.steps}")
        if self.snapshot == "lazy" and self.plan.step != "split":
            plan = ",".join(filter(None, (str(self.plan), "step=split")))
            out.append("--snapshot=lazy copies the state while the next gradients are computed, which needs a gradient program that does "
                       f"not donate it: --plan={plan}")
        return out

    def config(self) -> Config:
        """What config.json holds: the three strings and the flags that say what is computed."""
        return {"workload": str(self.workload), "topology": str(self.topology), "plan": str(self.plan), "data": self.data,
                "steps": self.steps, "lr": self.lr, "schedule": self.schedule_text, "warmup": self.warmup, "clip": self.clip,
                "seed": self.seed, "eval_every": self.eval_every, "eval_batches": self.eval_batches, "spike": self.spike,
                "init_from": self.init_from, "skip": [list(pair) for pair in self.skip], "checkpoint_every": self.checkpoint_every,
                "keep": self.keep, "snapshot": self.snapshot, "max_rollbacks": self.max_rollbacks, "fault": self.fault,
                "elastic": self.elastic} | ({"start_from": self.start_from} if self.start_from else {}) | (
                    {"rehearsal": str(self.rehearsal)} if self.rehearsal else {})


def check(settings: Settings) -> None:
    problems = settings.problems()
    if settings.rehearsal:
        problems += settings.rehearsal.problems(batch=settings.workload.batch, shards=shards_of(settings.plan))
    if not problems or not settings.rehearsal:  # the same rows would be complained of twice
        found = settings.plan.problems(settings.program_workload, settings.topology)
        why = (f" (the programs' batch is --batch={settings.workload.batch} and r={settings.rehearsal.r} rows of rehearsal)"
               if settings.rehearsal else "")
        problems += [one + why if one.startswith("batch(") else one for one in found]
    if problems:
        raise InputError("\n".join(problems))

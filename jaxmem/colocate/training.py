"""Training K small runs of one workload and plan: in one program, on parts of the devices, or one after another.

The three ways give each run its own seed, learning rate, clip and order of the data, as `jaxmem train` gives them to one run: run r of
`vmapped` is the run that the same seed makes alone, up to the order of sums; run r of `parts` is it bit for bit.

What a step takes is measured with the data ready on the host and the loss of every step fetched two steps late, as in `jaxmem train`.

R runs, B batch.
"""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import schedules, step
from jaxmem.colocate import parts, vmapped
from jaxmem.colocate.packing import WAYS, Way
from jaxmem.data import Batches, open_for
from jaxmem.data.batches import eval_batches
from jaxmem.data.rows import Data
from jaxmem.hardware import Topology
from jaxmem.optim import transforms
from jaxmem.plan import Plan
from jaxmem.spec import InputError, nearest
from jaxmem.targets.child import memory_of
from jaxmem.workload import Workload

AHEAD = 2  # rounds dispatched before the oldest one's losses are fetched
BLOCK = 8  # rounds whose data is read before their clock starts: read between rounds, devices would work while it stands still


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What may differ between runs of one program."""

    seed: int = 0
    lr: float = 1e-3
    clip: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """losses: of each run, one a step. eval_losses: of each run after the last step, None where it was not asked for.

    step_s: the time in which every run makes one step, the median over blocks of rounds (measure). setup_s: building, compiling and
    making the states, of all of them (measure). memory: the compiler's figures of one program, and how many such programs are resident
    on a device at a time.
    """

    losses: list[list[float]]
    eval_losses: list[float] | None
    step_s: float
    setup_s: float
    memory: dict[str, int] | None


@dataclasses.dataclass
class Lane:
    """Programs with a state of their own: of one run, or of several in one program."""

    programs: step.Programs
    compiled: dict[str, jax.stages.Compiled]
    runs: Sequence[Run]
    stacked: bool
    state: Any = None


def train_many(workload: Workload, plan: Plan, topology: Topology, runs: Sequence[Run], *, how: Way, steps: int, data: str = "synthetic",
               schedule: str = "constant", warmup: int = 0, eval_rows: int = 0) -> Trained:
    """Trains all of `runs` for `steps` steps on the devices that are here; `plan` is of one run. Raises InputError.

    vmapped: see `vmapped.build`. parts: as many parts as runs, dispatched from this process and never waiting for each other.
    one_after_another: each run has the plan's devices, the first of the topology, to itself; compiled once.
    """
    check(plan, runs, how=how, steps=steps, workload=workload)
    train = open_for(workload, data, split="train")
    held_out = open_for(workload, data, split="eval") if eval_rows else None
    losses: dict[int, list[float]] = {i: [] for i in range(len(runs))}
    evals: dict[int, float] = {}
    times, setup_s, memory = [], 0.0, None
    names = ("init", "train", *(("eval",) if eval_rows else ()))
    for wave in waves(workload, plan, topology, runs, how, names):
        setup_s += wave.setup_s
        memory = memory_of(wave.lanes[0].compiled["train"])
        times.append(train_wave(wave, runs, train, workload, steps, schedule, warmup, losses))
        if held_out is not None:
            evaluate(wave, held_out, workload, eval_rows, evals)
    return Trained(losses=[losses[i] for i in range(len(runs))], eval_losses=[evals[i] for i in range(len(runs))] if evals else None,
                   step_s=sum(times), setup_s=setup_s, memory=memory)


def check(plan: Plan, runs: Sequence[Run], *, how: str, steps: int, workload: Workload) -> None:
    if how not in WAYS:
        raise InputError(f"how={how}: expected one of {', '.join(WAYS)}{nearest(how, WAYS)}")
    if not runs or steps < 1:
        raise InputError(f"{len(runs)} runs of {steps} steps: at least 1 of each")
    if plan.step != "fused":
        raise InputError(f"step={plan.step}: many runs train with step=fused, for no snapshot is taken between its halves")
    if how == "vmapped" and workload.optimizer.name == "learned" and workload.optimizer.weights not in (None, "shipped"):
        raise InputError("how=vmapped makes every run's optimizer state itself, and cannot put the weights of a file into it; "
                         "how=parts or how=one_after_another can")


# ---------------------------------------------------------------- lanes

@dataclasses.dataclass(frozen=True, kw_only=True)
class Wave:
    """Lanes that train at the same time, and which runs they hold."""

    lanes: list[Lane]
    members: list[list[int]]
    setup_s: float


def waves(workload: Workload, plan: Plan, topology: Topology, runs: Sequence[Run], how: Way, names: Sequence[str]) -> Iterator[Wave]:
    ready = time.perf_counter()
    devices = jax.devices()[:topology.devices]
    everyone = range(len(runs))
    if how == "vmapped":
        built = vmapped.build(workload, plan, topology, devices, runs=len(runs))
        yield started([Lane(built, compiled(built, names), runs, True)], [list(everyone)], workload, ready)
    elif how == "parts":
        lanes = [Lane(built, compiled(built, names), [run], False) for built, run in
                 zip(parts.programs(workload, plan, topology, len(runs), devices), runs, strict=True)]
        yield started(lanes, [[i] for i in everyone], workload, ready)
    else:
        one = parts.part_of(topology, parts.parts_for(plan, topology))
        built = step.build(workload, plan, one, parts.groups(topology, topology.devices // one.devices, devices)[0])
        programs = compiled(built, names)
        for i in everyone:
            yield started([Lane(built, programs, [runs[i]], False)], [[i]], workload, ready)
            ready = time.perf_counter()


def compiled(built: step.Programs, names: Sequence[str]) -> dict[str, jax.stages.Compiled]:
    return {name: built[name].lower().compile() for name in names}


def started(lanes: list[Lane], members: list[list[int]], workload: Workload, began: float) -> Wave:
    for lane in lanes:
        seeds = np.array([run.seed for run in lane.runs], np.uint32)
        lane.state = lane.compiled["init"](put(seeds, lane, lane.programs["init"].args[0].sharding))
        if not lane.stacked:
            lane.state |= {"opt_state": transforms.with_trained_weights(lane.state["opt_state"], workload.optimizer)}
    jax.block_until_ready([lane.state for lane in lanes])
    return Wave(lanes=lanes, members=members, setup_s=time.perf_counter() - began)


def put(values: np.ndarray, lane: Lane, sharding: NamedSharding) -> jax.Array:
    """[R, ...] onto the lane's devices: as it is where runs are stacked, else the only run's."""
    return jax.device_put(values if lane.stacked else values[0], sharding)


# ---------------------------------------------------------------- steps

def train_wave(wave: Wave, runs: Sequence[Run], data: Data, workload: Workload, steps: int, schedule: str, warmup: int,
               losses: dict[int, list[float]]) -> float:
    """The median seconds of a round, in which every run of the wave makes a step; `losses` are added to."""
    rates = [schedules.learning_rate(schedules.parse(schedule), peak=run.lr, warmup=warmup, steps=steps) for run in runs]
    flying: collections.deque[list[jax.Array]] = collections.deque()
    seconds: list[float] = []

    def settle(left: int) -> None:
        while len(flying) > left:
            for members, values in zip(wave.members, flying.popleft(), strict=True):
                for i, loss in zip(members, np.atleast_1d(np.asarray(values)), strict=True):
                    losses[i].append(float(loss))
    with reading(wave, data, workload) as rows:
        for first in range(1, steps + 1, BLOCK):
            block = range(first, min(first + BLOCK, steps + 1))
            batches = [[rows(members, at - 1) for members in wave.members] for at in block]  # before the clock, with nothing in flight
            begin = time.perf_counter()
            for at, given in zip(block, batches, strict=True):
                flying.append([one_step(lane, members, batch, [rates[i](at) for i in members])
                               for lane, members, batch in zip(wave.lanes, wave.members, given, strict=True)])
                settle(AHEAD)
            settle(0)
            seconds.append((time.perf_counter() - begin) / len(block))
    return statistics.median(seconds[1:] or seconds)  # the first block warms up


def one_step(lane: Lane, members: Sequence[int], batch: dict[str, np.ndarray], rates: Sequence[float]) -> jax.Array:
    hyper = lane.programs["train"].args[2]
    given = {"lr": np.array(rates, np.float32), "clip": np.array([run.clip for run in lane.runs], np.float32)}
    lane.state, metrics = lane.compiled["train"](
        lane.state, {name: put(batch[name], lane, leaf.sharding) for name, leaf in lane.programs.batch.items()},
        {name: put(values, lane, hyper[name].sharding) for name, values in given.items()})
    return metrics["loss"]


@contextlib.contextmanager
def reading(wave: Wave, data: Data, workload: Workload) -> Iterator[Callable[[Sequence[int], int], dict[str, np.ndarray]]]:
    """A function from runs and a position to their batches, {field: [R, B, ...]}, each run's in the order of its own seed."""
    with contextlib.ExitStack() as closing:
        own: dict[int, Batches] = {}
        for lane, members in zip(wave.lanes, wave.members, strict=True):
            shardings = {name: NamedSharding(lane.programs.mesh, P()) for name in lane.programs.batch}
            for i, run in zip(members, lane.runs, strict=True):
                own[i] = closing.enter_context(Batches(data, batch=workload.batch, seed=run.seed, shardings=shardings))

        def rows(members: Sequence[int], position: int) -> dict[str, np.ndarray]:
            found = [own[i].global_rows(position) for i in members]
            return {name: np.stack([one[name] for one in found]) for name in found[0]}
        yield rows


def evaluate(wave: Wave, data: Data, workload: Workload, rows: int, out: dict[int, float]) -> None:
    """Mean loss a token or image over the first `rows` rows that are held out, rounded up to whole batches."""
    for lane, members in zip(wave.lanes, wave.members, strict=True):
        totals: dict[str, np.ndarray] = {}
        host = {name: NamedSharding(lane.programs.mesh, P()) for name in lane.programs.batch}
        for batch in eval_batches(data, workload.batch, host, limit=-(-rows // workload.batch)):
            same = {name: np.broadcast_to(np.asarray(value), (len(members), *value.shape)) for name, value in batch.items()}
            given = {name: put(same[name], lane, leaf.sharding) for name, leaf in lane.programs.batch.items()}
            for name, value in lane.compiled["eval"](lane.state["params"], given).items():
                totals[name] = totals.get(name, np.zeros(len(members))) + np.atleast_1d(np.asarray(value, np.float64))
        means = totals["loss_sum"] / totals["tokens" if "tokens" in totals else "images"]
        out |= dict(zip(members, means.tolist(), strict=True))

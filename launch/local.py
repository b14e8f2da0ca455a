"""N processes of M emulated devices on this machine, under a supervisor that starts them again when one dies.

  python -m launch.local --processes=4 --devices=2 -- --model=decoder-tiny --plan=data=4,fsdp=2 --out=runs/a
  python -m launch.local --processes=4 --devices=2 --elastic --run -- --model=decoder-tiny --plan=data=4,fsdp=2 --out=runs/a

Prints the commands; --run runs them. Process K's output goes to OUT/logs/process.K.log, that of process 0 to the terminal too. With
--elastic a process that failed --lost_after times in a row is counted as lost, and the run goes on without it: on a smaller mesh, with
the same global batch. On a GPU or TPU host, --processes=1 supervises one process that has all of the host's devices.

Exit status: that of jaxmem train; 0 done, 2 bad input, 75 saved on SIGTERM, 77 rollbacks exhausted, and after --max_restarts whatever
the last process ended with (128 and a signal's number for one that was killed).
"""

import sys
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from jaxmem.replan import replan
from jaxmem.runs.settings import Settings
from jaxmem.spec import InputError
from jaxmem.supervise.roster import Rejoin, Roster, parse_losses
from jaxmem.supervise.supervisor import Layout, Patience, free_port, supervise
from launch import command


def define(flags: absl_flags.FlagValues) -> None:
    f: dict[str, Any] = {"flag_values": flags}
    whole, number = absl_flags.DEFINE_integer, absl_flags.DEFINE_float
    whole("processes", 1, "how many processes", lower_bound=1, **f)
    whole("devices", None, "CPU devices that each of them emulates (default: what the run's --topology leaves each)", lower_bound=1, **f)
    absl_flags.DEFINE_boolean("run", False, "run it; else the commands are printed", **f)
    whole("max_restarts", 10, "start again after a failure, so often in all", lower_bound=0, **f)
    number("backoff", 1.0, "seconds before a restart, doubled with each that took no step, up to 60", lower_bound=0.0, **f)
    number("grace", 2.0, "seconds that the other processes have to end by themselves when one failed", lower_bound=0.0, **f)
    absl_flags.DEFINE_boolean("elastic", False, "go on with fewer processes when one keeps failing", **f)
    whole("lost_after", 1, "failures in a row after which a process is counted as lost", lower_bound=1, **f)
    absl_flags.DEFINE_string("rejoin_after", "", "when a lost process is back: after seconds, as in 60, or after a number of attempts, "
                             "as in 2attempts (default: never)", **f)
    absl_flags.DEFINE_string("lose", "", "count processes as lost from an attempt on, for trials: 2@1 is process 2 from the second "
                             "attempt", **f)


def launch(flags: absl_flags.FlagValues, train: list[str]) -> int:
    train, settings = with_topology(train, flags.processes, flags.devices)
    if flags.elastic:
        train = [*train, "--elastic"]
    elif flags.lose or flags.rejoin_after:
        raise InputError("--lose and --rejoin_after have a meaning with --elastic only")
    roster = Roster(processes=flags.processes, lost_after=flags.lost_after if flags.elastic else None,
                    rejoin=Rejoin.parse(flags.rejoin_after), losses=parse_losses(flags.lose, flags.processes))
    layouts = Layouts(settings, flags.processes)
    if not flags.run:
        layout = layouts(tuple(range(flags.processes)), port=12345)
        print("\n".join(command.shown(argv_of(train, number, layout)) + (" &" if number < flags.processes - 1 else "")
                        for number in range(flags.processes)))
        print(f"# {layout.text}; logs in {settings.out}/logs; --run runs this, with a free port and restarts", file=sys.stderr)
        return 0
    patience = Patience(max_restarts=flags.max_restarts, backoff_s=flags.backoff, grace_s=flags.grace)
    return supervise(lambda number, layout: argv_of(train, number, layout), layouts, roster, settings.out, patience)


def with_topology(train: Sequence[str], processes: int, devices: int | None) -> tuple[list[str], Settings]:
    """The run's flags with the topology that the launcher's mean, and the run's settings. Raises `InputError`."""
    train = list(train)
    if devices is not None and "topology" not in command.given(train)[1]:
        train.insert(0, f"--topology=cpu:{processes * devices}")
    settings, given = command.train_settings(train)
    if "out" not in given:
        raise InputError("the run needs a folder, which the logs go to as well: --out=RUN after --")
    if own := {"coordinator", "processes", "process"} & given:
        raise InputError(f"{', '.join(f'--{name}' for name in sorted(own))} of the run are given by launch.local itself")
    topology = settings.topology
    if topology.chip.kind != "cpu":
        if processes > 1 or devices is not None:
            raise InputError(f"--topology={topology}: {processes} processes of emulated devices are of cpu:N; on a host of "
                             f"{topology.chip.kind.upper()}s give --processes=1 and no --devices")
        return train, settings
    if devices is not None and topology.devices != processes * devices:
        raise InputError(f"--topology={topology} has {topology.devices} devices, and --processes={processes} of --devices={devices} are "
                         f"{processes * devices}; leave one of them out")
    if topology.devices % processes:
        raise InputError(f"{topology} cannot be shared by --processes={processes}; nearest: "
                         f"cpu:{max(1, topology.devices // processes) * processes}")
    # The batch may follow from the topology, and has to stay what it is when that shrinks.
    more = {"topology": topology, "batch": settings.workload.batch}
    return [*train, *(f"--{name}={value}" for name, value in more.items() if name not in given)], settings


class Layouts:
    """Who is present -> the layout of an attempt: the plan as given with everybody, another one with fewer."""

    def __init__(self, settings: Settings, processes: int) -> None:
        self._settings, self._processes = settings, processes

    def __call__(self, present: tuple[int, ...], port: int | None = None) -> Layout:
        s = self._settings
        a_process = s.topology.devices // self._processes
        plan, topology = s.plan, s.topology
        if len(present) < self._processes:
            plan, topology = replan(s.plan, s.workload, s.topology, a_process * len(present), devices_per_process=a_process)
        count = topology.devices // a_process
        changes = {} if plan == s.plan else {"topology": str(topology), "plan": str(plan)}
        return Layout(present=present[:count], devices=topology.devices, changes=changes,
                      coordinator=None if count == 1 else f"127.0.0.1:{port or free_port()}",
                      text=f"{count} process{'es' if count > 1 else ''} of {a_process} devices, {topology}, plan {plan or 'of one device'}")


def argv_of(train: Sequence[str], number: int, layout: Layout) -> list[str]:
    """The command of one process; flags that are given twice count as they are given last."""
    argv = [sys.executable, "-m", "jaxmem", "train", *train, *(f"--{name}={value}" for name, value in layout.changes.items())]
    if local := next((word for word in reversed(train) if word.startswith("--local_checkpoints=")), ""):
        argv.append(f"{local}/{layout.present[number]}")  # a disk of its own for each place, whatever number its process has today
    if layout.coordinator is not None:
        argv += [f"--coordinator={layout.coordinator}", f"--processes={len(layout.present)}", f"--process={number}"]
    return argv


def main(words: Sequence[str]) -> int:
    return command.run(__doc__ or "", define, launch, words, "launch.local")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

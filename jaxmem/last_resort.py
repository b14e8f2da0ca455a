"""Ends a process that cannot end itself: stopped, or in a call that never gives the interpreter's lock back.

A script, started by path in a bare interpreter as the child of every process that has a watchdog, in a session of its own so that
what stops or interrupts the parent's group does not reach it. Each line on its standard input, `SECONDS STEP PHASE`, is the
parent's "I shall write again within SECONDS". When it does not, this makes the parent's faulthandler dump the stacks (its handler
is C and needs no lock; a stopped process is continued for it), says so, and sends SIGKILL. It leaves when its parent is gone.
"""

import json
import math
import os
import pathlib
import select
import signal
import sys
import time

LOOK_S = 0.5
# A longer gap between two looks means that this process was itself stopped, and so perhaps the parent: it is no time of the parent's.
LONGEST_GAP_S = 1.0
ANSWER_S = 3.0  # how long after its limit a process has to begin to end itself, before this does it
DUMP_S = 1.5


def watch(parent: int, logs: pathlib.Path, *, process: int, processes: int, attempt: int, dump_signal: int) -> None:
    left_s, said, step, phase = math.inf, math.inf, 0, "start"
    text, last = b"", time.monotonic()
    while True:
        ready, _, _ = select.select([0], [], [], max(0.0, min(left_s, LOOK_S)))
        now = time.monotonic()
        left_s, last = left_s - min(now - last, LONGEST_GAP_S), now
        if os.getppid() != parent:
            return
        if ready:
            more = os.read(0, 1 << 16)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            if lines:
                seconds, number, phase = lines[-1].decode().split(" ")
                said, step = float(seconds), int(number)
                left_s = said
        elif left_s <= 0:
            if processes > 1 or not suspended(parent):
                break
            left_s = ANSWER_S  # Ctrl-Z of a run that nobody waits for is the user's wish; when it goes on, it has so long to answer
    header = (f"\n=== attempt {attempt}, process {process} (pid {parent}) did not answer at step {step} ({phase}), "
              f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}; stacks by its signal handler, then killed\n")
    stacks = logs / f"stacks.{process}.txt"
    append(stacks, header)
    dump(parent, stacks, dump_signal)
    say(f"watchdog: process {process} (pid {parent}) stopped answering at step {step} ({phase}): it is stopped, or in a call that lets "
        f"no other thread run; stacks in {stacks}; killing it\n")
    event = {"kind": "watchdog", "time": time.time(), "attempt": attempt, "step": step, "process": process, "missing": [process]}
    append(logs / "events.jsonl", json.dumps(event) + "\n")
    if os.getppid() == parent:  # not reaped, so the number is still its own
        os.kill(parent, signal.SIGKILL)


def dump(parent: int, stacks: pathlib.Path, dump_signal: int) -> None:
    """Returns when the file has stopped growing, or after DUMP_S."""
    before = grown = size(stacks)
    end = time.monotonic() + DUMP_S
    os.kill(parent, dump_signal)
    os.kill(parent, signal.SIGCONT)
    while time.monotonic() < end and os.getppid() == parent:
        time.sleep(0.2)
        if before < size(stacks) == grown:
            return
        grown = size(stacks)


def suspended(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def size(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def append(path: pathlib.Path, text: str) -> None:
    """As far as the disk lets it: nothing may keep this from its end."""
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(text.encode())
    except OSError:
        pass


def say(line: str) -> None:
    try:
        os.write(2, line.encode())
    except OSError:
        pass


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    watch(given.pop("parent"), pathlib.Path(given.pop("logs")), **given)

"""Does the frame keep what it is given?

An experiment for tests, without jax. What a point does is its setting `does`; each try of it leaves a line in `tries` beside the
records, with the time in which it ran.
"""

import os
import pathlib
import signal
import time

from jaxmem import experiment
from jaxmem.records import Found, Point
from jaxmem.spec import InputError


def grid(flags):
    return [experiment.point(model="decoder-tiny", batch=batch, seq=64, topology="cpu:8", plan="fsdp=*",
                             settings={"does": does, "folder": flags.out}, alone=does == "alone", seeded=does != "unseeded")
            for does in flags.does.split("|") for batch in flags.batch.split("|")]


def run(point: Point) -> Found:
    does, folder = point.settings["does"], pathlib.Path(point.settings["folder"])
    began = time.time()
    if does == "fails":
        raise RuntimeError("the reason\nand more")
    if does == "refuses":
        raise InputError("cannot be used")
    if does == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "leaves":
        os._exit(3)
    if does == "wrong":
        return Found(values={"batch": (1, "measure")})
    if does == "ignores":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if does in ("sleeps", "ignores") and not (folder / "awake").exists():
        (folder / f"asleep-{os.getpid()}").touch()
        time.sleep(60)
    if does in ("alone", "together"):
        time.sleep(0.4)
    with open(folder / "tries", "a") as file:
        file.write(f"{does} {point.seed} {began} {time.time()}\n")
    return Found(backend="none", values={"value": (10.0 + point.seed, "measure"), "unknown": (None, "compile")})


def pages(records):
    return {"page.txt": " ".join(sorted(f"{one['settings']['does']}={one['status']}" for one in records))}


EXPERIMENT = experiment.Experiment(name="fake_question", module="experiments_fake_question", doc=__doc__ or "", grid=grid, pages=pages,
                                   flags={"does": ("works", "what the points do")})

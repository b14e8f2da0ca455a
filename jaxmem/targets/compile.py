"""Compiles programs for a target in child processes: time limits, progress, survival of compiler aborts, a cache of results.

A child that dies is a result (`status: abort`), and the programs it had not reached go to a new child.
"""

import collections
import dataclasses
import gzip
import importlib.util
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.environment import versions
from jaxmem.hardware import Topology
from jaxmem.spec import InputError
from jaxmem.targets import cache
from jaxmem.targets.child import SCHEMA
from jaxmem.targets.devices import environment
from jaxmem.targets.gpu_target_config import REFUSED

Progress = Callable[[str], None]

# seconds on two cores for the train step of an 8B decoder with scanned layers, as far as seen; they grow little with chips or layers
TYPICAL_S = {"tpu": "40-150 s", "gpu": "20-90 s", "cpu": "10-60 s"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to compile and for what. `spec` is what the child needs to build the programs: see `child.build_programs`."""

    spec: Mapping[str, Any]
    programs: tuple[str, ...]
    topology: Topology
    flags: tuple[str, ...]
    salt: str | None = ""  # whatever else the programs depend on; None: unknown, so only the lowered text can be a key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artifact:
    """One compiled program: the compiler's figures, and its text if it compiled."""

    result: dict[str, Any]
    folder: pathlib.Path | None
    cached: bool

    def text(self, name: str) -> str | None:
        """`hlo` or `buffers`; None where there is none."""
        path = self.folder / f"{name}.txt.gz" if self.folder else None
        return gzip.decompress(path.read_bytes()).decode() if path and path.exists() else None


def missing_package(topology: Topology) -> str | None:
    """What to install before anything can be compiled for this target, or why no compiler here takes it."""
    if topology.chip.name in REFUSED:
        return f"{topology.chip.name}: {REFUSED[topology.chip.name]}"
    need = {"tpu": {"libtpu": "libtpu"}, "gpu": {"jax_cuda13_plugin": "jax-cuda13-plugin", "jax_plugins.xla_cuda13": "jax-cuda13-pjrt"},
            "cpu": {}}[topology.chip.kind]
    missing = []
    for module, package in need.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            missing.append(package)
    return (f"compiling for {topology.chip.name} needs {' and '.join(missing)}, not installed here: pip install 'jaxmem[targets]'"
            if missing else None)


def compile_programs(request: Request, *, timeout_s: float = 1800, jobs: int | None = None, use_cache: bool = True,
                     progress: Progress = lambda line: None) -> dict[str, Artifact]:
    """Program name -> artifact, for every program asked for: compiled, refused, out of memory, aborted or out of time."""
    installed = versions()
    spec = {k: v for k, v in request.spec.items() if k != "export"}  # a temporary path
    key = cache.request_key(spec, request.topology.text, list(request.flags), installed, request.salt)
    if use_cache and request.salt is not None and (known := cache.remembered(key)) and set(request.programs) <= set(known):
        return {name: load(known[name], cached=True) for name in request.programs}
    if trouble := cache.unwritable():
        raise InputError(trouble)
    if reason := missing_package(request.topology):
        return {name: failure(name, "refused", reason, request, installed) for name in request.programs}
    jobs = max(1, min(jobs or os.cpu_count() or 1, len(request.programs)))
    waiting: queue.Queue[tuple[str, ...]] = queue.Queue()
    for group in share(request.programs, jobs):
        waiting.put(group)
    done: dict[str, Artifact] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                left = run_child(request, group, installed, done, timeout_s=timeout_s, use_cache=use_cache, progress=progress, stop=errors)
            except BaseException as error:
                errors.append(error)
                return
            if left:
                waiting.put(left)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except KeyboardInterrupt:
        errors.append(KeyboardInterrupt())
        for thread in threads:
            thread.join(5)
        raise
    if errors:
        raise errors[0]
    keys = {name: artifact.folder.name for name, artifact in done.items() if artifact.folder}
    if len(keys) == len(request.programs) and request.salt is not None:
        cache.remember(key, keys)
    return {name: done[name] for name in request.programs}


def share(programs: tuple[str, ...], jobs: int) -> list[tuple[str, ...]]:
    """The train program alone first, for it takes the longest; the rest together or spread over what is left of `jobs`."""
    heavy = [p for p in programs if p in ("train", "gradients")]
    rest = [p for p in programs if p not in heavy]
    if jobs == 1 or not heavy:
        return [tuple(heavy + rest)]
    lanes = max(1, jobs - len(heavy))
    return [(p,) for p in heavy] + [tuple(rest[i::lanes]) for i in range(lanes) if rest[i::lanes]]


def run_child(request: Request, programs: tuple[str, ...], installed: Mapping[str, Any], done: dict[str, Artifact], *, timeout_s: float,
              use_cache: bool, progress: Progress, stop: list) -> tuple[str, ...]:
    """Runs one child over `programs`, fills `done`, returns the programs a dead child had not reached."""
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as scratch:
        folder = pathlib.Path(scratch)
        dump = folder / "dump"
        dump.mkdir()
        backend = backend_name(request.topology)
        ask = {**request.spec, "programs": list(programs), "topology": request.topology.text, "flags": list(request.flags),
               "artifacts": str(cache.artifacts()), "use_cache": use_cache, "versions": dict(installed), "backend": backend,
               "key_salt": json.dumps([request.topology.text, list(request.flags), dict(installed)], sort_keys=True),
               "dump_dir": str(dump) if request.topology.chip.kind == "gpu" else None}
        path = folder / "request.json"
        path.write_text(json.dumps(ask))
        env = {**os.environ, **environment(request.topology, request.flags, ask["dump_dir"])}
        with open(folder / "stderr", "wb") as stderr:
            child = subprocess.Popen([sys.executable, "-m", "jaxmem.targets.child", str(path)], stdout=subprocess.PIPE, stderr=stderr,
                                     env=env, text=True, start_new_session=True)
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert child.stdout is not None
            with child.stdout:
                for line in child.stdout:
                    lines.put(line)
            lines.put(None)
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            return follow(child, lines, folder / "stderr", request, programs, installed, done, timeout_s=timeout_s, progress=progress,
                          stop=stop)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            reader.join(5)


def follow(child: subprocess.Popen, lines: queue.Queue, stderr: pathlib.Path, request: Request, programs: tuple[str, ...],
           installed: Mapping[str, Any], done: dict[str, Artifact], *, timeout_s: float, progress: Progress, stop: list) -> tuple[str, ...]:
    left = collections.deque(programs)
    where = request.topology.text
    phase, began, told = "start", time.monotonic(), time.monotonic()
    progress(f"{left[0]}: starting a compile process for {where}")
    while True:
        if stop:
            return ()
        now = time.monotonic()
        if now - began > timeout_s:
            progress(f"{left[0]}: no result within {timeout_s:.0f} s, stopped")
            done[left[0]] = failure(left[0], "timeout", f"no result within {timeout_s:.0f} s while the child was at: {phase}; --timeout "
                                    "raises the limit", request, installed)
            left.popleft()
            return tuple(left)
        if now - told > 15:
            told = now
            progress(f"{left[0]}: {phase} for {where}, {now - began:.0f} s (an 8B train step usually takes "
                     f"{TYPICAL_S[request.topology.chip.kind]})")
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        if line is None:
            break
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if not isinstance(message, dict):
            continue
        if "error" in message:
            if message.get("kind") == "input":
                raise InputError(message["error"])
            done[left[0]] = failure(left[0], "refused", message["error"], request, installed)
            left.popleft()
            return tuple(left)
        if message.get("phase") == "done":
            name = message["program"]
            done[name] = load(message["key"], cached=message["cached"])
            seconds = done[name].result.get("compile_s")
            progress(f"{name}: {'in the cache' if message['cached'] else done[name].result['status']}"
                     + (f", compiled in {seconds:.1f} s" if seconds and not message["cached"] else ""))
            left.popleft()
            if not left:
                return ()
            phase, began = "waiting", now
        else:
            step = str(message["phase"])
            phase = {"describe": "describing devices", "lower": "tracing and lowering", "compile": "compiling"}.get(step, step)
            began, told = now if step != "describe" else began, now
            if step == "compile":
                progress(f"{message['program']}: compiling for {where} (traced and lowered in {message['lower_s']:.1f} s)")
    code = child.wait()
    if not left:
        return ()
    reason = death(code, stderr)
    progress(f"{left[0]}: the compile process died: {reason}")
    done[left[0]] = failure(left[0], "abort", reason, request, installed)
    left.popleft()
    return tuple(left)


def death(code: int, stderr: pathlib.Path) -> str:
    """Why a child died, from its exit status and the last meaningful thing it printed."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    text = stderr.read_text(errors="replace")
    fatal = re.findall(r"^(?:F\d{4}.*|.*(?:Check failed|Unknown command line flag|Unknown flag|ERROR: ).*|\w*Error: .*)$", text, re.M)
    lines = fatal or [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("@", "0x", "***", "PC:"))]
    last = " ".join(lines[-1].split())[:400] if lines else "it printed nothing"
    hint = "; out of this machine's memory is the usual cause of SIGKILL" if code == -signal.SIGKILL else ""
    return f"{how}: {last}{hint}"


def backend_name(topology: Topology) -> str:
    return {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}[topology.chip.kind] + f" {topology.chip.name}"


def load(key: str, *, cached: bool) -> Artifact:
    folder = cache.artifacts() / key
    return Artifact(result=json.loads((folder / "result.json").read_text()), folder=folder, cached=cached)


def failure(program: str, status: str, reason: str, request: Request, installed: Mapping[str, Any]) -> Artifact:
    """A program that left no artifact. Never cached: the next try may end otherwise."""
    return Artifact(folder=None, cached=False, result={
        "schema": SCHEMA, "program": program, "status": status, "reason": reason, "lower_s": None, "compile_s": None, "memory": None,
        "limit_bytes": None, "callbacks": False, "arguments": [], "outputs": [], "topology": request.topology.text,
        "backend": backend_name(request.topology), "versions": dict(installed), "flags": list(request.flags),
        "mesh": {"axes": {}, "places": None, "ids": None}, "text_sha256": None})

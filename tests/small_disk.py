"""A file system of a few MiB that no other process sees: a tmpfs in a mount namespace of its own, as root or in a user namespace."""

import os
import pathlib
import subprocess

import pytest

SPACE = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]


def on_a_small_disk(folder: pathlib.Path, mib: int, *command: object, after: str = "true", timeout_s: float,
                    **environment: str) -> subprocess.CompletedProcess:
    """Runs `command` where `folder` is a file system of `mib` MiB; it is gone afterwards, but for what the shell line `after` copies.

    Skips where a process may mount nothing (a container without user namespaces): a disk that is full for one process alone needs that.
    """
    mount = f"mount -t tmpfs -o size={mib}m tmpfs {folder}"
    if (tried := subprocess.run([*SPACE, "sh", "-c", mount], capture_output=True, text=True)).returncode:
        pytest.skip(f"this machine lets nobody mount a small file system, not even in a user namespace ({tried.stderr.strip()}); "
                    "tests/checkpoint/test_store.py has saves that fail, and tests/test_faults.py a described file system that is filled")
    return subprocess.run([*SPACE, "sh", "-c", f'{mount} && {{ "$0" "$@"; status=$?; {after}; exit $status; }}', *map(str, command)],
                          capture_output=True, text=True, timeout=timeout_s, env=os.environ | environment)

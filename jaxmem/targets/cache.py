"""What was compiled once is not compiled again. One folder, `$JAXMEM_CACHE` or `~/.cache/jaxmem`:

`artifacts/KEY/` holds a compiled program's figures and text, KEY from the program's text, topology, versions and flags;
`requests/KEY.json` maps a request (the three strings, flags, versions and jaxmem's own source) to the artifacts it led to, so that
asking again needs no tracing.
"""

import functools
import hashlib
import json
import os
import pathlib
import shutil
import time
from typing import Any


def root() -> pathlib.Path:
    """The cache's folder; it need not exist."""
    given = os.environ.get("JAXMEM_CACHE")
    return pathlib.Path(given) if given else pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxmem"


def artifacts() -> pathlib.Path:
    return root() / "artifacts"


@functools.cache
def source_hash() -> str:
    """Of jaxmem's own modules: another version of the step builder is another request."""
    package = pathlib.Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.parts[len(package.parts)] not in ("cli", "report"):  # what only prints does not change a program
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def request_key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([*parts, source_hash()], sort_keys=True).encode()).hexdigest()[:32]


def remembered(key: str) -> dict[str, str] | None:
    """Program name -> artifact folder name of an earlier request, if all are still there."""
    path = root() / "requests" / f"{key}.json"
    try:
        programs = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return programs if all((artifacts() / k / "result.json").exists() for k in programs.values()) else None


def remember(key: str, programs: dict[str, str]) -> None:
    """Adds to what is known of this request: programs may be asked for one by one."""
    path = root() / "requests" / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    programs = {**(remembered(key) or {}), **programs}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(programs))
    temporary.rename(path)


def entries() -> list[dict[str, Any]]:
    """`[{key, program, topology, bytes, age_s, path}]`, newest first."""
    out = []
    for path in artifacts().glob("*/result.json"):
        try:
            result = json.loads(path.read_text())
            size = sum(f.stat().st_size for f in path.parent.iterdir())
            age = time.time() - path.stat().st_mtime
        except (OSError, ValueError):
            continue
        out.append({"key": path.parent.name, "program": result.get("program"), "topology": result.get("topology"), "bytes": size,
                    "age_s": age, "status": result.get("status"), "path": str(path.parent)})
    return sorted(out, key=lambda e: e["age_s"])


def clear(older_than_s: float | None = None) -> int:
    """Removes entries (all, or those older); returns how many. Only folders this module made are touched."""
    removed = 0
    for entry in entries():
        if older_than_s is None or entry["age_s"] > older_than_s:
            shutil.rmtree(entry["path"], ignore_errors=True)
            removed += 1
    if older_than_s is None:
        shutil.rmtree(root() / "requests", ignore_errors=True)
        for leftover in artifacts().glob(".new-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    return removed

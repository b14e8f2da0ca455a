"""What was compiled once is not compiled again. One folder, `$JAXMEM_CACHE` or `~/.cache/jaxmem`:

`artifacts/KEY/` holds a compiled program's figures and text, KEY from the program's text, topology, versions and flags;
`requests/KEY.json` maps a request (the three strings, flags, versions and jaxmem's own source) to the artifacts it led to, so that
asking again needs no tracing.
"""

import functools
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
import zlib
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


def whole(folder: pathlib.Path) -> bool:
    """Whether an artifact is there and undamaged; anything else is as if it had never been compiled."""
    try:
        result = json.loads((folder / "result.json").read_text())
        if not isinstance(result, dict) or not {"status", "memory", "backend", "versions", "arguments", "mesh"} <= set(result):
            return False
        if result["status"] == "ok":
            gzip.decompress((folder / "hlo.txt.gz").read_bytes())
    except (OSError, ValueError, EOFError, zlib.error):
        return False
    return True


def unwritable() -> str | None:
    """Why nothing can be kept in the cache, or None: said before minutes of compiling, not after."""
    try:
        artifacts().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=artifacts()):
            return None
    except OSError as error:
        return f"the cache {root()} cannot be written: {error.strerror or error}; JAXMEM_CACHE names another folder"


def remembered(key: str) -> dict[str, str] | None:
    """Program name -> artifact folder name of an earlier request, if all are still there."""
    path = root() / "requests" / f"{key}.json"
    try:
        programs = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(programs, dict):
        return None
    return programs if all(isinstance(k, str) and whole(artifacts() / k) for k in programs.values()) else None


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
    for folder in artifacts().glob("[!.]*"):
        try:
            size = sum(f.stat().st_size for f in folder.iterdir())
            age = time.time() - folder.stat().st_mtime
            result = json.loads((folder / "result.json").read_text()) if whole(folder) else {"status": "damaged"}
        except (OSError, ValueError):
            continue
        out.append({"key": folder.name, "program": result.get("program"), "topology": result.get("topology"), "bytes": size,
                    "age_s": age, "status": result.get("status"), "path": str(folder)})
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

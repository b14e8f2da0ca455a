"""compiled programs that are kept: list or clear.

  jaxmem cache                         what is kept, newest first
  jaxmem cache clear                   remove all
  jaxmem cache clear --older_than=7    remove what is older than so many days

Removing an entry loses nothing but the time to compile it again.
"""

import json

from absl import flags as absl_flags

from jaxmem.cli.tables import print_table
from jaxmem.report.cells import Column
from jaxmem.report.units import bytes_text
from jaxmem.spec import InputError, nearest
from jaxmem.targets import cache


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_float("older_than", None, "with clear: only entries older than so many days", lower_bound=0.0,
                             flag_values=flags)
    absl_flags.DEFINE_boolean("json", False, "print one JSON object", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    action = words[0] if words else "list"
    if action not in ("list", "clear") or len(words) > 1:
        raise InputError(f"cache {' '.join(words)}: expected list or clear{nearest(action, ('list', 'clear'))}")
    if action == "clear":
        removed = cache.clear(older_than_s=None if flags.older_than is None else flags.older_than * 86400)
        print(json.dumps({"removed": removed}) if flags.json else f"removed {removed} {'entry' if removed == 1 else 'entries'}")
        return 0
    if flags.older_than is not None:
        raise InputError("--older_than belongs to jaxmem cache clear")
    entries = sorted(cache.entries(), key=lambda entry: entry["age_s"])
    if flags.json:
        print(json.dumps({"entries": entries, "bytes": sum(entry["bytes"] for entry in entries)}, indent=1, default=str))
        return 0
    if not entries:
        print("the cache is empty")
        return 0
    print_table([Column(head="key"), Column(head="program", keep="start"), Column(head="topology", keep="start"),
                 Column(head="size", align="right"), Column(head="age", align="right")],
                [[str(entry["key"])[:12], str(entry["program"]), str(entry["topology"]), bytes_text(entry["bytes"]),
                  _age(entry["age_s"])] for entry in entries])
    print(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {bytes_text(sum(entry['bytes'] for entry in entries))}")
    return 0


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

"""The sample checks of `tests/fixtures/checks`, and checks made to break a layout."""

import copy
import json
import pathlib
from typing import Any

FOLDER = pathlib.Path(__file__).parent.parent / "fixtures" / "checks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def sample(name: str) -> dict[str, Any]:
    """A fresh copy of one sample."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def nothing_known() -> dict[str, Any]:
    """A check in which everything that may be null is."""
    check = sample("fits_v5p")
    nullable = """workload plan devices usable_bytes usable_note capacity_bytes peak_bytes headroom_bytes host_bytes worst_program
        unattributed_bytes parameters model_flops step_s tokens_per_s mfu backend wall_s""".split()
    check |= dict.fromkeys(nullable) | {"verdict": "unknown", "versions": {"jax": None}, "sources": {}, "flags": []}
    check |= {"composition": [], "timeline": [], "offload": [{"name": "out_proj", "bytes": None}], "warnings": [], "problems": []}
    for program in check["programs"].values():
        program |= {key: None for key in program if key.endswith("_bytes") or key in ("compile_s", "reason")}
    check["buffers"] = [{"bytes": 1} | dict.fromkeys("padding_bytes shape dtype sharding kind module source".split())]
    check["seconds_by_limit"] = {"math": None, "fsdp_exposed": None, "fsdp_hidden": None}
    check["traffic"] = [{"axis": None, "collective": "all-gather", "count": None, "bytes": None, "exposed_s": None}]
    check["advice"] = [{"change": "zero=3", "peak_bytes": None, "verdict": "unknown", "source": "estimate"}]
    return check


def hostile(text: str) -> dict[str, Any]:
    """The does-not-fit sample with `text` in every place that holds a name or a sentence."""
    check = sample("does_not_fit_v5e")
    check |= {"workload": text, "plan": text, "topology": text, "usable_note": text, "backend": text, "worst_program": text}
    check |= {"versions": {text: text}, "flags": [text], "warnings": [text], "problems": [text]}
    programs = list(check["programs"].values())
    programs[1] |= {"reason": text, "problems": [text]}
    check["programs"] = {text: programs[1], "init": programs[0]}
    check["timeline"][0]["program"] = text
    for entry in (*check["composition"], *check["buffers"]):
        entry["module"] = text
    for buffer in check["buffers"]:
        buffer |= {"dtype": text, "sharding": text, "source": text, "path": text, "name": text, "op_name": text}
    check["traffic"] = [{"axis": text, "collective": text, "count": 3, "bytes": 5, "exposed_s": 0.1, "hidden_s": 0.2}]
    check["offload"] = [{"name": text, "bytes": 7}]
    check |= {"step_s": 1.0, "seconds_by_limit": {"math": 0.9, f"{text}_exposed": 0.1, f"{text}_hidden": 0.2}}
    check["advice"] = [{"change": text, "plan": text, "peak_bytes": 9, "verdict": "fits", "source": "estimate"}]
    check["sources"] |= {text: "estimate"}
    return check


def huge() -> dict[str, Any]:
    """Figures of a model beyond anything that is trained: the widest numbers a table has to hold."""

    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: grown(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [grown(entry) for entry in value]
        return value * 98_765_431 if isinstance(value, int | float) and not isinstance(value, bool) else value

    check = copy.deepcopy(sample("tight_h100"))
    kept = {key: check[key] for key in ("schema", "timeline", "mfu", "buffers")}
    for buffer in kept["buffers"]:
        buffer |= {"bytes": buffer["bytes"] * 98_765_431, "padding_bytes": 123_456_789_012_345, "shape": [405_853_388_800] * 6}
    return grown(check) | kept

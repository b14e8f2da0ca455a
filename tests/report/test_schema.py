"""The schema of the check object, and that the samples are such objects and consistent in themselves."""

import json
import pathlib

import jsonschema
import pytest
from report.samples import NAMES, hostile, huge, nothing_known, sample

import jaxmem
from jaxmem.report.reading import parts, program_sum

SCHEMA = json.loads((pathlib.Path(jaxmem.__path__[0]) / "check.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
# The keys that scripts rely on, as the contract of `check --json` lists them.
CONTRACT = """schema workload topology plan verdict usable_bytes peak_bytes headroom_bytes host_bytes worst_program programs
composition buffers step_s tokens_per_s mfu seconds_by_limit traffic warnings advice sources backend versions""".split()
OF_A_PROGRAM = "argument_bytes output_bytes alias_bytes temp_bytes peak_bytes host_bytes compile_s problems".split()


def test_the_schema_is_one_and_demands_the_contract():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(CONTRACT) <= set(SCHEMA["required"])
    assert set(OF_A_PROGRAM) <= set(SCHEMA["$defs"]["program"]["required"])
    assert SCHEMA["$defs"]["verdict"]["enum"] == ["fits", "tight", "does_not_fit", "unknown"]


def test_every_property_is_described():
    def undescribed(schema, path):
        if "properties" in schema:
            for name, inner in schema["properties"].items():
                resolved = inner if "$ref" not in inner else inner | SCHEMA["$defs"][inner["$ref"].rpartition("/")[2]]
                if "oneOf" not in inner and not resolved.get("description"):
                    yield f"{path}.{name}"
                yield from undescribed(inner, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict):
                yield from undescribed(schema[key], f"{path}.{key}")

    assert not list(undescribed(SCHEMA, "check")) and not list(undescribed(SCHEMA["$defs"]["program"], "program"))


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_valid(name):
    VALIDATOR.validate(sample(name))


def test_made_checks_are_valid():
    for check in (nothing_known(), huge(), hostile("x")):
        VALIDATOR.validate(check)


def spoiled(check, *path, value):
    at = check
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return check


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("extra",), 1),
        (("programs", "train", "extra"), 1),
        (("composition", 0, "extra"), 1),
        (("timeline", 0, "points", 0, "extra"), 1),
        (("peak_bytes",), 1.5),
        (("peak_bytes",), -1),
        (("verdict",), "maybe"),
        (("programs", "train", "status"), "fine"),
        (("composition", 0, "kind"), "weights"),
        (("timeline", 0, "points", 0, "by_kind", "weights"), 1),
        (("sources", "peak_bytes"), "guess"),
        (("seconds_by_limit", "cosmic_rays"), 1.0),
        (("schema",), 2),
        (("mfu",), "57%"),
    ],
)
def test_the_schema_refuses(path, value):
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(spoiled(sample("fits_v5p"), *path, value=value))


@pytest.mark.parametrize("key", CONTRACT)
def test_no_key_of_the_contract_may_be_left_out(key):
    check = sample("fits_v5p")
    del check[key]
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(check)


@pytest.mark.parametrize("name", NAMES)
def test_samples_add_up(name):
    check = sample(name)
    peak, usable = check["peak_bytes"], check["usable_bytes"]
    if peak is not None:
        assert check["headroom_bytes"] == usable - peak
        assert check["programs"][check["worst_program"]]["peak_bytes"] == peak
        assert sum(part.bytes for part in parts(check)) == peak
        assert check["verdict"] == ("does_not_fit" if peak > usable else "tight" if usable - peak < 0.04 * usable else "fits")
    for entry in check["timeline"]:
        sizes = {point["t"]: point["bytes"] for point in entry["points"]}
        assert sizes[entry["peak_t"]] == max(sizes.values()) == (peak if entry["program"] == "train" else max(sizes.values()))
        assert all(sum(point["by_kind"].values()) <= point["bytes"] for point in entry["points"])
    if check["step_s"]:
        in_the_way = sum(value or 0 for key, value in check["seconds_by_limit"].items() if not key.endswith("_hidden"))
        assert in_the_way == pytest.approx(check["step_s"], rel=1e-3)
    assert any("invented" in warning for warning in check["warnings"])


def test_donated_buffers_count_once():
    program = {"argument_bytes": 100, "output_bytes": 101, "alias_bytes": 99, "temp_bytes": 7}
    assert program_sum(program) == 109
    assert program_sum(program | {"alias_bytes": 0}) == 208
    assert program_sum(program | {"temp_bytes": None}) is None

"""The difference of two checks, against changes made by hand."""

import copy

import pytest
from report.samples import NAMES, hostile, huge, nothing_known, sample
from report.test_terminal import LONG, widths

from jaxmem.report.diff import diff, render
from jaxmem.spec import InputError


def changed_pair():
    a = sample("fits_v5p")
    b = copy.deepcopy(a)
    b["plan"], b["topology"] = "fsdp=32,tensor=2,remat=block", "v5p-256"
    b["peak_bytes"] += 1024**3
    b["headroom_bytes"] -= 1024**3
    b["programs"]["train"]["peak_bytes"] += 1024**3
    b["programs"]["eval"] |= {"status": "timeout", "peak_bytes": None}
    next(part for part in b["composition"] if part["kind"] == "logits")["bytes"] += 1024**3
    b["composition"].append({"kind": "collective", "module": "head", "bytes": 77})
    b["seconds_by_limit"] |= {"math": 1.188, "tensor_exposed": 0.4}
    b["traffic"][0]["bytes"] += 5
    return a, b


def test_what_changed_and_nothing_else():
    a, b = changed_pair()
    found = diff(a, b)
    assert found["verdict"] == {"a": "fits", "b": "fits"} and found["warnings"] == []
    assert found["strings"] == [
        {"name": "plan", "field": "fsdp", "a": "64", "b": "32"},
        {"name": "plan", "field": "tensor", "a": None, "b": "2"},
        {"name": "topology", "field": None, "a": "v5p-128", "b": "v5p-256"},
    ]
    assert {entry["name"]: entry["change"] for entry in found["figures"]} == {"peak_bytes": 1024**3, "headroom_bytes": -(1024**3)}
    assert [(entry["program"], entry["name"], entry["change"]) for entry in found["programs"]] == [
        ("train", "peak_bytes", 1024**3),
        ("eval", "status", None),
        ("eval", "peak_bytes", None),
    ]
    assert [(entry["kind"], entry["module"], entry["change"]) for entry in found["composition"]] == [
        ("logits", "head", 1024**3),
        ("collective", "head", 77),
    ]
    assert [(entry["limit"], entry["part"], round(entry["change"], 9)) for entry in found["seconds"]] == [
        ("tensor", "exposed", 0.4),
        ("math", "exposed", -0.1),
    ]
    assert [(entry["axis"], entry["collective"], entry["name"], entry["change"]) for entry in found["traffic"]] == [
        ("fsdp", "all-gather", "bytes", 5)
    ]


def test_equal_checks():
    found = diff(sample("fits_v5p"), sample("fits_v5p"))
    assert not any(found[key] for key in ("warnings", "strings", "figures", "programs", "composition", "seconds", "traffic"))
    assert render(found) == "Verdict: Fits\nnothing differs\n"


def test_what_is_not_known_is_not_a_change_to_zero():
    found = diff(sample("fits_v5p"), sample("unknown_abort_v6e"))
    assert all(entry["b"] is None and entry["change"] is None for key in ("composition", "seconds", "traffic") for entry in found[key])
    lines = [line for line in render(found).split("\n") if line.startswith(("peak_bytes", "step_s", "math exposed"))]
    assert len(lines) == 3 and all(line.split()[-2:] == ["—", "—"] for line in lines)


def test_other_backends_versions_flags_and_sources_are_warned_of():
    a, b = changed_pair()
    b |= {"backend": "cuda h100", "flags": [*b["flags"][1:], "--new=1"]}
    b["versions"] |= {"jax": "9.9", "extra": "1"}
    b["sources"]["step_s"] = "measure"
    assert diff(a, b)["warnings"] == [
        "the backends differ: tpu v5p and cuda h100",
        "the versions of jax differ: 0.0.0+sample and 9.9",
        "the versions of extra differ: — and 1",
        "the compiler flags differ; only a: --xla_tpu_enable_async_collective_fusion=true; only b: --new=1",
        "step_s is by estimate in a and by measure in b",
    ]


@pytest.mark.parametrize(("one", "two"), [(1, 2), (2, 1), (2, 2), (None, 1)])
def test_other_schema_numbers_are_refused(one, two):
    a, b = sample("fits_v5p"), sample("fits_v5p")
    a["schema"], b["schema"] = one, two
    with pytest.raises(InputError, match=rf"schema {one} and schema {two}: .* schema 1 only"):
        diff(a, b)


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("b", [*map(sample, NAMES), nothing_known(), hostile(LONG), huge()], ids=[*NAMES, "nothing", "long", "huge"])
def test_every_line_fits(b, width):
    for found in (diff(sample("does_not_fit_v5e"), b), diff(b, sample("fits_v5p"))):
        assert max(widths(render(found, width=width, color=False))) <= width


def test_text():
    text = render(diff(*changed_pair()), color=False)
    assert "plan fsdp" in text and "Verdict: Fits" in text
    row = next(line for line in text.split("\n") if line.startswith("peak_bytes"))
    assert row.split() == ["peak_bytes", "9.81", "GiB", "10.81", "GiB", "+1.00", "GiB", "(+10.2%)"]
    row = next(line for line in text.split("\n") if line.startswith("math exposed"))
    assert row.split() == ["math", "exposed", "1.288", "s", "1.188", "s", "-0.100", "s", "(-7.8%)"]
    assert "eval status" in text and "timeout" in text

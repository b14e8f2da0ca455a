"""The palette: kinds can be told apart in both schemes and by colour-blind readers, and words on them can be read."""

import itertools
import json
import pathlib

import pytest
from report.colours import contrast, distance, lab

import jaxmem
from jaxmem.report.html import ink_on
from jaxmem.report.kinds import KINDS, UNATTRIBUTED, kind_of

EVERY = [*KINDS.values(), UNATTRIBUTED]
LARGE = "params opt_state gradients saved recomputed activations logits collective workspace padding".split()


def test_kinds_are_those_of_the_schema():
    schema = json.loads((pathlib.Path(jaxmem.__path__[0]) / "check.schema.json").read_text(encoding="utf-8"))
    assert set(KINDS) == set(schema["$defs"]["kind"]["enum"])
    assert kind_of(None) is kind_of("never heard of") is UNATTRIBUTED


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_kinds_can_be_told_apart_by_everyone(scheme):
    for a, b in itertools.combinations(EVERY, 2):
        least = 18 if a.name in LARGE and b.name in LARGE else 12  # a just noticeable difference is about 2.3
        assert distance(getattr(a, scheme), getattr(b, scheme)) >= least, (scheme, a.name, b.name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_on_a_kind_can_be_read(scheme):
    for kind in EVERY:
        fill = getattr(kind, scheme)
        assert contrast(ink_on(fill), fill) >= 4.5, (scheme, kind.name)


def test_the_arithmetic_of_these_tests():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert lab("#ffffff", "normal") == pytest.approx((100, 0, 0), abs=0.05)
    assert lab("#ff0000", "normal") == pytest.approx((53.24, 80.09, 67.20), abs=0.05)  # the published CIELAB of sRGB red
    red, green = "#c44601", "#5a7a00"  # far apart, but not for deuteranopes
    assert distance(red, green) < 0.5 * max(abs(a - b) for a, b in zip(lab(red, "normal"), lab(green, "normal"), strict=True))

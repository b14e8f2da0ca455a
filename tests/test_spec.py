"""One line of text <-> a flat dataclass, and what a mistake in it is answered with."""

import dataclasses
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxmem import spec
from jaxmem.spec import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cake:
    layers: int = 3
    sugar_kg: float = 0.25
    icing: Literal["none", "lemon", "chocolate"] = "none"
    tiers: Literal[1, 2, 3] = 1
    vegan: bool = False
    name: str = "plain"
    candles: int | None = None
    fruit: tuple[str, ...] = ()


CAKES = {"plain": Cake(), "wedding": Cake(layers=9, tiers=3, icing="lemon"), "birthday": Cake(candles=8)}


def test_parse():
    cake = spec.parse(Cake, " layers=4, sugar_kg = 0.5 ,icing=lemon,tiers=2,vegan=true,candles=none,fruit=fig+plum,", what="cake")
    assert cake == Cake(layers=4, sugar_kg=0.5, icing="lemon", tiers=2, vegan=True, candles=None, fruit=("fig", "plum"))
    assert type(cake.tiers) is int
    assert spec.parse(Cake, "", what="cake") == Cake()


def test_preset_and_changes():
    assert spec.parse_preset(CAKES, "wedding,layers=12", what="cake") == Cake(layers=12, tiers=3, icing="lemon")
    assert spec.parse_preset(CAKES, "birthday,candles=none", what="cake") == Cake()


@pytest.mark.parametrize(("text", "message"), [
    ("laiers=4", "cake: unknown field 'laiers'; did you mean layers"),
    ("layers", "cake: field 'layers' needs a value, as in layers=..."),
    ("layers=", "cake: field 'layers' needs a value, as in layers=..."),
    ("layers=4,layers=5", "cake: field 'layers' is given twice"),
    ("layers=4.5", "cake: layers=4.5: expected a whole number"),
    ("layers=many", "cake: layers=many: expected a whole number"),
    ("layers=none", "cake: layers=none: expected a whole number"),
    ("candles=some", "cake: candles=some: expected a whole number"),
    ("sugar_kg=sweet", "cake: sugar_kg=sweet: expected a number"),
    ("icing=lemmon", "cake: icing=lemmon: expected none|lemon|chocolate; did you mean lemon?"),
    ("tiers=4", "cake: tiers=4: expected 1|2|3"),
    ("vegan=maybe", "cake: vegan=maybe: expected true or false"),
])
def test_mistakes_are_named_with_what_would_work(text, message):
    with pytest.raises(InputError) as caught:
        spec.parse(Cake, text, what="cake")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["sugar_kg=nan", "sugar_kg=inf", "sugar_kg=-inf"])
def test_numbers_are_finite(text):
    with pytest.raises(InputError, match="expected a finite number"):
        spec.parse(Cake, text, what="cake")


@pytest.mark.parametrize(("text", "message"), [
    ("weding", "unknown cake 'weding'; did you mean wedding?"),
    ("Wedding,layers=3", "unknown cake 'Wedding'; did you mean wedding?"),
    ("layers=4", "cake 'layers=4': begins with a name"),
    ("", "cake '': begins with a name; known: birthday, plain, wedding"),
    ("zzz", "unknown cake 'zzz'; known: birthday, plain, wedding"),
    ("wedding,layer=3", "cake wedding: unknown field 'layer'; did you mean layers?"),
])
def test_presets_that_do_not_exist(text, message):
    with pytest.raises(InputError) as caught:
        spec.parse_preset(CAKES, text, what="cake")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("dash", "‐‑‒–—―−-")
def test_typographic_dashes_are_dashes(dash):
    presets = {"llama3-8b": Cake()}
    assert spec.parse_preset(presets, f"llama3{dash}8b,sugar_kg=1e{dash}3", what="cake") == Cake(sugar_kg=0.001)


def test_nearest_names_at_most_three_and_no_long_list():
    assert spec.nearest("layrs", ["layers", "layer", "players", "sayers", "icing"]).count(" or ") == 2
    assert spec.nearest("layrs", ["icing", "layers"]) == "; did you mean layers?"
    assert spec.nearest("Layer", ["layer"]) == "; did you mean layer?"
    assert spec.nearest("x", [f"name{i:02}" for i in range(41)]) == ""
    assert spec.nearest("x", []) == ""


words = st.text("abcdefgh_.0123456789", min_size=1, max_size=8)
cakes = st.builds(
    Cake, layers=st.integers(-10**9, 10**9), sugar_kg=st.floats(allow_nan=False, allow_infinity=False),
    icing=st.sampled_from(["none", "lemon", "chocolate"]), tiers=st.sampled_from([1, 2, 3]), vegan=st.booleans(), name=words,
    candles=st.none() | st.integers(0, 200), fruit=st.lists(words, max_size=3).map(tuple))


@given(cakes)
def test_what_is_printed_parses_back(cake):
    text = ",".join(["wedding", *spec.differences(cake, CAKES["wedding"])])
    assert spec.parse_preset(CAKES, text, what="cake") == cake


def test_differences_are_in_field_order_and_only_what_differs():
    cake = Cake(fruit=("fig", "plum"), layers=4, sugar_kg=2.0)
    assert spec.differences(cake, Cake()) == ["layers=4", "sugar_kg=2", "fruit=fig+plum"]
    assert spec.differences(Cake(), Cake()) == []


def test_alternatives_are_every_combination_in_order():
    assert spec.alternatives("remat=none|block,fsdp=8,zero=1|3") == [
        "remat=none,fsdp=8,zero=1", "remat=none,fsdp=8,zero=3", "remat=block,fsdp=8,zero=1", "remat=block,fsdp=8,zero=3"]
    assert spec.alternatives("gpt2|llama3-8b,layers=2") == ["gpt2,layers=2", "llama3-8b,layers=2"]
    assert spec.alternatives("fsdp=8") == ["fsdp=8"]

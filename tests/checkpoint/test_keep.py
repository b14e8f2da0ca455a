import math

import pytest

from jaxmem.checkpoint.keep import Keep
from jaxmem.spec import InputError


def test_latest_best_and_every():
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 2.5, 60: math.nan}
    assert Keep(last=1).kept(losses) == {60}
    assert Keep(last=2).kept(losses) == {50, 60}
    assert Keep(last=1, best=2).kept(losses) == {60, 20, 30}
    assert Keep(last=1, every=20).kept(losses) == {20, 40, 60}
    assert Keep(last=9).kept(losses) == set(losses)
    assert Keep(last=1, best=1).kept({1: 2.0, 5: 2.0}) == {5}
    assert Keep().kept({}) == set()


def test_text():
    assert Keep.parse("3") == Keep(last=3)
    assert Keep.parse("last=2,best=1,every=100") == Keep(last=2, best=1, every=100)
    assert Keep.parse(str(Keep(best=3))) == Keep(best=3)
    for text, part in (("lst=2", "last"), ("last=0", "at least 1"), ("best=-1", "at least 0")):
        with pytest.raises(InputError, match=part):
            Keep.parse(text)

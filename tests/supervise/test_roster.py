"""Who is counted as lost, and who is back."""

import pytest

from jaxmem.spec import InputError
from jaxmem.supervise.roster import Rejoin, Roster, parse_losses


def test_failures_in_a_row_lose_a_process():
    roster = Roster(processes=4, lost_after=2)
    assert roster.failed([1], 0, 0.0) == ()
    assert roster.failed([2], 1, 1.0) == ()  # not process 1 again: its row is broken
    assert roster.failed([1], 2, 2.0) == ()
    assert roster.failed([1], 3, 3.0) == (1,)
    assert roster.present == (0, 2, 3)
    assert roster.failed([], 4, 4.0) == ()
    assert roster.begin(100, 1e9) == ()  # never back
    assert Roster(processes=2, lost_after=None).failed([0], 0, 0.0) == ()


def test_back_after_seconds():
    roster = Roster(processes=3, lost_after=1, rejoin=Rejoin.parse("10"))
    assert roster.rejoin_at() is None
    assert roster.failed([2], 0, 100.0) == (2,)
    assert roster.failed([0], 1, 105.0) == (0,)
    assert roster.rejoin_at() == 110.0
    assert roster.begin(2, 109.0) == ()
    assert roster.begin(3, 110.0) == (2,)
    assert (roster.present, roster.lost, roster.rejoin_at()) == ((1, 2), (0,), 115.0)
    assert roster.failed([2], 3, 111.0) == (2,)


def test_back_after_attempts():
    roster = Roster(processes=3, lost_after=1, rejoin=Rejoin.parse("2attempts"))
    roster.failed([2], 0, 0.0)
    assert roster.begin(1, 0.0) == roster.begin(2, 1e9) == ()
    assert roster.rejoin_at() is None
    assert roster.begin(3, 0.0) == (2,)


def test_losses_on_purpose_happen_once():
    roster = Roster(processes=3, lost_after=1, rejoin=Rejoin.parse("1attempt"), losses=parse_losses("1@2, 0@3", 3))
    seen = []
    for attempt in range(5):
        back = roster.begin(attempt, float(attempt))
        seen.append((roster.present, back))
    assert seen == [((0, 1, 2), ()), ((0, 1, 2), ()), ((0, 2), ()), ((1, 2), (1,)), ((0, 1, 2), (0,))]


@pytest.mark.parametrize(("parse", "text"), [(Rejoin.parse, "soon"), (Rejoin.parse, "0attempts"), (Rejoin.parse, "-1"),
                                             (lambda text: parse_losses(text, 2), "2@0"), (lambda text: parse_losses(text, 2), "1")])
def test_what_is_not_understood(parse, text):
    with pytest.raises(InputError, match=text):
        parse(text)

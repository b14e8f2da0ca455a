import math
import random

from jaxmem.guard import PATIENCE, Guard


def test_nan_at_once_in_loss_or_gradients():
    assert Guard(0.0).problem(math.nan, 1.0)
    assert Guard(0.0).problem(1.0, math.inf)
    assert Guard(0.0).problem(1.0, 1.0) is None


def test_a_spike_that_lasts():
    draw = random.Random(0)
    guard = Guard(8.0)
    for _ in range(60):
        assert guard.problem(2.0 + draw.gauss(0, 0.05), 1.0) is None
    assert guard.problem(3.0, 1.0) is None  # one is a hard batch
    assert guard.problem(2.0, 1.0) is None
    answers = [guard.problem(3.0, 1.0) for _ in range(PATIENCE)]
    assert answers[:-1] == [None] * (PATIENCE - 1) and "deviations above" in answers[-1]


def test_a_slow_rise_and_the_beginning_are_no_spikes():
    guard = Guard(8.0)
    assert all(guard.problem(10.0 - 0.5 * i, 1.0) is None for i in range(10))
    guard = Guard(8.0)
    assert all(guard.problem(2.0 + 0.002 * i, 1.0) is None for i in range(300))


def test_what_a_checkpoint_carries_decides_alike():
    draw = random.Random(1)
    a = Guard(6.0)
    for _ in range(70):
        a.problem(2.0 + draw.gauss(0, 0.1), 1.0)
    a.problem(9.0, 1.0)
    b = Guard(6.0, a.recent, a.high)
    assert (a.problem(9.0, 1.0) is None) == (b.problem(9.0, 1.0) is None) is False

"""Goodput of logs whose every second is known."""

import math

import pytest
from runs.hand_made import event, killed_and_resumed, phase, start, train

from jaxmem.runs.goodput import Goodput, attempts, goodput
from jaxmem.runs.reading import Metrics


def account(metrics, events) -> Goodput:
    found = goodput(events, Metrics.of(metrics))
    if found.total_s is not None:
        assert math.fsum(found.parts().values()) == pytest.approx(found.total_s, abs=1e-9)
    return found


def rounded(found: Goodput) -> dict[str, float]:
    """The parts that are not 0, to the microsecond."""
    return {name: round(value, 6) for name, value in found.parts().items() if value and abs(value) > 1e-7}


def test_a_run_that_was_killed_and_resumed():
    found = account(*killed_and_resumed())
    # 1014 is the last dropped line, 1020 the begin of the second compile.
    assert rounded(found) == {
        "productive": 10.0,
        "compile": 8.0,
        "restore": 4.0,
        "data": 0.5,
        "checkpoint": 2.0,
        "eval": 4.0,
        "lost_work": 2.0,
        "down": 6.0,
        "unaccounted": 0.5,  # from the last checkpoint to the end
    }
    assert found.total_s == 37.0
    assert found.fraction == pytest.approx(10 / 37)
    assert (found.starts, found.set_back_s) == (2, 0.0)


def test_dropped_work_of_unknown_time_leaves_less_of_down():
    metrics, events = killed_and_resumed()
    for entry in events:
        entry.pop("last_time", None)
    # The last sign of life is now the commit at 1012.5, 7.5 s before the next compile. Of the 37 s the other parts are 30.5 s.
    found = account(metrics, events)
    assert (found.lost_work_s, found.down_s, found.unaccounted_s) == (2.0, 6.5, pytest.approx(0.0))


def test_killed_without_an_end_and_not_started_again():
    metrics, events = killed_and_resumed()
    found = account([*metrics[:4], train(5, 1013), train(6, 1014)], events[:7])
    assert found.total_s == 14.0  # to the last line: 1014
    assert rounded(found) == {"productive": 6.0, "compile": 5.0, "restore": 2.0, "checkpoint": 1.0}
    assert found.fraction == pytest.approx(6 / 14)


def test_a_run_that_is_alive_is_counted_up_to_its_last_record():
    events = [phase("compile", 105, 5), start(106)]
    assert account([], events).total_s == 6.0
    assert rounded(account([], events)) == {"compile": 5.0, "down": 1.0}
    found = account([train(1, 107), train(2, 108)], events)
    assert found.total_s == 8.0 and found.fraction == 0.25
    # Compiling still: no start yet.
    assert rounded(account([], events[:1])) == {"compile": 5.0}


def test_killed_while_compiling_between_two_starts():
    """The attempt that never started has the number of the next; the hour that nothing ran is down, its compile is compile."""
    events = [
        phase("compile", 105, 5),
        start(105),
        event("end", 107, step=2, status="sigterm"),
        phase("compile", 120, 10, 1),  # 110 to 120, killed
        phase("compile", 3730, 10, 1),  # 3720 to 3730
        start(3730, 1, 2),
        event("end", 3731, 1, step=3, status="done"),
    ]
    found = account([train(1, 106), train(2, 107), train(3, 3731)], events)
    assert found.total_s == 3631.0
    assert rounded(found) == {"productive": 3.0, "compile": 25.0, "down": 3 + 3600.0}


def test_a_rollback_inside_an_attempt():
    events = [
        start(100),
        phase("drain", 106, 0.25),
        phase("restore", 108, 1.75),
        event("rollback", 108, step=6, to=3, skip=[3, 5], reason="loss is not finite"),
        event("dropped", 108, **{"from": 4, "to": 5, "steps": 2, "seconds": 2.0}),
        event("end", 111, step=6, status="done"),
    ]
    metrics = [train(step, 100 + step) for step in (1, 2, 3)] + [train(step, 105 + step) for step in (4, 5, 6)]
    found = account(metrics, events)
    # Step 6, the bad one, was done from 105 to 106 and has no line: a second that nothing accounts for.
    assert rounded(found) == {"productive": 6.0, "restore": 1.75, "waits": 0.25, "lost_work": 2.0, "unaccounted": 1.0}
    assert found.total_s == 11.0 and found.starts == 1


def test_what_a_rollback_dropped_is_no_life_of_the_attempt_before():
    """Killed at 104 after step 4 with nothing to drop (its checkpoint is of step 4); the next one rolls back at 205."""
    events = [
        start(100),
        start(200, 1, 4),
        event("rollback", 205, 1, step=9, to=4, skip=[4, 8]),
        event("dropped", 205, 1, **{"from": 5, "to": 8, "steps": 4, "seconds": 4.0, "last_time": 204.0}),
        event("end", 206, 1, status="done"),
    ]
    found = account([*(train(step, 100 + step) for step in range(1, 5)), train(5, 206)], events)
    assert rounded(found) == {"productive": 5.0, "lost_work": 4.0, "down": 96.0, "unaccounted": 1.0}


def test_lines_belong_to_the_attempt_that_wrote_them():
    events = [
        start(0, 0),
        start(100, 1, 10),
        event("rollback", 140, 1, to=12),
        start(200, 2, 8),  # the checkpoints of steps 10 and 12 were damaged
        start(300, 3, 20),
    ]
    metrics = Metrics.of([train(step, float(step)) for step in range(1, 31)])
    found = attempts(events, metrics)
    assert [attempt.last_step for attempt in found] == [8, None, 20, 30]
    assert [len(attempt.times) for attempt in found] == [8, 0, 12, 10]


def test_a_clock_that_goes_backwards():
    """Set back by 500 s while the first attempt runs, and by another 1000 s before the second one starts."""
    events = [
        start(10_000),
        event("epoch", 10_010, epoch=0),
        event("epoch", 9_515, epoch=1),
        event("end", 9_520, status="sigterm"),
        start(8_520, 1, 20),
        event("end", 8_530, 1, status="done"),
    ]
    metrics = [train(step, 10_000 + step if step <= 10 else 9_500 + step) for step in range(1, 21)]
    metrics += [train(step, 8_500 + step) for step in range(21, 31)]
    found = account(metrics, events)
    # The lines show 19 s of the first attempt, of 20 that passed: one fell into the jump.
    assert found.productive_s == 30.0 and found.total_s == 29.0
    assert found.down_s == 0.0 and found.unaccounted_s == -1.0
    assert found.set_back_s == pytest.approx(499 + 1000)


def test_events_a_little_out_of_order_are_no_time_and_no_jump():
    events = [start(100), event("checkpoint", 110, step=1), event("commit", 104, step=1), event("end", 120, status="done")]
    found = account([], events)
    assert (found.total_s, found.set_back_s) == (20.0, 0.0)


def test_what_the_supervisor_writes_is_no_life_of_the_run():
    events = [start(100), event("supervisor", 160, text="process 0 ended with status -9"), start(170, 1), event("end", 171, 1)]
    found = account([train(1, 105, step_s=5.0)], events)
    assert found.starts == 2
    # Step 1's line is the second attempt's by its step, as that began from nothing; so the first has no sign of life after 100.
    assert found.down_s == 70.0


def test_overlapping_measurements_show_as_less_than_nothing():
    events = [start(100), phase("data", 104, 3), event("end", 110, status="done")]
    found = account([train(1, 110, step_s=10.0)], events)
    assert found.total_s == 10.0 and found.unaccounted_s == pytest.approx(-3.0)


def test_what_is_not_known_is_none():
    assert account([], []) == Goodput()
    assert account([], []).fraction is None
    found = account([train(1, 5.0, step_s=2.0)], [])
    assert found.productive_s == 2.0 and found.total_s is None and found.fraction is None
    assert account([], [start(100)]).fraction is None  # no time has passed
    assert account([], [start(None)]).total_s is None


@pytest.mark.parametrize("odd", [None, "x", -5, math.nan, math.inf, 10**400, [1], {"a": 1}, True])
def test_odd_values_count_as_nothing(odd):
    events = [
        phase("compile", 101, 1),
        start(101),
        phase("compile", 102, odd),
        phase("eval", None if odd == -5 else odd, 1.0),
        event("dropped", 102, **{"from": odd, "to": odd, "seconds": odd}),
        event("rollback", 102, to=odd),
        event("phase", 103, name=odd, seconds=1.0),
        event("end", 111, status=odd),
    ]
    found = account([train(1, 102), train(2, 103, step_s=odd)], events)
    assert found.productive_s == 1.0 and found.compile_s == 1.0 and found.lost_work_s == 0.0 and found.waits_s == 1.0
    assert found.eval_s == 1.0 and found.total_s == 11.0

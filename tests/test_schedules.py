"""Against optax's schedules, which are of another make."""

import numpy as np
import optax
import pytest

from jaxmem.schedules import learning_rate, parse
from jaxmem.spec import InputError

STEPS, WARMUP, PEAK = 100, 10, 0.3
# Ibrahim et al.: warm-up, cooldown of 30 steps to 0.4 x peak, constant until step 75, then geometrically to 0.1 x peak
INFINITE = optax.join_schedules([
    optax.linear_schedule(0, PEAK, WARMUP), optax.cosine_decay_schedule(PEAK, 30, alpha=0.4), optax.constant_schedule(0.4 * PEAK),
    optax.exponential_decay(0.4 * PEAK, 25, 0.25)], [WARMUP, WARMUP + 30, 75])


@pytest.mark.parametrize("text, reference", [
    ("constant", optax.warmup_constant_schedule(0.0, PEAK, WARMUP)),
    ("cosine", optax.warmup_cosine_decay_schedule(0.0, PEAK, WARMUP, STEPS)),
    ("cosine,floor=0.1", optax.warmup_cosine_decay_schedule(0.0, PEAK, WARMUP, STEPS, end_value=0.1 * PEAK)),
    ("linear,floor=0.5", optax.join_schedules([optax.linear_schedule(0, PEAK, WARMUP),
                                               optax.linear_schedule(PEAK, 0.5 * PEAK, STEPS - WARMUP)], [WARMUP])),
    ("wsd,decay=0.2", optax.join_schedules([optax.linear_schedule(0, PEAK, WARMUP), optax.constant_schedule(PEAK),
                                            optax.linear_schedule(PEAK, 0.0, 20)], [WARMUP, 80])),
    ("infinite,level=0.4,cooldown=30,decay=0.25,floor=0.1", INFINITE),
    ("rsqrt", lambda step: PEAK * np.minimum(step / WARMUP, np.sqrt(WARMUP / np.maximum(step, WARMUP)))),
])
def test_against_optax(text, reference):
    rate = learning_rate(parse(text), peak=PEAK, warmup=WARMUP, steps=STEPS)
    for step in range(1, STEPS + 1):
        assert rate(step) == pytest.approx(float(reference(step)), rel=1e-5, abs=1e-8), step


def test_without_warm_up_and_wrong_text():
    assert learning_rate(parse("constant"), peak=1.0, warmup=0, steps=5)(1) == 1.0
    for text, part in (("cosin", "cosine"), ("cosine,flor=0", "floor"), ("wsd,decay=0", "above 0"), ("cosine,floor=2", "parts of 1"),
                       ("infinite,floor=0", "0 < floor <= level"), ("infinite,level=0.05", "level=0.05 to floor=0.1"),
                       ("constant,zero=-1", "zero=-1")):
        with pytest.raises(InputError, match=part):
            parse(text)


def test_a_run_that_goes_on_has_the_rest_of_the_curve():
    """Forty steps and then sixty more are the hundred, for every schedule that goes on; without a decay the first forty are, too."""
    for text, first in (("infinite,level=0.4,cooldown=30,decay=0.25,floor=0.1", "infinite,level=0.4,cooldown=30,decay=0,floor=0.1"),
                        ("constant", "constant"), ("rsqrt", "rsqrt"), ("wsd,decay=0.2", "constant")):
        whole = learning_rate(parse(text), peak=PEAK, warmup=WARMUP, steps=STEPS)
        # its decay is a part of the run's own steps: 25 of 60 are the 25 of 100
        own = text.replace("decay=0.25", f"decay={25 / 60}").replace("decay=0.2", f"decay={20 / 60}") if "decay" in text else text
        before = learning_rate(parse(first), peak=PEAK, warmup=WARMUP, steps=40)
        after = learning_rate(parse(own), peak=PEAK, warmup=WARMUP, steps=60, origin=40)
        rates = [before(step) for step in range(1, 41)] + [after(step) for step in range(1, 61)]
        assert rates == pytest.approx([whole(step) for step in range(1, 101)], rel=1e-9), text
        assert parse(text).goes_on
    assert not parse("cosine").goes_on and not parse("linear").goes_on


def test_steps_at_rate_zero_come_before_all_else():
    """A run of 105 steps, the first five at zero, has the curve of a hundred after them; a run that goes on, too."""
    for text in ("cosine,floor=0.1", "wsd,decay=0.2", "infinite"):
        plain = learning_rate(parse(text), peak=PEAK, warmup=WARMUP, steps=STEPS)
        late = learning_rate(parse(f"{text},zero=5"), peak=PEAK, warmup=WARMUP, steps=STEPS + 5)
        assert [late(step) for step in range(1, 6)] == [0.0] * 5
        assert [late(step) for step in range(6, 106)] == pytest.approx([plain(step) for step in range(1, 101)], rel=1e-9)
    on = learning_rate(parse("constant,zero=3"), peak=PEAK, warmup=WARMUP, steps=20, origin=40)
    assert [on(step) for step in (1, 3, 4, 20)] == [0.0, 0.0, PEAK, PEAK]


def test_a_decay_that_begins_before_the_cooldown_ends_goes_on_from_there():
    rate = learning_rate(parse("infinite,level=0.5,cooldown=80,decay=0.5"), peak=1.0, warmup=0, steps=100)
    reached = 0.75 + 0.25 * np.cos(np.pi * 50 / 80)
    assert rate(50) == pytest.approx(reached) and rate(75) == pytest.approx(np.sqrt(reached * 0.1)) and rate(100) == pytest.approx(0.1)

"""Against optax's schedules, which are of another make."""

import numpy as np
import optax
import pytest

from jaxmem.schedules import learning_rate, parse
from jaxmem.spec import InputError

STEPS, WARMUP, PEAK = 100, 10, 0.3


@pytest.mark.parametrize("text, reference", [
    ("constant", optax.warmup_constant_schedule(0.0, PEAK, WARMUP)),
    ("cosine", optax.warmup_cosine_decay_schedule(0.0, PEAK, WARMUP, STEPS)),
    ("cosine,floor=0.1", optax.warmup_cosine_decay_schedule(0.0, PEAK, WARMUP, STEPS, end_value=0.1 * PEAK)),
    ("linear,floor=0.5", optax.join_schedules([optax.linear_schedule(0, PEAK, WARMUP),
                                               optax.linear_schedule(PEAK, 0.5 * PEAK, STEPS - WARMUP)], [WARMUP])),
    ("wsd,decay=0.2", optax.join_schedules([optax.linear_schedule(0, PEAK, WARMUP), optax.constant_schedule(PEAK),
                                            optax.linear_schedule(PEAK, 0.0, 20)], [WARMUP, 80])),
    ("rsqrt", lambda step: PEAK * np.minimum(step / WARMUP, np.sqrt(WARMUP / np.maximum(step, WARMUP)))),
])
def test_against_optax(text, reference):
    rate = learning_rate(parse(text), peak=PEAK, warmup=WARMUP, steps=STEPS)
    for step in range(1, STEPS + 1):
        assert rate(step) == pytest.approx(float(reference(step)), rel=1e-5, abs=1e-8), step


def test_without_warm_up_and_wrong_text():
    assert learning_rate(parse("constant"), peak=1.0, warmup=0, steps=5)(1) == 1.0
    for text, part in (("cosin", "cosine"), ("cosine,flor=0", "floor"), ("wsd,decay=0", "above 0"), ("cosine,floor=2", "parts of 1")):
        with pytest.raises(InputError, match=part):
            parse(text)

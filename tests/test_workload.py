"""A workload prints as one line and parses back; nonsense is refused before anything is compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.models.configs import DECODERS
from jaxmem.optim.configs import OPTIMIZERS
from jaxmem.spec import InputError
from jaxmem.workload import Workload


def test_prints_the_line_it_was_parsed_from():
    workload = Workload.parse(model="llama3-8b,layers=4", optimizer="adamw,b2=0.95", batch=64, seq=8192)
    assert str(workload) == "model=llama3-8b,layers=4,optimizer=adamw,b2=0.95,batch=64,seq=8192"
    assert workload.model.layers == 4 and workload.model.embed == 4096 and workload.optimizer.b2 == 0.95
    assert workload.tokens == 524_288
    assert (workload.model_text, workload.optimizer_text) == ("llama3-8b,layers=4", "adamw,b2=0.95")
    assert Workload.parse_line("batch=64, seq=8192, optimizer=adamw, b2=0.95, model=llama3-8b, layers=4") == workload


def test_a_field_at_its_preset_value_is_not_printed():
    assert str(Workload.parse(model="gpt2,layers=12", batch="8", seq="1024")) == "model=gpt2,optimizer=adamw,batch=8,seq=1024"


@given(model=st.sampled_from(sorted(DECODERS)), optimizer=st.sampled_from(sorted(OPTIMIZERS)), layers=st.integers(1, 200),
       theta=st.floats(1, 1e9), eps=st.floats(1e-12, 1e-3), window=st.none() | st.integers(1, 10_000),
       batch=st.integers(1, 1 << 20), moments=st.sampled_from(["f32", "bf16"]))
def test_every_workload_parses_back(model, optimizer, layers, theta, eps, window, batch, moments):
    pattern = "" if window else ",window_pattern=1"
    text = f"{model},layers={layers},rope_theta={theta!r},window={window if window else 'none'}{pattern}"
    workload = Workload.parse(model=text, optimizer=f"{optimizer},eps={eps!r},moments={moments}", batch=batch, seq=128)
    assert workload.model.rope_theta == theta and workload.model.window == window and workload.optimizer.eps == eps
    assert Workload.parse_line(str(workload)) == workload


@pytest.mark.parametrize("line, expected", [
    ("model=llama3-8b,batch=64", "seq missing"),
    ("model=llama3-8b,batch=64,seq=0", "seq=0: expected at least 1"),
    ("model=llama3-8b,batch=-8,seq=128", "batch=-8: expected at least 1"),
    ("model=llama3-8b,batch=8.5,seq=128", "batch=8.5: expected a whole number"),
    ("model=gpt2,batch=8,seq=2048", "beyond the 1024 learned positions of gpt2; use seq=1024 or less"),
    ("model=llama3-8b,kv_heads=5,batch=8,seq=128",
     "heads=32 is not a multiple of kv_heads=5; nearest kv_heads that work: 2, 4, 8"),
    ("model=llama3-8b,batch=8,seq=128,layers=2", "'layers=2' belongs to no part"),
    ("model=llama3-8b,batch=8,batch=9,seq=128", "'batch' is given twice"),
    ("model=llama3-8b,optimizer=adam,batch=8,seq=128", "unknown optimizer 'adam'; did you mean adamw"),
    ("model=llama3-8b,optimizer=adamw,b2=1.5,batch=8,seq=128", "b2=1.5: expected 0 <= b2 < 1"),
    ("model=llama3-8b,optimizer=muon,momentum=none,batch=8,seq=128", "its preset has 0.95"),
    ("model=llama3-8b,optimizer=adamw,weight_decay=nan,batch=8,seq=128", "weight_decay=nan"),
    ("modl=llama3-8b,batch=8,seq=128", "did you mean model"),
])
def test_refusals_quote_what_was_given_and_what_would_work(line, expected):
    with pytest.raises(InputError) as error:
        Workload.parse_line(line)
    assert expected in str(error.value)


def test_every_problem_is_listed_at_once():
    with pytest.raises(InputError) as error:
        Workload.parse(model="gpt2,kv_heads=5", optimizer="adamw,b1=2", batch=0, seq=4096)
    assert len(str(error.value).splitlines()) == 4

"""Plans: one line in and out, `*`, every problem with its numbers and the nearest legal choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.hardware import parse_topology
from jaxmem.plan import AXES, SAVED_NAMES, Plan, Remat, divisors
from jaxmem.spec import InputError
from jaxmem.workload import Workload


def work(model="llama3-8b", batch=64, seq=8192) -> Workload:
    return Workload.parse(model=model, batch=batch, seq=seq)


@given(st.sampled_from(AXES), st.integers(1, 64), st.sampled_from(["none", "dots", "block", "save:query_proj+out_proj", "offload:context",
                                                                   "save:mlp_up+offload:context+out_proj"]), st.integers(0, 3))
def test_prints_and_parses_back(axis, size, remat, zero):
    plan = Plan(**{axis: size}, remat=remat, zero=zero)
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(("text", "devices", "fsdp"), [("fsdp=*", 64, 64), ("fsdp=*,tensor=4", 64, 16), ("data=2,fsdp=*,tensor=8", 128, 8)])
def test_one_axis_takes_the_rest(text, devices, fsdp):
    assert Plan.parse(text, devices=devices).fsdp == fsdp


@pytest.mark.parametrize(("text", "words"), [
    ("tensr=4", ["unknown field 'tensr'", "tensor"]), ("fsdp=*,tensor=*", ["may be *"]), ("fsdp=0", ["at least 1"]),
    ("fsdp=4.5", ["whole number"]), ("fsdp", ["needs a value"]), ("fsdp=2,fsdp=4", ["given twice"]), ("remat=blok", ["block"]),
    ("remat=save:query_prj", ["unknown name 'query_prj'", "query_proj"]), ("remat=sav:query_proj", ["save"]), ("zero=4", ["0|1|2|3"]),
    ("stage=4", ["unknown field 'stage'"]), ("compute=bf61", ["bf16"]), ("remat=save:context+context", ["twice"])])
def test_bad_plans_name_the_nearest(text, words):
    with pytest.raises(InputError) as caught:
        Plan.parse(text, devices=64)
    assert all(word in str(caught.value) for word in words), caught.value


def test_typographic_dashes_and_blanks_are_read():
    assert Plan.parse(" fsdp=4 , tensor=2 ") == Plan(fsdp=4, tensor=2)


def test_remat_names():
    remat = Remat.parse("save:query_proj+key_proj+offload:context")
    assert remat.save == ("query_proj", "key_proj") and remat.offload == ("context",)
    for name in SAVED_NAMES:
        assert Remat.parse(f"offload:{name}").offload == (name,)


@pytest.mark.parametrize(("plan", "topology", "model", "batch", "words"), [
    ("fsdp=32", "v5p-128", "llama3-8b", 64, ["fsdp(32)", "32 devices", "64", "fsdp=64"]),
    ("fsdp=64", "v5p-128", "llama3-8b", 65, ["batch(65)", "64", "batch=64"]),
    ("fsdp=64,accumulate=3", "v5p-128", "llama3-8b", 128, ["accumulate(3)", "accumulate=2"]),
    ("fsdp=4,tensor=16", "v5p-128", "gpt2", 64, ["heads(12) is not a multiple of tensor(16)", "tensor=12"]),
    ("fsdp=512", "2xv5e-256", "llama3-8b", 512, ["data(1) is not a multiple of the 2 slices", "data=2"]),
    ("fsdp=64,loss_chunks=3", "v5p-128", "llama3-8b", 64, ["loss_chunks(3)", "loss_chunks=2"]),
    ("fsdp=64,attention=triton", "v5p-128", "llama3-8b", 64, ["triton", "GPU"]),
    ("fsdp=36,tensor=4", "gb200:36x4", "llama3-405b", 36, ["embed(16384) over fsdp(36) = 36", "fsdp=32 or fsdp=64"]),
    ("data=2,fsdp=32,zero=1", "v5p-128", "llama3-8b,embed=2080", 64, ["embed(2080) over data(2) * fsdp(32) = 64"]),
    ("fsdp=64,attention=splash", "v5p-128", "llama3-8b,vocab=1000", 64, ["attention=splash needs seq(1000) to be a multiple of 128"]),
    ("fsdp=64", "v5p-128", "llama3-8b,kv_heads=5", 64, ["kv_heads"]),
])
def test_problems_have_numbers_and_choices(plan, topology, model, batch, words):
    where = parse_topology(topology)
    try:
        seq = 1000 if "splash" in plan else 1024
        problems = Plan.parse(plan).problems(work(model, batch, seq=seq), where)
    except InputError as error:  # what no machine could compute is refused by the workload
        problems = [str(error)]
    assert all(any(word in p for p in problems) for word in words), problems


def test_a_good_plan_has_no_problems():
    assert Plan.parse("fsdp=16,tensor=4,remat=block").problems(work(), parse_topology("v5p-128")) == []


@given(st.integers(1, 5000))
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]

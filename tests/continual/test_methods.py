"""Methods as text, and what makes no sense together."""

import pytest

from jaxmem.continual.methods import METHODS, Method, parse, problems
from jaxmem.spec import InputError


def test_presets_and_fields():
    assert parse("incremental") == Method() and parse("scratch") == Method(rows="all", start="fresh")
    assert parse("rehearsal,r=28,policy=replace,buffer=0.1") == Method(r=28, policy="replace", buffer=0.1)
    assert parse("der++,beta=0").distils and not parse("rehearsal").distils
    assert not any(problems(one) for one in METHODS.values())


@pytest.mark.parametrize("text, says", [
    ("rehearsel", "did you mean rehearsal"), ("ewc,strength=3", "unknown field 'strength'"), ("rehearsal,buffer=0", "buffer=0: expected"),
    ("rehearsal,replay=7", "either a buffer or all earlier rows"), ("incremental,alpha=0.5", "give both"),
    ("incremental,alpha=0.5,beta=1", "r needs to be at least 1"), ("scratch,r=7", "nothing to add"), ("ewc,ewc=-3", "ewc=-3"),
    ("ewc,start=fresh", "resets the optimizer's state"), ("shrink-perturb,shrink=2", "shrink=2"),
    ("rehearsal,policy=fifo", "reservoir|replace")])
def test_bad_texts(text, says):
    with pytest.raises(InputError) as error:
        parse(text)
    assert says in str(error.value)

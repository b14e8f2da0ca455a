"""`jaxmem pack` with a compiler whose figures are given; and once with the real one."""

import json

import pytest

from jaxmem.cli import main as cli
from jaxmem.colocate import fitting, mix
from jaxmem.colocate.fitting import Tried
from jaxmem.spec import InputError
from jaxmem.verdict import usable

GB = 10**9
TINY, SMALL = "model=decoder-tiny,batch=8,seq=128", "model=decoder-small,batch=8,seq=256"


@pytest.fixture
def compiler(monkeypatch):
    """decoder-tiny: 1 GB a run and a step of 10 ms, 2 ms for each further run, ten times as long on a slice. decoder-small: 9 GB, 20 ms
    a run whatever is beside it."""
    asked = []

    def try_runs(workload, plan, topology, runs, **_):
        asked.append((workload.model_name, topology.text, runs))
        limit = usable(topology, 0.75)[0]
        if limit is None:
            raise InputError("no memory of its own")
        tiny = workload.model_name == "decoder-tiny"
        peak = runs * (GB if tiny else 9 * GB)
        step = (0.010 + 0.002 * (runs - 1) if tiny else 0.020 * runs) * (10 if topology.chip.parent else 1)
        fits = peak <= limit
        return Tried(runs=runs, fits=fits, peak_bytes=peak, step_s=step if fits else None, backend="x"), limit
    monkeypatch.setattr(mix, "try_runs", try_runs)
    monkeypatch.setattr(fitting, "try_runs", try_runs)
    return asked


def packed(capsys, *words: str) -> tuple[int, dict]:
    status = cli.main(["pack", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_a_mix_is_compiled_placed_and_recommended(compiler, capsys):
    status, found = packed(capsys, "--topology=h100:1", f"4*{TINY}", f"2*{SMALL}")
    assert status == 0 and found["recommended"] == "vmapped"
    ways = {one["how"]: one for one in found["arrangements"]}
    assert ways["one_after_another"]["round_s"] == pytest.approx(4 * 0.010 + 2 * 0.020)
    assert ways["vmapped"]["round_s"] == pytest.approx(0.016 + 0.040) and ways["vmapped"]["used_bytes"] == 22 * GB
    assert ways["mig"]["round_s"] == pytest.approx(0.2)  # 1g.10gb and 1g.20gb: all fit one GPU, and the slowest decides
    assert sorted(name for device in ways["mig"]["devices"] for name, _ in device) == ["decoder-small@1g.20gb"] * 2 + [
        "decoder-tiny@1g.10gb"] * 4
    assert set(compiler) == {(model, where, runs) for model in ("decoder-tiny", "decoder-small") for where, runs in (
        ("h100:1", 1), ("h100:1", 2))} | {("decoder-tiny", "h100-mig-1g.10gb", 1), ("decoder-small", "h100-mig-1g.20gb", 1)}


def test_devices_of_their_own_where_there_are_enough(compiler, capsys):
    status, found = packed(capsys, "--topology=v5e-8", f"8*{TINY}")
    assert status == 0 and found["recommended"] == "parts" and any("no MIG slices" in one for one in found["reasons"])
    status, found = packed(capsys, "--topology=v5e-8", "--plan=fsdp=4", f"8*{TINY}")  # two parts of four devices
    assert found["recommended"] == "vmapped" and [one["devices"] for one in found["arrangements"] if one["how"] == "vmapped"] == [
        [[["decoder-tiny", 4]], [["decoder-tiny", 4]]]]


def test_isolation_takes_slices(compiler, capsys):
    assert packed(capsys, "--topology=h100:1", "--prefer=isolation", f"7*{SMALL}")[1]["recommended"] == "one_after_another"
    assert packed(capsys, "--topology=h100:2", "--prefer=isolation", f"7*{SMALL}")[1]["recommended"] == "one_after_another"


def test_what_does_not_fit_at_all(compiler, capsys):
    status = cli.main(["pack", "--topology=v5e-1", f"2*{SMALL}"])
    out = capsys.readouterr().out
    assert status == 0 and "one_after_another" in out.split("Recommended on v5e-1:")[1].split("\n")[0]
    assert "all of them need about 16.76 GiB" in out


def test_the_table_says_what_numbers_are(compiler, capsys):
    assert cli.main(["pack", "--topology=h100:1", f"4*{TINY}"]) == 0
    out = capsys.readouterr().out
    assert "memory: compile" in out and "seconds: estimate" in out and "Recommended on h100:1: vmapped" in out
    assert "2.50 times the throughput of one after another" in out and "4 x decoder-tiny" in out


def test_the_largest_number(compiler, capsys):
    status, found = packed(capsys, "--topology=v5e-1", "--largest", TINY)
    assert status == 0 and (found["runs"], found["certain"]) == (16, True)  # 16.9 GB are usable
    assert cli.main(["pack", "--topology=v5e-8", "--largest", TINY]) == 0
    assert "fit v5e-8 in one program" in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    ((), "which runs?"), (("--prefer=isolatoin", TINY), "did you mean isolation"),
    (("--topology=cpu:8", TINY), "no memory of its own to share out"), ((f"0*{TINY}",), "COUNT*WORKLOAD"),
    (("8*gpt2",), "COUNT*WORKLOAD"), (("--plan=fsdp=3", "--topology=v5e-8", TINY), "do not divide the 8"),
    (("--largest", TINY, SMALL), "takes one workload"), (("--topology=h100:1", "model=decoder-tinny,batch=8,seq=128"), "decoder-tiny")])
def test_mistakes_are_told(compiler, capsys, words, said):
    assert cli.main(["pack", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_a_pulse_with_the_real_compiler(capsys):
    status, found = packed(capsys, "--topology=v5e-4", "4*model=decoder-tiny,layers=1,batch=8,seq=128")
    assert status == 0 and found["recommended"] in ("parts", "vmapped")
    assert all(one["round_s"] is not None for one in found["arrangements"] if one["problem"] is None)

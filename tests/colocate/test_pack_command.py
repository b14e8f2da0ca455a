"""`jaxmem pack` with a compiler whose figures are given; and once with the real one."""

import json

import pytest

from jaxmem import environment
from jaxmem.cli import main as cli
from jaxmem.colocate import fitting, mix, packing
from jaxmem.colocate.fitting import Tried
from jaxmem.hardware import parse_topology
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
        ("h100:1", 1), ("h100:1", 2))} | {("decoder-tiny", "h100-mig-1g.10gb", 1), ("decoder-small", "h100-mig-1g.20gb", 1),
                                         ("decoder-tiny", "h100:1", 4)}  # what is recommended with more than two
    assert found["verified"] is True and found["problem"] is None


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
    assert "memory: compile, for x" in out and "seconds: estimate" in out and "usable a device (estimate)" in out
    assert "Recommended on h100:1: vmapped" in out
    assert "2.50 times the throughput of one after another" in out and "4 x decoder-tiny" in out
    assert environment.versions_text() in out and f"jaxmem {environment.versions()['jaxmem']}, jax " in out
    found = packed(capsys, "--topology=h100:1", TINY)[1]
    assert found["versions"] == environment.versions() and found["sources"]["usable_bytes"] == "estimate"
    assert packed(capsys, "--topology=v5e-8", TINY)[1]["sources"]["usable_bytes"] == "compile"  # a TPU's is its compiler's own


def test_the_largest_number(compiler, capsys):
    status, found = packed(capsys, "--topology=v5e-1", "--largest", TINY)
    assert status == 0 and (found["runs"], found["certain"]) == (16, True)  # 16.9 GB are usable
    assert cli.main(["pack", "--topology=v5e-8", "--largest", TINY]) == 0
    out = capsys.readouterr().out
    assert "fit v5e-8 in one program" in out and "usable a device, compile; " in out and environment.versions_text() in out


@pytest.mark.parametrize("words", [(), ("--largest",)])
def test_what_does_not_compile_is_unknown(monkeypatch, capsys, words):
    def try_runs(workload, plan, topology, runs, **_):
        raise fitting.Unknown("train: timeout: no result within 5 s")
    monkeypatch.setattr(mix, "try_runs", try_runs)
    monkeypatch.setattr(fitting, "try_runs", try_runs)
    assert cli.main(["pack", "--topology=v5e-1", *words, TINY]) == 4
    assert capsys.readouterr().err == "jaxmem pack: unknown, because a program did not compile: train: timeout: no result within 5 s\n"


# ---------------------------------------------------------------- the recommendation is compiled

TWO_PARTS = "--topology=v5e-4", "--plan=fsdp=2"  # with 16.9 GB usable on each device


@pytest.fixture
def bending(monkeypatch):
    """`bending(peak, refusals=True)`: memory of decoder-tiny by the number of runs (a peak of None: the compiler gives no figures);
    decoder-small takes 9 GB and 1 s a run. Without `refusals`, a refusal carries no number. Returns the numbers of runs of decoder-tiny
    that are asked."""
    def use(peak, refusals: bool = True) -> list[int]:
        asked = []

        def try_runs(workload, plan, topology, runs, **_):
            tiny = workload.model_name == "decoder-tiny"
            if tiny:
                asked.append(runs)
            bytes_ = peak(runs) if tiny else 9 * GB * runs
            if bytes_ is None:
                raise RuntimeError("train_step: no result within 5 s")
            limit = usable(topology, 0.75)[0]
            fits = bytes_ <= limit
            return Tried(runs=runs, fits=fits, peak_bytes=bytes_ if fits or refusals else None,
                         step_s=(0.1 + 0.002 * (runs - 1) if tiny else 1.0 * runs) if fits else None, backend="x"), limit
        monkeypatch.setattr(mix, "try_runs", try_runs)
        return asked
    return use


def far_too_low(runs: int) -> int:
    """Small while temporaries stay in VMEM (up to four runs), as docs/many_runs.md says of decoder-tiny on v5e-1; 1 GB a run beyond."""
    return runs * 4_200_000 if runs <= 4 else runs * GB


def way(found: dict, how: str) -> dict:
    return next(one for one in found["arrangements"] if one["how"] == how)


def test_a_line_that_is_far_too_low_is_not_recommended(bending, capsys):
    """The line says 84 MB for 20 runs, and they take 20 GB where 16.9 are usable. One device has no other place for them."""
    asked = bending(far_too_low)
    status, found = packed(capsys, "--topology=v5e-1", f"20*{TINY}")
    assert asked == [1, 2, 20]
    assert status == 0 and found["recommended"] == "one_after_another" and found["verified"] is True
    assert "all of them need about 18.63 GiB" in way(found, "vmapped")["problem"]
    assert any("20 runs of decoder-tiny in one program take 20000000000 bytes (compile), not 84000000" in one for one in found["reasons"])


def test_a_mended_line_moves_runs_to_another_device(bending, capsys):
    """One long run on a part, and 18 short ones that crowd the other, 76 MB by the line: 18 GB are refused, so some go beside
    the long one."""
    asked = bending(far_too_low)
    status, found = packed(capsys, *TWO_PARTS, f"18*{TINY}", SMALL)
    assert status == 0 and found["recommended"] == "vmapped" and found["verified"] is True and asked[:3] == [1, 2, 18]
    long, short = sorted((dict(device) for device in way(found, "vmapped")["devices"]), key=lambda device: "decoder-small" not in device)
    assert long["decoder-tiny"] + short["decoder-tiny"] == 18 and asked[-1] == short["decoder-tiny"] > 8
    limit = usable(parse_topology("v5e-4"), 0.75)[0]
    assert limit is not None and far_too_low(short["decoder-tiny"]) <= limit and far_too_low(long["decoder-tiny"]) + 9 * GB <= limit


def test_what_fits_alone_may_not_fit_beside_another(bending, capsys):
    """Two parts with 9 GB each and half of the short runs: 8 fit alone (8 GB, 34 MB by the line) and not beside 9 GB, 7 fit."""
    asked = bending(far_too_low)
    status, found = packed(capsys, *TWO_PARTS, f"16*{TINY}", f"2*{SMALL}")
    assert status == 0 and found["recommended"] == "one_after_another" and asked == [1, 2, 8]
    asked = bending(far_too_low)
    status, found = packed(capsys, *TWO_PARTS, f"14*{TINY}", f"2*{SMALL}")
    assert status == 0 and found["recommended"] == "vmapped" and found["verified"] is True and asked == [1, 2, 7]
    assert way(found, "vmapped")["used_bytes"] == pytest.approx(14 * GB + 18 * GB, abs=100)


@pytest.mark.parametrize("refusals", [True, False])
def test_what_is_refused_is_not_recommended(bending, capsys, refusals):
    """9 runs of 2 GB are refused, 8 fit; of a refusal without a number it is known only that they take more than there is."""
    asked = bending(lambda runs: runs * 4_200_000 if runs <= 2 else runs * 2 * GB, refusals)
    status, found = packed(capsys, *TWO_PARTS, f"17*{TINY}")
    assert asked == [1, 2, 9] and found["recommended"] == "one_after_another" and status == 0
    asked = bending(lambda runs: runs * 4_200_000 if runs <= 2 else runs * 2 * GB, refusals)
    status, found = packed(capsys, *TWO_PARTS, f"16*{TINY}")
    assert asked == [1, 2, 8] and found["recommended"] == "vmapped" and found["verified"] is True and status == 0


def test_two_that_are_refused_are_not_placed(bending, capsys):
    """2 GB alone; two are refused without a number, though twice 2 GB would fit."""
    asked = bending(lambda runs: 2 * GB if runs == 1 else 20 * GB, refusals=False)
    status, found = packed(capsys, "--topology=v5e-1", f"2*{TINY}")
    assert asked == [1, 2] and status == 0 and found["recommended"] == "one_after_another" and way(found, "vmapped")["problem"]


def test_after_four_arrangements_nothing_is_recommended(bending, capsys):
    """One long run on a device, and 20 short ones that crowd the other: 17 GB from three on, so that each time one
    less seems to fit."""
    asked = bending(lambda runs: runs * GB // 10 if runs <= 2 else 17 * GB)
    status, found = packed(capsys, *TWO_PARTS, f"20*{TINY}", SMALL)
    assert asked == [1, 2, 20, 19, 18, 17, 16]
    assert (status, found["recommended"], found["verified"]) == (3, None, False)
    assert "arranged 4 times anew, and still 16 runs of decoder-tiny in one program take 17000000000 bytes" in found["problem"]


def test_what_cannot_be_verified_is_not_recommended(bending, capsys):
    bending(lambda runs: runs * GB if runs <= 2 else None)
    status, found = packed(capsys, "--topology=v5e-1", f"4*{TINY}")
    assert (status, found["recommended"], found["verified"]) == (3, None, False)
    assert found["problem"] == "4 runs of decoder-tiny in one program could not be compiled: train_step: no result within 5 s"
    assert way(found, "vmapped")["problem"] == found["problem"] and not way(found, "vmapped")["devices"]
    assert cli.main(["pack", "--topology=v5e-1", f"4*{TINY}"]) == 3
    out = capsys.readouterr().out
    assert "Recommended on v5e-1: none of these\n" in out and "could not be compiled" in out and "one_after_another: 1 device" in out


def test_slices_are_verified_where_they_were_compiled():
    small = packing.Program(name="a", count=1, fixed_bytes=0, each_bytes=GB, slices={"1g.10gb": 0.1})
    found = mix.Mix(programs=[small], profiles=[], parts=1, usable_bytes=60 * GB, backend="x")
    for what, verified in (("a@1g.10gb", True), ("a@1g.20gb", False)):
        assert mix.on_compiled_slices(packing.Arrangement(how="mig", devices=(((what, 1),),)), found) is verified


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

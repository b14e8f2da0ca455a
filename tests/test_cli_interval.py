"""`jaxmem interval`: what it recommends is what the closed forms say for the bytes, rates and times that it shows."""

import json
import math

import pytest

from jaxmem import environment
from jaxmem.cli import main
from jaxmem.cli.interval import rate
from jaxmem.cost.checkpoint_time import FIXED_STALL_S
from jaxmem.cost.checkpointing import Costs, expected
from jaxmem.report.interval import share_text
from jaxmem.spec import InputError

LLAMA = ("--model=llama3-8b", "--topology=h100:16x8", "--plan=fsdp=*,step=split")
KNOWN = (*LLAMA, "--bandwidth=20GB/s", "--mtbf_hours=10", "--restart_s=300")


@pytest.fixture
def ask(capsys):
    def run(*argv: str) -> tuple[int, str, str]:
        status = main.main(["interval", *argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err
    return run


def asked(ask, *argv: str) -> dict:
    status, out, _ = ask(*argv, "--json")
    assert status == 0
    return json.loads(out)


def test_the_recommended_interval_is_the_best_whole_number_of_steps(ask):
    found = asked(ask, *KNOWN, "--step_s=1.5")
    # AdamW in f32: 12 bytes a parameter, over 20 GB/s; then 16 hosts read all of it again, at 64 GB/s a device onto the devices
    assert found["total_bytes"] == 12 * 8_030_261_248 + 8
    assert found["write_s"] == pytest.approx(12 * 8_030_261_248 / 20e9) and found["mtbf_s"] == 36000
    assert set(found["modes"]) == {"sync", "async", "lazy"}
    for one in found["modes"].values():
        costs = Costs(stall_s=one["stall_s"], commit_s=one["commit_s"], restart_s=300 + found["read_s"])
        best = max(range(1, 2000), key=lambda k: expected(costs, 1.5 * k, 36000.0).goodput)
        assert one["steps"] == best and one["interval_s"] == 1.5 * best
        assert one["account"]["goodput"] == pytest.approx(expected(costs, 1.5 * best, 36000.0).goodput, rel=1e-12)
        assert math.fsum(one["account"][name] for name in ("goodput", "stalls", "lost", "restarts")) == pytest.approx(1)
        # the longest that does nearly as well is just that
        at = [expected(costs, 1.5 * (one["longest_steps"] + more), 36000.0).goodput for more in (0, 1)]
        assert at[0] >= one["account"]["goodput"] - 0.001 > at[1]
    goodputs = [found["modes"][mode]["account"]["goodput"] for mode in ("sync", "async", "lazy")]
    assert goodputs == sorted(goodputs) and found["modes"]["lazy"]["stall_s"] == FIXED_STALL_S


def test_the_answer_in_words(ask):
    status, out, err = ask(*KNOWN, "--step_s=1.5")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    assert f"estimate, but for what is given or measured; jaxmem {environment.versions()['jaxmem']}\n" in out
    assert "89.75 GiB in all, 5.61 GiB a host" in out and "4.818 s at 20 GB/s" in out and "one in 10 h" in out
    recommended = asked(ask, *KNOWN, "--step_s=1.5")["modes"]["async"]
    assert f"--checkpoint_every={recommended['steps']} --snapshot=async: goodput {100 * recommended['account']['goodput']:.1f}%" in out
    assert "most of the rest: starting again after a failure" in out
    assert "at most" in ask(*LLAMA, "--bandwidth=20GB/s", "--mtbf_hours=10")[1]  # the restart is not all known
    assert "the interval is the commit time" not in out
    slow = (*LLAMA, "--bandwidth=1GB/s", "--mtbf_hours=10", "--step_s=1.5")  # 97 s to commit; a stall of 40 ms alone would say 54 s
    assert "the interval is the commit time" in ask(*slow, "--snapshot=lazy")[1]
    out = ask(*KNOWN, "--step_s=900")[1]
    assert "--checkpoint_every=1 " in out and "one step is longer than the best interval" in out and "commit time" not in out


def test_failure_rates_are_published_or_given_or_unknown(ask):
    published = asked(ask, *LLAMA, "--bandwidth=20GB/s")
    assert published["mtbf_s"] == pytest.approx(54 * 86400 * 16384 / 419 / 128) and "2407.21783" in published["mtbf_source"]
    given = asked(ask, *LLAMA, "--bandwidth=20GB/s", "--device_mtbf_hours=12800")
    assert given["mtbf_s"] == 100 * 3600 and given["mtbf_source"] is None
    unknown = asked(ask, "--model=llama3-8b", "--topology=v5p-128", "--bandwidth=20GB/s")
    assert unknown["mtbf_s"] is None and unknown["modes"] is None
    cells = unknown["table"][0]["cells"]
    assert [cell["mtbf_s"] / 3600 for cell in cells] == [1, 6, 24, 168]
    intervals = [cell["best"]["interval_s"] for cell in cells]
    assert intervals == sorted(intervals) and intervals[3] / intervals[1] == pytest.approx(math.sqrt(28), rel=0.01)  # Young's square root
    assert "no published rate for this chip" in ask("--model=llama3-8b", "--topology=v5p-128", "--bandwidth=20GB/s")[1]


def test_without_a_bandwidth_the_answer_is_a_table_over_them(ask):
    found = asked(ask, *LLAMA, "--mtbf_hours=1")
    assert found["write_s"] is None and found["read_s"] is None
    goodputs = [line["cells"][0]["best"]["account"]["goodput"] for line in found["table"]]
    assert goodputs == sorted(goodputs) and len(goodputs) == 5
    out = ask(*LLAMA, "--mtbf_hours=1")[1]
    assert "500 GB/s" in out and "reading not known" in out


def test_a_measured_stall_stands_in_for_the_estimate(ask):
    """The README's example: Young's interval for 1 s and half an hour is 60 s; the exact one is a little shorter."""
    found = asked(ask, "--model=gpt2", "--topology=cpu:8", "--stall_s=1", "--commit_s=1", "--mtbf_hours=0.5")
    one = found["modes"]["async"]
    assert one["young_s"] == 60 and one["interval_s"] == pytest.approx(60 - 2 / 3, abs=0.02)  # sqrt(2CM) - 2C/3 + ...
    assert found["modes"]["sync"] is None and one["account"]["restarts"] is None  # not known, and not 0
    assert "a checkpoint every 59.3 s" in ask("--model=gpt2", "--topology=cpu:8", "--stall_s=1", "--commit_s=1", "--mtbf_hours=0.5")[1]
    assert "cannot be estimated: this chip's link" in ask("--model=gpt2", "--topology=cpu:8", "--bandwidth=1GB/s", "--mtbf_hours=1")[1]


def test_the_step_s_time_may_be_predicted(ask, monkeypatch):
    from jaxmem import verdict

    seen = []
    monkeypatch.setattr(verdict, "check_workload", lambda *what, **how: seen.append((*map(str, what), how)) or {"step_s": 3.0})
    found = asked(ask, *KNOWN, "--batch=128", "--seq=4096")
    assert found["step_s"] == 3.0 and found["step_source"] == "predicted from the compiled step"
    assert found["sources"] == {"step_s": "estimate"} and found["versions"] == environment.versions()
    assert f"jax {found['versions']['jax']}" in ask(*KNOWN, "--batch=128", "--seq=4096")[1]  # the compiler's, for a predicted step
    assert seen[0][0].endswith("batch=128,seq=4096") and seen[0][3] == {"programs": ("train",)}
    monkeypatch.setattr(verdict, "check_workload", lambda *what, **how: {"step_s": None, "verdict": "does_not_fit"})
    status, out, err = ask(*KNOWN, "--batch=128", "--seq=4096")
    assert status == 0 and "no step time: the check says does_not_fit" in err and "step        not known" in out


@pytest.mark.parametrize("argv, words", [
    (["--topology=h100:8"], "which model? --model=NAME"),
    (["--model=gpt2"], "which topology? --topology=NAME"),
    ([*LLAMA, "--bandwidth=200Gbit/s"], "a network's 200Gbit/s are 25GB/s"),
    ([*LLAMA, "--bandwidth=20Gb/s"], "expected bytes a second"),
    ([*LLAMA, "--bandwidth=0GB/s"], "expected more than 0"),
    ([*LLAMA, "--bandwidth=1.2.3GB/s"], "1.2.3 is no number"),
    ([*LLAMA, "--snapshot=asinc"], "expected sync, async, lazy; did you mean async"),
    ([*LLAMA, "--mtbf_hours=0"], "--mtbf_hours=0: expected a number above 0"),
    ([*LLAMA, "--restart_s=-1"], "--restart_s=-1: expected seconds, 0 or more"),
    ([*LLAMA, "--mtbf_hours=1", "--device_mtbf_hours=1"], "give one of them"),
    ([*LLAMA, "--stall_s=1"], "--stall_s and --commit_s go together"),
    ([*LLAMA, "--stall_s=2", "--commit_s=1", "--mtbf_hours=1"], "nearest: commit_s=2"),
    ([*LLAMA, "--stall_s=0", "--commit_s=0", "--mtbf_hours=1"], "costs nothing is best written after every step"),
    (["--model=gpt2", "--topology=h100:8", "--snapshot=lazy"], "lazy snapshots need step=split"),
    (["--model=gpt3", "--topology=h100:8"], "gpt3"),
    ([*LLAMA, "extra"], "interval takes flags only, not 'extra'"),
])
def test_bad_input(ask, argv, words):
    status, out, err = ask(*argv)
    assert (status, out) == (2, "") and err.startswith("jaxmem interval: ") and words in err


def test_rates_and_shares():
    assert rate("x", "20GB/s") == 20e9 and rate("x", " 1.5GiB/s") == 1.5 * 2**30 and rate("x", "500MB") == 5e8
    assert rate("x", "2e10B/s") == 2e10 and rate("x", None) is None and rate("x", "3TB/s") == 3e12
    with pytest.raises(InputError):
        rate("x", "fast")
    shown = {None: "—", 0.0: "0%", 1.0: "100%", 0.92: "92.0%", 0.99986: "99.986%", 1.4e-4: "0.014%", 0.0049: "0.49%"}
    assert {value: share_text(value) for value in shown} == shown

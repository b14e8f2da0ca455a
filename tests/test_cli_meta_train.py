"""`jaxmem meta-train`: what it refuses, and one small run with its resume."""

import hashlib
import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxmem.checkpoint.keep import Keep
from jaxmem.checkpoint.store import Store
from jaxmem.cli import main as cli


@pytest.mark.parametrize(("flags", "says"), [
    (["--rule=cello"], "did you mean celo"), (["--estimator=pse"], "did you mean pes"), (["--families=digit"], "did you mean digits"),
    (["--families=mnist28"], "mnist28 is held out"), (["--families=,"], "no families"), (["--minutes=0"], "--minutes=0"),
    (["--objective=los"], "expected loss or log_loss"),
    (["--tasks=3"], "nearest: 4"), (["--lengths=a:b"], "expected LOW:HIGH, as in 100:2000"),
    (["--lengths=20:40"], "shorter than a truncation"),
    (["--learning_rates=0:1"], "0 < LOW <= HIGH"), (["--sigma=nan"], "sigma=nan"), (["--topology=cpu:x"], "cpu:x"), (["word"], "word"),
    (["--begin_from=/nowhere/w.npz"], "/nowhere/w.npz")])
def test_bad_input(tmp_path, capsys, flags, says):
    assert cli.main(["meta-train", f"--out={tmp_path / 'run'}", *flags]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_help_says_what_it_does(capsys):
    assert cli.main(["meta-train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--estimator" in out and "(default 2300)" in out


def test_the_file_to_begin_from_is_known_by_its_content(tmp_path, monkeypatch, capsys):
    """Changed under its name it is refused. Gone, it is missed as long as no checkpoint has the weights."""
    out, file = tmp_path / "run", tmp_path / "w.npz"

    def begun(asked, folder, *rest, **more):
        with open(folder.events, "a") as events:
            events.write('{"kind": "start"}\n')
        return 0
    monkeypatch.setattr("jaxmem.optim.learned.meta.run.meta_train", begun)
    monkeypatch.setattr("jaxmem.running.starting.start", lambda *more: None)

    def command():
        return cli.main(["meta-train", f"--out={out}", f"--begin_from={file}"]), capsys.readouterr().err
    file.write_bytes(b"one")
    assert command()[0] == 0
    sha256 = json.loads((out / "config.json").read_text())["begin_from_sha256"]
    assert sha256 == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two")
    status, said = command()
    assert status == 2 and f"begin_from_sha256: was '{sha256}'" in said
    file.unlink()
    status, said = command()
    assert status == 2 and f"--begin_from={file}: " in said and "sha256" not in said
    store = Store(out / "checkpoints", keep=Keep(last=1), run_id="x")
    store.save(1, {"x": jnp.ones(2)}, {"digests": []}, wait=True)
    store.close()
    status, said = command()
    assert status == 0, said
    file.write_bytes(b"two")
    assert command()[0] == 2


@pytest.mark.long
def test_a_run_from_the_command_line(tmp_path):
    """Stopped by its minutes after a meta-step, gone on with, then finished; another configuration is refused."""
    out = tmp_path / "run"

    def run(*flags, rule="small_fc"):
        command = ["meta-train", f"--out={out}", f"--rule={rule}", "--families=wine", "--tasks=2", "--truncation=4", "--lengths=8:16",
                   "--iterations=6", *flags]
        return subprocess.run([sys.executable, "-m", "jaxmem", *command], capture_output=True, text=True, timeout=500)

    first = run("--minutes=1e-9")
    assert first.returncode == 0 and "1 of 6 meta-steps are done" in first.stderr, first.stderr
    second = run()
    assert second.returncode == 0 and "resuming at meta-step 1 of 6" in second.stderr, second.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7)) and all(0 < line["losses"]["wine"] < 20 for line in lines)
    assert (out / "curve.svg").read_text().startswith("<svg")
    said = json.loads((out / "weights.json").read_text())
    assert said["iterations"] == 6 and said["recipe"]["rule"] == "small_fc" and said["backend"] == "cpu"
    other = run(rule="celo")
    assert other.returncode == 2 and "rule: was 'small_fc', now 'celo'" in other.stderr
    again = run()
    assert again.returncode == 0 and "is finished: all 6 meta-steps are done" in again.stderr

"""What the launchers print: against stored texts, through shellcheck, and back through a shell."""

import shlex
import subprocess

import pytest
from launchers import AWKWARD, CASES, FOLDER, golden, shellcheck, text_of

SHELL = [name for name in CASES if CASES[name][0] != "gke"]


@pytest.mark.parametrize("name", CASES)
def test_stored_texts(name):
    assert text_of(name) == golden(name).read_text(), ".venv/bin/python tests/launchers.py writes them anew"


def test_every_stored_text_is_of_a_case():
    assert {path.name for path in FOLDER.iterdir()} == {golden(name).name for name in CASES} | {"jobset.schema.json"}


def test_shellcheck(tmp_path):
    assert shellcheck(*(golden(name) for name in SHELL)) == []
    wrong = tmp_path / "wrong.sh"
    wrong.write_text('cd "$1"\nrm -rf $2/*\n')
    assert "SC2164" in "".join(shellcheck(wrong))  # it does look


def words_in_a_shell(text: str) -> list[str]:
    """The words of one command, as bash takes them apart."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def test_awkward_values_reach_the_run_as_they_are():
    assert words_in_a_shell(text_of("local-1"))[:7] == ["python", "-m", "jaxmem", "train", "--topology=cpu:2", *AWKWARD[:2]]
    assert set(AWKWARD) < set(words_in_a_shell(text_of("local-1")))
    script = text_of("slurm-awkward")
    command = script[script.index("srun "):script.index("\n}\n")]
    assert words_in_a_shell(command) == ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none", "/shared/venv/bin/python", "-m", "jaxmem",
                                         "train", "--topology=cpu:8", *AWKWARD]
    here = words_in_a_shell(text_of("tpu_vm-one-host"))  # twice through a shell: here and on the host
    assert here[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "small"]
    assert words_in_a_shell(here[-1].removeprefix("--command=")) == ["jaxmem", "train", "--topology=v6e-4", *AWKWARD]


def test_hosts_find_each_other_where_there_are_several():
    several = words_in_a_shell(text_of("tpu_vm-2xv5e-16"))
    assert {"--worker=all", "--node=all", "queued-resources"} <= set(several)
    assert shlex.split(several[-1])[-1] == "--coordinator=auto"
    assert several[-1].startswith("--command=~/venv/bin/jaxmem train ")  # the ~ of the host
    assert "--coordinator=auto" not in text_of("tpu_vm-one-host")

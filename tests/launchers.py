"""One table of launcher commands with the text each prints, for the tests of `launch`.

The texts are in tests/fixtures/launch; `.venv/bin/python tests/launchers.py` writes them anew, and `git diff` shows what changed.
"""

import contextlib
import importlib
import io
import pathlib
import subprocess
import sys

SHELLCHECK = pathlib.Path(sys.executable).parent / "shellcheck"  # of the development extra
FOLDER = pathlib.Path(__file__).parent / "fixtures" / "launch"
AWKWARD = ("--out=/shared/my runs/it's", "--plan=fsdp=*", "--data=text:/data/$(HOME)/`x`.txt")  # what a shell would take apart
LLAMA = ("--model=llama3-8b", "--batch=256", "--seq=4096")

# name -> (launcher, its own flags, the run's)
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "local-4x2": ("local", ("--processes=4", "--devices=2"), ("--plan=data=4,fsdp=2", "--out=runs/a")),
    "local-1": ("local", (), ("--topology=cpu:2", *AWKWARD)),
    "local-gpu": ("local", (), ("--topology=h100:8", "--out=runs/a")),
    "local-elastic": ("local", ("--processes=2", "--elastic"), ("--topology=cpu:4", "--out=runs/a")),
    "slurm-h100-16x8": ("slurm", ("--partition=gpu", "--time=12:00:00"),
                        (*LLAMA, "--topology=h100:16x8", "--plan=data=2,fsdp=64", "--out=/shared/runs/a")),
    "slurm-one-host": ("slurm", ("--cpus=48", "--account=me", "--sbatch=--qos=high", "--sbatch=--mem=0", "--max_restarts=0"),
                       ("--topology=a100-80gb:4", "--out=/shared/runs/a")),
    "slurm-awkward": ("slurm", ("--jaxmem=/shared/venv/bin/python -m jaxmem", "--save_before=60"), ("--topology=cpu:8", *AWKWARD)),
    "gke-2xv5e-256": ("gke", ("--image=registry/jaxmem:1", "--claim=runs", "--queue=training"),
                      (*LLAMA, "--topology=2xv5e-256", "--plan=data=2,fsdp=128,tensor=2", "--batch=512", "--out=/runs/a")),
    "gke-v5p-128": ("gke", ("--image=registry/jaxmem:1", "--name=big-one", "--namespace=team"),
                    (*LLAMA, "--topology=v5p-128", "--out=/shared/a")),
    "gke-tpu7x-one-host": ("gke", ("--image=registry/jaxmem:1",), ("--topology=tpu7x-8", "--out=/shared/a")),
    "gke-h100-16x8": ("gke", ("--image=registry/jaxmem:1", "--claim=runs", "--accelerator=nvidia-h100-mega-80gb"),
                      (*LLAMA, "--topology=h100:16x8", "--out=/runs/a")),
    "gke-mig": ("gke", ("--image=registry/jaxmem:1", "--jaxmem=/venv/bin/python -m jaxmem"), ("--topology=h100-mig-1g.10gb", *AWKWARD)),
    "tpu_vm-v5p-128": ("tpu_vm", ("--tpu=my-tpu", "--zone=us-east5-a", "--project=mine"),
                       (*LLAMA, "--topology=v5p-128", "--out=/shared/runs/a")),
    "tpu_vm-2xv5e-16": ("tpu_vm", ("--tpu=slices", "--zone=us-west4-a", "--jaxmem=~/venv/bin/jaxmem"),
                        ("--topology=2xv5e-16", "--plan=data=2,fsdp=16", "--out=/shared/runs/a")),
    "tpu_vm-one-host": ("tpu_vm", ("--tpu=small", "--zone=us-west4-a"), ("--topology=v6e-4", *AWKWARD)),
    "tpu_vm-shape": ("tpu_vm", ("--tpu=odd", "--zone=us-east5-a"), (*LLAMA, "--topology=v5p:2x2x8", "--out=/shared/runs/a")),
}


def text_of(name: str) -> str:
    """What the launcher prints on stdout; it must end with status 0."""
    launcher, own, train = CASES[name]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = importlib.import_module(f"launch.{launcher}").main([*own, "--", *train])
    assert status == 0, name
    return out.getvalue().replace(sys.executable, "python")


def golden(name: str) -> pathlib.Path:
    return FOLDER / f"{name}.{'yaml' if CASES[name][0] == 'gke' else 'sh'}"


def shellcheck(*scripts: pathlib.Path) -> list[str]:
    """What a linter for shells has to say of bash scripts."""
    done = subprocess.run([SHELLCHECK, "--shell=bash", "--severity=style", *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    # SC2016: `$` in single quotes stays a dollar, which is what is wanted of a path with one
    return [block for block in done.stdout.split("\n\n") if block.strip() and "SC2016" not in block and "more information" not in block]


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
    for case in CASES:
        golden(case).write_text(text_of(case))

"""what is installed, which targets work, what is missing and how to get it.

  jaxmem doctor              what is there, by looking
  jaxmem doctor --compile    and compile one matrix product for each target, some seconds each
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import time

from absl import flags as absl_flags

from jaxmem import environment
from jaxmem.hardware import parse_topology
from jaxmem.spec import InputError

EXAMPLES = ("v5e-1", "h100:1")
TARGETS = "make env in a checkout, or pip install 'jaxmem[targets]'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """`what` works or not, `state` says with which version or why not, `mend` is the command that helps."""

    what: str
    works: bool
    state: str
    mend: str | None = None


def define(flags: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_boolean("compile", False, "compile a matrix product for a TPU and a GPU", flag_values=flags)
    absl_flags.DEFINE_boolean("json", False, "print one JSON object", flag_values=flags)


def run(flags: absl_flags.FlagValues, words: list[str]) -> int:
    from jaxmem.cli.arguments import no_words

    no_words(words, "doctor")
    versions = environment.versions()
    here = accelerator_findings(environment.accelerators(), environment.plugins())
    findings = [tpu_target(versions), gpu_target(versions), *here, *map(compiles, EXAMPLES if flags.compile else ())]
    if flags.json:
        print(json.dumps({"versions": versions, "findings": [dataclasses.asdict(f) for f in findings],
                          "jax_platforms": os.environ.get("JAX_PLATFORMS")}, indent=1))
        return 0
    print("Versions")
    for name, version in versions.items():
        print(f"  {name:<14}{version or '—'}")
    print("\nTargets and devices")
    for finding in findings:
        print(f"  {'yes' if finding.works else 'no ':<5}{finding.what:<23}{finding.state}")
        if finding.mend:
            print(f"{'':<30}{finding.mend}")
    print(f"\nJAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '(not set: jax chooses)')}")
    return 0


def tpu_target(versions: dict[str, str | None]) -> Finding:
    """Whether libtpu is there, whole, and the release line that this jax asks for."""
    what, mend = "checks for TPU", TARGETS
    if versions["libtpu"] is None:
        return Finding(what=what, works=False, state="libtpu is not installed", mend=mend)
    if not library("libtpu", "libtpu.so"):
        return Finding(what=what, works=False, state=f"libtpu {versions['libtpu']} is broken: no libtpu.so in it",
                       mend="pip install --force-reinstall 'jaxmem[targets]'")
    asked = asked_of("jax", "libtpu")
    if asked and not matches(versions["libtpu"], asked):
        return Finding(what=what, works=True, mend=mend,
                       state=f"libtpu {versions['libtpu']}, and jax {versions['jax']} asks for {asked}")
    return Finding(what=what, works=True, state=f"libtpu {versions['libtpu']}")


def gpu_target(versions: dict[str, str | None]) -> Finding:
    """Whether the CUDA plugin and its pjrt are there, whole, and of jax's version."""
    what, mend = "checks for NVIDIA GPU", TARGETS
    plugin, pjrt = versions["cuda_plugin"], versions["cuda_pjrt"]
    missing = [name for name, version in (("jax-cuda13-plugin", plugin), ("jax-cuda13-pjrt", pjrt)) if version is None]
    if missing:
        return Finding(what=what, works=False, state=f"not installed: {', '.join(missing)}", mend=mend)
    if not any(library(f"jax_plugins.xla_cuda{n}", "xla_cuda_plugin.so") for n in (13, 12)):
        return Finding(what=what, works=False, state=f"jax-cuda13-pjrt {pjrt} is broken: no xla_cuda_plugin.so in it",
                       mend="pip install --force-reinstall 'jaxmem[targets]'")
    if {plugin, pjrt} != {versions["jax"]}:
        return Finding(what=what, works=False, mend=mend,
                       state=f"jax-cuda13-plugin {plugin} and jax-cuda13-pjrt {pjrt} are not of jax's version {versions['jax']}")
    return Finding(what=what, works=True, state=f"jax-cuda13-plugin and -pjrt {plugin}")


def accelerator_findings(present: tuple[str, ...], installed: tuple[str, ...]) -> list[Finding]:
    """One line for each accelerator of this machine, or one that says there is none."""
    names = {"tpu": ("a TPU is here", "pip install 'jaxmem[tpu]'"),
             "cuda": ("an NVIDIA GPU is here", "pip install 'jaxmem[cuda]'"),
             "rocm": ("an AMD GPU is here", None)}
    if not present:
        return [Finding(what="an accelerator here", works=False, state="none found; checks need none, programs run on the CPU")]
    return [Finding(what=names[name][0], works=True, state="jax uses it") if name in installed
            else Finding(what=names[name][0], works=False, state="jax has no plugin for it", mend=names[name][1])
            for name in present]


def compiles(topology: str) -> Finding:
    """Whether one matrix product compiles for a topology of one device."""
    from jaxmem import targets, verdict

    start = time.monotonic()
    program = pathlib.Path(targets.__path__[0], "square.py")
    try:
        answer = verdict.check_program(str(program), "build", parse_topology(topology), use_cache=False, timeout_s=300,
                                       progress=lambda line: None)
        reason = "; ".join(answer["problems"]) or answer["verdict"]
        works = answer["verdict"] in ("fits", "tight")
    except InputError as error:
        reason, works = str(error), False
    state = f"in {time.monotonic() - start:.1f} s" if works else reason if len(reason) < 300 else reason[:300] + "..."
    return Finding(what=f"compiles for {topology}", works=works, state=state)


def library(module: str, file: str) -> str | None:
    """Path of a package's shared library, without importing the package."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    for folder in (found.submodule_search_locations or []) if found else []:
        if (pathlib.Path(folder) / file).is_file():
            return str(pathlib.Path(folder) / file)
    return None


def asked_of(distribution: str, package: str) -> str | None:
    """The version that a distribution's extras ask of a package: `"0.0.50.*"`, or None."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        if match := re.match(rf"{package}==([^;\s]+)", requirement):
            return match[1]
    return None


def matches(version: str, asked: str) -> bool:
    """`matches("0.0.50.1", "0.0.50.*")`."""
    return (version + ".").startswith(asked[:-1]) if asked.endswith(".*") else version == asked

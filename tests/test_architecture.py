"""The layers of DESIGN.md, read from the source: who imports whom, who imports jax, and that importing does nothing else."""

import ast
import functools
import json
import pathlib
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).parent.parent
PACKAGE = TOP / "jaxmem"

# Every module belongs to the first entry that its name begins with. A layer imports itself and those in `BELOW`.
LAYER_OF = {
    "jaxmem.models.configs": "words",
    "jaxmem.models.image_configs": "words",
    "jaxmem.optim.configs": "words",
    "jaxmem.optim.learned.meta": "running",
    "jaxmem.spec": "words",
    "jaxmem.chips": "words",
    "jaxmem.hardware": "words",
    "jaxmem.workload": "words",
    "jaxmem.plan": "words",
    "jaxmem.rules": "words",
    "jaxmem.replan": "words",
    "jaxmem.rehearsal": "words",
    "jaxmem.kernel_limits": "words",
    "jaxmem.environment": "words",
    "jaxmem.schedules": "words",
    "jaxmem.guard": "words",
    "jaxmem.cost": "prediction",
    "jaxmem.hlo": "prediction",
    "jaxmem.dims": "mechanism",
    "jaxmem.sharding": "mechanism",
    "jaxmem.models": "mechanism",
    "jaxmem.parallel": "mechanism",
    "jaxmem.optim": "mechanism",
    "jaxmem.step": "assembly",
    "jaxmem.targets": "assembly",
    "jaxmem.verdict": "assembly",
    "jaxmem.analysis": "assembly",
    "jaxmem.advice": "assembly",
    "jaxmem.offloaded": "assembly",
    "jaxmem.resident": "assembly",
    "jaxmem.colocate.packing": "words",
    "jaxmem.colocate.slices": "words",
    "jaxmem.colocate.training": "running",
    "jaxmem.colocate": "assembly",
    "jaxmem.data": "running",
    "jaxmem.checkpoint": "running",
    "jaxmem.continual": "running",
    "jaxmem.runs": "runs",
    "jaxmem.supervise": "runs",
    "jaxmem.records": "runs",
    "jaxmem.tabulate": "runs",
    "jaxmem.sweep": "entry",
    "jaxmem.handing": "entry",
    "jaxmem.experiment": "entry",
    "jaxmem.faults": "running",
    "jaxmem.watchdog": "running",
    "jaxmem.damage": "running",
    "jaxmem.heartbeat": "running",
    "jaxmem.last_resort": "running",
    "jaxmem.hosts": "running",
    "jaxmem.roll_call": "running",
    "jaxmem.cluster": "running",
    "jaxmem.train": "running",
    "jaxmem.running": "running",
    "jaxmem.report": "report",
    "jaxmem.cli": "entry",
    "jaxmem.__main__": "entry",
}
BELOW = {
    "words": set(),
    "prediction": {"words"},
    "mechanism": {"words"},
    "assembly": {"words", "prediction", "mechanism"},
    "runs": {"words"},
    "running": {"words", "prediction", "mechanism", "assembly", "runs"},
    "report": {"words", "prediction", "assembly", "runs"},
    "entry": {"words", "prediction", "assembly", "runs", "running", "report"},
}
WITHOUT_JAX = {"words", "prediction", "runs", "report", "entry"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "libtpu", "jax_plugins"}
SAY_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc", "core", "manager", "base", "lib"}


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer(module: str) -> str | None:
    return next((name for prefix, name in LAYER_OF.items() if module == prefix or module.startswith(prefix + ".")), None)


@functools.cache
def imports(module: str, source: str | None = None) -> set[str]:
    """Modules that a module imports anywhere, inside functions too."""
    found = set()
    package = module if MODULES.get(module, pathlib.Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[:len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([base] if base else [])])
            # `from jaxmem import plan` is about jaxmem.plan
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module):
    own = layer(module)
    if module == "jaxmem" or module in ("jaxmem.models", "jaxmem.optim"):
        return  # loads names on first use, which `test_importing_has_no_side_effects` sees to; and the packages hold words too
    assert own is not None, f"{module} has no layer: add it to LAYER_OF and to DESIGN.md"
    for imported in imports(module) - {"jaxmem"}:
        if imported.partition(".")[0] == "jaxmem":
            theirs = layer(imported)
            assert theirs == own or theirs in BELOW[own], f"{module} ({own}) imports {imported} ({theirs})"
        if imported.partition(".")[0] in JAX:
            assert own not in WITHOUT_JAX, f"{module} ({own}) imports {imported}"


def test_packages_that_hold_two_layers_import_nothing():
    assert imports("jaxmem.models") == imports("jaxmem.optim") == set()


def test_models_know_nothing_of_meshes_and_mechanisms_nothing_of_models():
    for module in MODULES:
        found = imports(module)
        if module.startswith("jaxmem.models"):
            above = ("jaxmem.plan", "jaxmem.rules", "jaxmem.sharding", "jaxmem.parallel", "jaxmem.step")
            assert not [name for name in found if name.startswith(above)], module
            assert "jax.sharding" not in found, module
        if module.startswith("jaxmem.parallel"):
            assert not [name for name in found if name.startswith("jaxmem.models")], module


def test_step_is_the_only_file_that_sees_plan_model_and_optimizer():
    def of(module: str, package: str) -> bool:
        return any(name.startswith(package) and not name.endswith(".configs") for name in imports(module))

    together = [m for m in MODULES if "jaxmem.plan" in imports(m) and of(m, "jaxmem.optim.") and of(m, "jaxmem.models.")]
    assert together == ["jaxmem.step"]


def test_the_reader_of_imports_sees_every_form():
    source = ("import jax.numpy as jnp\nfrom jaxmem import plan, spec as s\n"
              "def f():\n    from . import kinds\n    from ..hlo import parse\n")
    found = {"jax.numpy", "jaxmem.plan", "jaxmem.spec", "jaxmem.report.kinds", "jaxmem.hlo.parse"}
    assert imports("jaxmem.report.html", source) == found


def test_file_names_say_something():
    for path in (path for folder in ("jaxmem", "experiments", "launch", "tests") for path in (TOP / folder).rglob("*.py")):
        assert path.stem not in SAY_NOTHING, path


def python(code: str) -> dict:
    """What `code` prints as its last line, as JSON; it runs in a fresh interpreter that prints nothing else."""
    done = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1, done.stdout
    return json.loads(done.stdout)


@pytest.mark.parametrize("layers", [WITHOUT_JAX, set(BELOW) - WITHOUT_JAX], ids=["without jax", "with jax"])
def test_importing_has_no_side_effects(layers):
    modules = ["jaxmem", *(m for m in MODULES if layer(m) in layers)]
    before_and_after = """
import os, sys, json, signal, logging, threading, warnings
from absl import flags
def state():
    return [dict(os.environ), sorted(flags.FLAGS), [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
            len(logging.root.handlers), os.getcwd()]
{first}
before = state()
import importlib
for name in {modules}:
    importlib.import_module(name)
after = state()
print(json.dumps({{"same": before == after, "jax": "jax" in sys.modules, "threads": threading.active_count(), {extra}}}))
"""
    if layers == WITHOUT_JAX:
        found = python(before_and_after.format(first="", modules=modules, extra=""))
        assert found == {"same": True, "jax": False, "threads": 1}
    else:
        first = "import jax, flax.nnx, optax, orbax.checkpoint, jax.experimental.pallas"  # what they do is not ours
        extra = '"devices": jax._src.xla_bridge.backends_are_initialized()'
        found = python(before_and_after.format(first=first, modules=modules, extra=extra))
        assert found["same"] and not found["devices"]


def test_the_names_of_the_package_load_on_first_use():
    found = python("""
import jaxmem, json, sys
before = sorted(name for name in sys.modules if name.startswith("jaxmem."))
loaded = [getattr(jaxmem, name).__name__ for name in jaxmem.__all__]
print(json.dumps({"before": before, "loaded": loaded, "listed": set(jaxmem.__all__) <= set(dir(jaxmem))}))
""")
    assert found["before"] == []
    assert found["loaded"] == ["InputError", "Plan", "Workload", "check", "check_workload", "mesh", "parse_topology"]
    assert found["listed"]

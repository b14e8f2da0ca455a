"""Which platforms JAX is told to open, from device files and installed plugins; and that a machine without any is quiet."""

import json
import os
import subprocess
import sys

import pytest

from jaxmem import environment


def device(root, path, text=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def pci(root, address, vendor, number):
    device(root, f"sys/bus/pci/devices/{address}/vendor", f"{vendor}\n")
    device(root, f"sys/bus/pci/devices/{address}/device", f"{number}\n")


@pytest.mark.parametrize(("file", "found"), [
    ("dev/nvidia0", ("cuda",)), ("dev/nvidia3", ("cuda",)), ("dev/nvidiactl", ("cuda",)), ("dev/dxg", ("cuda",)),
    ("dev/accel0", ("tpu",)), ("dev/kfd", ("rocm",)),
    ("dev/accel/accel0", ()),  # an NPU of the kernel's accel class, not a TPU
    ("dev/nvidia-uvm", ()), ("dev/null", ()),
])
def test_device_files(tmp_path, file, found):
    assert environment.accelerators(str(tmp_path), {}) == ()
    device(tmp_path, file)
    assert environment.accelerators(str(tmp_path), {}) == found


@pytest.mark.parametrize(("vendor", "number", "found"), [
    ("0x1ae0", "0x0062", ("tpu",)),  # v5p
    ("0x1ae0", "0x0042", ()),  # Google's network card, in every machine of that cloud
    ("0x10de", "0x0062", ()),
])
def test_tpus_on_the_pci_bus(tmp_path, vendor, number, found):
    pci(tmp_path, "0000:00:04.0", "0x8086", "0x1237")
    pci(tmp_path, "0000:00:05.0", vendor, number)
    assert environment.accelerators(str(tmp_path), {}) == found


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_not_here(tmp_path, hidden):
    device(tmp_path, "dev/nvidia0")
    assert environment.accelerators(str(tmp_path), {"CUDA_VISIBLE_DEVICES": hidden}) == ()
    assert environment.accelerators(str(tmp_path), {"CUDA_VISIBLE_DEVICES": "0"}) == ("cuda",)


@pytest.mark.parametrize(("present", "installed", "value"), [
    ((), (), "cpu"),
    ((), ("tpu", "cuda"), "cpu"),
    (("cuda",), (), "cpu"),  # jax cannot use it, and would say so at every command; `jaxmem doctor` says it once
    (("cuda",), ("cuda",), None),
    (("tpu",), ("tpu",), None),
    (("cuda",), ("tpu", "cuda"), "cuda,cpu"),  # libtpu is here for its compiler, and the GPU is used
    (("tpu",), ("tpu", "cuda"), "tpu,cpu"),
    (("tpu", "cuda"), ("tpu", "cuda"), None),
    ((), ("tpu", "metal"), None),  # a plugin we know nothing of
])
def test_platforms(present, installed, value):
    assert environment.platforms({}, present, installed) == value
    assert environment.platforms({"JAX_PLATFORMS": ""}, present, installed) is None
    assert environment.platforms({"JAX_PLATFORMS": "cuda"}, present, installed) is None
    assert environment.platforms({"JAX_PLATFORM_NAME": "cpu"}, present, installed) is None


def test_quiet_comes_too_late_once_jax_is_imported():
    environ: dict[str, str] = {}
    environment.quiet(environ)  # this test's process has jax
    assert environ == {}


def test_a_machine_with_compilers_and_no_accelerator_is_quiet():
    """With libtpu and the CUDA plugin installed, JAX alone prints a traceback here; after `quiet`, nothing, and the CPU runs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "TPU_"))}
    code = "from jaxmem import environment; environment.quiet(); import jax; print(jax.devices()[0].platform, end='')"
    if environment.accelerators():
        code = code.replace("environment.quiet()", "environment.accelerators = lambda **_: (); environment.quiet()")
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("cpu", "", 0)


def test_versions_need_no_jax_and_nothing_installed():
    code = "import json, sys; from jaxmem import environment as e; print(json.dumps(e.versions())); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    printed = json.loads(done.stdout)
    import flax
    import jax
    import jaxlib

    import jaxmem

    assert {name: printed[name] for name in ("jax", "jaxlib", "flax", "jaxmem", "python")} == {
        "jax": jax.__version__, "jaxlib": jaxlib.__version__, "flax": flax.__version__, "jaxmem": jaxmem.__version__,
        "python": sys.version.split()[0]}
    assert set(printed) == {"python", "jaxmem", "jax", "jaxlib", "flax", "optax", "orbax", "libtpu", "cuda_plugin", "cuda_pjrt"}
    nothing_installed = subprocess.run(
        [sys.executable, "-S", "-c", "from jaxmem import environment; print(environment.versions()['jax'])"],
        capture_output=True, text=True, timeout=60, check=True, cwd=environment.__file__.rpartition("/jaxmem/")[0])
    assert nothing_installed.stdout == "None\n"

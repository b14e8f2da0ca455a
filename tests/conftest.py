"""Every test runs on eight emulated CPU devices, with strict promotion, and with a result cache of its own."""

import os
import pathlib
import tempfile
from collections.abc import Iterator

# Before jax is imported: the plugins for other targets are installed, and their devices are not here.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_PLATFORM_NAME", None)

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples everywhere, so that a failure in CI is a failure at the desk; compiling makes a deadline meaningless.
hypothesis.settings.register_profile("jaxmem", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jaxmem")

_CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CACHE] = tempfile.TemporaryDirectory(prefix="jaxmem-tests-")
    os.environ["JAXMEM_CACHE"] = config.stash[_CACHE].name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_CACHE].cleanup()


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The checkout's top folder."""
    return pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def compiled_once(xla_cache: pathlib.Path) -> Iterator[None]:
    """What the module's runs compile is compiled once, as for the runs of a user."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(xla_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", before)

"""The compile child: what it survives, what it keeps, what it remembers. Every program here is tiny."""

import json
import pathlib
import textwrap

import pytest

from jaxmem.hardware import parse_topology
from jaxmem.spec import InputError
from jaxmem.targets import cache, child
from jaxmem.targets.compile import Request, compile_programs, death, missing_package, share
from jaxmem.targets.flags import flags_for

V5E = parse_topology("v5e-4")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "cache"))


def program(tmp_path: pathlib.Path, body: str) -> dict:
    """A program file whose build() is `body`."""
    path = tmp_path / "mine.py"
    path.write_text("import os, time, jax, jax.numpy as jnp\nfrom jax.sharding import NamedSharding, PartitionSpec as P\n"
                    "def build(mesh_for):\n" + textwrap.indent(textwrap.dedent(body), "    "))
    return {"kind": "file", "file": str(path), "function": "build"}


GOOD = """
    mesh = mesh_for({"fsdp": 4})
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    return lambda x: x * 2 + 1, (x,), {"donate_argnums": (0,)}
"""


def compiled(spec: dict, **kwargs) -> dict:
    lines: list[str] = []
    artifacts = compile_programs(Request(spec=spec, programs=("program",), topology=kwargs.pop("topology", V5E),
                                         flags=kwargs.pop("flags", ()), salt=None),
                                 progress=lines.append, **kwargs)
    return {**artifacts["program"].result, "cached": artifacts["program"].cached, "lines": lines, "artifact": artifacts["program"]}


def test_compiles_for_a_slice_that_is_not_here_and_remembers(tmp_path, own_cache):
    """A donated [8, 1024] f32 split over 4 devices: 2 rows of 4 KiB, padded to a tile of 8 rows, in and out the same memory."""
    spec = program(tmp_path, GOOD)
    first = compiled(spec)
    assert first["status"] == "ok", first["reason"]
    assert first["backend"] == "tpu v5e"
    m = first["memory"]
    assert m["argument_bytes"] == m["output_bytes"] == m["alias_bytes"]
    assert m["argument_bytes"] in (2 * 4096, 8 * 4096)
    assert first["arguments"][0]["bytes"] == 2 * 4096
    assert "is_scheduled=true" in first["artifact"].text("hlo")
    again = compiled(spec)
    assert again["cached"] and again["memory"] == m
    other = compiled(spec, flags=("--xla_tpu_enable_async_collective_fusion=true",))
    assert not other["cached"], "flags change the schedule, so they are part of the key"


@pytest.mark.parametrize(("file", "damage"), [("result.json", b"{"), ("result.json", b"{}"), ("hlo.txt.gz", b"\x1f\x8b cut"),
                                              ("hlo.txt.gz", None)])
def test_a_damaged_artifact_is_compiled_again(tmp_path, own_cache, file, damage):
    """On CPU emulation, where compiling takes no time; a damaged entry is listed and cleared like any other."""
    body = GOOD.replace("P(\"fsdp\")", "P()")
    spec, where = program(tmp_path, body), parse_topology("cpu:4")
    first = compiled(spec, topology=where)
    path = first["artifact"].folder / file
    path.write_bytes(damage) if damage is not None else path.unlink()
    assert [e["status"] for e in cache.entries()] == ["damaged"]
    again = compiled(spec, topology=where)
    assert not again["cached"] and again["memory"] == first["memory"] and cache.whole(again["artifact"].folder)
    (again["artifact"].folder / "result.json").write_bytes(b"")
    assert cache.clear() == 1 and not list(cache.artifacts().glob("*"))


def test_an_unwritable_cache_is_said_before_compiling(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="cannot be written.*JAXMEM_CACHE"):
        compiled(program(tmp_path, GOOD))


def test_what_a_program_prints_is_not_the_answer(tmp_path, own_cache):
    noisy = 'print(3); print("null"); print(\'{"phase": "done", "program": "program", "key": "x"}\')\n' + textwrap.dedent(GOOD)
    assert compiled(program(tmp_path, noisy), topology=parse_topology("cpu:4"))["status"] == "ok"


@pytest.mark.parametrize(("body", "words"), [
    ("raise ValueError('my own')", ["mine.py:4 in build", "ValueError: my own"]),
    ("import not_a_module", ["mine.py:4 in build", "ModuleNotFoundError"]),
    ("raise SystemExit(0)", ["mine.py:4 in build", "SystemExit"]),
    ("return (1, 2)", ["expected (fn, args)"]),
    ("def f(x):\n    raise RuntimeError('in trace')\nreturn f, (jax.ShapeDtypeStruct((2,), jnp.float32, "
     "sharding=NamedSharding(mesh_for({'a': 4}), P())),)", ["mine.py:5 in f", "in trace"]),
    ("return (", ["mine.py:4", "SyntaxError"]),
])
def test_errors_in_a_users_file_name_its_line(tmp_path, own_cache, body, words):
    with pytest.raises(InputError) as caught:
        compiled(program(tmp_path, body), topology=parse_topology("cpu:4"))
    assert all(w in str(caught.value) for w in words), caught.value


def test_an_abort_is_a_result(tmp_path, own_cache):
    got = compiled(program(tmp_path, "os.write(2, b'F1201 compiler.cc:1] Check failed: it broke'); os.abort()"))
    assert got["status"] == "abort" and got["memory"] is None
    assert "SIGABRT" in got["reason"] and "Check failed: it broke" in got["reason"]
    assert cache.entries() == [], "the next try may end otherwise"


def test_a_hang_ends_in_bounded_time(tmp_path, own_cache):
    got = compiled(program(tmp_path, "time.sleep(1000)"), timeout_s=6)
    assert got["status"] == "timeout" and "6 s" in got["reason"]


def test_an_unknown_compiler_flag_is_a_result(tmp_path, own_cache):
    got = compiled(program(tmp_path, GOOD), flags=("--xla_tpu_no_such_flag=true",))
    assert got["status"] in ("abort", "refused") and "xla_tpu_no_such_flag" in got["reason"]


def test_out_of_memory_is_the_compilers_word(tmp_path, own_cache):
    """64 GiB a device on a chip with 15.75 GiB usable; the numbers are the compiler's."""
    got = compiled(program(tmp_path, """
        mesh = mesh_for({"fsdp": 4})
        x = jax.ShapeDtypeStruct((2 ** 16, 2 ** 20), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
        return lambda x: jnp.sin(x) + x.sum(0)[None], (x,)
    """))
    assert got["status"] == "oom"
    assert got["oom_bytes"] >= 2 ** 36
    assert got["limit_bytes"] == pytest.approx(15.75 * 2 ** 30, rel=1e-3)


@pytest.mark.parametrize(("body", "words"), [
    ("return 3", ["returned int", "(fn, args)"]),
    ('mesh = mesh_for({"fsdp": 3}); return None', ["fsdp(3) = 3 devices", "has 4"]),
    ("return lambda x: x, (jnp.ones((4, 4)),)", ["concrete array", "ShapeDtypeStruct"]),
    ("return lambda x: x, (jax.ShapeDtypeStruct((4, 4), jnp.float32),)", ["no sharding", "4 devices"]),
    ('mesh = mesh_for({"fsdp": 4})\nreturn lambda x: x, (jax.ShapeDtypeStruct((6, 4), jnp.float32, '
     'sharding=NamedSharding(mesh, P("fsdp"))),)', ["not a multiple of fsdp(4)", "nearest 4 or 8"]),
])
def test_bad_programs_are_input_errors(tmp_path, own_cache, body, words):
    with pytest.raises(InputError) as caught:
        compiled(program(tmp_path, body))
    assert all(w in str(caught.value) for w in words), caught.value


def test_a_missing_function_names_the_nearest(tmp_path, own_cache):
    with pytest.raises(InputError, match="no function 'biuld'; did you mean build"):
        compiled({**program(tmp_path, GOOD), "function": "biuld"})


@pytest.mark.parametrize(("topology", "module", "package"), [("v5e-4", "libtpu", "libtpu"),
                                                             ("h100:8", "jax_cuda13_plugin", "jax-cuda13-plugin")])
def test_a_missing_compiler_is_named(monkeypatch, topology, module, package):
    import importlib.util
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else real(name, *a))
    assert f"needs {package}" in missing_package(parse_topology(topology))
    assert "pip install 'jaxmem[targets]'" in missing_package(parse_topology(topology))


def test_a_chip_that_no_compiler_takes_is_said():
    assert "compute capability" in missing_package(parse_topology("v100:8"))


def test_death_reads_the_last_words(tmp_path):
    log = tmp_path / "stderr"
    log.write_text("warning: noise\nF0101 00:00:00.0 12 x.cc:3] Check failed: a == b (1 vs. 2)\n*** Aborted\n    @ 0x123 frame\n")
    assert death(-6, log) == "killed by SIGABRT: F0101 00:00:00.0 12 x.cc:3] Check failed: a == b (1 vs. 2)"
    assert "out of this machine's memory" in death(-9, log)


def test_train_gets_a_core_of_its_own():
    assert share(("init", "train", "eval", "save"), 2) == [("train",), ("init", "eval", "save")]
    assert share(("init", "train", "eval", "save"), 1) == [("train", "init", "eval", "save")]
    assert share(("eval",), 4) == [("eval",)]


@pytest.mark.parametrize(("message", "status", "needed", "limit"), [
    ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out: total (1.84T) exceeds available HBM (15.75G)", "oom", 1.84 * 2 ** 40,
     15.75 * 2 ** 30),
    ("RESOURCE_EXHAUSTED: Used 20.50G of 15.75G hbm. Exceeded", "oom", 20.5 * 2 ** 30, 15.75 * 2 ** 30),
    ("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Scoped allocation with size 20.0M", "refused", None, None),
    ("INVALID_ARGUMENT: something else", "refused", None, None)])
def test_refusals_are_told_apart(message, status, needed, limit):
    got = child.refusal(message)
    assert got["status"] == status
    assert got.get("oom_bytes") == (round(needed) if needed else None) and got.get("limit_bytes") == (round(limit) if limit else None)
    if "Vmem" in message:
        assert "not out of HBM" in got["reason"] and "scoped_vmem_limit_kib" in got["reason"]


@pytest.mark.parametrize("values", [{}, {"argument_bytes": 0, "output_bytes": 0, "temp_bytes": 0},
                                    {"argument_bytes": -1, "output_bytes": -1, "temp_bytes": -1}, {"argument_bytes": None}])
def test_memory_figures_that_say_nothing_are_none(values):
    assert child.usable_analysis(values) is None


def test_flags_of_a_plan(own_cache):
    assert flags_for("none", V5E) == ()
    assert "--xla_enable_async_all_gather=true" in flags_for("default", V5E)
    assert flags_for("default", V5E, "--xla_enable_async_all_gather=false").count("--xla_enable_async_all_gather=false") == 1
    assert "--xla_enable_async_all_gather=true" not in flags_for("default", V5E, "--xla_enable_async_all_gather=false")
    with pytest.raises(InputError, match="flags=defualt.*did you mean default"):
        flags_for("defualt", V5E)
    with pytest.raises(InputError, match="not of the form"):
        flags_for("default", V5E, "xla_foo")


def test_cache_is_listed_and_cleared(tmp_path, own_cache):
    folder = cache.artifacts() / "abc"
    child.write_artifact(folder, {"program": "train", "topology": "v5e-4", "status": "ok", "memory": None, "backend": "tpu v5e",
                                   "versions": {}, "arguments": [], "mesh": {}}, {"hlo.txt": "HloModule x"})
    (entry,) = cache.entries()
    assert entry["program"] == "train" and entry["bytes"] > 0 and json.loads((folder / "result.json").read_text())["status"] == "ok"
    cache.remember("key", {"train": "abc"})
    assert cache.remembered("key") == {"train": "abc"}
    assert cache.clear(older_than_s=1000) == 0
    assert cache.clear() == 1 and cache.entries() == [] and cache.remembered("key") is None

"""What users of such tools ran into, row by row: each case must come out right here, for the whole kind.

The numbers are those of the public reports named in each test. Rows that are a property of one module are tested beside it as well.
"""

import gzip
import json
import pathlib
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import offloaded, verdict
from jaxmem.hardware import parse_topology
from jaxmem.hlo import speed
from jaxmem.hlo.parse import parse
from jaxmem.plan import Plan
from jaxmem.spec import InputError
from jaxmem.targets.compile import Artifact
from jaxmem.workload import Workload

V5E, H100, CPU = parse_topology("v5e-4"), parse_topology("h100:8"), parse_topology("cpu:8")
GIB = 2 ** 30


def quiet(line: str) -> None:
    """Progress that nobody reads."""


def artifact(name: str = "train", *, status: str = "ok", memory: dict | None = None, callbacks: bool = False, topology=V5E,
             **more) -> Artifact:
    """A compile's outcome as the child writes it, without its text."""
    zero = dict.fromkeys(("alias_bytes", "generated_code_bytes", "peak_bytes", "host_argument_bytes", "host_output_bytes",
                          "host_alias_bytes", "host_temp_bytes"), 0)
    return Artifact(folder=None, cached=False, result={
        "program": name, "status": status, "reason": more.pop("reason", None), "memory": {**zero, **memory} if memory else None,
        "callbacks": callbacks, "lower_s": 1.0, "compile_s": 1.0, "limit_bytes": None, "arguments": [], "outputs": [],
        "backend": "tpu v5e", "versions": {"jax": "0.12"}, "flags": [], "mesh": {"axes": {}}, **more})


def judged(*artifacts: Artifact, topology=V5E, mem_fraction: float = 0.75, resident: dict | None = None) -> dict:
    return verdict.assemble({a.result["program"]: a for a in artifacts}, topology, mem_fraction=mem_fraction, flags=(),
                            resident=resident or {}, model_flops=None)


def sizes(argument: float, output: float = 0, alias: float = 0, temp: float = 0) -> dict:
    return {"argument_bytes": round(argument * GIB), "output_bytes": round(output * GIB), "alias_bytes": round(alias * GIB),
            "temp_bytes": round(temp * GIB)}


def test_row_1_the_compilers_outcome_decides_not_a_sum():
    """maxtext 4514: sizes that would fit do not, when the compiler says so; and what is compared is stated."""
    refused = artifact(status="oom", reason="CompileTimeHbmOom", oom_bytes=20 * GIB)
    refused.result["limit_bytes"] = 16_909_206_528
    out = judged(refused)
    assert out["verdict"] == "does_not_fit" and out["peak_bytes"] == 20 * GIB
    assert out["usable_bytes"] == 16_909_206_528 and "compiler" in out["usable_note"]
    assert out["sources"]["verdict"] == out["sources"]["peak_bytes"] == out["sources"]["headroom_bytes"] == "compile"


@pytest.mark.parametrize(("donate", "bytes_a_device"), [(True, 4 * 1024 * 1024), (False, 8 * 1024 * 1024)])
def test_row_2_donated_buffers_count_once(donate, bytes_a_device):
    """axlearn 1036: a 16 MiB array over 4 devices, updated: 4 MiB a device when donated, 8 MiB when not; compiled for v5e."""
    mesh = jaxmem.mesh("v5e-4", {"fsdp": 4})
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    out = jaxmem.check(lambda x: x * 2 + 1, x, topology="v5e-4", donate_argnums=(0,) if donate else (), progress=quiet)
    (program,) = out["programs"].values()
    assert program["argument_bytes"] == 4 * 1024 * 1024
    assert abs(out["peak_bytes"] - bytes_a_device) < 65536
    assert out["verdict"] == "fits" and out["backend"] == "tpu v5e" and out["versions"]["libtpu"]


@pytest.mark.parametrize(("alias", "gib", "want"), [(20, 35, "fits"), (0, 55, "fits")])
def test_row_2_on_a_gpu_the_sum_counts_a_donated_state_once(alias, gib, want):
    """20 GiB of state in and out and 15 GiB of temporaries: 35 GiB where the state is donated, 55 where it is not."""
    out = judged(artifact(memory=sizes(20, 20, alias, 15), topology=H100), topology=H100)
    assert out["peak_bytes"] == gib * GIB and out["verdict"] == want
    larger = judged(artifact(memory=sizes(25, 25, alias, 15), topology=H100), topology=H100)
    assert larger["verdict"] == ("fits" if alias else "does_not_fit")


def test_row_3_the_cpu_is_never_shown_as_hbm():
    """axlearn 1036, 1051."""
    out = judged(artifact(memory=sizes(1, temp=2), topology=CPU, backend="cpu cpu"), topology=CPU)
    assert out["verdict"] == "unknown" and out["peak_bytes"] is None and out["usable_bytes"] is None and out["headroom_bytes"] is None
    assert out["programs"]["train"]["argument_bytes"] == GIB, "what is known is shown"
    assert out["backend"] == "cpu cpu" and any("CPU" in w for w in out["warnings"])


def test_row_4_no_figures_is_unknown():
    """jax 18954, 12848: memory_analysis of zeros, -1 or None (the child turns all three into None)."""
    out = judged(artifact(memory=None))
    assert out["verdict"] == "unknown" and out["peak_bytes"] is None
    assert any("no memory figures" in p for p in out["problems"])


def test_row_5_callbacks_are_not_covered():
    """jax 31292."""
    out = judged(artifact(memory=sizes(1), callbacks=True))
    assert out["verdict"] == "unknown" and any("not covered" in p for p in out["problems"])

    def with_print(x):
        jax.debug.print("sum {s}", s=x.sum())
        return x * 2
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    out = jaxmem.check(with_print, x, topology="v5e-1", progress=quiet)
    assert out["verdict"] == "unknown" and any("not covered" in p and "callback" in p for p in out["problems"])


@pytest.mark.parametrize(("name", "row"), [("init", 6), ("eval", 7), ("save", 7)])
def test_rows_6_and_7_every_program_is_checked_and_the_worst_is_named(name, row):
    """EasyDeL 255, t5x 1253: training fits and another program does not."""
    good = [artifact(n, memory=sizes(2, 2, 2, 3)) for n in ("init", "train", "eval", "save") if n != name]
    out = judged(*good, artifact(name, status="oom", reason="CompileTimeHbmOom", oom_bytes=17 * GIB))
    assert out["verdict"] == "does_not_fit" and out["worst_program"] == name
    assert any(p.startswith(f"{name}: ") for p in out["problems"])
    failed = judged(*good, artifact(name, status="refused", reason="Unimplemented"))
    assert failed["verdict"] == "unknown" and failed["worst_program"] == name


def test_row_7_state_that_an_evaluation_does_not_take_is_still_there():
    """10 GiB of evaluation beside 8 GiB of optimizer state is more than a v5e has."""
    out = judged(artifact("eval", memory=sizes(4, temp=6)), resident={"eval": 8 * GIB})
    assert out["verdict"] == "does_not_fit" and out["peak_bytes"] == 18 * GIB


def test_row_8_out_of_memory_names_the_buffers():
    """marin 1946: the largest buffers with their operation, shape and bytes, from the compiler's refusal itself."""
    mesh = jaxmem.mesh("v5e-4", {"fsdp": 4})
    x = jax.ShapeDtypeStruct((2 ** 16, 2 ** 17), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))

    def too_big(x):
        with jax.named_scope("attention"):
            y = jnp.sin(x)
        return y @ jnp.ones((2 ** 17, 8)), y[:, ::-1] * 2
    line = too_big.__code__.co_firstlineno + 2
    out = jaxmem.check(too_big, x, topology="v5e-4", progress=quiet)
    assert out["verdict"] == "does_not_fit"
    assert out["peak_bytes"] > out["usable_bytes"]
    assert out["headroom_bytes"] == out["usable_bytes"] - out["peak_bytes"]
    named = [b for b in out["buffers"] if b["module"] and "attention" in b["module"]]
    assert named and named[0]["bytes"] >= 2 ** 33 and named[0]["source"].endswith(f"test_user_reports.py:{line}")
    assert any("compiled for v5p-8, which has room" in w for w in out["warnings"])


def test_row_9_usable_memory_is_stated_and_fractions_are_checked():
    """maxdiffusion 216, jax 4950, 17426: the pool is a fraction, the runtime's reserve lies outside it; 90 percent is 0.9."""
    bytes_75, note = verdict.usable(H100, 0.75)
    assert bytes_75 == int(H100.chip.hbm_bytes * 0.75) and "0.75" in note
    bytes_all, note = verdict.usable(H100, 1.0)
    assert bytes_all == H100.chip.hbm_bytes - H100.chip.runtime_reserve_bytes < H100.chip.hbm_bytes and "NCCL" in note
    for bad in (90, 75.0, 0, -0.5, 1.01):
        with pytest.raises(InputError, match="fraction"):
            verdict.check_fraction(bad)


def test_row_11_a_hang_keeps_what_was_done(tmp_path, monkeypatch):
    """xla 28959."""
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    path = tmp_path / "mine.py"
    path.write_text("import time\ndef build(mesh_for):\n    time.sleep(1000)\n")
    out = verdict.check_program(str(path), "build", V5E, timeout_s=5, progress=quiet)
    assert out["verdict"] == "unknown" and out["programs"]["program"]["status"] == "timeout"
    json.dumps(out)


def test_row_14_more_than_peak_is_refused():
    """maxtext 390: a step that would need more than 100% MFU is withheld, with the numbers."""
    seconds = 1e-3
    flops = 2 * seconds * V5E.devices * V5E.chip.peak_flops["bf16"]
    fast = speed.Speed(step_s=seconds, seconds_by_limit={"math": seconds}, flops=None)
    refused = speed.refuse_impossible(fast, V5E, flops)
    assert refused.step_s is None and "100% MFU" in refused.warnings[-1]
    assert speed.refuse_impossible(fast, V5E, flops / 4).step_s == seconds


HOST_COPY = """HloModule m, is_scheduled=true, entry_computation_layout={(bf16[2,256,64]{2,1,0})->bf16[2,256,64]{2,1,0}}

ENTRY %main (p: bf16[2,256,64]) -> bf16[2,256,64] {
  %p = bf16[2,256,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %c = bf16[2,256,64]{2,1,0:T(8,128)(2,1)S(5)} copy(%p)
  ROOT %d = bf16[2,256,64]{2,1,0:T(8,128)(2,1)} copy(%c)
}
"""


def test_row_15_an_offload_that_moves_nothing_is_said(monkeypatch):
    """xla 17541: bytes by name, and a warning with the numbers for a name without effect."""
    assert offloaded.moved(parse(HOST_COPY)) == {("bf16", (2, 256, 64)): 2 * 256 * 64 * 2}
    work = Workload.parse(model="decoder-tiny", batch=8, seq=256)
    plan = Plan.parse("fsdp=4,remat=offload:context+mlp_up")

    class WithText(Artifact):
        def text(self, name):
            return HOST_COPY
    base = artifact()
    rows, warnings, errors = offloaded.report(work, plan, {"train": WithText(result=base.result, folder=None, cached=False)})
    assert [r["name"] for r in rows] == ["context", "mlp_up"]
    assert rows[1]["bytes"] == 0 and any("mlp_up moves nothing" in e for e in errors)
    assert not any("context" in e for e in errors)
    with pytest.raises(InputError, match="unknown name 'contxt'"):
        Plan.parse("remat=offload:contxt")


def test_row_20_divisibility_is_checked_before_compiling(tmp_path, monkeypatch):
    """EasyDeL 183, 128, accelerate 3798: names, sizes and the nearest legal choices; no compiler is started."""
    import subprocess
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a compile was started"))
    work = Workload.parse(model="llama3-8b", batch=60, seq=4096)
    with pytest.raises(InputError) as caught:
        verdict.check_workload(work, Plan.parse("fsdp=16,tensor=4"), parse_topology("v5p-128"), progress=quiet)
    assert textwrap.dedent("""\
        batch(60) is not a multiple of data(1) * fsdp(16) * accumulate(1) = 16; nearest: batch=64""") in str(caught.value)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: Workload.parse(model="llama3-8c", batch=1, seq=1), "llama3-8b"),
    (lambda: Workload.parse(model="llama3-8b,layrs=4", batch=1, seq=1), "layers"),
    (lambda: Workload.parse(model="llama3-8b", optimizer="adamv", batch=1, seq=1), "adamw"),
    (lambda: Plan.parse("fspd=4"), "fsdp"),
    (lambda: parse_topology("v5q-128"), "v5p"),
])
def test_row_21_a_mistyped_name_gets_the_nearest(call, words):
    """Soup 627, jax 13148."""
    with pytest.raises(InputError, match=words):
        call()


def test_tight_is_less_than_four_percent_left():
    limit = V5E.chip.usable_bytes
    for left, want in ((0.05, "fits"), (0.03, "tight"), (-0.001, "does_not_fit")):
        m = {"argument_bytes": round(limit * (1 - left)), "output_bytes": 0, "temp_bytes": 0}
        assert judged(artifact(memory=m))["verdict"] == want


def test_host_memory_decides_too():
    """What four chips put into one host's memory against a typical host's."""
    room = V5E.chip.host_ram_bytes
    m = {**sizes(1), "host_output_bytes": room // V5E.devices_per_host + GIB}
    out = judged(artifact("save", memory=m))
    assert out["verdict"] == "does_not_fit" and out["host_bytes"] > room and any("host memory" in p for p in out["problems"])
    both = judged(artifact("train", memory=sizes(3)), artifact("save", memory=m))
    assert both["worst_program"] == "save", "the program that does not fit is named, whatever its device peak"


def test_row_16_offloaded_state_is_explained():
    """marin 5587: an update that mixes memory spaces is refused by the compiler; the reason says what to do."""
    from jaxmem.targets.child import refusal
    got = refusal("INVALID_ARGUMENT: memory space of all inputs must be the same, got <host> and <device>: pinned_host")
    assert got["status"] == "refused" and "jax.device_put" in got["reason"]


@pytest.mark.parametrize("name", ["hlo/llama3.1-8b-offload-v6e-256", "gpu/b200_offload"])
def test_row_15_bytes_that_really_move(name):
    """Real offloading programs: what goes to the host in a step is what the compiler allocates there."""
    folder = pathlib.Path(__file__).parent / "fixtures"
    text, figures = ((folder / name / "hlo.txt.gz", folder / name / "result.json") if name.startswith("hlo") else
                     (folder / f"{name}.hlo.txt.gz", folder / f"{name}.json"))
    memory = json.loads(figures.read_text())["memory"]
    moved = sum(offloaded.moved(parse(gzip.open(text, "rt").read())).values())
    assert moved == pytest.approx(memory["host_temp_bytes"], rel=0.01) and moved > 10 ** 7

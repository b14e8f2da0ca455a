"""Every verb: what it prints, where, and the status it ends with."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from absl import flags as absl_flags

import jaxmem
from jaxmem.cli import arguments, check, doctor, main
from jaxmem.models.configs import MODELS
from jaxmem.spec import InputError


@pytest.fixture
def run(capsys):
    """`run("models", "--json")` -> (status, stdout, stderr)."""
    def run(*argv):
        status = main.main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err
    return run


def command(*argv, **environ):
    """The same in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "jaxmem", *argv], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environ})
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------- the frame

@pytest.mark.parametrize("verb", main.VERBS)
def test_every_verb_has_help(run, verb):
    for argv in ((verb, "--help"), (verb, "-h"), ("help", verb), (verb, "--whatever", "—help")):
        status, out, err = run(*argv)
        assert (status, err) == (0, "")
        assert out.startswith(f"jaxmem {verb}: {main.VERBS[verb]}.\n")
        assert max(map(len, out.splitlines())) <= 100


def test_help_names_the_verbs_and_version_is_the_package_s(run):
    status, out, _ = run("--help")
    assert status == 0 and all(f"\n  {verb} " in out for verb in main.VERBS)
    assert run("--version") == (0, f"jaxmem {jaxmem.__version__}\n", "")
    status, out, err = run()
    assert (status, out) == (2, "") and "check" in err


@pytest.mark.parametrize(("argv", "message"), [
    (["chek"], "jaxmem: unknown verb 'chek'; did you mean check"),
    (["topology"], "jaxmem: unknown verb 'topology'; did you mean topologies?"),
    (["--model=gpt2"], "jaxmem: the verb comes first, as in jaxmem check --model=gpt2"),
    (["check", "--modle=gpt2"], "jaxmem check: unknown flag --modle; did you mean --model"),
    (["check", "--mem-fractoin=1"], "jaxmem check: unknown flag --mem_fractoin; did you mean --mem_fraction"),
    (["check", "--batch=many"], "jaxmem check: --batch=many: expected a whole number"),
    (["check", "--batch=1.5"], "jaxmem check: --batch=1.5: expected a whole number"),
    (["check", "--batch=0"], "jaxmem check: --batch=0: 0 is not a positive integer"),
    (["check", "--timeout=soon"], "jaxmem check: --timeout=soon: expected a number"),
    (["check", "--json=perhaps"], "jaxmem check: --json=perhaps: expected true or false"),
    (["check", "--model"], "jaxmem check: Missing value for flag --model"),
    (["check", "model=gpt2"],
     "jaxmem check: check takes flags only, not 'model=gpt2'; flags are written --name=value, as in --model=gpt2"),
    (["check"], "jaxmem check: what to check? --model=NAME"),
    (["check", "--model=gpt2"], "jaxmem check: which topology? --topology=NAME"),
    (["check", "--model=gpt2", "--topology=v5p-100"],
     "jaxmem check: topology 'v5p-100' does not exist: did you mean v5p-64 or v5p-128?"),
    (["check", "--model=gtp2", "--topology=v5p-128"], "jaxmem check: unknown model 'gtp2'; did you mean gpt2"),
    (["check", "--model=gpt2,layer=1", "--topology=v5p-128"],
     "jaxmem check: model gpt2: unknown field 'layer'; did you mean layers"),
    (["check", "--model=gpt2", "--topology=v5e-4", "--plan=fdsp=4"], "taking --batch=4 --seq=1024\n"
     "jaxmem check: plan: unknown field 'fdsp'; did you mean fsdp"),
    (["check", "--model=gpt2", "--topology=v5e-4", "--optimizer=adam"], "taking --batch=4 --seq=1024\n"
     "jaxmem check: unknown optimizer 'adam'; did you mean adamw"),
    (["check", "--model=gpt2", "--topology=v5e-4", "--programs=train,evaluate"],
     "jaxmem check: --programs=train,evaluate: unknown program 'evaluate'; did you mean eval"),
    (["check", "--model=gpt2", "--topology=v5e-4", "--programs=,"],
     "jaxmem check: --programs=,: at least one of init, train, eval, save"),
    (["check", "--model=gpt2", "--topology=v5e-4", "--timeout=0"], "jaxmem check: --timeout=0: seconds, above 0"),
    (["check", "--program=build.py", "--topology=v5e-4"], "jaxmem check: --program=build.py: expected FILE:FUNCTION"),
    (["check", "--program=nowhere.py:build", "--topology=v5e-4"], "jaxmem check: --program=nowhere.py:build: no file nowhere.py"),
    (["check", "--program=a.py:build", "--topology=v5e-4", "--batch=4", "--plan=fsdp=4"],
     "jaxmem check: --program brings its own step, so --plan, --batch has no meaning beside it"),
    (["cache", "clera"], "jaxmem cache: cache clera: expected list or clear; did you mean clear?"),
    (["cache", "clear", "--older_than=-1"], "jaxmem cache: --older_than=-1: "),
    (["cache", "--older_than=1"], "jaxmem cache: --older_than belongs to jaxmem cache clear"),
    (["doctor", "who"], "jaxmem doctor: doctor takes flags only, not 'who'"),
    (["models", "lamma"], "jaxmem models: no model has 'lamma' in its name"),
    (["models", "gpt2,layer=1"], "jaxmem models: model gpt2: unknown field 'layer'; did you mean layers?"),
    (["topologies", "v5x"], "jaxmem topologies: unknown topology 'v5x'; did you mean v5p"),
    (["diff", "a.json"], "jaxmem diff: diff takes two files, as in jaxmem diff a.json b.json; 1 given"),
    (["diff", "nowhere.json", "b.json"], "jaxmem diff: nowhere.json: No such file or directory"),
])
def test_bad_input_is_one_message_and_status_2(run, argv, message):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert "Traceback" not in err


@pytest.mark.parametrize("written", ["—model=gpt2", "–model=gpt2", "−−model=gpt2", "––model=gpt2", "-model=gpt2",
                                     "--model=“gpt2”",
                                     "--model=gpt2"])
def test_what_word_processors_do_to_a_flag_is_undone(written):
    assert arguments.plain(written) == "--model=gpt2"


def test_other_words_are_left_as_they_are():
    for word in ("a–b.json", "-1", "−1", "--", "2xv5e-256", "", "model=“x”"):
        assert arguments.plain(word) == word
    assert arguments.plain("—mem–fraction=0.5") == "--mem_fraction=0.5"
    assert arguments.plain("--compiler_flags=--xla_a=1 --xla-b=“2”") == "--compiler_flags=--xla_a=1 --xla-b=“2"


def test_flags_and_words_in_any_order():
    flags = absl_flags.FlagValues()
    check.define(flags)
    words = arguments.parse(flags, ["one", "--batch", "8", "two", "--json", "--nojson", "--compiler_flags=--xla_a=1 --xla_b=2"])
    assert words == ["one", "two"]
    assert (flags.batch, flags.json, flags.compiler_flags) == (8, False, "--xla_a=1 --xla_b=2")


def test_a_verb_s_flags_are_its_own():
    before = set(absl_flags.FLAGS)
    flags = absl_flags.FlagValues()
    check.define(flags)
    assert set(absl_flags.FLAGS) == before
    assert len(flags) >= 16


def test_an_unexpected_error_is_70_and_the_traceback_is_one_variable_away(run, monkeypatch):
    def fail(flags, words):
        raise ZeroDivisionError("first line\nsecond line")
    monkeypatch.setattr(doctor, "run", fail)
    status, out, err = run("doctor")
    assert (status, out) == (70, "")
    assert err == ("jaxmem doctor: internal error: ZeroDivisionError: first line\n"
                   "This is a defect of jaxmem. JAXMEM_TRACEBACK=1 in the environment shows where it happened.\n")
    monkeypatch.setenv("JAXMEM_TRACEBACK", "1")
    status, out, err = run("doctor")
    assert status == 70 and err.startswith("Traceback") and "second line" in err


def test_an_interrupt_is_130_and_says_what_is_kept(run, monkeypatch):
    import jaxmem.verdict

    def interrupted(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(jaxmem.verdict, "check_workload", interrupted)
    status, out, err = run("check", "--model=gpt2", "--topology=v5e-4", "--batch=4", "--seq=64")
    assert (status, out) == (130, "")
    assert err == "\njaxmem: interrupted; programs that finished compiling are kept, and the same command goes on from there\n"


def test_an_input_error_from_deep_inside_is_status_2(run, monkeypatch):
    def refuse(flags, words):
        raise InputError("no such thing\nand a second line")
    monkeypatch.setattr(doctor, "run", refuse)
    assert run("doctor") == (2, "", "jaxmem doctor: no such thing\nand a second line\n")


def test_a_reader_that_leaves_early_is_no_error():
    process = subprocess.Popen([sys.executable, "-m", "jaxmem", "topologies", "--json"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_listing_verbs_start_without_jax_and_need_no_home():
    code = "import sys; from jaxmem.cli import main; print(main.main(sys.argv[1:]), 'jax' in sys.modules, file=sys.stderr)"
    for argv in (["models"], ["topologies"], ["cache"], ["doctor"], ["check", "--model=gpt2"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.stderr.splitlines()[-1] == ("2 False" if argv[0] == "check" else "0 False")


# ---------------------------------------------------------------- check, with the compiler left out

def answer(verdict):
    return {"schema": 1, "workload": "model=gpt2,optimizer=adamw,batch=4,seq=64", "topology": "v5e-4", "plan": "fsdp=4",
            "verdict": verdict}


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """`checked(verdict)` makes every check end with that verdict; the calls' arguments are collected."""
    import jaxmem.report.html
    import jaxmem.report.terminal
    import jaxmem.verdict

    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxmem.report.html, "render", lambda check: f"<html>{check['verdict']}")
    monkeypatch.setattr(jaxmem.report.terminal, "render", lambda check: f"terminal: {check['verdict']}\n")

    def verdict_is(verdict):
        for name in ("check_workload", "check_program"):
            def called(*arguments, _name=name, **options):
                calls.append((_name, arguments, options))
                return answer(verdict)
            monkeypatch.setattr(jaxmem.verdict, name, called)
        return calls
    return verdict_is


GPT2 = ["check", "--model=gpt2", "--topology=v5e-4", "--batch=4", "--seq=64"]


@pytest.mark.parametrize(("verdict", "status"), [("fits", 0), ("tight", 0), ("does_not_fit", 3), ("unknown", 4)])
def test_the_verdict_is_the_status(run, checked, verdict, status, tmp_path):
    checked(verdict)
    got, out, err = run(*GPT2)
    assert (got, out) == (status, f"terminal: {verdict}\n")
    (page,) = tmp_path.iterdir()
    assert err == f"report: {page.name}\n"
    assert page.name == "jaxmem-gpt2,adamw,batch=4,seq=64-fsdp=4-v5e-4.html"
    assert page.read_text() == f"<html>{verdict}"


def test_json_is_alone_on_stdout(run, checked, tmp_path):
    checked("fits")
    status, out, err = run(*GPT2, "--json", f"--report={tmp_path}/new/folder/page.html")
    assert status == 0 and json.loads(out) == answer("fits") and out.count("\n") == 1
    assert err == f"report: {tmp_path}/new/folder/page.html\n"
    assert (tmp_path / "new/folder/page.html").exists()
    assert run(*GPT2, "--report=none") == (0, "terminal: fits\n", "")


def test_an_answer_is_not_lost_over_a_report_that_cannot_be_written(run, checked, tmp_path):
    checked("does_not_fit")
    (tmp_path / "file").write_text("")
    status, out, err = run(*GPT2, f"--report={tmp_path}/file/page.html")
    assert (status, out) == (3, "terminal: does_not_fit\n")
    assert err.startswith("no report: ")


def test_flags_reach_the_check(run, checked):
    calls = checked("fits")
    run(*GPT2, "--plan=fsdp=2,tensor=*,remat=block", "--optimizer=adamw,b2=0.9", "--mem-fraction=0.9", "--timeout=7", "--jobs=2",
        "--no_cache",
        "--advise", "--programs=eval,train", "--compiler_flags=--xla_a=1", "--report=none")
    (name, (workload, plan, topology), options), = calls
    assert name == "check_workload"
    assert str(workload) == "model=gpt2,optimizer=adamw,b2=0.9,batch=4,seq=64"
    assert (plan.fsdp, plan.tensor, plan.remat, str(topology)) == (2, 2, "block", "v5e-4")
    assert options == {"programs": ("eval", "train"), "advise": True, "mem_fraction": 0.9, "compiler_flags": "--xla_a=1",
                       "timeout_s": 7.0,
                       "jobs": 2, "use_cache": False, "rehearsal": None}


def test_sizes_that_are_not_given_are_said(run, checked):
    calls = checked("fits")
    _, _, err = run("check", "--model=llama3-8b", "--topology=v5p-128", "--report=none")
    assert err == "taking --batch=64 --seq=4096\n"
    _, (workload, plan, _), options = calls[0]
    assert (workload.batch, workload.seq, plan.fsdp) == (64, 4096, 64)
    assert options["programs"] == ("init", "train", "eval", "save")
    assert (options["mem_fraction"], options["use_cache"]) == (0.75, True)
    _, _, err = run("check", "--model=gpt2,max_positions=512", "--topology=h100:8", "--batch=16", "--report=none")
    assert err == "taking --batch=16 --seq=512\n"


def test_a_program_of_ones_own(run, checked, tmp_path):
    calls = checked("unknown")
    (tmp_path / "my.py").write_text("")
    status, _, _ = run("check", "--program=my.py:build", "--topology=h100:8", "--report=none")
    assert status == 4
    (name, (path, function, topology), options), = calls
    assert (name, path, function, str(topology)) == ("check_program", "my.py", "build", "h100:8")
    assert set(options) == {"mem_fraction", "compiler_flags", "timeout_s", "jobs", "use_cache"}


@pytest.mark.parametrize("fraction", ["75", "0", "-0.1", "1.01", "nan"])
def test_a_fraction_outside_0_to_1_is_refused(run, fraction):
    status, out, err = run(*GPT2, f"--mem_fraction={fraction}")
    assert (status, out) == (2, "") and "mem_fraction" in err


def test_a_plan_that_cannot_run_is_refused_before_compiling(run):
    status, out, err = run("check", "--model=gpt2", "--topology=v5e-4", "--plan=fsdp=2,tensor=5", "--batch=4", "--seq=64")
    assert (status, out) == (2, "")
    assert "10 devices" in err and "v5e-4 has 4" in err


def test_report_names_are_short_and_differ():
    long = answer("fits") | {"plan": "remat=save:" + "+".join(["query_proj"] * 20)}
    names = [check.report_name(long), check.report_name(long | {"plan": long["plan"] + "+x"})]
    assert names[0] != names[1] and all(len(name) < 140 for name in names)
    own = answer("fits") | {"workload": "../my file.py:build", "plan": None}
    assert check.report_name(own) == "jaxmem-..-my-file.py-build-v5e-4.html"


# ---------------------------------------------------------------- the listing verbs

def test_models(run):
    status, out, err = run("models")
    assert (status, err) == (0, "") and len(out.splitlines()) == len(MODELS) + 3  # two heads and a blank line
    assert max(map(len, out.splitlines())) <= 100
    row = next(line for line in out.splitlines() if line.startswith("llama3-8b "))
    assert row.split() == ["llama3-8b", "8,030,261,248", "8.03B", "32", "4096", "32", "8", "128", "14336", "128256"]
    listed = [line.split()[0] for line in run("models", "gpt2")[1].splitlines()[1:]]
    assert listed == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    printed = json.loads(run("models", "gpt2,layers=2", "--json")[1])
    # 50257 x 768 + 1024 x 768 tables, 2 blocks of 12 x 768^2 + 13 x 768, and a final norm
    assert printed["gpt2,layers=2"]["parameters"] == 50257 * 768 + 1024 * 768 + 2 * (12 * 768**2 + 13 * 768) + 2 * 768
    assert printed["gpt2,layers=2"]["mlp_kind"] == "plain"


def test_topologies(run):
    status, out, err = run("topologies")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    assert "v5p" in out and "h100-mig-1g.10gb" in out
    row = next(line for line in out.splitlines() if line.startswith("v5e "))
    assert row.split()[1:5] == ["16.00", "GiB", "819", "GB/s"]
    one = run("topologies", "h100")[1]
    assert "989.4 TFLOP/s" in one and "h100:16x8" in one and "(20" in one
    slices = run("topologies", "2xv5e-256")[1]
    assert [line.split(maxsplit=1)[1] for line in slices.splitlines()] == [
        "2xv5e-256", "v5e", "16x16", "2", "512", "512", "128", "ring x ring", "17179869184"]


def test_every_figure_of_a_chip_is_listed_with_a_source(run):
    chips = json.loads(run("topologies", "--json")[1])["chips"]
    for name in ("v5p", "v6e", "h100", "b200"):
        chip = chips[name]
        for field in ("hbm_bytes", "hbm_bytes_per_s", "peak_flops.bf16", "host_ram_bytes", "network"):
            source, date = chip["sources"][field]
            assert source and date[:2] == "20", (name, field)


def test_cache(run, monkeypatch):
    from jaxmem.targets import cache

    entries = [{"key": "b" * 32, "program": "train", "topology": "v5e-4", "bytes": 3 * 2**20, "age_s": 7200.0, "path": "/x/b"},
               {"key": "a" * 32, "program": "init", "topology": "v5e-4", "bytes": 2**20, "age_s": 30.0, "path": "/x/a"}]
    cleared = []
    monkeypatch.setattr(cache, "entries", lambda: entries)
    monkeypatch.setattr(cache, "clear", lambda older_than_s=None: cleared.append(older_than_s) or 1)
    status, out, _ = run("cache")
    assert status == 0
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["a" * 12, "init", "v5e-4", "1.00", "MiB", "30", "s"], ["b" * 12, "train", "v5e-4", "3.00", "MiB", "2", "h"],
        ["2", "entries,", "4.00", "MiB"]]
    printed = json.loads(run("cache", "--json")[1])
    assert printed["bytes"] == 4 * 2**20 and [entry["program"] for entry in printed["entries"]] == ["init", "train"]
    assert run("cache", "clear", "--older_than=2") == (0, "removed 1 entry\n", "")
    assert json.loads(run("cache", "clear", "--json")[1]) == {"removed": 1}
    assert cleared == [2 * 86400, None]


def test_an_empty_cache(run, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "never made"))
    assert run("cache") == (0, "the cache is empty\n", "")
    assert run("cache", "clear") == (0, "removed 0 entries\n", "")
    assert not (tmp_path / "never made").exists()


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not JSON"), ("[1]", "is not a check"), ('{"a": 1}', "is not a check"),
    ('{"schema": 2, "verdict": "fits"}', "schema 2"),
])
def test_diff_refuses_what_is_no_check(run, tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    status, out, err = run("diff", f"{tmp_path}/a.json", f"{tmp_path}/a.json")
    assert (status, out) == (2, "") and message in err


def test_diff_of_two_recorded_checks(run):
    checks = pathlib.Path(__file__).parent / "fixtures" / "checks"
    fits, does_not = f"{checks}/fits_v5p.json", f"{checks}/does_not_fit_v5e.json"
    status, out, err = run("diff", fits, does_not)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    printed = json.loads(run("diff", fits, does_not, "--json")[1])
    assert printed["verdict"] == {"a": "fits", "b": "does_not_fit"}
    peaks = [json.loads(pathlib.Path(path).read_text())["peak_bytes"] for path in (fits, does_not)]
    assert next(f["change"] for f in printed["figures"] if f["name"] == "peak_bytes") == peaks[1] - peaks[0]


# ---------------------------------------------------------------- doctor

INSTALLED = {"python": "3.12.1", "jaxmem": "0.1.0", "jax": "0.12.0.1", "jaxlib": "0.12.0.1", "flax": "0.12.12", "optax": "0.2.8",
             "orbax": "0.12.8", "libtpu": "0.0.50.1", "cuda_plugin": "0.12.0.1", "cuda_pjrt": "0.12.0.1"}


def test_doctor_on_a_whole_installation(monkeypatch):
    monkeypatch.setattr(doctor, "library", lambda module, file: f"/somewhere/{file}")
    monkeypatch.setattr(doctor, "asked_of", lambda distribution, package: "0.0.50.*")
    assert doctor.tpu_target(INSTALLED) == doctor.Finding(what="checks for TPU", works=True, state="libtpu 0.0.50.1")
    assert doctor.gpu_target(INSTALLED).works and doctor.gpu_target(INSTALLED).mend is None
    other = doctor.tpu_target(INSTALLED | {"libtpu": "0.0.52"})
    assert other.works and "asks for 0.0.50.*" in other.state and "jaxmem[targets]" in other.mend


@pytest.mark.parametrize(("target", "changed", "state"), [
    (doctor.tpu_target, {"libtpu": None}, "libtpu is not installed"),
    (doctor.gpu_target, {"cuda_plugin": None, "cuda_pjrt": None}, "not installed: jax-cuda13-plugin, jax-cuda13-pjrt"),
    (doctor.gpu_target, {"cuda_pjrt": None}, "not installed: jax-cuda13-pjrt"),
    (doctor.gpu_target, {"cuda_pjrt": "0.11.2"}, "not of jax's version 0.12.0.1"),
])
def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch, target, changed, state):
    monkeypatch.setattr(doctor, "library", lambda module, file: f"/somewhere/{file}")
    finding = target(INSTALLED | changed)
    assert not finding.works and state in finding.state and "jaxmem[targets]" in finding.mend


def test_doctor_sees_a_broken_package(monkeypatch):
    monkeypatch.setattr(doctor, "library", lambda module, file: None)
    for target in (doctor.tpu_target, doctor.gpu_target):
        assert not target(INSTALLED).works and "--force-reinstall" in target(INSTALLED).mend


def test_doctor_on_accelerators():
    assert [f.works for f in doctor.accelerator_findings((), ("tpu", "cuda"))] == [False]
    here = doctor.accelerator_findings(("tpu", "cuda"), ("tpu",))
    assert [(f.what, f.works) for f in here] == [("a TPU is here", True), ("an NVIDIA GPU is here", False)]
    assert "jaxmem[cuda]" in here[1].mend


def test_doctor_matches_versions():
    assert doctor.matches("0.0.50.1", "0.0.50.*") and doctor.matches("0.0.50", "0.0.50.*") and doctor.matches("1.2", "1.2")
    for version, asked in (("0.0.5", "0.0.50.*"), ("0.0.501", "0.0.50.*"), ("1.2.1", "1.2")):
        assert not doctor.matches(version, asked)
    assert doctor.asked_of("jax", "libtpu").startswith("0.0.")
    assert doctor.asked_of("no-such-distribution", "libtpu") is None


@pytest.mark.long
@pytest.mark.parametrize("topology", doctor.EXAMPLES)
def test_doctor_compiles_for_real(topology):
    finding = doctor.compiles(topology)
    assert finding.works, finding.state


def test_doctor_reports_a_compile_that_fails(monkeypatch):
    import jaxmem.verdict

    def answering(verdict, *problems):
        monkeypatch.setattr(jaxmem.verdict, "check_program", lambda *_, **__: {"verdict": verdict, "problems": list(problems)})
        return doctor.compiles("h100:1")

    assert answering("fits").works and answering("tight").works
    failed = answering("unknown", "program: abort: cuDNN not found")
    assert (failed.works, failed.state) == (False, "program: abort: cuDNN not found")
    assert not answering("does_not_fit").works

    def missing(*_, **__):
        raise InputError("jax-cuda13-plugin is not installed")
    monkeypatch.setattr(jaxmem.verdict, "check_program", missing)
    assert (doctor.compiles("h100:1").works, doctor.compiles("h100:1").state) == (False, "jax-cuda13-plugin is not installed")


def test_doctor_prints(run):
    status, out, err = run("doctor")
    assert (status, err) == (0, "") and "checks for TPU" in out and "checks for NVIDIA GPU" in out
    printed = json.loads(run("doctor", "--json")[1])
    assert printed["versions"]["jaxmem"] == jaxmem.__version__ and len(printed["findings"]) >= 3


# ---------------------------------------------------------------- as a process

def test_as_a_module_and_without_colours():
    status, out, err = command("models", "gpt2", NO_COLOR="1")
    assert (status, err) == (0, "") and "\x1b" not in out
    assert command("--version")[1] == f"jaxmem {jaxmem.__version__}\n"
    assert command("chek")[0] == 2


def test_ctrl_c_in_a_process(tmp_path):
    code = ("import sys, time\nfrom jaxmem.cli import main, doctor\n"
            "def wait(flags, words):\n    print('waiting', flush=True)\n    time.sleep(60)\n"
            "doctor.run = wait\nsys.exit(main.main(['doctor']))")
    # a shell that runs the tests in the background has its children ignore SIGINT; at a terminal they do not
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "\njaxmem: interrupted\n")
    assert time.monotonic() - start < 10

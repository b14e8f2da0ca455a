"""Files as a kill, a full disk or a bad one leaves them."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs.hand_made import CONFIG, VERSIONS, held, killed_and_resumed, train, write

from jaxmem.runs.reading import Metrics, finite, live_holder, number, read_run


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "run", *killed_and_resumed())


def test_every_file_of_a_run(folder):
    run = read_run(folder)
    metrics, events = killed_and_resumed()
    assert (run.config, run.versions, run.events, run.problems) == (CONFIG, VERSIONS, events, [])
    assert list(run.metrics.train.steps) == list(range(1, 11)) and list(run.metrics.eval.steps) == [10]
    for name in ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "epoch", "batch", "time"):
        assert list(run.metrics.train.column(name)) == [line[name] for line in metrics if line["kind"] == "train"]
    assert all(math.isnan(value) for value in run.metrics.train.column("mfu"))
    assert run.metrics.eval.last("tokens") == 4096 and run.metrics.train.last("mfu") is None
    assert (run.asked("plan"), run.asked("seed"), run.asked("nothing"), run.steps_asked) == (CONFIG["plan"], "0", None, 10)


def test_a_line_torn_at_any_byte_is_skipped_without_a_word(folder):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(train(step, step)) + "\n" for step in (1, 2, 3)))
    whole = path.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for size in range(begin, len(whole) + 1):
        path.write_bytes(whole[:size])
        run = read_run(folder)
        assert run.problems == []
        # The line counts from its closing brace on, with the end of line or without.
        assert list(run.metrics.train.steps) == ([1, 2, 3] if size >= len(whole) - 1 else [1, 2])


def test_unreadable_lines_in_the_middle_are_counted_and_said(folder):
    path = folder / "metrics.jsonl"
    good = [json.dumps(train(step, step)).encode() for step in range(1, 5)]
    path.write_bytes(b"\n".join([good[0], b'{"kind": "tr' + good[1], b"\0" * 40, good[2], b"\xff\xfe", b"[1]", b"", good[3], b'{"torn']))
    run = read_run(folder)
    assert list(run.metrics.train.steps) == [1, 3, 4]
    assert run.problems == ["metrics.jsonl: 4 unreadable lines, the first is line 2"]
    path.write_bytes(b"\n".join([b"x", good[0], b""]))
    assert read_run(folder).problems == ["metrics.jsonl: 1 unreadable line, the first is line 1"]


def test_lines_that_are_json_but_no_metrics(folder):
    odd = [{"kind": "train"}, {"kind": "train", "step": "3"}, {"kind": "train", "step": 2.5}, {"kind": "train", "step": True}, {"step": 1}]
    odd += [{"kind": "train", "step": -1}, {"kind": "train", "step": 10**30}, {"kind": ["train"], "step": 1}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [train(1, 1), *odd, train(2, 2)]))
    run = read_run(folder)
    assert list(run.metrics.train.steps) == [1, 2]
    assert run.problems == ["metrics.jsonl: 8 lines without a known kind and step"]


def test_values_that_are_no_numbers():
    odd = (None, math.nan, math.inf, "x")
    metrics = Metrics.of([train(1, 1), *(train(step, step, loss=value) for step, value in enumerate(odd, 2))])
    assert [finite(value) for value in metrics.train.column("loss")] == [4.9, None, None, None, None]
    assert metrics.train.column("loss")[3] == math.inf
    assert metrics.train.last("loss") is None and metrics.train.at("loss", 1) == 4.9
    assert metrics.train.at("loss", 2) is None and metrics.train.at("loss", 6) is None
    assert (number(True), number("1"), number(10**400), number(3)) == (None, None, None, 3.0)


def test_a_step_that_comes_again_supersedes_what_followed():
    """As in a folder of a run that was killed before it had dropped the lines past its checkpoint."""
    metrics = Metrics.of([*(train(step, step) for step in range(1, 8)), *(train(step, 10 + step, loss=0.5) for step in (4, 5))])
    assert list(metrics.train.steps) == [1, 2, 3, 4, 5]
    assert list(metrics.train.column("loss"))[2:] == [4.7, 0.5, 0.5]
    assert list(metrics.train.column("time")) == [1, 2, 3, 14, 15]


def test_recent_is_a_median_of_what_is_known():
    metrics = Metrics.of([train(step, step, step_s=float(step), tokens_per_s=None) for step in range(1, 301)])
    assert metrics.train.recent("step_s") == 250.5 and metrics.train.recent("step_s", 3) == 299.0
    assert metrics.train.recent("tokens_per_s") is None and Metrics().train.recent("step_s") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "is not JSON"), (b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "holds no object"), (b"[" * 100_000, "is not JSON")],
)
def test_damaged_configuration(folder, content, problem):
    (folder / "config.json").write_bytes(content)
    run = read_run(folder)
    assert run.config == {} and len(run.problems) == 1 and run.problems[0].startswith(f"config.json {problem}")
    assert len(run.metrics.train) == 10


def test_missing_and_strange_files(folder):
    for name in ("config.json", "versions.json", "metrics.jsonl"):
        (folder / name).unlink()
    (folder / "metrics.jsonl").mkdir()
    run = read_run(folder)
    assert run.problems == ["config.json is missing", "versions.json is missing", "metrics.jsonl: Is a directory"]
    assert len(run.events) == 17


def test_the_lock_of_a_live_process(folder):
    assert live_holder(folder) is None
    with held(folder):
        assert live_holder(folder) == {"pid": 4242, "host": "here", "time": 1000.0}
        (folder / "lock").write_text("half a")
        assert live_holder(folder) == {}
    # The file stays and says nothing: whoever held it is gone.
    assert (folder / "lock").exists() and live_holder(folder) is None
    assert read_run(folder).holder is None


def test_looking_does_not_keep_the_lock(folder):
    (folder / "lock").touch()
    assert live_holder(folder) is None
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        live_holder(folder)
    assert len(os.listdir("/proc/self/fd")) == before
    with held(folder):
        pass


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3))


@given(st.lists(st.dictionaries(st.sampled_from(["kind", "step", "loss", "time", "x"]), JSON | st.sampled_from(["train", "eval"]))))
def test_any_lines_leave_columns_of_one_length_in_ascending_steps(lines):
    metrics = Metrics.of(lines)
    for series, names in ((metrics.train, ("loss", "time", "mfu")), (metrics.eval, ("loss", "tokens"))):
        assert list(series.steps) == sorted(set(series.steps))
        assert {len(series.column(name)) for name in names} == {len(series)}

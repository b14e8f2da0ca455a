"""A run's page: as text, and where there is a browser (always in CI) as it is drawn."""

import json
import math
import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report.browser import Browser, chromium
from report.test_html import NASTY, Page
from runs.hand_made import event, held, killed_and_resumed, phase, start, train, write

from jaxmem.report.run_charts import Curve, chart
from jaxmem.report.run_events import happenings
from jaxmem.report.run_page import render, render_svg_curve
from jaxmem.runs.reading import read_run

needs_browser = pytest.mark.skipif(not chromium() and not os.environ.get("CI"), reason="no chromium on the path")


def busy() -> tuple[list[dict], list[dict]]:
    """Every kind of event, a rollback, a loss that is not finite, and a second start under another plan."""
    metrics, events = killed_and_resumed()
    metrics[2]["loss"] = math.nan
    events.insert(5, event("memory", 1008, predicted_bytes=5 << 20, measured_bytes=None, backend="cpu"))
    events[10:10] = [event("corrupt", 1024, 1, step=6, reason="params/embed: digest 12 is not 34")]
    events[-1:] = [
        event("fault", 1029, 1, text="nan:step=9", process=1),
        event("rollback", 1029, 1, step=9, to=8, skip=[8, 9], reason="the loss is not finite"),
        event("dropped", 1029, 1, **{"from": 9, "to": 9, "steps": 1, "seconds": 0.0}),
        event("commit_failed", 1030, 1, step=8, reason="No space left on device"),
        event("watchdog", 1031, 1, missing=[2, 3]),
        event("epoch", 1031, 1, step=9, epoch=1),
        event("supervisor", 1032, 1, text="process 2 ended with status -9"),
        events[-1],
    ]
    return metrics, events


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "tiny", *busy())


def test_it_is_one_page_that_loads_nothing(folder):
    text = render(folder)
    text.encode("utf-8")
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "a")
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "srcset", "xlink:href")}
        assert attributes.get("href", "data:,") == "data:,"
    style = next(data for tag, data in page.text if tag == "style")
    assert "url(" not in style and "@import" not in style


def test_sections_and_figures(folder):
    page = Page(render(folder))
    headings = [data for tag, data in page.text if tag == "h2"]
    assert headings == [
        "Loss",
        "Gradient norm",
        "Learning rate",
        "Seconds a step",
        "Tokens a second",
        "Predicted and measured",
        "Goodput 27.0%",
        "Checkpoints",
        "What happened",
        "Skipped batches",
        "What was asked, and with what",
    ]
    words = page.words()
    for figure in (
        "tiny: done",
        "Step 10 of 10, loss 4.0000",
        "Measured on cpu, 8 devices, 1 process. 2 starts. The last record is of 1970-01-01 00:17:17 UTC.",
        "Workload model=decoder-tiny,optimizer=adamw,batch=8,seq=64 Plan data=2,fsdp=2,tensor=2,remat=block Topology cpu:8",
        "Loss 4.0000 measure Evaluation loss 4.5000 measure Step 1.000 s measure Tokens a second 512 measure MFU — Device memory 1.43 MiB",
        "The loss is not finite at 1 step, the first is 3.",
        "peak memory of a device 1.91 MiB compile 1.43 MiB measure 0.75 cpu 1",
        "peak memory of a device 5.00 MiB compile — — — cpu 0",
        "a step — — 1.000 s measure — cpu 1",
        "steps that count 10.0 s 27.0% compiling 8.000 s 21.6%",
        "not running 6.000 s 16.2%",
        "total 37.0 s 100.0%",
        "stall of the loop, async 1 1.000 s 1.000 s",
        "from the start of a save to its commit 1 0.500 s 0.500 s",
        "1 could not be saved. 1 was found damaged and not used.",
        "1970-01-01 00:16:54 7.000 s 0 6 killed no end was written; this is its last sign of life",
        "restored step 4, 8 devices, 1 process, cpu:8",
        "back to step 8, leaving out batches 8 to 9: the loss is not finite",
        "steps 5 to 6, 2.000 s of work",
        "nan:step=9, process 1",
        "missing processes: 2, 3",
        "No space left on device",
        "process 2 ended with status -9",
        "8 9 2 9 the loss is not finite",
        "jax 0.12.0.1",
    ):
        assert figure in words, figure


def test_marks_stand_at_their_steps(folder):
    marks = {}
    for mark in happenings(read_run(folder)):
        marks.setdefault(mark.kind, []).append(mark.step)
    assert marks == {
        "start": [0, 4],
        "epoch": [1, 9],
        "commit": [4],
        "kill": [6],  # the last step that the next start dropped
        "corrupt": [6],
        "dropped": [4, 9],
        "fault": [4],
        "rollback": [9],
        "commit_failed": [8],
        "watchdog": [8],
        "supervisor": [9],
        "end": [10],
        "not_finite": [3],
    }
    found = re.findall(r'<div class="row" data-kind="(\w+)" data-count="(\d+)">(.*?)</div>', render(folder))
    assert {kind: int(count) for kind, count, _ in found} == {
        kind: len(steps) for kind, steps in marks.items() if kind not in ("dropped", "supervisor")
    }
    starts = next(inner for kind, _, inner in found if kind == "start")
    assert re.findall(r"left:([\d.]+)%", starts) == ["0.000", "40.000"]


def test_a_kill_is_no_kill_while_the_process_lives(folder):
    (folder / "logs" / "events.jsonl").write_text(json.dumps(start(1007)) + "\n")
    assert "killed" in [mark.kind.replace("kill", "killed") for mark in happenings(read_run(folder))]
    with held(folder):
        assert "kill" not in [mark.kind for mark in happenings(read_run(folder))]
        text = render(folder)
        assert "tiny: running" in text and "while the run went on" in text


def charts(text: str) -> list[dict]:
    return [json.loads(data) for tag, data in Page(text).text if tag == "script" and data.startswith("{")]


def test_what_is_under_the_pointer_is_the_file(folder):
    loss, norm, rate, seconds, tokens = charts(render(folder))
    metrics, _ = busy()
    lines = [line for line in metrics if line["kind"] == "train"]
    assert loss["last"] == 10 and loss["curves"][0]["x"] == list(range(1, 11))
    assert loss["curves"][0]["y"] == [None if math.isnan(line["loss"]) else pytest.approx(line["loss"]) for line in lines]
    assert loss["curves"][1] | {"colour": ""} == {"label": "evaluation loss", "colour": "", "x": [10], "y": [4.5]}
    for drawn, name in ((norm, "grad_norm"), (rate, "lr"), (seconds, "step_s"), (tokens, "tokens_per_s")):
        assert drawn["curves"][0]["y"] == [line[name] for line in lines]


def test_a_gap_breaks_the_line_and_a_point_between_gaps_is_a_dot(tmp_path):
    losses = [3.0, 2.0, math.nan, 1.0, math.inf, 2.0, 3.0]
    text = render(write(tmp_path / "run", [train(i, i, loss=loss) for i, loss in enumerate(losses, 1)], [start(0)]))
    line, dots = re.findall(r'<path d="([^"]*)" class="curve-(?:line|dots)"', text)[:2]
    xs = re.findall(r"([ML])([\d.]+),", line)
    assert [(move, round(float(x) * 7 / 1000)) for move, x in xs] == [("M", 1), ("L", 2), ("M", 4), ("M", 6), ("L", 7)]
    assert [round(float(x) * 7 / 1000) for x in re.findall(r"M([\d.]+),", dots)] == [4]


def test_a_label_cannot_end_the_script():
    text = chart([Curve(label="</script><b>", steps=[1], values=[1.0], colour="red")], 1, reads="number", label="x")
    assert charts(text)[0]["curves"][0]["label"] == "</script><b>"


def test_an_empty_run_and_a_run_of_one_step(tmp_path):
    page = Page(render(write(tmp_path / "fresh", [], [])))
    assert "fresh: not started No step yet" in page.words() and "No step is done yet." in page.words()
    assert not re.search(r"(?<![\w.,:-])0(\.0+)?(?![\w.:-])", page.words().partition("config.json")[0])  # nothing is 0: it is unknown
    (tmp_path / "nothing").mkdir()
    assert "config.json is missing" in Page(render(tmp_path / "nothing")).words()
    one = Page(render(write(tmp_path / "one", [train(1, 8.0)], [phase("compile", 7, 3), start(7)])))
    assert "Step 1 of 10, loss 4.9000" in one.words() and "Goodput 25.0%" in one.words()


def test_names_are_text_and_never_markup(tmp_path):
    metrics, events = busy()
    for entry in events:
        for name, value in entry.items():
            if isinstance(value, str) and name not in ("kind", "name"):
                entry[name] = NASTY
    config = dict.fromkeys(("workload", "plan", "topology", "data", NASTY), NASTY)
    folder = write(tmp_path / "a <b> & 'c'", metrics, events, **config)
    (folder / "versions.json").write_text(json.dumps({NASTY: NASTY}))
    page = Page(render(folder))
    shown = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\x07", "\ufffd")
    assert sum(shown in data for _, data in page.text) >= 12
    assert not [data for tag, data in page.text if tag == "script" and "alert" in data]
    assert sum(tag == "script" for tag, _ in page.tags) == 2 + len(charts(render(folder)))
    render_svg_curve(folder, tmp_path / "loss.svg")
    Page((tmp_path / "loss.svg").read_text())


VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=3)
KINDS = """start phase checkpoint commit commit_failed corrupt rollback dropped epoch fault watchdog memory step_time supervisor end
    x""".split()
FIELDS = """time attempt step restored_from seconds name to from skip reason text process missing predicted_bytes measured_bytes predicted_s
    measured_s backend status bytes stall_s snapshot last_time plan topology devices processes epoch state_sha256""".split()
EVENTS = st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=8).flatmap(
    lambda fields: st.sampled_from(KINDS).map(lambda kind: fields | {"kind": kind})), max_size=8)
LINES = st.lists(st.dictionaries(st.sampled_from(["loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "time"]), VALUE).flatmap(
    lambda fields: st.tuples(st.sampled_from(["train", "eval"]), st.integers(0, 2**61)).map(
        lambda head: fields | {"kind": head[0], "step": head[1]})), max_size=6)


ODD = [None, 10**40, "odd", [1, None]]


def test_whatever_a_field_holds_there_is_a_page(tmp_path):
    """Every field of every event and line in turn holds what it should not."""
    metrics, events = busy()
    names = sorted({name for entry in (*metrics, *events) for name in entry})
    folder = write(tmp_path / "run", metrics, events)
    for name in names:
        for value in ODD:
            for path, lines in (("metrics.jsonl", metrics), ("logs/events.jsonl", events)):
                text = "".join(json.dumps(line | ({name: value} if name in line else {})) + "\n" for line in lines)
                (folder / path).write_text(text)
            assert render(folder).endswith("</html>\n"), (name, value)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(LINES, EVENTS, st.dictionaries(st.sampled_from(["workload", "plan", "steps", "flags", "x"]), VALUE))
def test_whatever_the_files_hold_there_is_a_page(tmp_path_factory, metrics, events, config):
    folder = write(tmp_path_factory.mktemp("odd") / "run", metrics, events, **config)
    Page(render(folder))


def test_a_hundred_thousand_steps_stay_small_and_keep_their_extremes(tmp_path):
    line = json.dumps(train(123_456_789, 1.5, loss=2.5))
    losses = [2 + (step * 7919 % 1000) / 1000 for step in range(1, 100_001)]
    many = [line.replace("123456789", str(step)).replace("2.5", str(loss)) + "\n" for step, loss in enumerate(losses, 1)]
    commits = [event("commit", step, step=step, bytes=1, seconds=1) for step in range(10, 100_001, 10)]
    folder = write(tmp_path / "long", [], [start(0), *commits])
    (folder / "metrics.jsonl").write_text("".join(many))
    text = render(folder)
    assert len(text) < 400_000
    drawn = charts(text)
    assert all(len(curve["x"]) <= 2000 for one in drawn for curve in one["curves"])
    loss = drawn[0]["curves"][0]
    assert (min(loss["y"]), max(loss["y"])) == (min(losses), max(losses)) and (loss["x"][0], loss["x"][-1]) == (1, 100_000)


def test_many_events_are_cut_in_the_middle(tmp_path):
    events = [entry for i in range(300) for entry in (start(10 * i, i), event("end", 10 * i + 5, i, status="sigterm"))]
    page = Page(render(write(tmp_path / "run", [], events)))
    assert "400 in the middle are left out here; logs/events.jsonl has all." in page.words()
    assert page.words().count("saved and stopped on SIGTERM") == 100


def test_the_loss_curve_alone(folder, tmp_path):
    render_svg_curve(folder, tmp_path / "loss.svg")
    text = (tmp_path / "loss.svg").read_text()
    page = Page(text)
    assert text.startswith("<svg xmlns=") and page.tags[0][1]["aria-label"] == "Loss of decoder-tiny, text:python-docs"
    assert not [attributes for _, attributes in page.tags if "href" in attributes or "src" in attributes]
    assert [data for tag, data in page.text if tag == "text"][-2:] == ["training loss", "evaluation loss"]
    render_svg_curve(write(tmp_path / "fresh", [], []), tmp_path / "none.svg")


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert chromium(), "no chromium on the path; install it with: apt-get install --yes --no-install-recommends chromium"
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Renders a run, opens it, and asserts that the page was silent and loaded nothing but itself."""

    def open_(folder, **options):
        path = tmp_path / "page.html"
        path.write_text(render(folder), encoding="utf-8")
        browser.open(path, **options)
        browser.value("new Promise(resolve => setTimeout(resolve, 30))")
        asked = [parameters["request"]["url"] for method, parameters in browser.events if method == "Network.requestWillBeSent"]
        assert asked == [path.as_uri()]
        loud = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        assert not [entry for entry in browser.events if entry[0] in loud]
        return browser

    return open_


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_the_window(show, folder, tmp_path, width):
    long = write(tmp_path / "long", [train(step * 1000, step, loss=5e8 / step) for step in range(1, 101)], [start(0)], workload="x" * 300)
    for run in (folder, long, write(tmp_path / "fresh", [], [])):
        page = show(run, width=width)
        assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        overflowing = """(right => [...document.querySelectorAll('h1,h2,.sub,.lead,dd,.figures div,.legend li,.steps span,.row *')]
            .filter(e => e.offsetParent && e.getBoundingClientRect().right > right + 0.5).map(e => e.outerHTML)
        )(document.documentElement.clientWidth)"""
        assert page.value(overflowing) == []
        beyond = """[...document.querySelectorAll('.curve')].map(chart => Math.max(...[...chart.querySelectorAll('.steps span')]
            .map(e => e.getBoundingClientRect().right)) - chart.getBoundingClientRect().right)"""
        assert all(by < 8 for by in page.value(beyond))


@needs_browser
def test_curves_and_marks_stand_where_the_data_says(show, folder):
    page = show(folder)
    found = page.value("""(() => {
        const chart = document.querySelector('.curve'), plot = chart.querySelector('.plot').getBoundingClientRect();
        const svg = chart.querySelector('svg'), path = svg.querySelector('.curve-line'), size = path.getTotalLength();
        const matrix = path.getScreenCTM();
        const place = at => { const p = path.getPointAtLength(at).matrixTransform(matrix);
            return [(p.x - plot.left) / plot.width, (plot.bottom - p.y) / plot.height]; };
        return {first: place(0), last: place(size), low: +chart.dataset.low, high: +chart.dataset.high, marks: Object.fromEntries(
            [...chart.querySelectorAll('.row')].map(row => [row.dataset.kind, [...row.querySelectorAll('i')].map(mark => {
                const box = mark.getBoundingClientRect(); return (box.left + box.width / 2 - plot.left) / plot.width; })]))};
    })()""")
    span = found["high"] - found["low"]
    assert found["first"] == [pytest.approx(0.1, abs=0.003), pytest.approx((4.9 - found["low"]) / span, abs=0.005)]
    assert found["last"] == [pytest.approx(1.0, abs=0.003), pytest.approx((4.0 - found["low"]) / span, abs=0.005)]
    for kind, steps in (("start", [0, 4]), ("kill", [6]), ("commit", [4]), ("rollback", [9]), ("end", [10]), ("not_finite", [3])):
        assert found["marks"][kind] == pytest.approx([step / 10 for step in steps], abs=0.004), kind


@needs_browser
def test_the_bar_of_goodput_is_to_scale(show, folder):
    page = show(folder)
    shares = page.value("""[...document.querySelectorAll('.whole .bar')].map(bar => [...bar.children].map(part =>
        [part.textContent, part.getBoundingClientRect().width / bar.getBoundingClientRect().width]))""")[0]
    assert shares[0] == ["steps that count", pytest.approx(10 / 37, abs=0.003)]
    assert shares[1] == ["compiling", pytest.approx(8 / 37, abs=0.003)]
    assert sum(share for _, share in shares) == pytest.approx(1.0, abs=0.01)


@needs_browser
def test_reading_a_chart_with_pointer_and_keys(show, folder):
    page = show(folder)
    x, y, width = page.value("""(({left, top, width, height}) => [left, top + height / 2, width])
        (document.querySelector('.curve .plot').getBoundingClientRect())""")
    page.value(f"scrollTo(0, {y} - 300)")
    text = "document.querySelector('.curve .tip').innerText"
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 0.52 * width, y=300)
    assert page.value(text) == "step\t5\ntraining loss\t4.5\nevaluation loss at 10\t4.5"
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 0.29 * width, y=300)
    assert "step\t3\ntraining loss\tnot finite" in page.value(text)
    page.value("document.querySelector('.curve .plot').focus()")
    for key, line in (("Home", "step\t1\n"), ("ArrowRight", "step\t2\n"), ("End", "step\t10\n"), ("ArrowLeft", "step\t9\n")):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert page.value(text).startswith(line)
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert page.value("document.querySelector('.curve .tip').hidden")


@needs_browser
def test_both_schemes(show, folder):
    seen = {}
    for scheme in ("light", "dark"):
        page = show(folder, scheme=scheme)
        colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.curve-line')).stroke]"
        seen[scheme] = page.value(colours)
        page.value("document.getElementById('theme').click()")
        seen[f"{scheme} toggled"] = page.value(colours)
    assert seen["light"] == seen["dark toggled"] == ["rgb(247, 248, 249)", "rgb(10, 98, 189)"]
    assert seen["dark"] == seen["light toggled"] == ["rgb(14, 17, 22)", "rgb(116, 196, 253)"]

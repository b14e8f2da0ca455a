"""Tables, page and figure of an experiment, from hand-made records."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from jaxmem.records import Point, record
from jaxmem.report import experiment_page as page
from jaxmem.report.experiment_figure import Scatter, drawing, front
from jaxmem.report.experiment_page import Cell, Column, Table, axis_unit, baseline, cell_text, lines, markdown
from jaxmem.tabulate import Interval

PLACES = {"v5e-8": "estimate", "cpu:8": "measure"}
SVG = "{http://www.w3.org/2000/svg}"
COLUMNS = (Column(name="remat", head="policy"), Column(name="peak_bytes", head="memory", unit="bytes"),
           Column(name="step_s", head="step", unit="seconds"))


def one(remat: str, peak_bytes: int | None, step_s: float | None, *, topology: str = "v5e-8", seed: int = 0, status: str = "done",
        reason: str | None = None) -> dict:
    point = Point(workload="model=gpt2,optimizer=adamw,batch=8,seq=64", topology=topology, plan=f"fsdp=8,remat={remat}", seed=seed,
                  settings={"how": "x"})
    values = {"peak_bytes": (peak_bytes, "compile"), "step_s": (step_s, PLACES[topology])} if status == "done" else {}
    return record("e", point, {"jax": "9.9", "python": "3"}, status=status, time=1.0, values=values, reason=reason, backend="tpu v5e")


RECORDS = [one("none", 4 * 2**30, 1.0), one("dots", 3 * 2**30, 1.1), one("block", 2**30, 1.3), one("attention", 3 * 2**30, 1.2),
           one("none", 2**20, 0.01, topology="cpu:8"), one("none", 2**20, 0.03, topology="cpu:8", seed=1),
           one("dots", 2**20, None, topology="cpu:8")]


def panel(line):
    return str(line["topology"].value), "words"


def scatter(**more) -> Scatter:
    return Scatter(title="A <title>", x=COLUMNS[2], y=COLUMNS[1], mark="remat", row=lambda line: "row", panel=panel, **more)


def test_seeds_become_one_line_with_an_interval():
    found = {(line["topology"].value, line["remat"].value): line for line in lines(RECORDS)}
    assert len(found) == 6
    several = found["cpu:8", "none"]
    assert several["step_s"].source == "measure" and several["step_s"].number == pytest.approx(0.02)
    assert several["step_s"].value.half_width is None and several["step_s"].value.seeds == 2
    assert several["step_s"].value.span == pytest.approx((0.01, 0.03)) and cell_text(several["step_s"], "seconds") == "20 (10 to 30) ms"
    assert cell_text(several["peak_bytes"], "count") == cell_text(Cell(value=several["peak_bytes"].number), "count")  # both are the same
    assert found["v5e-8", "dots"]["step_s"] == Cell(value=1.1, source="estimate")
    assert found["cpu:8", "dots"]["step_s"].value is None


@pytest.mark.parametrize("cell, unit, text", [
    (Cell(value=None), "bytes", "—"), (Cell(value=0), "flops", "0"), (Cell(value=2.5 * 2**30), "bytes", "2.50 GiB"),
    (Cell(value=Interval(mean=0.0653, half_width=0.467, seeds=3)), "seconds", "65.3 ± 4.7e+02 ms"),
    (Cell(value=Interval(mean=0.5, half_width=0.012, seeds=3)), "percent", "50 ± 1.2 %"),
    (Cell(value=Interval(mean=3.0 * 2**20, half_width=0.0, seeds=3)), "bytes", "3.00 MiB"),
    (Cell(value=Interval(mean=0.3658, half_width=None, seeds=2, span=(0.2412, 0.4904))), "percent", "36.58 (24.1 to 49) %"),
    (Cell(value=Interval(mean=2.5, half_width=None, seeds=2, span=(1.0, 4.0))), "count", "2.5 (1 to 4)"),
    (Cell(value=75497472.0), "flops", "75.5 MFLOP"), (Cell(value=1.25), "times", "1.25x"), (Cell(value="fits"), "words", "fits")])
def test_cells(cell, unit, text):
    assert cell_text(cell, unit) == text


def test_a_table_names_the_source_once_where_it_is_one_and_in_each_cell_where_not():
    all_lines = lines(RECORDS)
    one_place = Table(title="t", lead="l", columns=COLUMNS, lines=[line for line in all_lines if line["topology"].value == "v5e-8"])
    text = markdown(one_place).splitlines()
    assert text[0] == "| policy | memory<br>*compile* | step<br>*estimate* |"
    assert text[1] == "| --- | ---: | ---: |"
    assert text[2:4] == ["| none | 4.00 GiB | 1.000 s |", "| dots | 3.00 GiB | 1.100 s |"]
    mixed = markdown(Table(title="t", lead="l", columns=COLUMNS, lines=all_lines)).splitlines()
    assert mixed[0] == "| policy | memory<br>*compile* | step |"
    assert mixed[2] == "| none | 4.00 GiB | 1.000 s *estimate* |" and mixed[-1] == "| dots | 1.00 MiB | — |"
    assert markdown(Table(title="", lead="", columns=COLUMNS[:1], lines=[{"remat": Cell(value="a|b")}])).splitlines()[2] == "| a\\|b |"


def test_a_baseline_is_of_the_same_point_but_for_what_varies():
    found = lines(RECORDS)
    bases = baseline(found, ("topology", "batch"), {"remat": "none"}, "peak_bytes")
    assert bases == [2**20 if line["topology"].value == "cpu:8" else 4 * 2**30 for line in found]
    assert baseline(found, ("topology",), {"remat": "absent"}, "peak_bytes") == [None] * 6


def test_the_front_is_what_nothing_beats_in_both():
    points = [(1.0, 4.0), (1.1, 3.0), (1.3, 1.0), (1.2, 3.0), (1.0, 5.0), (1.1, 3.0)]
    brute = [p for p in dict.fromkeys(points) if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]
    assert front(points) == sorted(brute) == [(1.0, 4.0), (1.1, 3.0), (1.3, 1.0)]


def marks(group) -> dict[str, tuple[float, float]]:
    """What a panel draws: name -> place."""
    out = {}
    for mark in group.iter(f"{SVG}g"):
        if (title := mark.find(f"{SVG}title")) is not None:
            x, y = re.fullmatch(r"translate\((\S+) (\S+)\)", mark.get("transform")).groups()
            out[title.text.partition(":")[0]] = float(x), float(y)
    return out


def test_the_drawing_puts_each_point_where_its_numbers_are():
    third = one("none", 2**20, 0.02, topology="cpu:8", seed=2)
    root = ElementTree.fromstring(drawing(scatter(), lines([*RECORDS, third])))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert "A <title>" in words and "step, s" in words and "memory, GiB" in words and "not drawn: dots" in words
    panels = [group for group in root if group.tag == f"{SVG}g" and group.find(f"{SVG}text") is not None]
    assert [group.find(f"{SVG}text").text for group in panels] == ["v5e-8", "cpu:8"]
    found = marks(panels[0])
    assert set(found) == {"none", "dots", "block", "attention"}
    assert found["none"][0] < found["dots"][0] < found["attention"][0] < found["block"][0]
    assert found["block"][1] > found["dots"][1] == found["attention"][1] > found["none"][1]  # y grows downwards
    share = (found["dots"][0] - found["none"][0]) / (found["block"][0] - found["none"][0])
    assert share == pytest.approx(1 / 3, abs=0.01)
    bars = [line for line in panels[1].iter(f"{SVG}line") if line.get("class") == "bar"]
    assert len(bars) == 1 and float(bars[0].get("x1")) < marks(panels[1])["none"][0] < float(bars[0].get("x2"))
    assert 'class="bar"' not in drawing(scatter(), lines(RECORDS))  # two seeds make no interval


@pytest.mark.parametrize("usable, drawn", [(4.5 * 2**30, True), (16 * 2**30, False)])
def test_a_limit_is_drawn_where_it_is_near(usable, drawn):
    found = [line | {"usable": Cell(value=usable, source="compile")} for line in lines(RECORDS) if line["topology"].value == "v5e-8"]
    assert ('class="limit"' in drawing(scatter(limit="usable"), found)) == drawn


def test_every_mark_has_a_look_of_its_own():
    many = [one(name, 2**20 * (i + 1), 0.1 * (i + 1)) for i, name in enumerate(("none", "dots", "block", "attention", "save:query_proj",
                                                                              "save:out_proj", "save:context", "offload:mlp_up"))]
    root = ElementTree.fromstring(drawing(scatter(), lines(many)))
    looks = [(path.get("d"), path.get("style")) for group in root if group.tag == f"{SVG}g" and group.find(f"{SVG}text") is None
             for path in group.iter(f"{SVG}path")]
    assert len(looks) == 8 == len({d for d, _ in looks}) == len({style for _, style in looks})


def test_the_page_shows_question_tables_figure_and_what_has_no_numbers():
    records = [*RECORDS, one("block", None, None, topology="cpu:8", status="failed", reason="<b>died</b>")]
    table = Table(title="Table of <things>", lead="lead", columns=COLUMNS, lines=lines(records))
    text = page.render("Title", "Why is that?\n\nCommand: x < y\n", [("Figure", "words", drawing(scatter(), lines(records), alone=False))],
                       [table], records)
    for words in ("<h1>Why is that?</h1>", "7 of 8 points have numbers", "Table of &lt;things&gt;", "Command: x &lt; y", "jax 9.9",
                  "&lt;b&gt;died&lt;/b&gt;", '<i class="source compile"', "4.00 GiB", "<svg", "Backends: tpu v5e"):
        assert words in text, words
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "") and "python" not in text.partition("Backends")[2][:80]


@pytest.mark.parametrize("unit, largest, wanted", [("bytes", 3 * 2**20, ("MiB", 2**20)), ("seconds", 0.02, ("ms", 1e-3)),
                                                   ("seconds", 2e-5, ("µs", 1e-6)), ("flops", 3e12, ("TFLOP", 1e12)),
                                                   ("count", 5, ("", 1))])
def test_axes_have_fitting_units(unit, largest, wanted):
    assert axis_unit(unit, largest) == wanted

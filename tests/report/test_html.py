"""The HTML report as text: well formed, self-contained, escaped, complete, and without invented zeros."""

import html.parser
import json
import re

import pytest
from report.samples import NAMES, hostile, huge, nothing_known, sample

from jaxmem.report import html as report
from jaxmem.report.charts import stack, ticks

EMPTY = {"meta", "link", "line", "path", "circle"}
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" 'single' & &amp; \x00\x1b]0;x\x07"


class Page(html.parser.HTMLParser):
    """Tags with attributes, and text by the tag that holds it; an unbalanced tag is an error."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], []
        self.feed(source)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in EMPTY, tag
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.text.append((self.open[-1], data))

    def words(self):
        return " ".join(data for tag, data in self.text if tag not in ("script", "style"))


CHECKS = [*map(sample, NAMES), nothing_known(), hostile(NASTY), huge()]
IDS = [*NAMES, "nothing", "nasty", "huge"]


@pytest.mark.parametrize("check", CHECKS, ids=IDS)
def test_well_formed_and_loads_nothing(check):
    text = report.render(check)
    text.encode("utf-8")
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n")
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "video", "audio", "base", "form", "a")
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "srcset", "xlink:href")}, (
            tag,
            attributes,
        )
        assert attributes.get("href", "data:,") == "data:,"
    style = next(data for tag, data in page.text if tag == "style")
    assert "url(" not in style and "@import" not in style and "//" not in style
    assert text.count("<script") == 1 + sum(bool(entry["points"]) for entry in check["timeline"])


def test_names_are_text_and_never_markup():
    page = Page(report.render(hostile(NASTY)))
    shown = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\x07", "\ufffd")
    for tag in ("code", "span", "b", "title"):  # the name comes back as it went in, wherever it stands
        assert any(shown in data for where, data in page.text if where == tag), tag
    assert sum(shown in data for _, data in page.text) >= 20
    assert not [data for tag, data in page.text if tag == "script" and "alert" in data]
    titles = [attributes["title"] for _, attributes in page.tags if "title" in attributes]
    assert any(shown in title for title in titles)


@pytest.mark.parametrize("name", NAMES)
def test_sections(name):
    check = sample(name)
    headings = [data for tag, data in Page(report.render(check)).text if tag == "h2"]
    assert headings[-2:] == ["Programs", "How each number was obtained"]
    for heading, there in (
        ("Memory over the schedule", check["timeline"]),
        ("Composition of the peak", check["composition"]),
        ("Largest buffers at the peak", check["buffers"]),
        ("Collectives and transfers", check["traffic"]),
    ):
        assert (heading in headings) == bool(there)


def test_figures_and_their_sources():
    words = Page(report.render(sample("fits_v5p"))).words()
    assert "85.93 GiB (89.8%) left of 95.74 GiB usable" in words
    for figure in (
        "Peak on a device 9.81 GiB compile",
        "Step 1.642 s estimate",
        "Tokens a second 319,298 estimate",
        "MFU 57.3% estimate",
        "peak_bytes 9.81 GiB compile peak of the worst program on one device",
        "traffic 3 kinds compile collectives of a step; exposed_s: estimate",
        "64.00 MiB (50.0%)",
        "fsdp all-gather 258 29.71 GiB 71 ms 0.402 s",
        "backend  tpu v5p",
        "libtpu 0.0.0+sample",
        "--xla_tpu_overlap_compute_collective_tc=true",
    ):
        assert figure in words, figure


def test_unknown_is_a_dash_and_never_zero():
    words = Page(report.render(nothing_known())).words()
    assert not re.search(r"(?<![\w.,])0(\.0+)?(?![\w.])", words)
    assert "Peak on a device — Usable on a device — Host memory — Step — Tokens a second — MFU —" in words
    assert re.search(r"\btrain ok — — — — — — — —", words)


def test_treemap_areas_are_bytes():
    check = sample("does_not_fit_v5e")
    text = report.render(check)
    for which in ("wide", "narrow"):
        region = re.search(rf'<div class="treemap {which}".*?(?=<div class="treemap|<div class="scroll")', text, re.S)[0]
        cells = re.findall(r'left:([\d.]+)%;top:([\d.]+)%;width:([\d.]+)%;height:([\d.]+)%" title="[^"]*" data-bytes="(\d+)"', region)
        assert len(cells) == len(check["composition"]) + 1
        for _, _, width, height, size in cells:
            assert float(width) * float(height) / 1e4 == pytest.approx(int(size) / check["peak_bytes"], rel=0.02, abs=2e-5)


def test_the_chart_stacks_what_is_known_and_the_rest():
    points = [{"t": 0, "bytes": 10, "by_kind": {"saved": 4, "params": 3}}, {"t": 5, "bytes": 6, "by_kind": {"params": 6}}]
    assert stack(points) == {"params": [3, 6], "saved": [4, 0], "unattributed": [3, 0]}
    assert list(stack(points)) == ["params", "saved", "unattributed"]
    assert ticks(10 * 1024**3) == [i * 2 * 1024**3 for i in range(6)]
    assert ticks(5) == [0, 1, 2, 3, 4, 5]


def test_the_data_under_the_pointer_is_the_schedule():
    check = sample("tight_h100")
    data = json.loads(next(data for tag, data in Page(report.render(check)).text if tag == "script" and data.startswith("{")))
    points = check["timeline"][0]["points"]
    assert data["t"] == [point["t"] for point in points]
    assert [sum(kind["bytes"][i] for kind in data["kinds"]) for i in range(len(points))] == [point["bytes"] for point in points]


def test_a_schedule_of_one_point_and_of_none():
    check = sample("fits_v5p")
    check["timeline"] = [{"program": "train", "points": [{"t": 0, "bytes": 5, "by_kind": {"params": 5}}], "peak_t": None}]
    assert "peak 5 B" in Page(report.render(check)).words()
    check["timeline"] = [{"program": "train", "points": [], "peak_t": None}]
    assert "Memory over the schedule" not in report.render(check)

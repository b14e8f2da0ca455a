"""The live curve of meta-training: means over stretches, a sparkline, and the picture."""

import io
import math
import re
import xml.etree.ElementTree as ET

from jaxmem.report import meta_curve


def test_means_over_stretches():
    assert meta_curve.stretches([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [3.0, 8.0]
    assert meta_curve.stretches([math.nan, math.inf, 4.0, 6.0], 2) == [None, 5.0]
    assert meta_curve.stretches([], 5) == []


def test_sparklines_go_from_low_to_high():
    assert meta_curve.sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert meta_curve.sparkline([1.0, math.nan, 2.0]) == "▁ █"
    assert meta_curve.sparkline([2.0, 2.0]) == "▁▁" and meta_curve.sparkline([]) == ""
    assert len(meta_curve.sparkline(list(range(1000)))) == 32


def test_the_picture_has_every_family_at_its_place():
    """Two families, ten meta-steps of twenty: the curves end in the middle, and ten times the loss is a decade higher."""
    root = ET.fromstring(meta_curve.drawing({"low": [0.1] * 10, "high & <b>": [1.0] * 9 + [math.nan]}, 20))
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    points = [[tuple(map(float, p.split(","))) for p in e.attrib["points"].split()] for e in lines]
    assert [len(p) for p in points] == [10, 9]
    middle = meta_curve.LEFT + (meta_curve.WIDTH - meta_curve.LEFT - meta_curve.RIGHT) / 2
    assert abs(points[0][-1][0] - middle) < 15 and points[0][-1][0] < middle
    ticks = {e.text: float(e.attrib["y"]) - 4 for e in root.iter() if e.tag.endswith("text") and re.fullmatch(r"[\d.]+", e.text or "")}
    assert abs(ticks["0.1"] - points[0][0][1]) < 0.2 and abs(ticks["1"] - points[1][0][1]) < 0.2
    assert "high & <b>" in [e.text for e in root.iter()]


def test_a_live_curve_is_written_while_it_goes(tmp_path, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(meta_curve, "EVERY_S", 0.0)
    live = meta_curve.Live(tmp_path, 4, out)
    for step, loss in ((1, 2.0), (2, 1.0)):
        live.show({"step": step, "loss": loss, "losses": {"digits": loss}, "step_s": 30.0, "broken": 1})
    assert out.getvalue().splitlines()[1] == "meta-step 2/4  loss 1.5000  █▁  2.0/min  about 1 min left  1 broken"
    before = (tmp_path / "curve.svg").read_text()
    for _ in range(20):
        live.show({"step": 3, "loss": 0.5, "losses": {"digits": 0.5}, "step_s": 0.1, "broken": 0})
    assert out.getvalue().splitlines()[-1].endswith("10.0/s  about 0 min left")
    live.close()
    assert (tmp_path / "curve.svg").read_text() != before and not list(tmp_path.glob("*.new"))

"""Cell widths and layout, on text whose widths are known."""

from hypothesis import given
from hypothesis import strategies as st

from jaxmem.report.cells import Column, beside, cells, line_cells, paint, shorten, table, wrap


def test_widths():
    assert [cells(text) for text in ("abc", "日本", "e\u0301", "—█", "")] == [3, 4, 1, 2, 0]


def test_shorten_keeps_the_side_that_is_asked_for():
    assert shorten("blocks/attention", 9) == "blocks/a…"
    assert shorten("blocks/attention", 9, "end") == "…ttention"
    assert shorten("blocks/attention", 9, "middle") == "bloc…tion"
    assert shorten("short", 9, "end") == "short"
    assert shorten("日本語日本語", 6) == "日本…"


@given(st.text(max_size=60), st.integers(0, 40), st.sampled_from(["start", "middle", "end"]))
def test_shortened_text_fits(text, width, keep):
    assert cells(shorten(text, width, keep)) <= width


@given(st.text(alphabet="ab 日 ", max_size=80), st.integers(2, 20))
def test_wrapping_fits_and_loses_nothing(text, width):
    rows = wrap(text, width)
    assert all(0 < cells(row) <= width for row in rows)
    assert "".join(rows).replace(" ", "") == text.replace(" ", "")


def test_table_shortens_the_widest_soft_column_first():
    columns = [
        Column(head="size", align="right"),
        Column(head="module", keep="end", least=6),
        Column(head="source", keep="end", least=6),
    ]
    rows = [[("1.00 GiB", ""), ("a/very/long/module/path", ""), ("layers.py:1", "")]]
    header, row = (paint([line], False).rstrip("\n") for line in table(columns, rows, 34))
    assert row == "1.00 GiB  …odule/path  layers.py:1" and cells(row) == 34
    assert header.split() == ["size", "module", "source"]


def test_beside_and_colour():
    lines = beside([[("ab", "bold")], [("c", "")]], [[("x", "red")]], 4, 1)
    assert paint(lines, False) == "ab   x\nc\n"
    assert paint(lines, True) == "\x1b[1mab\x1b[0m   \x1b[31mx\x1b[0m\nc\n"
    assert [line_cells(line) for line in lines] == [6, 1]

"""Numbers as text: rounding, and that unknown is a dash."""

import pytest

from jaxmem.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "—"),
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (1023 * 1024**2, "1.00 GiB"),
        (999 * 1024**2, "999.00 MiB"),
        (10533007163, "9.81 GiB"),
        (-3 * 1024**3, "-3.00 GiB"),
        (1884 * 1024**3, "1.84 TiB"),
        (5 * 1024**6, "5,120.00 PiB"),
    ],
)
def test_bytes(value, text):
    assert units.bytes_text(value) == text


def test_one_unit_for_a_table_never_shows_bytes_as_zero():
    assert units.byte_unit([None, 8, 3 * 1024**3]) == ("GiB", 1024**3)
    assert [units.bytes_in(v, 1024**3) for v in (None, 0, 8, 3 * 1024**3)] == ["—", "0", "<0.01", "3.00"]
    assert units.byte_unit([None]) == ("B", 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "—"),
        (0.0, "0 s"),
        (-2.5e-3, "-2.5 ms"),
        (-1e-9, "0 s"),
        (1e-9, "<1 µs"),
        (2.5e-5, "25 µs"),
        (9.994e-4, "999 µs"),
        (0.0391, "39.1 ms"),
        (0.1, "0.100 s"),
        (1.6424, "1.642 s"),
        (63.44, "63.4 s"),
        (119.0, "119 s"),
        (662.5, "11 min 2 s"),
        (7200.0, "2 h 0 min"),
    ],
)
def test_seconds(value, text):
    assert units.seconds_text(value) == text


def test_other_numbers():
    assert [units.percent_text(v) for v in (None, 0, 1e-6, 0.5731)] == ["—", "0.0%", "<0.1%", "57.3%"]
    assert [units.count_text(v) for v in (None, 0, 4, 2.5, 319298.2)] == ["—", "0", "4", "2.5", "319,298"]
    assert [units.scaled_text(v) for v in (None, 124439808, 8030261248, 405853388800, 999.6e9)] == [
        "—",
        "124M",
        "8.03B",
        "406B",
        "1T",
    ]
    assert [units.duration_text(v) for v in (None, 0.04, 6.12, 63.4, 600.0)] == ["—", "40 ms", "6.1 s", "63 s", "10 min 0 s"]

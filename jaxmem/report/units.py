"""Numbers as people read them. None is unknown and prints as an em dash, never as 0."""

UNKNOWN = "—"
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def byte_unit(values: list[int | None]) -> tuple[str, int]:
    """The unit, with its size in bytes, in which the largest of `values` is at least 1: one unit for a whole table."""
    largest = max((abs(v) for v in values if v is not None), default=0)
    power = 0
    while power + 1 < len(BYTE_UNITS) and largest >= 1024 ** (power + 1):
        power += 1
    return BYTE_UNITS[power], 1024**power


def bytes_in(value: int | None, size: int) -> str:
    """Bytes in units of `size` bytes, without the unit; what is there but rounds away is `<0.01`."""
    if value is None:
        return UNKNOWN
    if size == 1 or value == 0:
        return f"{value / size:,.0f}"
    return "<0.01" if 0 < value < 0.005 * size else f"{value / size:,.2f}"


def bytes_text(value: int | None) -> str:
    """`10533007163` -> `9.81 GiB`."""
    if value is None:
        return UNKNOWN
    unit, size = byte_unit([value])
    if abs(value) >= 1000 * size and unit != BYTE_UNITS[-1]:
        unit, size = BYTE_UNITS[BYTE_UNITS.index(unit) + 1], 1024 * size
    return f"{bytes_in(value, size)} {unit}"


def seconds_text(value: float | None) -> str:
    """Three digits or so: `1.642 s`, `39 ms`, `250 µs`, `12 min 5 s`. A difference of times may be below zero: `-2.1 ms`."""
    if value is None:
        return UNKNOWN
    if value < 0:
        return f"-{seconds_text(-value)}" if value <= -9.5e-7 else seconds_text(0.0)
    if value == 0:
        return "0 s"
    if value < 9.995e-4:
        return f"{value * 1e6:.0f} µs" if value >= 9.5e-7 else "<1 µs"
    if value < 0.09995:
        return f"{value * 1e3:.3g} ms"
    if value < 99.95:
        return f"{value:.3f} s" if value < 9.9995 else f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def duration_text(value: float | None) -> str:
    """How long one waited, coarser than `seconds_text`: `6.1 s`, `63 s`."""
    if value is None or not 0.0995 <= value < 120:
        return seconds_text(value)
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def percent_text(fraction: float | None) -> str:
    """`0.0281` -> `2.8%`; what is there but rounds away is `<0.1%`."""
    if fraction is None:
        return UNKNOWN
    return "<0.1%" if 0 < fraction < 0.0005 else f"{100 * fraction:.1f}%"


def count_text(value: float | None) -> str:
    """With thousands separators: `319,298`; below 10, one digit after the point."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}"


def scaled_text(value: float | None) -> str:
    """In powers of a thousand, as model sizes are named: `8030261248` -> `8.03B`."""
    if value is None:
        return UNKNOWN
    for size, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:,.0f}{suffix}" if scaled >= 999.5 else f"{scaled:.3g}{suffix}"
    return f"{value:.3g}"

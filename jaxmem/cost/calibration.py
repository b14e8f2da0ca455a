"""The few constants that no data sheet gives, fitted on published step times (`experiments/benchmarks/predicted_speed.py`).

Each is global, has a physical meaning and a range that the fit may not leave. Nothing is fitted for a row, a model or a chip.
"""
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """`low` <= value <= `high`; the range is what physics allows, not a confidence interval."""
    low: float
    high: float
    meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants of the TPU speed model; `CONSTANTS` says what they mean."""
    estimate_share: float = 0.242
    link_efficiency: float = 1.0


CONSTANTS = {
    "estimate_share": Constant(low=0.0, high=1.0, meaning="part that is real of the compiler's cycles beyond the roofline"),
    "link_efficiency": Constant(low=0.0, high=1.0, meaning="bandwidth that collectives reach over that of the links"),
}
TPU = Calibration()

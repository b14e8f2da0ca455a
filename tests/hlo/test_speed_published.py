"""The stored programs of the published rows give the errors that docs/speed.md shows, inside the bar."""
import dataclasses
import pathlib
import statistics

import pytest

from experiments.benchmarks.predicted_speed import Row, load, published, published_seconds, trim
from jaxmem.cost.calibration import CONSTANTS, TPU
from jaxmem.hardware import parse_topology
from jaxmem.workload import Workload

MEDIAN, WORST = 0.10, 0.20
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "speed.md"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [load(figures) for figures in published()]


def test_predictions_are_inside_the_bar(rows: list[Row]) -> None:
    errors = {row.name: row.error(TPU) for row in rows}
    assert len(errors) == 6
    assert statistics.median(map(abs, errors.values())) <= MEDIAN, errors
    assert max(map(abs, errors.values())) <= WORST, errors


def test_no_prediction_beats_the_peak(rows: list[Row]) -> None:
    for row in rows:
        speed = row.predict(TPU)
        assert speed.step_s is not None and speed.flops is not None
        assert speed.step_s > speed.flops / row.topology.chip.peak_flops["bf16"], row.name


def test_more_bandwidth_is_never_slower(rows: list[Row]) -> None:
    for row in rows:
        times = [row.predict(dataclasses.replace(TPU, link_efficiency=efficiency)).step_s for efficiency in (0.5, 0.7, 1.0)]
        assert times == sorted(times, reverse=True), row.name


def test_the_page_shows_these_errors(rows: list[Row]) -> None:
    text = DOCS.read_text()
    for row in rows:
        assert f"| {row.published_s:.2f} | {row.predict(TPU).step_s:.2f} | {row.error(TPU):+.1%} |" in text, row.name
    for name in CONSTANTS:
        assert f"| `{name}` | {getattr(TPU, name):g} |" in text


def test_published_seconds_follow_the_convention() -> None:
    """Llama 3.1 8B at 7207 tokens/s a device and 4 sequences of 8192 each; 16B at 120 TFLOP/s by hand."""
    eight = Workload.parse(model="llama3.1-8b", optimizer="adamw", batch="1024", seq="8192")
    assert published_seconds(eight, parse_topology("v6e-256"), {"tokens_per_s_per_device": 7207}) == pytest.approx(32768 / 7207)
    sixteen = Workload.parse(model="scale-16b", optimizer="adamw", batch="1536", seq="2048")
    tokens = 6 * 2048
    parameters = 32 * (4 * 4096 * 8192 + 3 * 4096 * 28672 + 2 * 4096) + 4096 + 4096 * 32000
    flops = 6 * parameters * tokens + 12 * 32 * 64 * 128 * 2048 * tokens
    assert published_seconds(sixteen, parse_topology("v5e-256"), {"tflops_per_chip": 120}) == pytest.approx(flops / 120e12)


def test_trimming_keeps_cycles_and_drops_the_rest() -> None:
    text = ('HloModule m, is_scheduled=true\n\nFileNames\n1 "/home/me/a.py"\n\n%f (p: f32[1]) -> f32[1] {\n'
            '  ROOT %a = f32[1]{0} add(%p, %p), metadata={op_name="x/{y}" stack_frame_id=1}, '
            'backend_config={"window_config":{"estimated_cycles":"77","x":["{"]}}\n}\n')
    assert trim(text) == ('HloModule m, is_scheduled=true\n\n%f (p: f32[1]) -> f32[1] {\n'
                          '  ROOT %a = f32[1]{0} add(%p, %p), backend_config={"estimated_cycles":"77"}\n}\n')

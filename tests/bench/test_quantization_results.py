"""The committed measurements of quantization: the documented table has their numbers, and they keep the bars."""

import re
from pathlib import Path

import pytest

from tritium.bench.results import INDUCTOR, TRITIUM, Results

ROOT = Path(__file__).parent.parent.parent
FORMATS = ("fp8", "int8", "int8-rotated", "int8-weights", "int4-weights")


@pytest.fixture(scope="module")
def rows():
    found = Results.load(ROOT / "benchmarks" / "results" / "cpu-2-cores-quantize.json")
    return {(row.workload, row.variant): row for row in found.rows}


def in_remark(row, what):
    return re.search(rf"{what} ([0-9.]+)", row.remark)[1]


@pytest.mark.parametrize("format_", FORMATS)
def test_the_documented_row_is_the_measured_one(rows, format_):
    image, call = (rows[workload, f"{TRITIUM} {format_}"] for workload in ("example", "example denoiser"))
    expected = (
        f"| {format_} | {image.psnr:.1f} dB | {in_remark(image, 'lowest PSNR')} dB "
        f"| {in_remark(image, 'right halves')} | {image.ratio:.2f}x | {call.ratio:.2f}x |"
    )
    assert expected in (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("format_", "least"), [("fp8", 33), ("int8", 40), ("int8-weights", 45)])
def test_images_are_near_the_unquantized_ones(rows, format_, least):
    assert rows["example", f"{TRITIUM} {format_}"].psnr >= least


@pytest.mark.parametrize("format_", ["fp8", "int8", "int8-rotated", "int8-weights"])
def test_the_scorer_loses_less_than_1_percent(rows, format_):
    plain = float(in_remark(rows["example", TRITIUM], "right halves"))
    assert float(in_remark(rows["example", f"{TRITIUM} {format_}"], "right halves")) >= plain - 0.01


def test_int8_is_faster_than_torch_compile_on_a_cpu(rows):
    row = rows["example", f"{TRITIUM} int8"]
    assert row.ratio >= 1.3
    assert row.ratio == pytest.approx(rows["example", INDUCTOR].median_ms / row.median_ms)

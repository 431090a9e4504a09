"""What docs/skipping.md says about the shipped recipe is in the committed results."""

from support import scripts
from tritium.bench.results import EAGER, INDUCTOR, OPTIMIZED, Results

FILE = Results.load(scripts.ROOT / "benchmarks" / "results" / "cpu-2-cores-tune.json")
ROWS = {row.variant: row for row in FILE.rows}
PAGE = (scripts.ROOT / "docs" / "skipping.md").read_text()


def busy(row):
    """Return the speed-up in seconds of the processor."""
    return float(row.remark.rsplit(" ", 1)[1])


def test_the_page_has_the_measured_rows():
    assert set(ROWS) == {EAGER, INDUCTOR, OPTIMIZED, "tritium recipe"}
    for name, row in ROWS.items():
        psnr = "equal" if row.psnr is None else f"{row.psnr:.1f}"
        assert f"| {name} | {row.median_ms:.0f} | {row.ratio:.2f} | {busy(row):.2f} | {psnr} |" in PAGE


def test_the_recipe_is_faster_than_compiling_alone():
    assert ROWS["tritium recipe"].ratio >= 2.2
    assert ROWS["tritium recipe"].psnr >= 32
    assert ROWS[INDUCTOR].ratio == 1

"""The diagram of steps and blocks on the report's page."""

import pytest

from support.denoising import Denoiser, euler, generate, optimized
from support.report_samples import Page
from tritium import Skip
from tritium.report.html import skipping
from tritium.report.records import Component


def component(rows, *, count=4, span=None, begin=0, **fields):
    last = {"rows": rows, "begin": begin, "blocks": {"done": 1, "planned": 2, "without": 3}}
    data = {"last": last, "span": span, "block_count": count, "declined": [], "loss": "", **fields}
    figures = {"milliseconds": 1.0, "calls": 1, "share": 1.0, "first_call_seconds": 0.0, "what": ""}
    return Component(name="transformer", techniques={"skip": data}, **figures)


def kinds(row, **fields):
    (part,) = skipping.skipped([component([row], **fields)])
    (branch,) = part.branches
    columns = {}
    for cell in branch.cells:
        columns.setdefault(cell.x, []).append(cell.kind)
    return list(columns.values())


def test_every_step_has_its_blocks():
    assert kinds("R1D", count=2) == [["run"] * 2, ["forecast"] * 2, ["derived"] * 2]
    assert kinds("RB", count=4, span=(1, 3)) == [["run"] * 4, ["run", "kept", "kept", "run"]]
    assert kinds("RA", count=2, span=(0, 1)) == [["run"] * 2, ["attention", "run"]]
    assert kinds("R.R", count=1) == [["run"], ["run"]]


@pytest.mark.parametrize("count", [1, 24, 25, 57, 100])
def test_large_models_are_drawn_in_groups(count):
    (part,) = skipping.skipped([component(["RR"], count=count)])
    column = [cell for cell in part.branches[0].cells if cell.x == skipping.LEFT]
    assert len(column) <= skipping.MOST_ROWS
    assert column[-1].title.endswith(f"{count}: computed")


def test_the_page_of_a_pipeline_has_it(tmp_path):
    model, scheduler = Denoiser(), euler()
    with optimized(model, Skip(("RRR1R1R1", "RRRRDDRD"), loss="PSNR 33 dB"), scheduler) as handle:
        handle.report.to_html(tmp_path / "before.html")
        assert "Skipped steps" not in (tmp_path / "before.html").read_text()
        generate(model, scheduler, guidance=(0.0, 0.3))
        handle.report.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert "48 of 64 block executions, 48 planned" in page.words
    assert "PSNR 33 dB" in page.words
    # Two branches of eight steps and four blocks, and the legend.
    assert text.count("<rect class=") == 2 * 8 * 4 + len(skipping.KINDS)
    assert text.count('class="derived"') == 4 + 1
    assert "step 4, block 1: forecast" in text

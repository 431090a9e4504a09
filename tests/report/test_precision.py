"""The plot of precisions: a cell per linear, a column per block, a title with the reason."""

import re

import pytest
import torch
from torch import nn

import tritium
from support.report_samples import Page, full_report, quantized
from tritium.report.html import precision, render
from tritium.report.html.precision import precisions
from tritium.report.records import Component

EAGER = tritium.CompilationConfig(engine="eager")


def component(layers, name="transformer"):
    techniques = {"quantize": {"layers": layers}} if layers is not None else {"quantize": {}}
    return Component(
        name=name, milliseconds=None, calls=0, share=None, first_call_seconds=0.0, what="", techniques=techniques
    )


def test_each_layer_has_one_cell_in_its_block_and_row():
    ((found,), names) = precisions([component(quantized()["layers"])]), list(quantized()["layers"])
    blocks, outside = found.grids
    assert (blocks.title, blocks.rows, blocks.columns) == ("blocks", ["attn.plain", "ff.net.2", "extra"], [0, 1])
    assert [(cell.column, cell.row, cell.kind) for cell in blocks.cells] == [
        (0, 0, "int8"),
        (1, 0, "int8"),
        (0, 1, "fp8"),
        (1, 1, "kept"),
        (1, 2, "other"),
    ]
    assert (outside.rows, outside.columns, len(outside.cells)) == (["proj_out"], [0], 1)
    titles = [cell.title for grid in found.grids for cell in grid.cells]
    assert [title.partition(":")[0] for title in titles] == names
    assert titles[2] == "blocks.0.ff.net.2: fp8, computed by scaled_mm, SQNR 28.5 dB"
    assert titles[3] == "blocks.1.ff.net.2: unchanged, its input has 1 row: plain"
    assert titles[4] == "blocks.1.extra: fp3 plain"
    assert found.counts[0] == ("int8", "int8, rotated by 64", 2)
    assert sum(count for *_, count in found.counts) == len(names)


def test_two_lists_of_blocks_are_two_grids():
    names = ["blocks.3.attn.to_out.0", "blocks.10.attn.to_out.0", "single.0.proj", "in"]
    (found,) = precisions([component({name: {"precision": "int8-weights"} for name in names})])
    assert [(grid.title, grid.rows, grid.columns) for grid in found.grids] == [
        ("blocks", ["attn.to_out.0"], [3, 10]),
        ("single", ["proj"], [0]),
        ("outside of the blocks", ["in"], [0]),
    ]
    assert {cell.kind for grid in found.grids for cell in grid.cells} == {"int8-weights"}


@pytest.mark.parametrize("layers", [None, {}])
def test_parts_without_quantized_layers_have_no_plot(layers):
    assert precisions([component(layers)]) == []
    report = full_report()
    report.components.clear()
    page = Page(render(report, "none"))
    assert not page.all("rect")
    assert not page.all("section", id="precision")


def test_many_blocks_fit_the_page_and_their_numbers_too():
    (found,) = precisions([component({f"b.{n}.x": {"precision": "fp8"} for n in range(120)})])
    (grid,) = found.grids
    assert grid.width <= precision.LABEL + 8 + precision.CELLS
    assert grid.ticks[:2] == [(0, 0), (10, 10)]
    assert len(grid.ticks) == 12


def test_the_plot_is_on_the_page():
    text = render(full_report(), "quantized")
    page = Page(text)
    assert len(page.all("rect")) == len(quantized()["layers"])
    kinds = [attributes["class"] for attributes in page.all("rect")]
    assert kinds == ["cell int8", "cell int8", "cell fp8", "cell kept", "cell other", "cell kept"]
    places = {(attributes["x"], attributes["y"]) for attributes in page.all("rect")[:-1]}
    assert len(places) == 5
    said = "2 linears in int8, rotated by 64"
    assert said in page.words
    assert "2 linears unchanged" in page.words
    assert page.all("a", href="#precision")
    # Every kind of cell has a colour.
    for kind in (*precision.KINDS, precision.KEPT, precision.OTHER):
        assert re.search(rf"\.cell\.{kind},", text)


class Blocks(nn.Module):
    """Two repeated blocks of two linears."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_a_quantized_model_has_its_plot():
    """The data of the technique is what the plot reads."""
    model = Blocks()
    chosen = tritium.Quantize("int8", layers={"blocks.1": None})
    with tritium.optimize(model, tritium.Plan(quantize=chosen, config=EAGER, progress=False)) as handle:
        with torch.inference_mode():
            model(torch.ones(40, 32))
        (found,) = precisions(handle.report.components)
    titles = [cell.title for grid in found.grids for cell in grid.cells]
    # The provider depends on the machine.
    by_name = {title.partition(":")[0]: title for title in titles}
    assert by_name.keys() == {"blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"}
    assert all(by_name[name].startswith(f"{name}: int8, computed by ") for name in ("blocks.0.0", "blocks.0.1"))
    assert by_name["blocks.1.0"] == "blocks.1.0: unchanged, layers says None"

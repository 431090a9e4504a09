"""The error of each format at each linear, from inputs that the model really has."""

import math

import pytest
import torch
from torch import nn

from tritium import Quantize
from tritium.ops import quantize_rows
from tritium.techniques.quantize.config import FORMATS
from tritium.techniques.quantize.sensitivity import emulating, observing, quantized_product


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2)])
        self.unused = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


def observed(model, x, names=("blocks.0.0",), config=None, step=lambda: 0):
    config = config or Quantize("int8", group=32)
    with observing(model, names, config, step, lambda step: True) as found, torch.no_grad():
        model(x)
    return found


def ratio(actual, expected):
    return 10 * math.log10(float(expected.double().square().sum() / (actual - expected).double().square().sum()))


@pytest.mark.parametrize("format_", FORMATS)
def test_the_ratio_is_that_of_the_product(model, format_):
    x = torch.randn(2, 7, 64)
    seen = observed(model, x)["blocks.0.0"]
    weight = model.blocks[0][0].weight.detach()
    precision = Quantize("int8", group=32).precision(format_, 64)
    product = torch.nn.functional.linear(x, weight)
    expected = ratio(quantized_product(x, weight, precision), product)
    assert seen.ratio(format_) == pytest.approx(expected, abs=1e-3)


def test_ratios_of_formats_are_in_their_known_ranges():
    torch.manual_seed(0)
    seen = observed(Model(512), torch.randn(512, 512))["blocks.0.0"]
    assert 27 < seen.ratio("fp8") < 31
    assert 36 < seen.ratio("int8") < 42
    assert 39 < seen.ratio("int8-weights") < 50
    assert 16 < seen.ratio("int4-weights") < 26


def test_outliers_are_what_rotation_is_for(model):
    x = torch.randn(512, 64)
    x[:, 5] *= 60
    seen = observed(model, x)["blocks.0.0"]
    assert seen.ratio("int8-rotated") > seen.ratio("int8") + 6


def test_energies_add_up_over_calls(model):
    first, second = torch.randn(64, 64), 10 * torch.randn(64, 64)
    config = Quantize("int8", group=32)
    with observing(model, ["blocks.0.0"], config, lambda: 0, lambda step: True) as found, torch.no_grad():
        model(first)
        model(second)
    both = observed(model, torch.cat([first, second]))["blocks.0.0"]
    assert found["blocks.0.0"].ratio("fp8") == pytest.approx(both.ratio("fp8"), abs=0.01)


def test_largest_magnitudes_by_step_and_rotation(model):
    steps = iter([0, 0, 1])
    x = torch.randn(16, 64)
    config = Quantize("int8")
    current = [0]
    with observing(model, ["blocks.0.0"], config, lambda: current[0], lambda step: False) as found, torch.no_grad():
        for factor in (1.0, 3.0, 2.0):
            current[0] = next(steps)
            model(x * factor)
    seen = found["blocks.0.0"]
    assert seen.largest_by_step(0) == pytest.approx({0: 3 * float(x.abs().max()), 1: 2 * float(x.abs().max())})
    rotated = float(quantize_rows.rotated(x, 64).abs().max())
    assert seen.largest_by_step(64) == pytest.approx({0: 3 * rotated, 1: 2 * rotated})
    # Errors are measured in chosen steps alone.
    assert math.isnan(seen.ratio("fp8"))


def test_a_layer_without_calls_has_no_ratio(model):
    seen = observed(model, torch.randn(8, 64), names=("unused",))["unused"]
    assert math.isnan(seen.ratio("int8"))
    assert seen.largest_by_step(0) == {}


def test_formats_that_do_not_divide_a_layer_are_left_out():
    seen = observed(Model(50), torch.randn(8, 50))["blocks.0.0"]
    assert set(seen.precisions) == {"fp8", "int8", "int8-weights"}


def test_hooks_are_gone_afterwards(model):
    x = torch.randn(8, 64)
    before = model(x)
    observed(model, x)
    with pytest.raises(RuntimeError, match="stop"), observing(model, ["blocks.0.0"], Quantize(), lambda: 0, bool):
        raise RuntimeError("stop")
    assert not any(inner._forward_pre_hooks or inner._forward_hooks for inner in model.modules())
    assert torch.equal(model(x), before)


def test_emulation_is_the_product_with_its_bias(model):
    x = torch.randn(8, 64)
    how = Quantize("int8").precision("int8", 64)
    with emulating(model, {"blocks.1.1": how}), torch.no_grad():
        found = model(x)
    inner = model.blocks[1][0](model.blocks[0](x)).detach()
    last = model.blocks[1][1]
    torch.testing.assert_close(found, quantized_product(inner, last.weight, how) + last.bias)
    assert not torch.equal(found, model(x))

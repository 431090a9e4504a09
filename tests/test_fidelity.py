"""The bound of `close`, and the float64 run it is measured against."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tritium import fidelity

EXACT = torch.linspace(-1, 1, 63, dtype=torch.float64)
EAGER = EXACT.float()


def test_twice_eager_s_own_error_and_16_eps():
    eager = EAGER + 1e-4
    bound = 2 * fidelity.error(eager, EXACT) + 16 * torch.finfo(torch.float32).eps
    assert fidelity.allowed(eager, EXACT) == bound
    assert fidelity.excess(EAGER + 1.9e-4, eager, EXACT) < 1 < fidelity.excess(EAGER + 2.1e-4, eager, EXACT)


@pytest.mark.parametrize(
    "actual", [EAGER[:-1], EAGER.double(), EAGER.where(EAGER < 0.9, torch.nan), EAGER.where(EAGER < 0.9, torch.inf)]
)
def test_another_shape_or_dtype_or_no_number_is_outside(actual):
    assert fidelity.excess(actual, EAGER, EXACT) == math.inf


def test_infinity_and_integers_are_equal_or_outside():
    finite, integers = EAGER < 0.9, torch.arange(7)
    eager = EAGER.where(finite, torch.inf)
    assert fidelity.excess(eager.clone(), eager, EXACT) == fidelity.excess(EAGER[finite], EAGER[finite], EXACT[finite])
    assert fidelity.excess(-eager, eager, EXACT) == math.inf
    assert fidelity.excess(EAGER, eager, EXACT) == math.inf
    assert fidelity.excess(EAGER, EAGER, EXACT.where(EXACT < 0.9, torch.nan)) == math.inf
    assert fidelity.excess(integers.clone(), integers, integers) == 0
    assert fidelity.excess(integers + 1, integers, integers) == math.inf


def test_the_worst_of_several_results_counts():
    found = fidelity.largest_excess((EAGER, [EAGER + 1]), (EAGER, [EAGER]), (EXACT, [EXACT]))
    assert found == fidelity.excess(EAGER + 1, EAGER, EXACT)
    assert fidelity.largest_excess((EAGER,), (EAGER, EAGER), (EXACT, EXACT)) == math.inf
    assert fidelity.largest_excess("text", "text", "text") is None


class Casting(nn.Module):
    """Casts in all the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("angles", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.table = torch.arange(8.0) / 3

    def forward(self, x, scale):
        self.seen = [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.bfloat16),
            x.half(),
            torch.arange(8, dtype=torch.float32, device=x.device),
            torch.arange(8) / 3,
            torch.ones(8),
            self.table,
            (x * self.angles).real,
        ]
        return self.linear(sum(self.seen) * scale)


def test_float64_stays_float64_whatever_a_model_casts_to():
    module, x = Casting(), torch.randn(3, 8)
    default = torch.get_default_dtype()
    result = fidelity.in_float64(module, (x,), {"scale": torch.tensor(0.5)})
    assert result.dtype == torch.float64
    # What float32 loses of a third is nowhere lost.
    weight, bias, third = module.linear.weight.double(), module.linear.bias.double(), torch.arange(8).double() / 3
    wide = x.double()
    seen = (
        4 * wide + torch.arange(8) + third + 1 + module.table.double() + wide * module.angles.to(torch.complex128).real
    )
    assert torch.allclose(result, nn.functional.linear(seen * 0.5, weight, bias), rtol=1e-14, atol=1e-14)
    # The module, the default and the casts of other code are as before.
    assert not hasattr(module, "seen")
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == default == torch.ones(1).double().float().dtype

"""The one way tests compare numbers: against float64, with eager's own error as the yardstick."""

from __future__ import annotations

import torch


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference from the float64 value, relative to its scale."""
    scale = exact.abs().max().clamp_min(1e-30)
    return float(((actual.double() - exact).abs().max() / scale).item())


def assert_no_worse(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, where: str = "") -> None:
    """`close`: at most twice eager's own error plus 16 eps of the dtype."""
    assert actual.shape == eager.shape, where
    assert actual.dtype == eager.dtype, where
    assert exact.dtype == torch.float64
    if actual.numel() == 0:
        return
    allowed = 2 * error(eager, exact) + 16 * torch.finfo(eager.dtype).eps
    found = error(actual, exact)
    assert found <= allowed, f"{where}: error {found:.3e} against float64, allowed {allowed:.3e}"

"""The one way tests compare numbers: against float64, with eager's own error as the yardstick."""

from __future__ import annotations

import torch

from tritium.fidelity import allowed, error

__all__ = ["assert_no_worse", "error"]


def assert_no_worse(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, where: str = "") -> None:
    """`close`: at most twice eager's own error plus 16 eps of the dtype."""
    assert actual.shape == eager.shape, where
    assert actual.dtype == eager.dtype, where
    assert exact.dtype == torch.float64
    if actual.numel() == 0:
        return
    granted = allowed(eager, exact)
    found = error(actual, exact)
    assert found <= granted, f"{where}: error {found:.3e} against float64, allowed {granted:.3e}"

"""Another provider of the op `rms_norm`: ATen's own operator, for whoever wants to compare. Pin it with
`tritium.CompilationConfig(force_provider={"rms_norm": "plain"})`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tritium import Provider


def run(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps).to(out_dtype or x.dtype)


def decline(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None) -> str | None:
    del eps, out_dtype
    if weight is not None and weight.dtype != x.dtype:
        return f"ATen wants weight and input of one dtype, got {weight.dtype} and {x.dtype}"
    return None


PROVIDER = Provider("plain", "rms_norm", run, decline)

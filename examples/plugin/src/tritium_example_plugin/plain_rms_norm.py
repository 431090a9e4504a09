"""Add a provider of the op `rms_norm` for comparisons: ATen's operator.

Pin it with `tritium.CompilationConfig(force_provider={"rms_norm": "plain"})`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from tritium.plugins import Arguments, Provider


def run(given: Arguments) -> torch.Tensor:
    x = given.x
    return F.rms_norm(x, (x.shape[-1],), given.weight, given.eps).to(given.out_dtype or x.dtype)


def decline(given: Arguments) -> str | None:
    weight, dtype = given.weight, given.x.dtype
    if weight is not None and weight.dtype != dtype:
        return f"ATen wants weight and input of one dtype, got {weight.dtype} and {dtype}"
    return None


PROVIDER = Provider("plain", "rms_norm", run, decline)

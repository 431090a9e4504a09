"""How the providers of `block_sparse_attention` are compared at the first call of a shape class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tritium import compat, fidelity
from tritium.compat import attention as compat_attention
from tritium.ops import attention
from tritium.ops.block_sparse_attention.triton import decline_triton, run_triton
from tritium.ops.op import REFERENCE, Arguments, FirstUse, Shape, Trial


def shape(given: Arguments) -> Shape:
    sides = {name: getattr(given, name).transpose(1, 2) for name in "qkv"}
    dense = Arguments(**sides, mask=None, scale=given.scale, causal=given.causal)
    return {"block": given.block, **attention.TRIAL.shape(dense)}


def alike(given: Arguments) -> Callable[[], Mapping[str, Any]] | None:
    """Return the arguments of the call: the number of listed blocks decides which provider is faster.

    None on a CPU, in graphs, and if there is nothing to compare.
    """
    if not given.q.is_cuda or compat.traced.is_traced(given.q) or decline_triton(given) is not None:
        return None
    return lambda: vars(given)


def check(given: Arguments) -> Callable[[torch.Tensor], str | None]:
    """Compare results with the Triton kernel's, which tests compare with the reference: that takes minutes for video."""
    exact = run_triton(given).double()
    allowed = 32 * torch.finfo(given.q.dtype).eps

    def too_far(out: torch.Tensor) -> str | None:
        error = fidelity.error(out, exact)
        return None if error <= allowed else f"it differs from the kernel by {error:.2e}, allowed {allowed:.2e}"

    return too_far


def rule(given: Arguments) -> str:
    if decline_triton(given) is None:
        return "triton"
    return "flex" if given.q.is_cuda and not compat.dynamo.is_compiling() else REFERENCE


TRIAL = Trial(shape, first_use=FirstUse(alike=alike, check=check, default=rule, versions=compat_attention.versions))

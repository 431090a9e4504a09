"""`softmax(q k^T * scale) v` for heads too wide for flash kernels: the head of 512 in an image VAE.

Tensors are heads-first, [B, N, S, D], without mask, causality or gradient. The result has the strides of PyTorch's
memory-efficient kernel: the heads of a token are adjacent.
"""

from __future__ import annotations

from tritium.ops.op import Op, Provider
from tritium.ops.wide_attention.products import WIDEST_FLASH, attend, decline_products, results, run_products
from tritium.ops.wide_attention.reference import reference, samples
from tritium.ops.wide_attention.trial import TRIAL

__all__ = ["OP", "TRIAL", "WIDEST_FLASH", "attend", "reference", "samples"]

OP = Op(
    name="wide_attention",
    reference=reference,
    samples=samples,
    results=results,
    providers=(Provider("products", "wide_attention", run_products, decline_products),),
    keeps_strides=True,
    any_layout=True,
    trial=TRIAL,
)

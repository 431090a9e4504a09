"""`softmax(q k^T * scale) v` for heads wider than flash kernels take: the one head of 512 in an image VAE's middle.

Tensors are heads-first, [B, N, S, D], without mask, causality or gradient. The result lies in memory as that of PyTorch's
memory-efficient kernel does: the heads of a token together.
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

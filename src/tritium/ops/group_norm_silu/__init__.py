"""`silu(group_norm(x + offset))`, which precedes every convolution of a UNet or VAE.

It is computed in float32 and rounded once. The offset is one value per channel: the bias of the preceding
convolution, which this op adds. The result is channels-last if `x` is channels-last, else contiguous.
"""

from __future__ import annotations

from tritium.ops.group_norm_silu.reference import reference, samples
from tritium.ops.group_norm_silu.trial import TRIAL
from tritium.ops.group_norm_silu.triton import decline_triton, results, run_triton
from tritium.ops.op import Op, Provider

__all__ = ["OP", "TRIAL", "reference", "samples"]

OP = Op(
    name="group_norm_silu",
    reference=reference,
    samples=samples,
    results=results,
    providers=(Provider("triton", "group_norm_silu", run_triton, decline_triton, traced=True),),
    keeps_strides=True,
    trial=TRIAL,
)

"""`normalize(x + offset, dim) * scale * weight + shift`, optionally with SiLU, as in video VAEs.

It is computed over channels, in float32, and rounded once. The offset is one value per channel: the bias of the
preceding convolution, which this op adds. The result is channels-last if `x` is channels-last, else contiguous.
"""

from __future__ import annotations

from tritium.ops.channel_norm.reference import reference, samples
from tritium.ops.channel_norm.trial import TRIAL
from tritium.ops.channel_norm.triton import decline_triton, results, run_triton
from tritium.ops.op import Op, Provider

__all__ = ["OP", "reference", "samples"]

OP = Op(
    name="channel_norm",
    reference=reference,
    samples=samples,
    results=results,
    providers=(Provider("triton", "channel_norm", run_triton, decline_triton, traced=True),),
    keeps_strides=True,
    trial=TRIAL,
)

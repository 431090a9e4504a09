"""`normalize(x + offset, dim) * scale * weight + shift`, with or without a SiLU after it: the RMSNorm over channels of video VAEs,
computed in float32 and rounded once.

The offset is one number a channel: the bias of the convolution before, which this op adds on its way.

The result lies in memory as `x` does: channels last if `x` is channels last, else contiguous.
"""

from __future__ import annotations

from tritium.ops.channel_norm.reference import fake, reference, samples
from tritium.ops.channel_norm.trial import TRIAL
from tritium.ops.channel_norm.triton import decline_triton, run_triton
from tritium.ops.launch import remembered
from tritium.ops.op import Op, Provider

__all__ = ["OP", "fake", "reference", "samples"]

OP = Op(
    name="channel_norm",
    schema="(Tensor x, Tensor weight, float scale, float shift, int dim, float eps, bool silu, "
    "ScalarType? out_dtype, Tensor? offset=None) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    providers=(Provider("triton", "channel_norm", remembered(run_triton), decline_triton),),
    keeps_strides=True,
    trial=TRIAL,
)

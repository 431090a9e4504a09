"""`silu(group_norm(x + offset))`, what stands in front of every convolution of a UNet or VAE, computed in float32 and rounded once.

The offset is one number a channel: the bias of the convolution before, which this op adds on its way.

The result lies in memory as `x` does: channels last if `x` is channels last, else contiguous.
"""

from __future__ import annotations

from tritium.ops.group_norm_silu.cpu import decline_cpu, run_cpu
from tritium.ops.group_norm_silu.reference import fake, reference, samples
from tritium.ops.group_norm_silu.trial import TRIAL
from tritium.ops.group_norm_silu.triton import decline_triton, run_triton
from tritium.ops.launch import remembered
from tritium.ops.op import Op, Provider

__all__ = ["OP", "TRIAL", "fake", "reference", "samples"]

OP = Op(
    name="group_norm_silu",
    schema="(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype, "
    "Tensor? offset=None) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    providers=(
        Provider("triton", "group_norm_silu", remembered(run_triton), decline_triton),
        Provider("cpu", "group_norm_silu", run_cpu, decline_cpu),
    ),
    keeps_strides=True,
    any_layout=True,
    trial=TRIAL,
)

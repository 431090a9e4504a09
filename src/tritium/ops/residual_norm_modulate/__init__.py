"""A gated residual with norm and modulation: `r = x + gate * y` and `norm(r) * (1 + scale) + shift`.

Computed in float32 (float64 for float64), each result rounded once; the norm reads the rounded residual, as the next
layer will. `norm` is "layer" or "rms", with weight and bias. x and y have one shape [..., H]; gate, scale and shift are
broadcast against it and do not affect the results' dtypes.
"""

from __future__ import annotations

from tritium.ops.op import Op, Provider
from tritium.ops.residual_norm_modulate.reference import NORMS, reference, samples
from tritium.ops.residual_norm_modulate.trial import TRIAL
from tritium.ops.residual_norm_modulate.triton import decline_triton, results, run_triton

__all__ = ["NORMS", "OP", "TRIAL", "decline_triton", "reference", "run_triton", "samples"]

OP = Op(
    name="residual_norm_modulate",
    reference=reference,
    samples=samples,
    results=results,
    providers=(Provider("triton", "residual_norm_modulate", run_triton, decline_triton, traced=True),),
    trial=TRIAL,
)

"""The query and the key of an attention: their parts normed, rotated and joined along tokens, rounded once.

q and k hold parts [B, S_i, H, D] of any strides, in the order in which they are joined: text and image, or one. Each
part has a norm weight of its own, or None, and a table of its own, or None: then it is not rotated. One table for
several parts holds all of their tokens. `norm` tells what is divided by its root mean square:

    head    D numbers of one head; weights are [D]
    row     all H * D numbers of a token; weights are [H * D]
    none    nothing; weights are [D]

`rope` is a mode of the op `rope` or "none". Cosines and sines are [B or 1, S_i, D / 2 or D]; complex tables are
[B or 1, S_i, D / 2], or as real pairs [B or 1, S_i, D / 2, 2], and have no sines. The results are [B, S, H, D], or
[B, H, S, D] with `heads_first`. Computed in float32, or in float64 if any input is double.
"""

from __future__ import annotations

from tritium.ops.launch import remembered
from tritium.ops.op import Op, Provider
from tritium.ops.qk_norm_rope.cpu import decline_cpu, run_cpu
from tritium.ops.qk_norm_rope.reference import NORMS, ROPES, fake, reference, samples
from tritium.ops.qk_norm_rope.trial import TRIAL
from tritium.ops.qk_norm_rope.triton import decline_triton, launch_options, run_triton

__all__ = [
    "NORMS",
    "OP",
    "ROPES",
    "TRIAL",
    "decline_cpu",
    "decline_triton",
    "fake",
    "launch_options",
    "reference",
    "run_triton",
    "samples",
]

OP = Op(
    name="qk_norm_rope",
    schema=(
        "(Tensor[] q, Tensor[] k, Tensor?[] q_weights, Tensor?[] k_weights, Tensor?[] tables, Tensor?[] sines, "
        "float eps, str norm, str rope, bool heads_first) -> (Tensor, Tensor)"
    ),
    reference=reference,
    fake=fake,
    samples=samples,
    providers=(
        Provider("triton", "qk_norm_rope", remembered(run_triton), decline_triton),
        Provider("cpu", "qk_norm_rope", remembered(run_cpu), decline_cpu),
    ),
    trial=TRIAL,
)

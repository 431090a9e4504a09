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

from tritium.ops.op import Op, Provider
from tritium.ops.qk_norm_rope.reference import NORMS, ROPES, reference, samples
from tritium.ops.qk_norm_rope.trial import TRIAL
from tritium.ops.qk_norm_rope.triton import decline_triton, launch_options, results, run_triton

__all__ = ["NORMS", "OP", "ROPES", "TRIAL", "decline_triton", "launch_options", "reference", "run_triton", "samples"]

OP = Op(
    name="qk_norm_rope",
    reference=reference,
    samples=samples,
    results=results,
    providers=(Provider("triton", "qk_norm_rope", run_triton, decline_triton, traced=True),),
    trial=TRIAL,
)

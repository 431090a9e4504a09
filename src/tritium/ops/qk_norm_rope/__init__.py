"""Normalize and rotate the parts of a query and a key and concatenate them, rounded once.

q and k are lists of parts [B, S_i, H, D] of any strides, in the order of the result: text and image, or one part. Each
part has a norm weight or None, and a table, or None if it is not rotated. A single table for several parts covers all
of their tokens. `norm` is the extent of the RMS norm:

    head    the D elements of one head; weights are [D]
    row     all H * D elements of a token; weights are [H * D]
    none    no norm; weights are [D]

`rope` is a mode of the op `rope` or "none". Cosines and sines are [B or 1, S_i, D / 2 or D]; complex tables are
[B or 1, S_i, D / 2], or as real pairs [B or 1, S_i, D / 2, 2], and have no sines. The results are [B, S, H, D], or
[B, H, S, D] with `heads_first`. Computed in float32, or in float64 if any input is double.
"""

from __future__ import annotations

from tritium.ops.op import Op, Provider
from tritium.ops.qk_norm_rope.reference import NORMS, ROPES, TRIAL, draw_samples, reference
from tritium.ops.qk_norm_rope.triton import decline_triton, launch_options, results, run_triton

__all__ = ["NORMS", "OP", "ROPES", "decline_triton", "launch_options", "reference", "run_triton"]

PROVIDER = Provider("triton", "qk_norm_rope", run_triton, decline_triton, traced=True)
OP = Op("qk_norm_rope", reference, draw_samples, (PROVIDER,), results=results, trial=TRIAL)

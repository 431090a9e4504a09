"""The softmax of `wide_attention`."""

import triton
import triton.language as tl


@triton.jit
def softmax_rows_kernel(scores_ptr, out_ptr, scale, keys, padded, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """Compute the softmax of one row per program; `scale` includes 1 / log(2), padding gets 0."""
    # 64 bits: rows times keys exceeds 2^31.
    row = tl.program_id(0).to(tl.int64) * padded
    scores = scores_ptr + row
    out = out_ptr + row
    lanes = tl.arange(0, TILE)
    # Mask loads and stores by the padded length, which is aligned; the number of keys may not be.
    if WHOLE:
        score = tl.load(scores + lanes, mask=lanes < padded, other=0.0) * scale
        score = tl.where(lanes < keys, score, float("-inf"))
        weight = tl.exp2(score - tl.max(score, 0))
        weight = weight * (1.0 / tl.sum(weight, 0))
        tl.store(out + lanes, weight.to(out_ptr.dtype.element_ty), mask=lanes < padded)
    else:
        # The first part of a longer row is full, so the maximum is finite from the start.
        largest = tl.max(tl.load(scores + lanes) * scale, 0)
        total = tl.zeros([TILE], tl.float32)
        for start in range(0, keys, TILE):
            places = start + lanes
            score = tl.load(scores + places, mask=places < padded, other=0.0) * scale
            score = tl.where(places < keys, score, float("-inf"))
            now = tl.maximum(largest, tl.max(score, 0))
            total = total * tl.exp2(largest - now) + tl.exp2(score - now)
            largest = now
        inverse = 1.0 / tl.sum(total, 0)
        for start in range(0, keys, TILE):
            places = start + lanes
            score = tl.load(scores + places, mask=places < padded, other=0.0) * scale
            score = tl.where(places < keys, score, float("-inf"))
            weight = tl.exp2(score - largest) * inverse
            tl.store(out + places, weight.to(out_ptr.dtype.element_ty), mask=places < padded)

"""Inputs of attention, and its result in float64."""

import math

import torch
import torch.nn.functional as F


def qkv(queries=63, keys=100, heads=4, kv_heads=None, width=32, batch=2, dtype=torch.float32, head_first=False):
    """Random streams [B, S, N, D], or heads first."""
    generator = torch.Generator().manual_seed(queries * keys)

    def random(tokens, heads):
        shape = (batch, heads, tokens, width) if head_first else (batch, tokens, heads, width)
        return torch.randn(shape, generator=generator).to(dtype)

    return random(queries, heads), random(keys, kv_heads or heads), random(keys, kv_heads or heads)


def exact_of(q, k, v, mask=None, *, scale=None, causal=False, head_first=False):
    """PyTorch's attention in float64, with every mask made explicit: other code than the package's."""
    if not head_first:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    bias = torch.zeros(q.shape[2], k.shape[2], dtype=torch.float64)
    if causal:
        keep = keep.tril()
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    elif mask is not None:
        bias = bias + mask.double()
    bias = bias.masked_fill(~keep, -math.inf)
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q.double(), k, v, bias, scale=scale)
    return out if head_first else out.transpose(1, 2)

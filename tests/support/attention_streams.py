"""Inputs of attention in 8 bits like those of trained models, and the error of a result."""

import torch


def streams(queries, keys, width=128, *, kind="normal", dtype=torch.bfloat16, batch=2, heads=2, where="cpu"):
    """Heads-first q, k and v with tokens first in memory; keys have a mean, and `outliers` some large channels."""
    generator = torch.Generator().manual_seed(queries * keys)

    def draw(tokens):
        return torch.randn(batch, tokens, heads, width, generator=generator).transpose(1, 2)

    q, k, v = draw(queries), draw(keys), draw(keys)
    k = k + 3 * torch.randn(batch, heads, 1, width, generator=generator)
    if kind == "outliers":
        k[..., ::32] *= 10
        q[..., ::64] *= 3
    if kind == "heavy tails":
        q, k = (side / torch.randn(3, *side.shape, generator=generator).square().mean(0).sqrt() for side in (q, k))
    return tuple(side.to(where, dtype) for side in (q, k, v))


def exact(q, k, v, scale):
    """Attention in float64."""
    return torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()


def sqnr(out, truth):
    """The ratio of signal to error of the worst head of each sample, in dB."""
    error = (out.double() - truth.double()).square().sum((2, 3))
    return float((10 * torch.log10(truth.double().square().sum((2, 3)) / error)).min())

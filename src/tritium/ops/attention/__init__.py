"""Attention, `softmax(q k^T * scale, masked) v`, of heads-first tensors: q [B, N, Sq, D], k and v [B, N', Sk, D].

N' divides N. A mask is broadcast to [B, N, Sq, Sk]; boolean, where True keeps a score, or added to the scores. `causal`
is aligned to the first key: query i sees keys 0 to i. In memory the result has the heads of a token side by side.

The providers are PyTorch's kernels, FlexAttention, kernels of other packages, and loops over matrix products. Which one is
fastest depends on the device, versions and sizes, so the first call of a shape class measures them.
"""

from __future__ import annotations

import torch

from tritium.ops.attention.providers import PROVIDERS, words
from tritium.ops.attention.reference import attention_math, draw_samples, reference
from tritium.ops.attention.trial import TRIAL, rule
from tritium.ops.op import Arguments, Op
from tritium.ops.wide_attention import empty_result

__all__ = ["OP", "TRIAL", "attention_math", "rule", "words"]


def results(given: Arguments) -> torch.Tensor:
    return empty_result(given.q, given.v)


OP = Op("attention", reference, draw_samples, PROVIDERS, keeps_strides=True, results=results, trial=TRIAL)

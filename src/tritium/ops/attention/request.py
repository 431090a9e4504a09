"""Properties of an attention's arguments, real or fake, on which its providers and their times depend.

A symbolic size counts as its value in the call that is being compiled.
"""

from __future__ import annotations

import torch

from tritium import compat
from tritium.ops.op import Arguments, present

HALF = (torch.float16, torch.bfloat16)


def tensors(given: Arguments) -> list[torch.Tensor]:
    return [tensor for tensor in (given.q, given.k, given.v, given.mask) if tensor is not None]


def queries(given: Arguments) -> int:
    return present(given.q.shape[2])


def keys(given: Arguments) -> int:
    return present(given.k.shape[2])


def width(given: Arguments) -> int:
    return present(given.q.shape[3])


def value_width(given: Arguments) -> int:
    return present(given.v.shape[3])


def is_grouped(given: Arguments) -> bool:
    return present(given.q.shape[1]) != present(given.k.shape[1])


def is_empty(given: Arguments) -> bool:
    return any(present(size) == 0 for tensor in (given.q, given.k, given.v) for size in tensor.shape)


def is_packed(given: Arguments) -> bool:
    """Return whether the elements of a head are contiguous."""
    return all(present(t.stride(3)) == 1 or present(t.shape[3]) == 1 for t in (given.q, given.k, given.v))


def is_symbolic(given: Arguments) -> bool:
    """Return whether a size is symbolic: no loop can run over it."""
    return any(not isinstance(size, int) for tensor in tensors(given) for size in tensor.shape)


def has_heads_first_in_memory(given: Arguments) -> bool:
    return present(given.q.stride(1)) >= present(given.q.stride(2))


def has_wide_mask(given: Arguments) -> bool:
    """Return whether an added mask has another dtype than the query: rounding would change the mask."""
    return given.mask is not None and given.mask.dtype not in (torch.bool, given.q.dtype)


def needs_gradients(given: Arguments) -> bool:
    return compat.dynamo.needs_gradients(*tensors(given))


def score_bytes(given: Arguments) -> int:
    """Return the bytes of all scores in float32."""
    return 4 * present(given.q.shape[0]) * present(given.q.shape[1]) * queries(given) * keys(given)


def words(given: Arguments) -> str:
    """Return a description for error messages and reports."""
    q, mask = given.q, given.mask
    parts = [f"{q.dtype} on {q.device.type}", f"{queries(given)} queries, {keys(given)} keys"]
    parts.append(f"{present(q.shape[1])} heads of {width(given)}")
    if is_grouped(given):
        parts.append(f"{present(given.k.shape[1])} heads of keys")
    if mask is not None:
        kind = "a boolean" if mask.dtype == torch.bool else "an additive"
        parts.append(f"{kind} mask {tuple(map(present, mask.shape))}")
    if given.causal:
        parts.append("causal")
    return ", ".join(parts)

"""Properties of an attention's arguments, real or fake, on which its providers and their times depend."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from tritium import compat
from tritium.ops.op import Arguments, present

HALF = (torch.float16, torch.bfloat16)


class Sizes(NamedTuple):
    """The sizes of an attention; a symbolic size counts as its value in the call that is being compiled."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    @classmethod
    def of(cls, given: Arguments) -> Self:
        batch, heads, queries, width = map(present, given.q.shape)
        _, kv_heads, keys, value_width = map(present, given.v.shape)
        return cls(batch, heads, kv_heads, queries, keys, width, value_width)

    @property
    def score_bytes(self) -> int:
        """The bytes of all scores in float32."""
        return 4 * self.batch * self.heads * self.queries * self.keys


def tensors(given: Arguments) -> list[torch.Tensor]:
    return [tensor for tensor in (given.q, given.k, given.v, given.mask) if tensor is not None]


def is_packed(given: Arguments) -> bool:
    """Return whether the elements of a head are contiguous."""
    return all(present(t.stride(3)) == 1 or present(t.shape[3]) == 1 for t in (given.q, given.k, given.v))


def has_heads_first_in_memory(given: Arguments) -> bool:
    return present(given.q.stride(1)) >= present(given.q.stride(2))


def has_wide_mask(given: Arguments) -> bool:
    """Return whether an added mask has another dtype than the query: rounding would change the mask."""
    return given.mask is not None and given.mask.dtype not in (torch.bool, given.q.dtype)


def needs_gradients(given: Arguments) -> bool:
    return compat.dynamo.needs_gradients(*tensors(given))


def words(given: Arguments) -> str:
    """Return a description for error messages and reports."""
    q, mask, sizes = given.q, given.mask, Sizes.of(given)
    parts = [f"{q.dtype} on {q.device.type}", f"{sizes.queries} queries, {sizes.keys} keys"]
    parts.append(f"{sizes.heads} heads of {sizes.width}")
    if sizes.heads != sizes.kv_heads:
        parts.append(f"{sizes.kv_heads} heads of keys")
    if mask is not None:
        kind = "a boolean" if mask.dtype == torch.bool else "an additive"
        parts.append(f"{kind} mask {tuple(map(present, mask.shape))}")
    if given.causal:
        parts.append("causal")
    return ", ".join(parts)

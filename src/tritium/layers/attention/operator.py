"""Attention as an operator that chooses an implementation when it is traced.

`tritium::attention` decomposes into other operators. Eagerly it chooses and computes; in a traced graph it chooses for
the sizes of that call, and the graph contains the chosen operator. A compiled model makes no choice at run time.
"""

from __future__ import annotations

import torch

from tritium import compat
from tritium.layers import checks
from tritium.layers.attention.candidates import Candidate, candidates
from tritium.layers.attention.choice import choose, choose_again
from tritium.layers.attention.request import Request
from tritium.report import LEDGER

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, "
    "str mode, str? op_type, str? layout, str identity) -> Tensor"
)
_LIBRARY.define(
    "attention_by(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, *, str candidate) -> Tensor"
)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    mode: str,
    op_type: str | None,
    layout: str | None,
    identity: str,
) -> torch.Tensor:
    del identity

    def chosen() -> Candidate:
        return choose(Request.of(q, k, v, mask, causal), mode, op_type, layout, q.device)

    # A traced tensor has another type, and its sizes may differ in every call.
    if type(q) is torch.Tensor:
        grad = checks.needs_gradients(*(t for t in (q, k, v, mask) if t is not None))
        sides = tuple((t.shape, t.stride(), t.dtype) if t is not None else None for t in (q, k, v, mask))
        candidate = choose_again((sides, q.device, causal, mode, op_type, layout, grad), chosen)
    else:
        candidate = chosen()
        note_choice(candidate.name, Request.of(q, k, v, mask, causal).words())
    given = (q, k, v) if layout is None else tuple(laid_out(tensor, layout) for tensor in (q, k, v))
    return run(candidate, given[0], given[1], given[2], mask, scale, causal)


def note_choice(by: str, what: str) -> None:
    """Record a choice in the report of the graph that is being traced."""
    frame = compat.dynamo.compiling_frame()
    if frame is not None:
        LEDGER.attention_chosen(frame.compile_id, by, what)


def run(
    candidate: Candidate,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    if candidate.opaque and not (type(q) is torch.Tensor and compat.dynamo.called_eagerly()):
        by = torch.ops.tritium.attention_by.default
        return by(q, k, v, mask, scale, causal, candidate=candidate.name)  # type: ignore[no-any-return]
    return candidate.run(q, k, v, mask, scale, causal)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a heads-first tensor with the strides of a layout, copied if necessary."""
    return tensor.contiguous() if layout == "BNSD" else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _attention_by(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    *,
    candidate: str,
) -> torch.Tensor:
    return candidates()[candidate].run(q, k, v, mask, scale, causal).contiguous()


def _fake_attention_by(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    *,
    candidate: str,
) -> torch.Tensor:
    del k, mask, scale, causal, candidate
    return q.new_empty((*q.shape[:3], v.shape[3]))


_LIBRARY.impl("attention", _attention, "CompositeImplicitAutograd")
_LIBRARY.impl("attention_by", _attention_by, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::attention_by", _fake_attention_by, lib=_LIBRARY)

# The operator that `attention_forward` calls.
ATTENTION = torch.ops.tritium.attention.default

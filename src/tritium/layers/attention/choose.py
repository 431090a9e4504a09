"""Choose the provider of an attention, and call it.

    runtime   the fastest in a measurement on this machine; the first call of a kind is measured, even while compiling
    static    the winner in a shipped table, otherwise by a rule
    manual    the named provider

`TRITIUM_ATTENTION` is the name of a provider, or `runtime` or `static`, and overrides all of them.

A graph of Dynamo contains `tritium::choose_attention`, which decomposes into other operators: it chooses when it is
traced, for the sizes of that call. A compiled model makes no choice at run time.
"""

from __future__ import annotations

from typing import Literal

import torch

from tritium import compat, envs, ops, tuning
from tritium.errors import ArgumentError, nearest
from tritium.ops import Arguments, Provider
from tritium.ops import attention as op
from tritium.report.ledger import LEDGER

Mode = Literal["runtime", "static", "manual"]
# The memory formats that inputs can be converted to. BSH, with merged heads, has the same bytes as BSND.
Layout = Literal["BNSD", "BSND", "BSH"]

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define(
    "choose_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, "
    "str mode, str? op_type, str? layout, str identity) -> Tensor"
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    mode: Mode = "runtime",
    op_type: str | None = None,
    layout: Layout | None = None,
) -> torch.Tensor:
    """Compute the attention of heads-first tensors, a mask of rank 4 or None, and a scale above 0."""
    if torch.compiler.is_dynamo_compiling():
        operator = torch.ops.tritium.choose_attention.default
        return operator(q, k, v, mask, scale, causal, mode, op_type, layout, identity())  # type: ignore[no-any-return]
    return _attend(q, k, v, mask, scale, causal, mode, op_type, layout, "")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    mode: Mode,
    op_type: str | None,
    layout: Layout | None,
    identity: str,
) -> torch.Tensor:
    del identity
    given = Arguments(q=q, k=k, v=v, mask=mask, scale=scale, causal=causal)
    provider = _provider(given, mode, op_type, layout)
    if layout is not None:
        given = Arguments(**{**vars(given), **{name: _laid_out(getattr(given, name), layout) for name in "qkv"}})
    if not provider.inlined:
        return op.OP.overload(*vars(given).values(), provider=provider.name)  # type: ignore[no-any-return]
    return provider.run(given)  # type: ignore[return-value]


def _provider(given: Arguments, mode: Mode, op_type: str | None, layout: Layout | None) -> Provider:
    tensors = [tensor for tensor in (given.q, given.k, given.v, given.mask) if tensor is not None]
    if any(map(compat.traced.is_traced, tensors)):
        # Symbolic sizes have other values in other calls.
        provider = choose(given, mode, op_type)
        note_choice(provider.name, op.words(given))
        return provider
    forms = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
    grad = compat.dynamo.needs_gradients(*tensors)
    call = ("attention", forms, given.q.device, given.causal, mode, op_type, layout, grad, envs.get(envs.ATTENTION))
    return tuning.once(call, lambda: choose(given, mode, op_type))


def choose(given: Arguments, mode: Mode, op_type: str | None = None) -> Provider:
    """Return the provider for a call; raise if a named provider cannot compute it."""
    override = envs.get(envs.ATTENTION)
    if override and override not in ("runtime", "static"):
        return _named(given, override, f"{envs.ATTENTION}={override}: ")
    if mode == "manual" and not override:
        return _named(given, op_type or "sdpa", "")
    name, _ = tuning.choose_at_first_use(op.OP, given, measures=(override or mode) == "runtime")
    return ops.providers(op.OP)[name]


def _named(given: Arguments, name: str, prefix: str) -> Provider:
    providers = ops.providers(op.OP)
    if name not in providers:
        raise ArgumentError(f"{prefix}there is no attention {name!r}; {nearest(name, providers)}")
    reason = providers[name].decline(given)
    if reason is not None:
        able = ", ".join(other for other, provider in providers.items() if provider.decline(given) is None)
        raise ArgumentError(f"{prefix}attention {name!r} cannot do {op.words(given)}: {reason}; those that can: {able}")
    return providers[name]


def check_choice(mode: str, op_type: str | None, layout: str | None) -> None:
    """Raise for names that are invalid for every call."""
    if mode != "manual" and (op_type is not None or layout is not None):
        raise ArgumentError(f"op_type and layout are for opt_mode 'manual', not for {mode!r}, which chooses by itself")
    if op_type is not None and (problem := _unknown(op_type)):
        raise ArgumentError(problem)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unknown(op_type: str) -> str | None:
    """Return the error for an unknown provider's name, or None.

    Dynamo treats the result as a constant: it cannot trace the search for installed packages.
    """
    known = ops.providers(op.OP)
    return None if op_type in known else f"there is no attention {op_type!r}; {nearest(op_type, known)}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def identity() -> str:
    """Return a digest of everything but the call that choices depend on, for a graph's cache key."""
    return f"{envs.get(envs.ATTENTION) or ''} {tuning.identity(op.OP)}"


def note_choice(by: str, what: str) -> None:
    """Record a choice in the report of the graph that is being traced."""
    frame = compat.dynamo.compiling_frame()
    if frame is not None:
        LEDGER.attention_chosen(frame.compile_id, by, what)


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a heads-first tensor in a memory format, copied if necessary."""
    return tensor.contiguous() if layout == "BNSD" else tensor.transpose(1, 2).contiguous().transpose(1, 2)


_LIBRARY.impl("choose_attention", _attend, "CompositeImplicitAutograd")

"""How a layer function computes an op of the core.

while a graph is traced    the op's reference, operator by operator: the compiler around it fuses that
eagerly, fused             an owned kernel that takes these arguments; on a GPU without one, what Inductor makes of
                           the reference, compiled at the first call
eagerly, not fused         the reference
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from tritium import compat, device, ops
from tritium.ops import Op
from tritium.ops.launch import signature

# What computes for arguments of some form; whoever has more forms than that has other worries than the host's time.
_CHOSEN: dict[Hashable, Callable[..., Any]] = {}
REMEMBERED = 1024
PLAIN = (torch.Tensor, torch.nn.Parameter)


def compute(op: Op, fused: bool, *arguments: Any) -> Any:
    if torch.compiler.is_compiling() or not fused:
        return op.reference(*arguments)
    tensors: list[torch.Tensor] = []
    form = signature(arguments, tensors)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not all(type(tensor) in PLAIN for tensor in tensors):
        # Traced ones may have sizes that no two calls share.
        return _choose(op, arguments, tensors, grad=grad)(*arguments)
    known = (op.name, form, tuple(tensor.device for tensor in tensors), grad)
    chosen = _CHOSEN.get(known)
    if chosen is None:
        if len(_CHOSEN) >= REMEMBERED:
            _CHOSEN.clear()
        chosen = _CHOSEN[known] = _choose(op, arguments, tensors, grad=grad)
    return chosen(*arguments)


def _choose(op: Op, arguments: tuple[Any, ...], tensors: list[torch.Tensor], *, grad: bool) -> Callable[..., Any]:
    provider = None if grad else _owned(op, arguments)
    if provider is not None:
        return functools.partial(op.overload, provider=provider)
    if _on_gpu(tensors) and device.has_triton():
        return _generated(op.name, tuple((tensor.dtype, tensor.dim()) for tensor in tensors))
    return op.reference


def _owned(op: Op, arguments: tuple[Any, ...]) -> str | None:
    """The first kernel of ours that takes these arguments."""
    for provider in ops.providers(op).values():
        if not provider.inlined and provider.decline(*arguments) is None:
            return provider.name
    return None


@functools.cache
def _generated(name: str, kinds: tuple[tuple[torch.dtype, int], ...]) -> Callable[..., Any]:
    """What Inductor makes of an op for tensors of some dtypes and ranks: for the sizes it meets first, then for any.

    Each has code of its own, so that no dtype uses up the compilations that another one is allowed.
    """
    del kinds
    reference: Any = ops.catalog()[name].reference
    return torch.compile(compat.with_code_of_its_own(reference))


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)

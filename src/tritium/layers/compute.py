"""How a layer function computes an op of the core.

while a graph is traced    the op's reference, operator by operator: the compiler around it fuses that
eagerly, fused             an owned kernel that takes these arguments; on a GPU without one, what Inductor makes of
                           the reference, compiled at the first call
eagerly, not fused         the reference
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat, device, ops
from tritium.ops import Op


def compute(op: Op, fused: bool, *arguments: Any) -> Any:
    if torch.compiler.is_compiling() or not fused:
        return op.reference(*arguments)
    provider = _owned(op, arguments)
    if provider is not None:
        return op.overload(*arguments, provider=provider)
    tensors = _tensors(arguments)
    if _on_gpu(tensors) and device.has_triton():
        return _generated(op.name, tuple((tensor.dtype, tensor.dim()) for tensor in tensors))(*arguments)
    return op.reference(*arguments)


def _owned(op: Op, arguments: tuple[Any, ...]) -> str | None:
    """The first kernel of ours that takes these arguments and gives no gradients up."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(arguments)):
        return None
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


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    flat = [part for value in arguments for part in (value if isinstance(value, (list, tuple)) else (value,))]
    return [part for part in flat if isinstance(part, torch.Tensor)]

"""Compute an op for a layer function.

In a graph, and under modes and transforms of PyTorch, the op's reference runs: its operators are fused or have rules.
Eagerly the first owned provider that takes the arguments runs, called through PyTorch's dispatcher. A GPU without one
runs the reference compiled by Inductor, and a CPU the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from tritium import compat, device, ops
from tritium.ops import Op

# The implementation for each form of arguments. The limit bounds memory; programs rarely have this many forms.
_CHOSEN: dict[Hashable, Callable[..., Any]] = {}
REMEMBERED = 1024


def compute(op: Op, fused: bool, *arguments: Any) -> Any:
    """Return an op's result; without `fused` its reference computes it."""
    if not fused or torch.compiler.is_compiling() or compat.dynamo.is_watched() or compat.dynamo.is_transformed():
        return op.reference(*arguments)
    # Declines and the search for providers take the host longer than a small kernel.
    form = (op.name, torch.is_grad_enabled(), *map(_form, arguments))
    implementation = _CHOSEN.get(form)
    if implementation is None:
        if len(_CHOSEN) >= REMEMBERED:
            _CHOSEN.clear()
        implementation = _CHOSEN[form] = _choose(op, arguments)
    return implementation(*arguments)


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else value


def _choose(op: Op, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    tensors = [leaf for leaf in compat.tensors.leaves_of(arguments) if isinstance(leaf, torch.Tensor)]
    # No owned provider has a backward.
    if not compat.dynamo.needs_gradients(*tensors):
        for name, provider in ops.providers(op).items():
            if not provider.inlined and provider.decline(op.bind(*arguments)) is None:
                return functools.partial(op.overload, provider=name)
    if _is_on_gpu(tensors) and device.has_triton():
        return _compiled(op.reference, tuple((tensor.dtype, tensor.dim()) for tensor in tensors))
    return op.reference


def _is_on_gpu(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


@functools.cache
def _compiled(reference: Any, kinds: tuple[tuple[torch.dtype, int], ...]) -> Callable[..., Any]:
    """Return an op's reference compiled for tensors of some dtypes and ranks.

    Each has a separate code object, so that no dtype counts towards the recompile limit of another one.
    """
    del kinds
    return torch.compile(compat.dynamo.with_code_of_its_own(reference))

"""Compute an op for a layer function.

while a graph is traced    the op's reference, operator by operator: the surrounding compiler fuses it
under vmap, grad or jvp    the same: its operators have rules for these
eagerly, fused             an owned kernel that takes these arguments; on a GPU without one, the reference compiled
                           by Inductor at the first call
eagerly, not fused         the reference

On a GPU most layers take less time than checking their arguments on the host. So arguments are checked, and the
implementation is chosen, once per form of the arguments (dtypes, shapes, strides, flags).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritium import compat, device, ops
from tritium.layers.generated import Generated
from tritium.ops import Op

# The implementation for each form of arguments. The limit bounds memory; programs rarely have this many forms.
_CHOSEN: dict[Hashable, Callable[..., Any]] = {}
REMEMBERED = 1024
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Types whose values are interchangeable if they are equal.
WORDS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Layer:
    """The op of a layer function, the check of the function's arguments, and their conversion to the op's."""

    op: Op
    # Raises for wrong arguments. Depends on types, dtypes, devices, shapes and strides, not on the values in tensors.
    check: Callable[..., None]
    # Returns the op's arguments.
    arguments: Callable[..., tuple[Any, ...]]


def compute(layer: Layer, fused: bool, *given: Any) -> Any:
    """Check the arguments of a layer and return its result; `check` receives `fused` first."""
    if torch.compiler.is_compiling() or compat.dynamo.is_transformed():
        layer.check(fused, *given)
        return layer.op.reference(*layer.arguments(*given))
    form = _form(layer, fused, given)
    chosen = None if form is None else _CHOSEN.get(form)
    if chosen is not None:
        return chosen(*layer.arguments(*given))
    layer.check(fused, *given)
    arguments = layer.arguments(*given)
    chosen = _choose(layer.op, arguments) if fused else layer.op.reference
    if form is None:
        return chosen(*arguments)
    result, again = chosen.first(arguments) if isinstance(chosen, Generated) else (chosen(*arguments), chosen)
    if len(_CHOSEN) >= REMEMBERED:
        _CHOSEN.clear()
    _CHOSEN[form] = again
    return result


def _form(layer: Layer, fused: Any, given: Sequence[Any]) -> Hashable | None:
    """Return all that checks and choices depend on, or None for calls that must not be cached."""
    if type(fused) is not bool or compat.dynamo.replaces_functions():
        return None
    form: list[Any] = [layer.op.name, fused, compat.dynamo.is_watched()]
    return tuple(form) if _extend(form, given, torch.is_grad_enabled()) else None


def _extend(form: list[Any], given: Sequence[Any], grad: bool) -> bool:
    for value in given:
        kind = type(value)
        if kind in PLAIN:
            # Traced tensors have other types, and their sizes may differ in every call.
            if not _is_as_it_lies(value) or (grad and value.requires_grad):
                return False
            form += (value.dtype, value.shape, value.stride(), value.device)
        elif kind in WORDS:
            # True == 1 == 1.0, but checks distinguish them.
            form += (kind, value)
        elif kind in (list, tuple, torch.Size):
            form += (kind, len(value))
            if not _extend(form, value, grad):
                return False
        else:
            return False
    return True


def _choose(op: Op, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    tensors = _tensors(arguments)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    eager, plain = not compat.dynamo.is_watched(), all(type(tensor) in PLAIN for tensor in tensors)
    if plain and not all(map(_is_as_it_lies, tensors)):
        return op.reference
    provider = None if grad else _owned(op, arguments)
    if provider is not None:
        # Dispatch modes and tensor subclasses need the operator. Bypassing the dispatcher takes half the host time.
        return ops.runner(op, provider) if plain and eager else functools.partial(op.overload, provider=provider)
    if eager and _on_gpu(tensors) and device.has_triton():
        return _generated(op.name, tuple((tensor.dtype, tensor.dim()) for tensor in tensors))
    return op.reference


def _is_as_it_lies(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor holds its values as they are.

    Otherwise PyTorch's operators negate or conjugate them, or create them, such as autograd's zero tensors. The dispatcher
    does so for custom operators too, but not in lists of optional tensors.
    """
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def _tensors(given: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in given:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _owned(op: Op, arguments: tuple[Any, ...]) -> str | None:
    """Return the name of the first owned provider that takes these arguments, or None."""
    for provider in ops.providers(op).values():
        if not provider.inlined and provider.decline(op.bind(*arguments)) is None:
            return provider.name
    return None


@functools.cache
def _generated(name: str, kinds: tuple[tuple[torch.dtype, int], ...]) -> Generated:
    """Return an op's reference compiled by Inductor for tensors of some dtypes and ranks.

    Each has a separate code object, so that no dtype counts towards the recompile limit of another one.
    """
    del kinds
    reference: Any = ops.catalog()[name].reference
    return Generated(compat.dynamo.with_code_of_its_own(reference))


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)

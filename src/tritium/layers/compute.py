"""How a layer function computes an op of the core.

while a graph is traced    the op's reference, operator by operator: the compiler around it fuses that
under vmap, grad or jvp    the same: its operators have rules for these
eagerly, fused             an owned kernel that takes these arguments; on a GPU without one, what Inductor makes of
                           the reference, compiled at the first call
eagerly, not fused         the reference

On a GPU most layers are done before the host has looked at their arguments. So arguments are checked, and who computes is
chosen, once for each form that they have.
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

# What computes for arguments of some form; whoever has more forms than that has other worries than the host's time.
_CHOSEN: dict[Hashable, Callable[..., Any]] = {}
REMEMBERED = 1024
PLAIN = (torch.Tensor, torch.nn.Parameter)
# What is the same wherever it is equal and of the same type.
WORDS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Layer:
    """A function over an op: what it asks of its arguments, and what of them the op takes."""

    op: Op
    # Raises where something else was given; knows of types, dtypes, devices, shapes and strides, and of no numbers in tensors.
    check: Callable[..., None]
    # The op's arguments.
    arguments: Callable[..., tuple[Any, ...]]


def compute(layer: Layer, fused: bool, *given: Any) -> Any:
    """What a layer makes of what was given to it; `fused` is the first thing that is checked."""
    if torch.compiler.is_compiling() or compat.is_transformed():
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
    """All that checks and choices depend on; None where that cannot be told: these take the long way every time."""
    if type(fused) is not bool or compat.replaces_functions():
        return None
    form: list[Any] = [layer.op.name, fused, compat.is_watched()]
    return tuple(form) if _extend(form, given, torch.is_grad_enabled()) else None


def _extend(form: list[Any], given: Sequence[Any], grad: bool) -> bool:
    for value in given:
        kind = type(value)
        if kind in PLAIN:
            # Traced ones are of other types, and may have sizes that no two calls share.
            if not _is_as_it_lies(value) or (grad and value.requires_grad):
                return False
            form += (value.dtype, value.shape, value.stride(), value.device)
        elif kind in WORDS:
            # True is 1, and 1 is 1.0, but not to a check.
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
    eager, plain = not compat.is_watched(), all(type(tensor) in PLAIN for tensor in tensors)
    if plain and not all(map(_is_as_it_lies, tensors)):
        return op.reference
    provider = None if grad else _owned(op, arguments)
    if provider is not None:
        # The operator is for whoever looks at operators; to go past the dispatcher takes the host half the time.
        return ops.runner(op, provider) if plain and eager else functools.partial(op.overload, provider=provider)
    if eager and _on_gpu(tensors) and device.has_triton():
        return _generated(op.name, tuple((tensor.dtype, tensor.dim()) for tensor in tensors))
    return op.reference


def _is_as_it_lies(tensor: torch.Tensor) -> bool:
    """Whether memory holds the numbers of a tensor.

    PyTorch's operators negate, conjugate or make up what it does not hold, such as autograd's zeros. The dispatcher does so
    for ours too, but not in lists of tensors that may be None.
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
    """The first kernel of ours that takes these arguments."""
    for provider in ops.providers(op).values():
        if not provider.inlined and provider.decline(op.bind(*arguments)) is None:
            return provider.name
    return None


@functools.cache
def _generated(name: str, kinds: tuple[tuple[torch.dtype, int], ...]) -> Generated:
    """What Inductor makes of an op for tensors of some dtypes and ranks.

    Each has code of its own, so that no dtype uses up the compilations that another one is allowed.
    """
    del kinds
    reference: Any = ops.catalog()[name].reference
    return Generated(compat.with_code_of_its_own(reference))


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)

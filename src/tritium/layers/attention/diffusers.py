"""Compute the attention of stock diffusers models by `attention_forward`.

    handle = tritium.set_attention(pipe.transformer)      # and handle.remove()
    pipe.transformer.set_attention_backend("tritium")     # after tritium.register_attention_backend()

The attention processors of recent models call diffusers' dispatcher with the name of a backend. Older ones call PyTorch's
function, which is replaced while their layer runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch import nn
from torch.overrides import TorchFunctionMode

from tritium.compat import diffusers
from tritium.errors import ArgumentError
from tritium.layers.arguments import checked
from tritium.layers.attention.choose import Layout, Mode, check_choice
from tritium.layers.attention.forward import attention_forward

NAME = "tritium"

# (query, key, value, attn_mask, scale, is_causal, enable_gqa) with tokens before heads.
Attend = Callable[..., torch.Tensor]


@dataclass
class AttentionHandle:
    """The changes of `set_attention`; `remove()` undoes them."""

    # The number of changed layers, and the paths of others: processors that are modules have special computations.
    layers: int = 0
    skipped: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def remove(self) -> None:
        """Restore the original attention of every layer."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@checked
def set_attention(
    module: nn.Module, *, opt_mode: Mode = "runtime", op_type: str | None = None, layout: Layout | None = None
) -> AttentionHandle:
    """Make every attention layer of a stock diffusers model compute by `attention_forward`.

    Args:
        module: A transformer, a UNet, or any module that contains diffusers attention layers.
        opt_mode: As in `attention_forward`.
        op_type: As in `attention_forward`.
        layout: As in `attention_forward`.
    """
    check_choice(opt_mode, op_type, layout)
    words = [word for word in (opt_mode, op_type, layout) if word]
    name = NAME if words == ["runtime"] else ":".join((NAME, *words))
    attend = functools.partial(attention_forward, opt_mode=opt_mode, op_type=op_type, layout=layout)
    return change_layers(module, name, attend)


def attention_layers(module: nn.Module) -> dict[str, tuple[nn.Module, Any]]:
    """Return the attention layers of diffusers in a module by path, each with its processor."""
    layers = ((path, layer, getattr(layer, "processor", None)) for path, layer in module.named_modules())
    return {path: (layer, processor) for path, layer, processor in layers if callable(processor)}


def change_layers(module: nn.Module, name: str, attend: Attend) -> AttentionHandle:
    """Make the attention layers of a module compute by `attend`, registered with diffusers under `name`."""
    handle = AttentionHandle()
    layers = attention_layers(module)
    if not layers:
        raise ArgumentError(f"{type(module).__name__} has no attention layers of diffusers")
    member = register_attention_backend(name, attend)
    # Layers may share a processor.
    changed: set[int] = set()
    for path, (layer, processor) in layers.items():
        has_backend = hasattr(processor, diffusers.BACKEND)
        if isinstance(processor, nn.Module) and not has_backend:
            handle.skipped.append(path)
            continue
        handle.layers += 1
        if not has_backend:
            handle._undo.append(_assign(layer, "forward", _Intercepted(_original_forward(layer), attend)))
        elif id(processor) not in changed:
            changed.add(id(processor))
            handle._undo.append(_assign(processor, diffusers.BACKEND, member))
    return handle


_ABSENT = object()


@dataclass(eq=False)
class _Assignment:
    before: Any
    value: Any


# The assignments to each object that are not undone, oldest first.
_ASSIGNMENTS: weakref.WeakKeyDictionary[Any, list[_Assignment]] = weakref.WeakKeyDictionary()


def _assign(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Assign an attribute of an object, and return a function that undoes this; several may be undone in any order.

    A value that other code has assigned since stays.
    """
    own = _Assignment(vars(owner).get(name, _ABSENT), value)
    assignments = _ASSIGNMENTS.setdefault(owner, [])
    assignments.append(own)
    setattr(owner, name, value)

    def undo() -> None:
        later = assignments[assignments.index(own) + 1 :]
        assignments.remove(own)
        if later:
            if later[0].before is own.value:
                later[0].before = own.before
        elif vars(owner).get(name, _ABSENT) is own.value:
            if own.before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own.before)

    return undo


@checked
def register_attention_backend(name: str = NAME, attend: Callable[..., torch.Tensor] = attention_forward) -> Any:
    """Register a name for `model.set_attention_backend(name)` and return diffusers' enum member for it.

    Raises `ArgumentError` if this version of diffusers has no attention backends, or already has one of this name.
    """

    def tritium_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        if dropout_p or return_lse or _parallel_config is not None:
            raise ArgumentError(
                "attention by tritium has no dropout, no log-sum-exp and no context parallelism: "
                f"got dropout_p={dropout_p}, return_lse={return_lse}, parallel={_parallel_config is not None}"
            )
        # A 2-D mask has one row per sample in diffusers, and one per query in PyTorch.
        if attn_mask is not None and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        return attend(query, key, value, attn_mask, scale, is_causal=is_causal, enable_gqa=enable_gqa)

    return diffusers.add_backend(name, tritium_attention)


class _Replaced(TorchFunctionMode):
    """Replace F.scaled_dot_product_attention by another function."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _as_pytorch(self.attend, *args, **kwargs)
        return func(*args, **kwargs)


def _as_pytorch(
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p:
        raise ArgumentError(f"attention by tritium has no dropout: got dropout_p={dropout_p}")
    given = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(*given, attn_mask, scale, is_causal=is_causal, enable_gqa=enable_gqa).transpose(1, 2)


@dataclass(eq=False)
class _Intercepted:
    """The forward of an attention layer, with PyTorch's attention replaced while it runs."""

    forward: Callable[..., Any]
    attend: Attend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Replaced(self.attend):
            return self.forward(*args, **kwargs)


def _original_forward(layer: nn.Module) -> Callable[..., Any]:
    # Nested replacements would let the older one apply.
    return layer.forward.forward if isinstance(layer.forward, _Intercepted) else layer.forward

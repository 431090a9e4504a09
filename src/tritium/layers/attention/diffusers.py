"""Compute the attention of stock diffusers models by `attention_forward`.

    handle = tritium.set_attention(pipe.transformer)      # and handle.remove()
    pipe.transformer.set_attention_backend("tritium")     # after tritium.register_attention_backend()

The attention processors of recent models call diffusers' dispatcher with the name of a backend. Older ones call PyTorch's
function, which is replaced while their layer runs.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch import nn
from torch.overrides import TorchFunctionMode

from tritium.compat import diffusers
from tritium.errors import ArgumentError
from tritium.layers.arguments import checked
from tritium.layers.attention.forward import Layout, Mode, attention_forward, check_choice

NAME = "tritium"

# (query, key, value, attn_mask, scale, *, is_causal, enable_gqa) with tokens before heads.
Attend = Callable[..., torch.Tensor]


class AttentionHandle(contextlib.ExitStack):
    """The changes of `set_attention`; `remove()`, or the end of a `with` block, undoes them."""

    def __init__(self) -> None:
        super().__init__()
        # The number of changed layers, and the paths of others: processors that are modules have special computations.
        self.layers = 0
        self.skipped: list[str] = []

    def remove(self) -> None:
        """Restore the original attention of every layer."""
        self.close()


@checked
def set_attention(
    module: nn.Module, *, opt_mode: Mode = "runtime", op_type: str | None = None, layout: Layout | None = None
) -> AttentionHandle:
    """Make every attention layer of a stock diffusers model compute by `attention_forward`.

    `module` is a transformer, a UNet, or any module that contains them; the options are those of `attention_forward`.
    """
    check_choice(opt_mode, op_type, layout)
    words = [word for word in (opt_mode, op_type, layout) if word]
    name = NAME if words == ["runtime"] else ":".join((NAME, *words))
    attend = functools.partial(attention_forward, opt_mode=opt_mode, op_type=op_type, layout=layout)
    handle = AttentionHandle()
    change_layers(handle, module, name, attend)
    return handle


def attention_layers(module: nn.Module) -> dict[str, Any]:
    """Return the attention layers of diffusers in a module, by path."""
    return {path: layer for path, layer in module.named_modules() if callable(getattr(layer, "processor", None))}


def change_layers(handle: AttentionHandle, module: nn.Module, name: str, attend: Attend) -> None:
    """Make the attention layers of a module compute by `attend`, registered with diffusers under `name`."""
    layers = attention_layers(module)
    if not layers:
        raise ArgumentError(f"{type(module).__name__} has no attention layers of diffusers")
    member = register_attention_backend(name, attend)
    for path, layer in layers.items():
        if hasattr(layer.processor, diffusers.BACKEND):
            handle.callback(_assign(layer.processor, diffusers.BACKEND, member))
        elif isinstance(layer.processor, nn.Module):
            handle.skipped.append(path)
        else:
            # Nested replacements would let the older one apply.
            forward = layer.forward.forward if isinstance(layer.forward, _Intercepted) else layer.forward
            handle.callback(_assign(layer, "forward", _Intercepted(forward, attend)))
    handle.layers = len(layers) - len(handle.skipped)


_ABSENT = object()

# The values of the assigned attribute of each object, oldest first; the first is the original.
_VALUES: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _assign(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Assign an attribute of an object, and return a function that undoes this; several may be undone in any order.

    A value that other code has assigned since stays.
    """
    current = vars(owner).get(name, _ABSENT)
    values = _VALUES.setdefault(owner, [current])
    if values[-1] is not current:
        values.append(current)
    values.append(value)
    setattr(owner, name, value)

    def undo() -> None:
        is_active = vars(owner).get(name, _ABSENT) is values[-1]
        values.remove(value)
        if is_active and values[-1] is _ABSENT:
            delattr(owner, name)
        elif is_active:
            setattr(owner, name, values[-1])

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
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if dropout_p:
            raise ArgumentError(f"attention by tritium has no dropout: got dropout_p={dropout_p}")
        given = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return self.attend(*given, attn_mask, is_causal=is_causal, **options).transpose(1, 2)


@dataclass(eq=False)
class _Intercepted:
    """The forward of an attention layer, with PyTorch's attention replaced while it runs."""

    forward: Callable[..., Any]
    attend: Attend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Replaced(self.attend):
            return self.forward(*args, **kwargs)

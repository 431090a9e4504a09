"""Tensors whose values arrive later: views of them are pending too, and reading one asks for its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class Promise(Protocol):
    """What fills the buffers of pending tensors."""

    is_kept: bool

    def read(self, operator: str) -> None:
        """Fill the buffers before an operator reads them, or raise."""


class Pending(torch.Tensor):
    """A tensor without memory: operators read `buffer` once its promise is kept."""

    buffer: torch.Tensor
    promise: Promise

    @staticmethod
    def __new__(cls, buffer: torch.Tensor, promise: Promise) -> Pending:  # noqa: ANN001 - ruff takes it for an argument
        pending = torch.Tensor._make_wrapper_subclass(
            cls, buffer.shape, strides=buffer.stride(), dtype=buffer.dtype, device=buffer.device
        )
        pending.buffer, pending.promise = buffer, promise
        return pending

    # Operators go to `__torch_dispatch__` alone.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        promise = next(
            (leaf.promise for leaf in leaves if isinstance(leaf, Pending) and not leaf.promise.is_kept), None
        )
        if promise is not None and not func.is_view:
            promise.read(str(func))
            promise = None
        args, kwargs = pytree.tree_map_only(Pending, lambda pending: pending.buffer, (args, kwargs))
        result = func(*args, **kwargs)
        if promise is None:
            return result
        return pytree.tree_map_only(torch.Tensor, lambda view: Pending(view, promise), result)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pending({tuple(self.shape)}, {self.dtype})"


def promise_of(value: Any) -> Any:
    """Return the promise of the first tensor in nested containers that has no values yet, or None."""
    leaves = pytree.tree_leaves(value)
    return next((leaf.promise for leaf in leaves if isinstance(leaf, Pending) and not leaf.promise.is_kept), None)


def when_kept(value: Any, function: Callable[[Any], None]) -> None:
    """Call a function with a value once the pending tensors in it have values: now, if none is pending."""
    promise = promise_of(value)
    if promise is None:
        function(with_values(value))
    else:
        promise.then.append(lambda: function(with_values(value)))


def with_values(value: Any) -> Any:
    """Return equal containers with plain tensors in place of pending ones that have values."""
    return pytree.tree_map_only(Pending, lambda tensor: tensor.buffer, value)

"""Identify tensors and their memory, take nested values apart, and intercept operators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414 - for importers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share if they share memory, also for fake tensors."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; writes in place increment it."""
    return int(tensor._version)


def keep_storage_id(tensor: torch.Tensor) -> StorageWeakRef:
    """Return an object that keeps the id of a tensor's memory from being reused, without keeping the memory."""
    return StorageWeakRef(tensor.untyped_storage())


def is_tensor_subclass(value: Any) -> bool:
    """Return True for tensor subclasses that AOTAutograd unwraps, such as quantized weights."""
    return bool(is_traceable_wrapper_subclass(value))


def inner_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a tensor subclass consists of."""
    names, _ = value.__tensor_flatten__()
    return [getattr(value, name) for name in names]


def leaves_of(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves(value, is_leaf=is_leaf)
    return leaves


def flatten(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of nested containers, and a function that builds equal containers from other leaves."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
    return leaves, lambda parts: pytree.tree_unflatten(list(parts), spec)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return equal containers with the results of a function in place of the tensors."""
    return pytree.tree_map_only(torch.Tensor, function, value)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors to others of the same layouts, with few launches on a GPU."""
    torch._foreach_copy_(targets, sources)


def fake_mode(**options: Any) -> Any:
    """Return a mode in which operators compute sizes, dtypes and strides only."""
    return importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(**options)


def fake_mode_of(value: Any) -> Any:
    """Return the fake mode of the first fake tensor in nested containers, or None."""
    return next((leaf.fake_mode for leaf in leaves_of(value) if hasattr(leaf, "fake_mode")), None)


def python_decompositions() -> AbstractContextManager[Any]:
    """Compute composite operators as traces do: before torch 2.13 `linear` in C++ takes no symbolic sizes."""
    dispatch: Any = importlib.import_module("torch._dispatch.python")
    return dispatch.enable_python_dispatcher()  # type: ignore[no-any-return]

"""Decompose operators in AOTAutograd, analyse their Triton kernels, and compute fake results."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tritium.compat.operators import is_mutable
from tritium.compat.tensors import leaves_of, map_tensors, python_decompositions
from tritium.compat.wrapping import wrap_once

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# The functions that find the arguments a kernel writes to: current, and up to torch 2.12.
_ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")


def take_apart(name: str, library: torch.library.Library, function: Callable[..., Any]) -> None:
    """Trace a function in place of an operator in AOTAutograd; `NotImplemented` keeps the operator.

    `torch.library.triton_op` does the same for an operator with a single implementation. AOTAutograd runs a graph once
    before it traces it, to see which results share memory: there the operator's own fake result is enough.
    """
    mode_class = importlib.import_module("torch._subclasses.functional_tensor").FunctionalTensorMode
    proxies: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")

    def rule(mode: Any, overload: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = NotImplemented
        if proxies.get_proxy_mode() is not None:
            with mode:
                result = function(*args, **kwargs)
        return mode.__torch_dispatch__(overload, types, args, kwargs) if result is NotImplemented else result

    torch.library.register_torch_dispatch(name, mode_class, rule, lib=library)


def is_traced(tensor: torch.Tensor) -> bool:
    """Return True for tensors of a trace, and False for tensors with storage."""
    return type(tensor) not in _PLAIN


def statically_known(condition: Any) -> bool:
    """Return True if a condition on sizes holds for all of them; no guard is added.

    >>> statically_known(3 == 3)
    True
    """
    if isinstance(condition, bool):
        return condition
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return bool(shapes.statically_known_true(condition))


class _PurityCheck(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_pure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or is_mutable(func):
            self.is_pure = False
        return func(*args, **(kwargs or {}))


def is_pure(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return True if a call of a function on fake tensors uses no random numbers and writes to no memory."""
    check = _PurityCheck()
    with check, torch.no_grad():
        function(*arguments, **options)
    return check.is_pure


def fake_results(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function on fake tensors instead of real ones, and return its fake results."""
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    modes = [leaf.fake_mode for leaf in leaves_of(dict(arguments)) if isinstance(leaf, fakes.FakeTensor)]
    if modes:
        with python_decompositions(), modes[0]:
            return function(**arguments)
    with torch.no_grad(), fakes.FakeTensorMode() as mode:
        return function(**map_tensors(mode.from_tensor, dict(arguments)))


def remember_kernel_accesses() -> None:
    """Analyse which arguments a Triton kernel writes to once, not five times for each launch in a graph.

    Every analysis compiles the kernel to Triton's IR. The result depends on the kernel, its constants, and on which
    other arguments are tensors and of which dtype.
    """
    module: Any = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
    for name in _ANALYSES:
        wrap_once(module, name, functools.partial(_remembered, {}))


def _remembered(results: dict[Any, Any], original: Callable[..., Any], kernel: Any, kwargs: Any, tma: Any) -> Any:
    key = None if tma else _access_key(kernel, kwargs)
    if key is None:
        return original(kernel, kwargs, tma)
    if key not in results:
        results[key] = original(kernel, kwargs, tma)
    return results[key]


def _access_key(kernel: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the key that determines the accesses of a launch; None if it cannot be hashed."""
    function = kernel
    while not hasattr(function, "params") and hasattr(function, "fn"):
        function = function.fn
    constants = {parameter.name for parameter in getattr(function, "params", ()) if parameter.is_constexpr}
    described: list[Any] = []
    for name, value in kwargs.items():
        dtype = _dtype(value)
        if dtype is not None:
            described.append((name, "tensor", dtype))
        elif name in constants or value is None:
            described.append((name, "constant", type(value), value))
        else:
            described.append((name, "number", isinstance(value, (float, torch.SymFloat))))
    key = (id(function), function, tuple(described))
    with contextlib.suppress(TypeError):
        hash(key)
        return key
    return None


def _dtype(value: Any) -> Any:
    """Return the dtype of a tensor or of a value in Inductor's IR, or None."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    ask = getattr(value, "get_dtype", None)
    return ask() if ask is not None else None

"""The bound of fidelity `close`: error against a float64 run at most 2 x eager's error + 16 eps.

The factor of 2 is what plain torch.compile needs, because it sums in another order. The 16 eps cover results that
eager happens to compute exactly.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tritium import compat

_TIMES_EAGER = 2
_EPS = 16

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}

# Cast methods named after their dtype.
_NAMED_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


def error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference from the float64 value, divided by its largest magnitude."""
    scale = exact.abs().max().clamp_min(1e-30)
    return float(((actual.to(exact.dtype) - exact).abs().max() / scale).item())


def allowed(eager: Tensor, exact: Tensor) -> float:
    """Return the error that `close` allows for this eager result."""
    return allowance(error(eager, exact), eager.dtype)


def allowance(eager_error: float, dtype: torch.dtype) -> float:
    """Return the error that `close` allows for a known eager error."""
    return _TIMES_EAGER * eager_error + _EPS * torch.finfo(dtype).eps


def excess(actual: Tensor, eager: Tensor, exact: Tensor) -> float:
    """Return the error divided by the allowed error; above 1 the result violates the bound.

    >>> exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> excess(exact.float(), exact.float(), exact)
    0.0
    >>> excess(exact.float() + 0.1, exact.float(), exact) > 1000
    True
    """
    if actual.shape != eager.shape or actual.dtype != eager.dtype:
        return math.inf
    if not (eager.is_floating_point() or eager.is_complex()):
        return 0.0 if torch.equal(actual, eager) else math.inf
    # NaN and infinity must be equal in both; compare the finite elements by error.
    finite = eager.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return math.inf
    if not torch.equal(actual[~finite].nan_to_num(), eager[~finite].nan_to_num()):
        return math.inf
    if not finite.any():
        return 0.0
    actual, eager, exact = actual[finite], eager[finite], exact[finite]
    found = error(actual, exact) / allowed(eager, exact)
    # The float64 run is NaN where eager is finite: neither result can be trusted.
    return math.inf if math.isnan(found) else found


def largest_excess(actual: Any, eager: Any, exact: Any) -> float | None:
    """Return the largest `excess` over all tensors that a module returned, or None if there are none."""
    found = [tensors(result) for result in (actual, eager, exact)]
    if len({len(results) for results in found}) != 1:
        return math.inf
    return max((excess(*results) for results in zip(*found, strict=True)), default=None)


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors in a module's result, in order."""
    return [leaf for leaf in compat.tensors.leaves_of(result) if isinstance(leaf, Tensor)]


def in_float64(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: Callable[[Any], Callable[..., Any]] = lambda wide: wide,
) -> Any:
    """Run a module in float64: weights, arguments and every cast inside it.

    `call` selects the method to call: `lambda vae: vae.decode`.

    Models cast to float32 by name. With such a cast the float64 run would share eager's error, and an equally exact
    result would violate the bound.
    """
    wide = compat.modules.map_tensors(copy.deepcopy(module), _widened)
    for inner in wide.modules():
        # Tensor attributes that are neither parameters nor buffers.
        for name, value in list(vars(inner).items()):
            if isinstance(value, Tensor):
                setattr(inner, name, _widened(value))
    wide_args, wide_kwargs = compat.tensors.map_tensors(_widened, (tuple(args), dict(kwargs)))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening(), torch.no_grad():
            return call(wide)(*wide_args, **wide_kwargs)
    finally:
        torch.set_default_dtype(default)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDE[tensor.dtype]) if tensor.dtype in _WIDE else tensor.clone()


class _Widening(TorchFunctionMode):
    """Replace casts to narrower floating point dtypes by casts to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func in _NAMED_CASTS:
            return args[0].to(torch.float64)
        # `view` with a dtype reinterprets bits and is not a cast.
        if func is not torch.Tensor.view:
            args = tuple(_wide_dtype(value) for value in args)
            kwargs = {name: _wide_dtype(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide_dtype(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

"""Choose how a module runs under a shape contract: compiled, from existing code only, or eagerly.

The part's contract decides once for each call of the part, in the calling thread, and the modules inside follow. No
state is global to the process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from tritium import compat


class Call(Protocol):
    """One call of a part."""

    # Run the modules of the part eagerly.
    eager: bool

    def compile(self, compiled: Callable[..., Any], reason: str) -> Callable[..., Any] | None:
        """Return the call for a module without fitting compiled code, None to run it eagerly, or raise."""


# The call of a part that is running in this thread.
CURRENT: ContextVar[Call | None] = ContextVar("tritium_part_call", default=None)


class Gate:
    """Run a module's compiled call as the current call of its part decides.

    `compiled` is the result of `torch.compile(function)`. `prepare` turns either of the two into a call of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        compiled: Callable[..., Any],
        prepare: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._eager: Callable[..., Any] = module._call_impl
        self.compiled = prepare(compiled)
        self._cached = prepare(compat.cached_code.only_cached(function, compiled))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Check `is_compiling` first: Dynamo cannot trace context variables.
        if compat.dynamo.is_compiling() or (call := CURRENT.get()) is None:
            return self.compiled(*args, **kwargs)
        if call.eager:
            return self._eager(*args, **kwargs)
        try:
            return self._cached(*args, **kwargs)
        except compat.cached_code.WouldCompile as refusal:
            run = call.compile(self.compiled, refusal.reason)
        return (run or self._eager)(*args, **kwargs)

"""The call of a compiled module under a shape contract: compiled, compiled only if nothing new compiles, or eager.

The part's contract decides once a call of the part, in the thread that makes it; the modules inside follow it. Nothing here
belongs to the process.
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
        """Return what runs a module that no compiled code fits, None for its eager call; or raise."""


# The call of a part that this thread is in.
CURRENT: ContextVar[Call | None] = ContextVar("tritium_part_call", default=None)


class Gate:
    """A module's compiled call that follows the current call of its part.

    `compiled` is what torch.compile made of `function`, and `prepare` makes either a call of the module.
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
        self._cached = prepare(compat.only_cached(function, compiled))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # First, because Dynamo reads no context variables.
        if compat.is_compiling() or (call := CURRENT.get()) is None:
            return self.compiled(*args, **kwargs)
        if call.eager:
            return self._eager(*args, **kwargs)
        try:
            return self._cached(*args, **kwargs)
        except compat.WouldCompile as refusal:
            run = call.compile(self.compiled, refusal.reason)
        return (run or self._eager)(*args, **kwargs)

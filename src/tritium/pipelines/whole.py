"""Call a denoiser as one compiled program, or block by block if its forward is not a single graph.

Dynamo traces the whole forward, so all of its guards apply. It does not guard on forward hooks of modules, so they are
compared here: each set of hooks gets separate compiled code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch import nn

from tritium import compat

# Compiles the forward of a module as one graph; code for different sets of hooks must be kept apart.
Compile = Callable[[Hashable], Callable[..., Any]]

# Installs compiled calls on the blocks and yields the call of the module around them; undone if that call raises.
ByBlocks = Callable[[], AbstractContextManager[Callable[..., Any]]]


class _Undo(Exception):
    """Ends `by_blocks` so that it is undone."""


# Attributes with the hooks that a module's call runs.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Hooks:
    """The forward hooks inside a module, compared without visiting all of its modules on each call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._registered = -1
        # The dictionaries with hooks, and the identities of those hooks.
        self._held: list[tuple[dict[int, Any], tuple[int, ...]]] = []
        self._present: Hashable = ()

    def present(self) -> Hashable:
        """Return a key that changes if a hook is added, removed or replaced."""
        if compat.modules.hooks_registered() != self._registered or any(
            tuple(map(id, hooks.values())) != known for hooks, known in self._held
        ):
            self._read()
        return self._present

    def _read(self) -> None:
        self._registered = compat.modules.hooks_registered()
        # Include hooks of the module itself: its whole call is traced.
        found = {
            (path, name): hooks
            for path, module in self._module.named_modules()
            for name in _HOOKS
            if (hooks := getattr(module, name))
        }
        self._held = [(hooks, tuple(map(id, hooks.values()))) for hooks in found.values()]
        self._present = tuple((place, tuple(map(id, hooks.values()))) for place, hooks in found.items())


class Whole:
    """The compiled call of a whole module.

    If Dynamo cannot trace a call as one graph, that call and all later ones run through `by_blocks`, and `refused`
    holds the reason. The first call has a second chance: a model may compute tables in it, by code that no later call
    runs and Dynamo does not trace, as Z-Image does. If a call fails in `by_blocks` too, its arguments are invalid, and the
    next call is tried as a whole again.
    """

    def __init__(self, module: nn.Module, compile_for: Compile, by_blocks: ByBlocks) -> None:
        self._module = module
        self._compile_for = compile_for
        self._by_blocks = by_blocks
        self._hooks = Hooks(module)
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._blocks: Callable[..., Any] | None = None
        # True once a call was traced, or refused for the first time.
        self._is_decided = False
        self.refused: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._blocks is not None:
            return self._blocks(*args, **kwargs)
        around = replaced_by_hooks(self._module)
        if around is not None:
            return self._without(around, args, kwargs)
        # A replaced forward may take other arguments.
        program = (self._hooks.present(), self._module.__dict__.get("forward"))
        compiled = self._compiled.get(program)
        floats = nullcontext() if compiled is not None else compat.dynamo.floats_as_constants()
        if compiled is None:
            compiled = self._compiled[program] = self._compile_for(program if any(program) else None)
        try:
            # Under dynamic=True the eps of each norm would be an input, and the model be traced twice.
            with floats:
                result = compiled(*args, **kwargs)
        except Exception as error:
            reason = compat.dynamo.why_not_traced(error)
            if reason is None:
                raise
            return self._without(reason, args, kwargs) if self._is_decided else self._once_by_blocks(args, kwargs)
        self._is_decided = True
        return result

    def _once_by_blocks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call block by block, and try the next one as a whole."""
        with suppress(_Undo), self._lock, self._by_blocks() as blocks:
            result = blocks(*args, **kwargs)
            raise _Undo
        self._is_decided = True
        return result

    def _without(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call block by block after it was refused; no part of it has run yet."""
        with self._lock:
            if self._blocks is None:
                with self._by_blocks() as blocks:
                    result = blocks(*args, **kwargs)
                self._blocks, self.refused = blocks, reason
                return result
        return self._blocks(*args, **kwargs)


def replaced_by_hooks(module: nn.Module) -> str | None:
    """Return which hook replaces a module's forward to move weights or arguments around it, or None."""
    hook = compat.modules.accelerate_hook(module)
    if hook is not None:
        return f"an accelerate hook ({type(hook).__name__}) runs around its forward"
    names = compat.modules.diffusers_hooks(module)
    return f"a diffusers hook ({', '.join(names)}) runs around its forward" if names else None

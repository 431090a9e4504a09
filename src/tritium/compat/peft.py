"""Count PEFT's merges, which write into weights without changing their version counters."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tritium.compat.wrapping import wrap_once


class Merges:
    """Count merges and unmerges of adapters in this process."""

    def __init__(self) -> None:
        self.count = 0
        # Called with the layer before a merge or an unmerge writes into its weight.
        self.before: list[Callable[[Any], Any]] = []
        # Called with the layer for the context in which it is merged or unmerged.
        self.around: list[Callable[[Any], contextlib.AbstractContextManager[None]]] = []
        self._watched = False

    def now(self) -> int:
        """Return the count; increment it when peft is first found, because earlier merges were not counted."""
        if not self._watched and (module := sys.modules.get("peft.tuners.tuners_utils")) is not None:
            self._watched = True
            self.count += 1
            self._watch(module.BaseTunerLayer)
        return self.count

    def watch(self) -> None:
        """Watch merges from now on: import peft if it is installed."""
        if importlib.util.find_spec("peft") is not None:
            importlib.import_module("peft.tuners.tuners_utils")
        self.now()

    def _watch(self, layer: type) -> None:
        for cls in _with_subclasses(layer):
            self._wrap(cls)
        inherited = layer.__init_subclass__

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            inherited(**kwargs)
            self._wrap(cls)

        # setattr, because mypy considers __init_subclass__ of a class to be bound.
        setattr(layer, "__init_subclass__", classmethod(init_subclass))  # noqa: B010

    def _wrap(self, cls: type) -> None:
        for name in ("merge", "unmerge"):
            wrap_once(cls, name, self._counted)

    def _counted(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A linear that stores quantized bytes holds its weight again while it is written to.
        for function in self.before:
            function(args[0])
        unpacked = getattr(getattr(args[0], "base_layer", None), "unpacked", contextlib.nullcontext)
        try:
            with contextlib.ExitStack() as stack:
                for around in self.around:
                    stack.enter_context(around(args[0]))
                stack.enter_context(unpacked())
                return original(*args, **kwargs)
        finally:
            self.count += 1


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    sub: type
    for sub in cls.__subclasses__():
        yield from _with_subclasses(sub)


MERGES = Merges()

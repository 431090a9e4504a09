"""Build a canonical expression DAG for an FX graph. Each module here declares the forms of some operations as `FORMS`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import fx

from tritium import catalog as catalogues
from tritium.errors import CatalogError
from tritium.fusions.expression import Build, Expr, Forms


@functools.cache
def catalog() -> dict[Any, Build]:
    """Return the builder of each target, a function or the name of a method."""
    builders: dict[Any, Build] = {}
    for forms in catalogues.unique(catalogues.walk(sys.modules[__name__], "FORMS", Forms), "canonical form").values():
        for target, build in forms.value.builders.items():
            if builders.setdefault(target, build) is not build:
                raise CatalogError(f"{forms.origin} declares a form of {target!r}, which has one")
    return builders


class Canonicaliser:
    """Build expressions for the nodes of one graph, on demand and once each."""

    def __init__(self) -> None:
        self._builders = catalog()
        self._exprs: dict[fx.Node, Expr] = {}

    def of(self, thing: Any) -> Any:
        """Return the expression of a node; return numbers, None and dtypes unchanged."""
        if not isinstance(thing, fx.Node):
            return thing
        # Graphs are thousands of nodes deep: build arguments from a stack instead of by recursion.
        stack = [thing]
        while stack:
            node = stack[-1]
            if node in self._exprs:
                stack.pop()
                continue
            missing = [arg for arg in node.all_input_nodes if arg not in self._exprs]
            if missing:
                stack.extend(missing)
                continue
            self._exprs[node] = self._build(node)
            stack.pop()
        return self._exprs[thing]

    def _build(self, node: fx.Node) -> Expr:
        build = self._builders.get(node.target) if node.op in ("call_function", "call_method") else None
        made = build(self.of, node) if build is not None else None
        return made if made is not None else Expr("opaque", node=node)

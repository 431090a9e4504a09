"""Create a call of one module with a separate code object.

Dynamo keys its cache and counts recompiles by code object. The outermost frame of most denoisers is one decorator in
diffusers that they all share: eight sizes across all models of a process would reach the recompile limit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

_KINDS = inspect.Parameter

_STARS: dict[Any, str] = {_KINDS.VAR_POSITIONAL: "*", _KINDS.VAR_KEYWORD: "**"}


def call_with_own_code(module: nn.Module) -> Callable[..., Any]:
    """Return a function that takes a module and the arguments of its forward.

    It has the forward's parameters, so Dynamo sees the same arguments for positional and keyword calls.
    """
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    if not parameters or any(parameter.name == "self" for parameter in parameters):
        return _made("self, /, *args, **kwargs", "*args, **kwargs", {})
    defaults = {
        f"default_{parameter.name}": parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }
    takes_any_number = any(parameter.kind is _KINDS.VAR_POSITIONAL for parameter in parameters)
    passed = ", ".join(_passed(parameter, by_place=takes_any_number) for parameter in parameters)
    return _made(", ".join(["self", *_declared(parameters)]), passed, defaults)


def _declared(parameters: list[inspect.Parameter]) -> list[str]:
    found = []
    for place, parameter in enumerate(parameters):
        before = parameters[place - 1].kind if place else None
        if parameter.kind is _KINDS.KEYWORD_ONLY and before not in (_KINDS.KEYWORD_ONLY, _KINDS.VAR_POSITIONAL):
            found.append("*")
        star = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"=default_{parameter.name}"
        found.append(f"{star}{parameter.name}{default}")
        after = parameters[place + 1].kind if place + 1 < len(parameters) else None
        if parameter.kind is _KINDS.POSITIONAL_ONLY and after is not _KINDS.POSITIONAL_ONLY:
            found.append("/")
    return found


def _passed(parameter: inspect.Parameter, *, by_place: bool) -> str:
    name = parameter.name
    if parameter.kind in _STARS:
        return f"{_STARS[parameter.kind]}{name}"
    is_by_place = parameter.kind is _KINDS.POSITIONAL_ONLY or (by_place and parameter.kind is not _KINDS.KEYWORD_ONLY)
    return name if is_by_place else f"{name}={name}"


def _made(declared: str, passed: str, values: dict[str, Any]) -> Callable[..., Any]:
    text = f"def forward({declared}):\n    return self._call_impl({passed})\n"
    # Before torch 2.13 Dynamo wraps a function of no module in one that takes any arguments.
    names = {"__name__": __name__, **values}
    exec(compile(text, "<tritium call>", "exec"), names)  # noqa: S102 - contains only parameter names
    made: Callable[..., Any] = names["forward"]
    return made

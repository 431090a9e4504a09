"""Record every torch call that a model makes in eager, with the diffusers statement that made it."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from census.statements import Statement, statement_at

SYNONYMS = {"radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul", "concat": "cat", "concatenate": "cat"}


@dataclass(eq=False)
class Call:
    """One operation: from which statement, the operation that made its first argument, and its result."""

    op: str
    statement: Statement
    producer: "Call | None"
    result: Any


def op_name(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> str:
    """Name an operation, however spelled: `mul` for `*`, `torch.mul`, `Tensor.mul_`, `__rmul__`.

    A `cat` along any but the last dim is a `cat_rows`.
    """
    name = (target if isinstance(target, str) else getattr(target, "__name__", str(target))).strip("_")
    name = SYNONYMS.get(name, name)
    if name == "cat":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return "cat" if dim % ndim == ndim - 1 else "cat_rows"
    return name


class Recorder(TorchFunctionMode):
    """While active, keeps every call made under a diffusers statement that returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._makers: dict[int, Call] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        statement = _caller() if isinstance(result, torch.Tensor) else None
        if statement is not None:
            producer = self._makers.get(id(args[0])) if args else None
            call = Call(op_name(func, args, kwargs, result.ndim), statement, producer, result)
            self.calls.append(call)
            # An operation that hands its argument back (`.to` of the same dtype) is not what made it.
            self._makers.setdefault(id(result), call)
        return result


def _caller() -> Statement | None:
    frame = sys._getframe(2)
    while frame is not None:
        statement = statement_at(frame.f_code.co_filename, frame.f_lineno)
        if statement is not None:
            return statement
        frame = frame.f_back
    return None

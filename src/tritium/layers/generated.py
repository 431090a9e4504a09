"""What Inductor makes of a function, called past Dynamo where that is known to be right.

At every call Dynamo asks whether what it compiled still holds, which takes the host longer than a small kernel runs. Whoever
knows that a call has the form of one before, to every size, stride, dtype and word, can call what that one called, if all
that its graph took were these tensors: Dynamo also makes constants of some, and knows them by identity.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tritium import compat


@dataclass(frozen=True)
class _Run:
    """One call of a compiled graph."""

    compiled: Callable[..., Any]
    inputs: tuple[Any, ...]
    outputs: Sequence[Any]


class _Listener(threading.local):
    """Who listens, in this thread, to which compiled graphs are called."""

    runs: list[_Run] | None = None


class Generated:
    """A function of tensors and words, compiled for the sizes it meets first, and at the second ones for any."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._listener = _Listener()
        self._by_dynamo = torch.compile(function, backend=self._compile)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, listener = compat.compile_fx(gm, example_inputs), self._listener

        def run(*inputs: Any) -> Any:
            outputs = compiled(*inputs)
            if listener.runs is not None:
                listener.runs.append(_Run(compiled, inputs, outputs))
            return outputs

        return run

    def __call__(self, *arguments: Any) -> Any:
        return self._by_dynamo(*arguments)

    def first(self, arguments: tuple[Any, ...]) -> tuple[Any, Callable[..., Any]]:
        """The result, and what to call for further arguments of the very same form, none of which needs gradients."""
        runs: list[_Run] = []
        self._listener.runs = runs
        try:
            result = self._by_dynamo(*arguments)
        finally:
            self._listener.runs = None
        # CUDA graphs have to be told where a call begins, which Dynamo does.
        again = _again(runs[0], arguments, result) if len(runs) == 1 and not compat.uses_cuda_graphs() else None
        return result, again or self


def _again(run: _Run, arguments: tuple[Any, ...], result: Any) -> Callable[..., Any] | None:
    """The same run for other arguments; None where it cannot be told which of them it takes, and what of it is the result."""
    tensors = [index for index, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    places = {id(arguments[index]): index for index in tensors}
    # One that is given twice is one input of the graph; the next call may give two.
    if len(places) < len(tensors):
        return None
    # What the graph takes, as places in the arguments with these numbers behind them.
    taken: list[int] = []
    numbers: tuple[int, ...] = ()
    for value in run.inputs:
        if isinstance(value, torch.Tensor) and id(value) in places:
            taken.append(places[id(value)])
        elif type(value) is int:
            # A size or a stride, which the form fixes. Or where a tensor begins in its storage, which no kernel is told: it is
            # given the tensor's own address.
            taken.append(len(arguments) + len(numbers))
            numbers += (value,)
        else:
            return None
    # A tensor that is no input has become part of the code: one that was marked as static, or frozen.
    if not set(tensors) <= set(taken):
        return None
    which = next((index for index, value in enumerate(run.outputs) if value is result), None)
    if which is None or not taken:
        return None
    compiled = run.compiled
    # Of a single place, itemgetter would give the value itself, and not a tuple of it.
    pick = operator.itemgetter(*taken) if len(taken) > 1 else operator.itemgetter(slice(taken[0], taken[0] + 1))

    def again(*given: Any) -> Any:
        return compiled(*pick(given + numbers))[which]

    return again

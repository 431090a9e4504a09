"""Call a function compiled by Inductor, and bypass Dynamo if that is known to be correct.

Dynamo checks its guards at every call, which takes the host longer than a small kernel runs. A call with the same sizes,
strides, dtypes and flags as an earlier one can call the same compiled graph directly, if the graph's inputs are exactly the
tensors of the call: Dynamo also turns some tensors into constants and identifies those by identity.
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
    """The list in which this thread records calls of compiled graphs, or None if it does not record."""

    runs: list[_Run] | None = None


class Generated:
    """A function of tensors and flags, compiled for its first sizes, then for dynamic ones."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._listener = _Listener()
        self._by_dynamo = torch.compile(function, backend=self._compile)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, listener = compat.inductor.compile_fx(gm, example_inputs), self._listener

        def run(*inputs: Any) -> Any:
            outputs = compiled(*inputs)
            if listener.runs is not None:
                listener.runs.append(_Run(compiled, inputs, outputs))
            return outputs

        return run

    def __call__(self, *arguments: Any) -> Any:
        return self._by_dynamo(*arguments)

    def first(self, arguments: tuple[Any, ...]) -> tuple[Any, Callable[..., Any]]:
        """Return the result, and a function for further calls of the same form without gradients."""
        runs: list[_Run] = []
        self._listener.runs = runs
        try:
            result = self._by_dynamo(*arguments)
        finally:
            self._listener.runs = None
        # Inductor's CUDA graphs need a mark at the start of each call, which Dynamo's wrapper sets.
        again = (
            _again(runs[0], arguments, result) if len(runs) == 1 and not compat.inductor.uses_cuda_graphs() else None
        )
        return result, again or self


def _again(run: _Run, arguments: tuple[Any, ...], result: Any) -> Callable[..., Any] | None:
    """Return a function that repeats a run for other arguments, or None.

    None if the inputs of the graph, or its result, cannot be identified.
    """
    tensors = [index for index, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    places = {id(arguments[index]): index for index in tensors}
    # A tensor passed twice is one input of the graph; the next call may pass two different ones.
    if len(places) < len(tensors):
        return None
    # The graph's inputs, as indices into the arguments followed by `numbers`.
    taken: list[int] = []
    numbers: tuple[int, ...] = ()
    for value in run.inputs:
        if isinstance(value, torch.Tensor) and id(value) in places:
            taken.append(places[id(value)])
        elif type(value) is int:
            # A size or a stride, which the form fixes; or a storage offset, which no kernel reads: kernels get the tensor's
            # address.
            taken.append(len(arguments) + len(numbers))
            numbers += (value,)
        else:
            return None
    # A tensor that is not an input was compiled in as a constant: it was marked as static, or frozen.
    if not set(tensors) <= set(taken):
        return None
    which = next((index for index, value in enumerate(run.outputs) if value is result), None)
    if which is None or not taken:
        return None
    compiled = run.compiled
    # With a single index itemgetter returns the value and not a tuple.
    pick = operator.itemgetter(*taken) if len(taken) > 1 else operator.itemgetter(slice(taken[0], taken[0] + 1))

    def again(*given: Any) -> Any:
        return compiled(*pick(given + numbers))[which]

    return again

"""The computed outputs of a branch in own buffers, and their continuation to a later step.

Outputs are copied: a captured call lends its results, and they are overwritten later. Buffers are float32, because
second differences of bfloat16 outputs have no digits left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritium import compat

Leaves = list[torch.Tensor | None]


class Structure:
    """The containers of an output, and the shapes and dtypes of the tensors in it."""

    def __init__(self, output: Any) -> None:
        self.leaves, self.rebuild = compat.tensors.flatten(output)
        self.key: tuple[Any, ...] = (type(output), *map(_described, self.leaves))

    def decline(self) -> str | None:
        """Return why such an output cannot be forecast, or None."""
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                if not leaf.is_floating_point():
                    return f"its output has a tensor of {leaf.dtype}"
                if leaf.requires_grad:
                    return "its output needs gradients"
            elif not isinstance(leaf, (bool, int, str, type(None))):
                return f"its output is a {type(leaf).__name__}"
        return None


def _described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


class History:
    """The last computed outputs of one branch, and its kept difference to the first branch."""

    def __init__(self, length: int) -> None:
        self._length = max(1, length)
        self._structure: Structure | None = None
        # Buffers by age, the newest last, and the step and abscissa of each.
        self._buffers: list[Leaves] = []
        self._points: list[int] = []
        self._difference: Leaves | None = None
        self.has_difference = False

    def clear(self) -> None:
        """Forget the outputs, and keep the buffers."""
        self._points.clear()
        self.has_difference = False

    @property
    def steps(self) -> list[int]:
        return list(self._points)

    @property
    def bytes(self) -> int:
        kept = [*self._buffers, self._difference or []]
        return sum(buffer.nbytes for buffers in kept for buffer in buffers if buffer is not None)

    def fits(self, structure: Structure) -> bool:
        return self._structure is None or self._structure.key == structure.key

    def add(self, structure: Structure, step: int) -> None:
        """Copy a computed output."""
        if not self.fits(structure):
            self._buffers.clear()
            self._difference = None
            self.clear()
        self._structure = structure
        structure_leaves, structure.leaves = structure.leaves, []
        if len(self._buffers) < self._length:
            self._buffers.append(buffers_like(structure_leaves))
        else:
            self._buffers.append(self._buffers.pop(0))
        for buffer, leaf in zip(self._buffers[-1], structure_leaves, strict=True):
            if buffer is not None:
                buffer.copy_(leaf)
        self._points = [*self._points, step][-self._length :]
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in structure_leaves]
        self._dtypes = [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in structure_leaves]

    def keep_difference(self, first: History) -> None:
        """Keep the difference of the first branch's newest output to the newest one of this branch."""
        if [None if b is None else b.shape for b in first.newest] != [
            None if b is None else b.shape for b in self.newest
        ]:
            return
        if self._difference is None:
            self._difference = buffers_like(self.newest)
        for kept, theirs, own in zip(self._difference, first.newest, self.newest, strict=True):
            if kept is not None and theirs is not None and own is not None:
                torch.sub(theirs, own, out=kept)
        self.has_difference = True

    @property
    def newest(self) -> Leaves:
        return self._buffers[-1]

    def can_derive(self, first: History) -> bool:
        """Return True if the first branch's newest output has the shapes of the kept difference."""
        kept = self._difference or []
        return [None if b is None else b.shape for b in first.newest] == [None if b is None else b.shape for b in kept]

    def derived(self, first: History) -> Any:
        """Return the first branch's newest output less the kept difference."""
        assert self._difference is not None
        pairs = zip(first.newest, self._difference, strict=True)
        return self._output([None if a is None or b is None else a - b for a, b in pairs])

    def forecast(self, order: int, step: int, place: Callable[[int], float]) -> Any:
        """Continue the last `order + 1` outputs to a step; `place` returns the abscissa of a step."""
        points = self._points[-(order + 1) :]
        # Buffers without a point belong to an earlier image.
        chosen = self._buffers[-len(points) :]
        xs, x = [place(point) for point in points], place(step)
        return self._output(
            [None if column[0] is None else extrapolated(column, xs, x) for column in zip(*chosen, strict=True)]
        )

    def _output(self, values: Leaves) -> Any:
        assert self._structure is not None
        leaves = [
            constant if value is None or dtype is None else _cast(value, dtype)
            for value, dtype, constant in zip(values, self._dtypes, self._constants, strict=True)
        ]
        return self._structure.rebuild(leaves)


@torch.inference_mode(mode=False)
def buffers_like(leaves: Sequence[Any]) -> Leaves:
    # Outside of inference mode: its tensors cannot be written to in other modes.
    return [torch.empty_like(x, dtype=torch.float32) if isinstance(x, torch.Tensor) else None for x in leaves]


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16:
        # Order 2 leaves the range of float16 where outputs are large.
        value = value.clamp(*(torch.finfo(dtype).min, torch.finfo(dtype).max))
    return value.to(dtype)


def extrapolated(values: Sequence[Any], xs: Sequence[float], x: float) -> torch.Tensor:
    """Return the polynomial through one, two or three points at another abscissa, as a new tensor.

    >>> extrapolated([torch.tensor(1.0), torch.tensor(3.0)], [0, 1], 4)
    tensor(9.)
    """
    newest: torch.Tensor = values[-1]
    if len(values) == 1:
        return newest.clone()
    slope = torch.sub(newest, values[-2]).div_(xs[-1] - xs[-2])
    if len(values) == 3:
        older = torch.sub(values[1], values[0]).div_(xs[1] - xs[0])
        # The slope at the newest point and its change on the way to x.
        curvature = torch.sub(slope, older).div_(xs[2] - xs[0])
        slope.add_(curvature, alpha=x - xs[1])
    return torch.add(newest, slope, alpha=x - xs[-1])

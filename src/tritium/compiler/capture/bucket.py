"""Which calls of a piece share a capture: facts about the piece, and the key of a call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Spec:
    """Static facts about a piece: the names of its inputs, which are weights, and which ones it writes to."""

    names: tuple[str, ...]
    weights: tuple[int, ...] = ()
    written: frozenset[int] = frozenset()
    # The number of the piece in its graph; None for the whole graph.
    piece: int | None = None
    # True if a call exchanges tensors with other ranks.
    has_collectives: bool = False

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(index for index in range(len(self.names)) if index not in self.weights)


def key_of(args: Sequence[Any], inputs: Sequence[int]) -> Hashable:
    """Return the layouts of tensor arguments, the values of others, and the modes that a graph depends on."""
    return (tuple(_part(args[index]) for index in inputs), modes())


def _part(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if type(value) is float:
        # 0.0 and -0.0 are equal but divide differently; NaN is not equal to itself.
        return float, value.hex()
    # 1, 1.0 and True are equal, but a graph distinguishes them.
    return type(value), value


def modes() -> tuple[bool, bool, tuple[torch.dtype | None, ...]]:
    """Return grad mode, inference mode and autocast dtypes of this thread."""
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in _AUTOCAST_DEVICES
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def bucket_text(args: Sequence[Any], inputs: Sequence[int], names: Sequence[str]) -> str:
    """Describe the key for the report.

    >>> bucket_text([torch.ones(2, 3), 4], [0, 1], ["x", "n"])
    'x 2x3 float32, n=4'
    """
    parts = []
    for index in inputs:
        value, name = args[index], names[index]
        if isinstance(value, torch.Tensor):
            sizes = "x".join(map(str, value.shape)) or "scalar"
            strided = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
            parts.append(f"{name} {sizes} {str(value.dtype).removeprefix('torch.')}{strided}")
        else:
            parts.append(f"{name}={value!r}")
    grad, inference, autocast = modes()
    parts += ["gradients on"] if grad and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args) else []
    parts += ["inference mode"] if inference else []
    parts += [f"autocast {dtype}".replace("torch.", "") for dtype in autocast if dtype is not None]
    return ", ".join(parts)

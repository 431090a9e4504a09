"""Static scales of the inputs of linears: set them for compiled code, and select those of the step before each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.compiler.passes.input_scales import forget_input_scales, set_input_scales
from tritium.techniques.technique import Part


class Scales:
    """The scales of a part: one for each linear, or one for each linear and step."""

    def __init__(self, part: Part, scales: Mapping[nn.Linear, tuple[float, ...]], *, by_step: bool) -> None:
        self._part = part
        self._by_step = by_step
        self._scales = dict(scales)
        self._steps = max(map(len, scales.values()))
        self._step = torch.empty(0)
        self._written = -1
        self._set(next(iter(scales)).weight.device)

    def _set(self, where: torch.device) -> None:
        with torch.inference_mode(False):
            self._step = torch.zeros((), dtype=torch.int64, device=where)
        self._written = 0
        for linear, scales in self._scales.items():
            step = self._step if self._by_step else None
            set_input_scales(linear.weight, torch.tensor(scales), step)

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write the step to the device before a call; compiled and captured code reads it there."""
        where = next(iter(self._scales)).weight.device
        if where != self._step.device:
            self._set(where)
        scheduler = self._part.schedulers[0]
        step, steps = compat.diffusers.step_of(scheduler), compat.diffusers.steps_of(scheduler)
        # Images of another number of steps use the scales at the same share of the way.
        step = step if steps == self._steps else step * self._steps // max(steps, 1)
        if step != self._written:
            self._step.fill_(step)
            self._written = step
        return call(*args, **kwargs)

    def forget(self) -> None:
        for linear in self._scales:
            forget_input_scales(linear.weight)

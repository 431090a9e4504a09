"""Which steps of an image use static scales, for users of the rebuilt suite: `TimestepManager` and `TimestepPolicyConfig`.

The number of the step is a tensor on each device, so that compiled and captured code serves all steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tritium.errors import ArgumentError, ArgumentTypeError, nearest

STATIC, DYNAMIC = "static", "dynamic"

# The tensor of each device, and the number of the step for further ones.
_STEPS: dict[torch.device, torch.Tensor] = {}
_current = [0]


class TimestepPolicyConfig:
    """The scales of inputs by step: `static`, measured before, or `dynamic`, of each row; dynamic if not registered.

    >>> policy = TimestepPolicyConfig()
    >>> policy.register(range(2, 8), "static")
    >>> policy.get_strategy(0), policy.get_strategy(3)
    ('dynamic', 'static')
    """

    def __init__(self) -> None:
        self._by_step: dict[int, str] = {}

    def register(self, steps: int | Iterable[int], strategy: str) -> None:
        """Set the strategy of one step or of several."""
        if not isinstance(strategy, str):
            raise ArgumentTypeError(f"strategy must be a string, got {strategy!r}")
        if strategy == "float":
            raise ArgumentError(
                "unquantized steps need the original weights: write Plan(quantize=Quantize(steps=Steps(...)))"
            )
        if strategy not in (STATIC, DYNAMIC):
            raise ArgumentError(f"there is no strategy {strategy!r}; {nearest(strategy, (STATIC, DYNAMIC))}")
        numbers = (
            [steps] if isinstance(steps, int) else list(steps) if isinstance(steps, (list, tuple, range)) else None
        )
        if numbers is None or not all(map(_is_step, numbers)):
            raise ArgumentTypeError(f"steps are integers of 0 or more, or a list or range of them; got {steps!r}")
        self._by_step |= dict.fromkeys(numbers, strategy)

    def get_strategy(self, step: int) -> str:
        """Return the strategy of a step."""
        if not _is_step(step):
            raise ArgumentTypeError(f"a step is an integer of 0 or more, got {step!r}")
        return self._by_step.get(step, DYNAMIC)

    def static_steps(self, steps: int) -> torch.Tensor:
        """Return a boolean for each of so many steps."""
        beyond = [step for step, strategy in self._by_step.items() if strategy == STATIC and step >= steps]
        if beyond:
            raise ArgumentError(f"step {beyond[0]} is registered as static, and the file has scales for {steps} steps")
        return torch.tensor([self.get_strategy(step) == STATIC for step in range(steps)])


Policy = TimestepPolicyConfig


class TimestepManager:
    """The number of the current step, for layers with scales by step; set it before each call of the model."""

    @staticmethod
    def set_timestep_idx(step: int) -> None:
        """Set the number of the step, in this process, for all threads."""
        if not _is_step(step):
            raise ArgumentTypeError(f"a step is an integer of 0 or more, got {step!r}")
        _current[0] = step
        for tensor in _STEPS.values():
            tensor.fill_(step)

    @staticmethod
    def get_timestep_idx() -> int:
        """Return the number of the step."""
        return _current[0]


def step_of(device: torch.device) -> torch.Tensor:
    """Return the number of the step as a tensor [1] on a device, the same one in every call."""
    if device not in _STEPS:
        with torch.inference_mode(False):
            _STEPS[device] = torch.full((1,), _current[0], dtype=torch.int64, device=device)
    return _STEPS[device]


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

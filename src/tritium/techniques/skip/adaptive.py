"""Decide during an image which steps are skipped, one step late: the device never waits for a decision.

The rule is that of AdaptiveDiffusion. While step i is computed, the change of the latent up to then is on its way to the
host; step i + 1 reads it. A step is skipped if the changes d of the last three known steps are nearly linear:
`|(d[2] + d[0]) / 2 - d[1]| <= threshold * d[1]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tritium.techniques.skip.clock import HostCopy
from tritium.techniques.skip.history import buffers_like
from tritium.techniques.skip.table import RUN

# The changes that a decision compares.
_COMPARED = 3


class Steady:
    """The changes of the latent in one image, and the decisions by them."""

    def __init__(self, threshold: float, order: int, longest: int) -> None:
        self._threshold, self._letter, self._longest = threshold, str(order), longest
        self._latent: torch.Tensor | None = None
        self._changes: list[float] = []
        self._coming: HostCopy | None = None
        self._in_row = 0
        self._decided = (-1, RUN)

    def letter(self, step: int, steps: int, branch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the letter of a call; all branches of a step have the same."""
        if self._decided[0] != step:
            if self._coming is not None:
                self._changes = [*self._changes, *self._coming.read()][-_COMPARED:]
            self._coming = self._change(latent_of(args, kwargs))
            is_steady = branch == 0 and step < steps - 1 and self._is_steady() and self._in_row < self._longest
            self._in_row = self._in_row + 1 if is_steady else 0
            self._decided = (step, self._letter if is_steady else RUN)
        return self._decided[1]

    def _is_steady(self) -> bool:
        if len(self._changes) < _COMPARED:
            return False
        first, middle, last = self._changes
        return abs((last + first) / 2 - middle) <= self._threshold * middle

    def _change(self, latent: torch.Tensor | None) -> HostCopy | None:
        if latent is None:
            return None
        before = self._latent
        if before is None or before.shape != latent.shape:
            (before,) = buffers_like([latent])
            assert before is not None
            self._latent, coming = before, None
        else:
            coming = HostCopy((latent - before).abs().mean())
        before.copy_(latent)
        return coming


def latent_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the latent among the arguments of a denoiser: the first tensor of floats."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    return None

"""Record what denoisers return in eager images, as inner products: all that proposals need, in a few kilobytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.techniques.skip.clock import Clock
from tritium.techniques.skip.propose import Recording


@dataclass
class Observed:
    """The schedule of an image, and the outputs of its calls by branch and step."""

    scheduler: str = ""
    sigmas: tuple[float, ...] = ()
    steps: int = 0
    # Why nothing can be skipped, or empty.
    declined: str = ""
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def branches(self) -> int:
        return 1 + max((branch for branch, _ in self.outputs), default=0)

    @property
    def is_whole(self) -> bool:
        """True if every branch was called in every step."""
        return len(self.outputs) == self.branches * self.steps > 0

    def products(self) -> torch.Tensor:
        """Return the inner products of the outputs, [branches, steps, branches, steps]."""
        places = [(branch, step) for branch in range(self.branches) for step in range(self.steps)]
        rows = torch.stack([self.outputs[place] for place in places]).double()
        return (rows @ rows.T).view(self.branches, self.steps, self.branches, self.steps)


@contextlib.contextmanager
def observing(modules: list[nn.Module], scheduler: Any, *, keep: bool) -> Iterator[Observed]:
    """Record the calls of denoisers in one image; with `keep` also their outputs.

    Several denoisers of a pipeline take turns in its steps, so they have one clock.
    """
    clock = Clock(lambda: [] if scheduler is None else [scheduler])
    found = Observed()

    def record(_module: nn.Module, _args: Any, output: Any) -> None:
        moment = clock.now()
        if isinstance(moment, str):
            found.declined = found.declined or moment
            return
        if not found.steps:
            found.steps, found.scheduler = moment.steps, type(scheduler).__name__
            levels = getattr(scheduler, "sigmas", None)
            found.sigmas = () if levels is None else tuple(map(float, levels.tolist()))
        tensors = [leaf for leaf in compat.tensors.leaves_of(output) if isinstance(leaf, torch.Tensor)]
        value = torch.cat([tensor.detach().float().flatten() for tensor in tensors]).cpu() if keep else torch.zeros(1)
        found.outputs[moment.branch, moment.step] = value

    hooks = [module.register_forward_hook(record) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def recording_of(observed: list[Observed]) -> Recording | None:
    """Return the recording of several images, or None if they had different calls."""
    first = observed[0]
    if any(not one.is_whole or (one.branches, one.steps) != (first.branches, first.steps) for one in observed):
        return None
    levels = first.sigmas[: first.steps] or tuple(float(step) for step in range(first.steps))
    return Recording(torch.stack([one.products() for one in observed]), levels)

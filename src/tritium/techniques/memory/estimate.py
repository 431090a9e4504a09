"""Estimate a call on fake tensors: the bytes alive at once, and the floating-point operations of each block.

Bytes are summed at every convolution, matrix product and attention. These are never fused, so compiled code holds the same
tensors there. The workspace of the routines is not included: the estimate is a lower bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.compat.tensors import TorchDispatchMode
from tritium.report.flops import flops_of_call

# ATen routines that read and write whole tensors with every compiler.
_ROUTINES = ("convolution", "mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", "grouped_linear")

# What an estimate is multiplied by, and the bytes added to it: workspaces, and what the allocator cannot use again.
MARGIN, WORKSPACE = 1.15, 192 * 2**20


class Live(TorchDispatchMode):
    """Track the bytes of live tensors that were created inside the mode."""

    def __init__(self, *, counts_flops: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By the id of a tensor's memory: a weak reference to that memory, and its bytes.
        self._held: dict[int, tuple[Any, int]] = {}
        self._counts_flops = counts_flops
        self.most = 0
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [value for value in compat.tensors.leaves_of((args, kwargs)) if isinstance(value, torch.Tensor)]
        outside = {compat.tensors.storage_id(value) for value in given} - self._held.keys()
        # A view of a real weight is a fake tensor with separate memory.
        views_outside = func.is_view and compat.tensors.storage_id(given[0]) in outside
        for value in compat.tensors.leaves_of(result):
            if not isinstance(value, torch.Tensor) or (storage := compat.tensors.storage_id(value)) in outside:
                continue
            size = 0 if views_outside else value.untyped_storage().nbytes()
            self._held.setdefault(storage, (compat.tensors.keep_storage_id(value), size))
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        if func.overloadpacket.__name__.startswith(_ROUTINES):
            self.most = max(self.most, sum(size for _, size in self._held.values()))
            if self._counts_flops:
                self.flops += flops_of_call(func, args, kwargs or {}, result)
        return result


def fake_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with empty tensors in place of tensors; lists are copied. Call it inside of a fake mode."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    mapped: tuple[tuple[Any, ...], dict[str, Any]] = compat.tensors.map_tensors(fake, (args, dict(kwargs)))
    return mapped


@dataclass(frozen=True)
class Estimate:
    """A call: the bytes of its activations, and the floating-point operations of all of it and of each block."""

    peak: int
    flops: int
    of_blocks: tuple[int, ...]
    # The places of the blocks in the order of their first calls.
    order: tuple[int, ...] = ()

    @property
    def reserve(self) -> int:
        """The bytes to keep free for the activations."""
        return int(self.peak * MARGIN) + WORKSPACE


def estimate(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    blocks: Sequence[nn.Module],
    mode: Any = None,
) -> Estimate:
    """Run a call on fake tensors. `mode` is the fake mode in which the module was built, if it is fake itself."""
    fakes = mode or compat.tensors.fake_mode(allow_non_fake_inputs=True)
    # In inference mode composite operators arrive here undecomposed, without the routines they call.
    with torch.inference_mode(mode=False), torch.no_grad(), fakes:
        args, named = fake_arguments(args, kwargs)
        live = Live(counts_flops=True)
        with live, _counting(live, blocks) as counts:
            module.forward(*args, **named)
    return Estimate(live.most, live.flops, tuple(counts.flops), tuple(counts.order))


@dataclass
class _Counts:
    """The operations of each block, and the blocks in the order of their first calls."""

    flops: list[int]
    order: dict[int, None]


@contextlib.contextmanager
def _counting(live: Live, blocks: Sequence[nn.Module]) -> Iterator[_Counts]:
    """Count the operations of each block inside, and run blocks eagerly, whatever is installed on them."""
    counts, slot = _Counts([0] * len(blocks), {}), compat.modules.COMPILED_CALL
    before = [block.__dict__.get(slot) for block in blocks]

    def counted(place: int, block: nn.Module) -> Any:
        eager = compat.modules.eager_call(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts.order.setdefault(place)
            start = live.flops
            result = eager(*args, **kwargs)
            counts.flops[place] += live.flops - start
            return result

        return run

    try:
        for place, block in enumerate(blocks):
            block.__dict__[slot] = counted(place, block)
        yield counts
    finally:
        for block, call in zip(blocks, before, strict=True):
            block.__dict__.pop(slot, None)
            if call is not None:
                block.__dict__[slot] = call


class Peaks:
    """The activations of a part by the size of its calls: measured at some sizes, fitted to a line for the others."""

    def __init__(self) -> None:
        self.samples: dict[int, int] = {}

    def add(self, size: int, peak: int) -> None:
        self.samples[size] = max(peak, self.samples.get(size, 0))

    @property
    def line(self) -> tuple[float, float] | None:
        """Return constant and slope through the smallest and the largest size, or None with fewer than two.

        A single size would count the constant as often as the pixels.
        """
        if len(self.samples) < 2:
            return None
        (low, least), (high, most) = min(self.samples.items()), max(self.samples.items())
        slope = max(0.0, (most - least) / (high - low))
        return max(0.0, most - slope * high), slope

    def at(self, size: int) -> int | None:
        """Return the activations at a size, at least those of smaller sizes; None if they are unknown."""
        if size in self.samples:
            return self.samples[size]
        if self.line is None:
            return None
        constant, slope = self.line
        smaller = [peak for known, peak in self.samples.items() if known <= size]
        return max([int(constant + slope * size), *smaller])

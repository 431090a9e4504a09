"""Owned buffers for the caller's tensors: except for weights, replays read no other memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch

from tritium import compat
from tritium.errors import CaptureRefused


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with expanded dims reduced to size one, so that each address occurs once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def empty_as(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate memory with the strides of a tensor, including strides of 0."""
    shown = without_repeats(tensor)
    if not compat.capture.has_one_address_per_element(shown):
        # torch cannot tell. If each stride exceeds the extent of all smaller strides, every element has its own address.
        extent = 0
        for stride, size in sorted((s, n) for s, n in zip(shown.stride(), shown.shape, strict=True) if n > 1):
            if stride <= extent:
                raise CaptureRefused(f"elements of a tensor with strides {tuple(shown.stride())} share memory")
            extent += stride * (size - 1)
    made = torch.empty_strided(shown.shape, shown.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.as_strided(tensor.shape, tensor.stride()) if shown is not tensor else made


class Copies:
    """Copies between pairs of tensors with known strides, in as few launches as torch allows."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        # One launch copies many tensors of the same dtype.
        self._groups: dict[torch.dtype, list[int]] = {}
        self.targets = [without_repeats(target) for target in targets]
        for place, target in enumerate(targets):
            self._groups.setdefault(target.dtype, []).append(place)

    def run(self, sources: Sequence[torch.Tensor], *, back: bool = False) -> None:
        """Copy sources into targets, or with `back` targets into sources, on the caller's stream."""
        for places in self._groups.values():
            ours, theirs = [], []
            for place in places:
                source = sources[place]
                # The caller passed this buffer itself: nothing to copy.
                if source.data_ptr() != self.targets[place].data_ptr():
                    ours.append(self.targets[place])
                    theirs.append(without_repeats(source))
            if ours:
                compat.tensors.copy_all(theirs if back else ours, ours if back else theirs)


class Buffers:
    """The buffers of a device; equal layouts share memory, because replays run one at a time."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, torch.Tensor] = weakref.WeakValueDictionary()

    def take(self, like: torch.Tensor, occurrence: int) -> tuple[torch.Tensor, int]:
        """Return a buffer for the n-th input of a layout in one call, and the number of new bytes."""
        # A tensor created in inference mode cannot be written to outside of it.
        mode = torch.is_inference_mode_enabled()
        key = (like.shape, like.stride(), like.dtype, like.device, mode, occurrence)
        known = self._known.get(key)
        if known is not None:
            return known, 0
        made = empty_as(like)
        self._known[key] = made
        return made, made.untyped_storage().nbytes()


class StaticInputs:
    """The arguments of one capture: buffers for tensors, aliases of weights, and other values unchanged."""

    def __init__(self, args: Sequence[Any], weights: Collection[int], buffers: Buffers) -> None:
        self.args: list[Any] = list(args)
        self._weights = weights
        self.indices = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in weights]
        self.take_weights(args)
        # Bytes allocated for this capture; shared buffers were counted when they were created.
        self.bytes = 0
        taken: Counter[Hashable] = Counter()
        for index in self.indices:
            layout = (args[index].shape, args[index].stride(), args[index].dtype)
            self.args[index], new = buffers.take(args[index], taken[layout])
            taken[layout] += 1
            self.bytes += new
        self._copies = Copies(self.at(self.indices))
        self._layouts = [_layout(self.args[index]) for index in self.indices]
        self._written: list[int] = []
        self._write_back = Copies([])

    def take_weights(self, args: Sequence[Any]) -> None:
        """Alias the memory of the weights: a capture depends on addresses, not on the tensor object."""
        for index in self._weights:
            self.args[index] = args[index].detach()

    def leave_weights(self) -> None:
        """Drop the aliases: a replay needs the addresses alone, and aliases keep memory that the weights have left."""
        for index in self._weights:
            self.args[index] = None

    @property
    def generators(self) -> list[torch.Generator]:
        return [arg for arg in self.args if isinstance(arg, torch.Generator)]

    def at(self, places: Iterable[int]) -> list[torch.Tensor]:
        """Return the static tensors at some places."""
        return [self.args[index] for index in sorted(places)]

    def fill(self, args: Sequence[Any]) -> None:
        self._copies.run([args[index] for index in self.indices])

    def changed(self, args: Sequence[Any]) -> set[int]:
        """Return the inputs that a run has written to; raise `CaptureRefused` for a changed shape or memory."""
        for index, layout in zip(self.indices, self._layouts, strict=True):
            if _layout(self.args[index]) != layout:
                raise CaptureRefused("it changes the shape or the memory of an input in place")
        return {index for index in self.indices if not _same(self.args[index], args[index])}

    def write_back_to(self, written: Iterable[int]) -> None:
        """Set the inputs whose changes are copied back to the caller."""
        self._written = sorted(set(self.indices) & set(written))
        self._write_back = Copies(self.at(self._written))

    def write_back(self, args: Sequence[Any]) -> None:
        if self._written:
            self._write_back.run([args[index] for index in self._written], back=True)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.data_ptr()


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if all bits are equal, also those of NaN."""
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1).contiguous()
    # A single element is contiguous with any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)

"""Weights that are loaded together: contiguous bytes on the host, and views of one place on the device.

The tensors of a unit keep their identity: `bind` lets them view bytes of a buffer, with their strides. Tensors that share
memory share it there too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import PipelineError

# A block with less than this share of its part's weights is not worth a copy.
_LEAST_SHARE = 0.002

# Copies and kernels are fastest at multiples of this many bytes.
ALIGNMENT = 512


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers of a module, each once."""
    return [*module.parameters(), *module.buffers()]


def plain_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors, each once, with those inside of tensor subclasses in place of the subclass."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        inner = plain_tensors(compat.tensors.inner_tensors(tensor)) if compat.tensors.is_tensor_subclass(tensor) else []
        found |= {id(one): one for one in inner or [tensor]}
    return list(found.values())


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights."""
    return bytes_in(tensors_of(module))


def bytes_in(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, each counted once, as its repeated elements are."""
    return sum(_extent(tensor) for tensor in plain_tensors(tensors))


def streamable(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a part that are worth copying one by one."""
    total = module_bytes(module)
    return [block for block in blocks if block is not module and module_bytes(block) >= _LEAST_SHARE * total]


def divided(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return the tensors outside of some blocks, and those of each block; tensors that share memory stay outside."""
    owners = {id(tensor): -1 for tensor in plain_tensors(tensors_of(module))}
    tensors = plain_tensors(tensors_of(module))
    for place, block in enumerate(blocks):
        for tensor in plain_tensors(tensors_of(block)):
            # A tensor of two blocks belongs to none.
            owners[id(tensor)] = place if owners[id(tensor)] in (-1, place) else -2
    for group in _overlapping(tensors):
        if len({owners[id(tensor)] for tensor in group}) > 1:
            owners |= {id(tensor): -2 for tensor in group}
    outside = [tensor for tensor in tensors if owners[id(tensor)] < 0]
    return outside, [[tensor for tensor in tensors if owners[id(tensor)] == place] for place in range(len(blocks))]


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in groups that share memory."""
    groups: list[list[torch.Tensor]] = []
    end, where = 0, None
    for tensor in sorted(tensors, key=lambda one: (str(one.device), one.data_ptr())):
        if not groups or tensor.device != where or tensor.data_ptr() >= end:
            groups.append([])
            end = 0
        groups[-1].append(tensor)
        end, where = max(end, tensor.data_ptr() + _extent(tensor)), tensor.device
    return groups


@dataclass(frozen=True)
class Place:
    """Where a tensor is in its unit, in bytes: its offset, the start of the memory that it shares, and its layout."""

    tensor: torch.Tensor
    offset: int
    start: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    extent: int

    def bytes_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the elements in the bytes of a unit, as one dim."""
        return buffer[self.offset : self.offset + self.extent].view(self.dtype)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this tensor's view of the bytes of a unit."""
        values = self.bytes_in(buffer)
        return values.as_strided(self.shape, self.strides, values.storage_offset())


@dataclass(eq=False)
class Unit:
    """Tensors that are copied together, and their values on the host."""

    name: str
    # The tensors in groups that share memory.
    groups: list[list[Place]]
    size: int
    # The bytes on the host; the values are nowhere else while the tensors view a slot.
    host: torch.Tensor
    # By the id of a tensor: its own memory if that was kept, else its device.
    origin: dict[int, torch.Tensor | torch.device] = field(default_factory=dict)
    # True if the values on the host are newer than those in `origin`.
    changed: bool = False

    @classmethod
    def packed(
        cls,
        name: str,
        tensors: Sequence[torch.Tensor],
        allocate: Callable[[int], torch.Tensor],
        *,
        keeps_origin: bool = False,
    ) -> Unit:
        """Copy tensors into the bytes that `allocate` returns, on the host. The tensors stay as they are."""
        groups: list[list[Place]] = []
        offset, order = 0, {id(tensor): number for number, tensor in enumerate(tensors)}
        # Equal blocks have equal layouts, wherever their tensors are now.
        for group in sorted(_overlapping(tensors), key=lambda group: min(order[id(tensor)] for tensor in group)):
            first = group[0].data_ptr()
            # Elements of other sizes in the same memory keep their alignment.
            start = offset + (first % 16 if first % max(tensor.element_size() for tensor in group) else 0)
            groups.append([_place(name, tensor, start + tensor.data_ptr() - first, start) for tensor in group])
            end = max(place.offset + place.extent for place in groups[-1])
            offset = -(-end // ALIGNMENT) * ALIGNMENT
        unit = cls(name, groups, offset, allocate(offset))
        with writing():
            for place in unit.places:
                place.bytes_in(unit.host).copy_(_flat(place.tensor))
                kept = place.tensor.data if keeps_origin and not place.tensor.is_cuda else place.tensor.device
                unit.origin[id(place.tensor)] = kept
        return unit

    @property
    def places(self) -> Iterator[Place]:
        return (place for group in self.groups for place in group)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [place.tensor for place in self.places]

    def bind(self, buffer: torch.Tensor) -> None:
        """Let the tensors view the bytes of a buffer."""
        with writing():
            for place in self.places:
                place.tensor.data = place.view(buffer)

    def poison(self, where: torch.device) -> None:
        """Let the tensors show NaN: they keep shape, dtype and device, and take the memory of one element."""
        elements = {dtype: poison(dtype, where) for dtype in {place.dtype for place in self.places}}
        with writing():
            for place in self.places:
                place.tensor.data = elements[place.dtype].expand(place.shape)

    def take_moved(self, buffer: torch.Tensor) -> None:
        """Copy weights that were views of a buffer and are elsewhere now to the host."""
        with writing():
            for place in self.places:
                tensor = place.tensor
                if tensor.data_ptr() == place.view(buffer).data_ptr():
                    continue
                if (tensor.dtype, tensor.shape, tensor.stride()) != (place.dtype, place.shape, place.strides):
                    raise PipelineError(
                        f"{self.name} has a weight of another shape or dtype now, which its place does not fit"
                    )
                place.bytes_in(self.host).copy_(_flat(tensor))

    def restore(self) -> None:
        """Put the tensors back to where they were, with the values on the host."""
        with writing():
            for group in self.groups:
                self._restore(group)

    def _restore(self, group: Sequence[Place]) -> None:
        origin = self.origin[id(group[0].tensor)]
        if isinstance(origin, torch.Tensor):
            for place in group:
                kept: Any = self.origin[id(place.tensor)]
                if self.changed:
                    _flat(kept).copy_(place.bytes_in(self.host))
                place.tensor.data = kept
            return
        host = self.host
        if origin.type != "cpu":
            # Memory that tensors shared is one allocation again.
            start, end = group[0].start, max(place.offset + place.extent for place in group)
            host = torch.empty(end - start, dtype=torch.uint8, device=origin).copy_(self.host[start:end])
            group = [replace(place, offset=place.offset - start) for place in group]
        for place in group:
            place.tensor.data = place.view(host)


def _place(name: str, tensor: torch.Tensor, offset: int, start: int) -> Place:
    if tensor.is_meta or tensor.layout is not torch.strided:
        what = "no values yet (it is on 'meta')" if tensor.is_meta else f"the layout {tensor.layout}"
        raise PipelineError(
            f"{name} has a weight with {what}, which cannot be copied; load it first, or leave out memory"
        )
    return Place(tensor, offset, start, tensor.dtype, tensor.shape, tensor.stride(), _extent(tensor))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element of a tensor, as one dim."""
    count = _extent(tensor) // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset())


def poison(dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    """Return one element of NaN, or of a byte's largest value for types without one."""
    if dtype is torch.bool:
        return torch.ones((), dtype=dtype, device=where)
    return torch.full((16,), 0xFF, dtype=torch.uint8, device=where).view(dtype)[0]


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Allow writes to weights, and keep parameters from becoming inference tensors."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def moved(tensors: Iterable[torch.Tensor], where: torch.device) -> Callable[[], None]:
    """Move tensors to a device; return a function that puts them back to their own memory, with their values then."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with writing():
        for group in _overlapping([one for one in plain_tensors(tensors) if one.device != where]):
            kept += [(tensor, tensor.data) for tensor in group]
            _move(group, where)

    def back() -> None:
        with writing():
            for tensor, before in kept:
                layouts = [(one.shape, one.stride(), one.dtype) for one in (tensor, before)]
                if layouts[0] == layouts[1]:
                    _flat(before).copy_(_flat(tensor))
                    tensor.data = before

    return back


def _move(group: Sequence[torch.Tensor], where: torch.device) -> None:
    if len(group) == 1:
        (tensor,) = group
        target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
        _flat(target).copy_(_flat(tensor))
        tensor.data = target
        return
    unit = Unit.packed("", group, functools.partial(torch.empty, dtype=torch.uint8))
    unit.bind(unit.host.to(where))

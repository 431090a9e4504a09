"""The lifetime of results.

A capture allocates its results in the pool that all captures share, where any later replay may overwrite them. There
are three ways to return them:

- `lend`    the capture ends by copying results into separate memory, which is returned; the next replay first checks
            whether they are still referenced
- `copy`    results are copied after each replay; used permanently once a result was still referenced on the next call
- `expose`  tensors over the pool's memory are returned (`safe_output_mode=False`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from tritium.compat import capture as compat_capture
from tritium.compiler.capture.inputs import Copies, empty_as
from tritium.errors import CaptureRefused

Way = Literal["lend", "copy", "expose"]


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a result, and a function that builds an equal result from other leaves.

    Supports everything registered with torch's pytrees (such as outputs of diffusers), and dataclasses.
    """
    leaves, spec = pytree.tree_flatten(value, is_leaf=_is_plain_dataclass)
    if not any(map(_is_plain_dataclass, leaves)):
        return leaves, lambda parts: pytree.tree_unflatten(list(parts), spec)
    flat: list[Any] = []
    builders = []
    for leaf in leaves:
        inner, build = _flatten_dataclass(leaf) if _is_plain_dataclass(leaf) else ([leaf], _only)
        builders.append((len(flat), len(flat) + len(inner), build))
        flat += inner

    def rebuild(parts: Sequence[Any]) -> Any:
        return pytree.tree_unflatten([build(parts[start:end]) for start, end, build in builders], spec)

    return flat, rebuild


def _only(parts: Sequence[Any]) -> Any:
    return parts[0]


def _is_plain_dataclass(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_instance and type(value) not in pytree.SUPPORTED_NODES


def _flatten_dataclass(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    names = [field.name for field in dataclasses.fields(value) if field.init]
    leaves, build = flatten([getattr(value, name) for name in names])
    cls = type(value)
    return leaves, lambda parts: cls(**dict(zip(names, build(parts), strict=True)))


@dataclasses.dataclass
class _View:
    """A leaf in an argument's memory: the caller gets the same view of the argument that it passed."""

    argument: int
    # Relative to the argument's offset; None for the argument itself.
    offset: int | None
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, args: Sequence[Any]) -> torch.Tensor:
        argument: torch.Tensor = args[self.argument]
        if self.offset is None:
            return argument
        return argument.as_strided(self.size, self.stride, argument.storage_offset() + self.offset)


class StaticOutputs:
    """The results of one capture."""

    def __init__(self, result: Any, args: Sequence[Any], way: Way) -> None:
        leaves, self._rebuild = flatten(result)
        self.way = way
        self._leaves: list[Any] = []
        self._owned: list[torch.Tensor] = []
        self._places: list[int] = []
        storages = {_storage(arg): index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append(leaf)
            elif (index := storages.get(_storage(leaf))) is not None:
                self._leaves.append(_view(leaf, args[index], index))
            else:
                self._places.append(len(self._leaves))
                self._leaves.append(None)
                self._owned.append(leaf)
        if any(type(leaf) not in (torch.Tensor, torch.nn.Parameter) for leaf in self._owned):
            raise CaptureRefused("it returns a tensor subclass")
        self._shared = len({_storage(leaf) for leaf in self._owned}) < len(self._owned)
        self._whole = _by_storage(self._owned) if self._shared else []
        self._users: list[int | None] = []
        if self.way == "lend" and None in self._counts():
            # This torch does not count references to memory.
            self.way = "copy"

    def own(self) -> None:
        """Move results to memory that no other capture uses."""
        self._owned = self._copied()
        self._whole = _by_storage(self._owned) if self._shared else []

    def keep(self, result: Any) -> None:
        """Copy the results of another run into this memory."""
        leaves = flatten(result)[0]
        made = [leaves[place] for place in self._places] if len(leaves) == len(self._leaves) else []
        if list(map(_form, made)) != list(map(_form, self._owned)):
            raise CaptureRefused("its results have another form on every call")
        if self._shared:
            Copies(self._whole).run(_by_storage(made))
        else:
            Copies(self._owned).run(made)

    @property
    def bytes(self) -> int:
        return sum({_storage(leaf): leaf.untyped_storage().nbytes() for leaf in self._owned}.values())

    def settle(self) -> None:
        """Remember the reference counts of the results' memory before anything is returned to the caller."""
        self._users = self._counts()

    def held(self) -> bool:
        """Return True if lent memory is still referenced by the caller."""
        return self.way == "lend" and self._counts() != self._users

    def _counts(self) -> list[int | None]:
        return [compat_capture.storage_users(leaf) for leaf in self._owned]

    def hand_out(self, args: Sequence[Any]) -> Any:
        owned = self._copied() if self.way == "copy" else [_over(leaf) for leaf in self._owned]
        leaves = [leaf.of(args) if isinstance(leaf, _View) else leaf for leaf in self._leaves]
        for place, tensor in zip(self._places, owned, strict=True):
            leaves[place] = tensor
        return self._rebuild(leaves)

    def _copied(self) -> list[torch.Tensor]:
        if not self._shared:
            made = [empty_as(leaf) for leaf in self._owned]
            Copies(made).run(self._owned)
            return made
        # Preserve sharing: copy shared memory once, as a whole.
        memory = {_storage(whole): whole.clone().untyped_storage() for whole in self._whole}
        return [_over(leaf, memory[_storage(leaf)]) for leaf in self._owned]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _form(leaf: Any) -> tuple[Any, ...] | None:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else None


def _view(leaf: torch.Tensor, argument: torch.Tensor, index: int) -> _View:
    if leaf is argument:
        return _View(index, None, leaf.shape, leaf.stride())
    if leaf.dtype != argument.dtype:
        raise CaptureRefused(f"it returns an input's memory as {leaf.dtype}")
    return _View(index, int(leaf.storage_offset() - argument.storage_offset()), leaf.shape, leaf.stride())


def _by_storage(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each distinct memory once, as bytes."""
    found = {}
    for leaf in leaves:
        storage = leaf.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        found[_storage(leaf)] = whole.set_(storage, 0, (storage.nbytes(),), (1,))
    return list(found.values())


def _over(leaf: torch.Tensor, storage: Any = None) -> torch.Tensor:
    """Return a tensor over memory that is not a view to autograd, so that the caller can write to it."""
    made = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return made.set_(storage or leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

"""The lifetime of results.

A capture allocates its results in the pool that all captures share, where any later replay may overwrite them. There
are three ways to return them:

- `lend`    the capture ends by copying results into separate memory, which is returned; the next replay first checks
            whether they are still referenced
- `copy`    results are copied after each replay, and all captures share the memory that they are copied from; used
            permanently once a result was still referenced on the next call
- `expose`  tensors over the pool's memory are returned (`safe_output_mode=False`)
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from tritium import compat
from tritium.compat.tensors import storage_id
from tritium.compiler.capture.inputs import Copies, empty_as
from tritium.errors import CaptureRefused

Way = Literal["lend", "copy", "expose"]

_COPIES = contextvars.ContextVar("copies_results", default=False)


@contextlib.contextmanager
def copied_results() -> Iterator[None]:
    """Let what is captured inside copy its results: lending takes memory for the results of every block."""
    token = _COPIES.set(True)
    try:
        yield
    finally:
        _COPIES.reset(token)


def way_of(*, is_safe: bool) -> Way:
    """Return how a capture returns its results."""
    return "copy" if _COPIES.get() else "lend" if is_safe else "expose"


class StaticOutputs:
    """The results of one capture."""

    def __init__(self, results: Sequence[Any], args: Sequence[Any], way: Way) -> None:
        # None for tensors: they are views of arguments, or use memory of the capture.
        self._results = [None if isinstance(result, torch.Tensor) else result for result in results]
        self._views: dict[int, Callable[[Sequence[Any]], torch.Tensor]] = {}
        self._places: list[int] = []
        storages = {storage_id(arg): index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        for place, result in enumerate(results):
            if not isinstance(result, torch.Tensor):
                continue
            if (index := storages.get(storage_id(result))) is not None:
                self._views[place] = _view(result, args[index], index)
            elif type(result) in (torch.Tensor, torch.nn.Parameter):
                self._places.append(place)
            else:
                raise CaptureRefused("it returns a tensor subclass")
        self._owned = [results[place] for place in self._places]
        self._users: list[int | None] = []
        # Some torch versions do not count references to memory.
        self.way: Way = "copy" if way == "lend" and None in self._counts() else way

    def own(self) -> None:
        """Move results to memory that no other capture uses."""
        self._owned = self._copied()

    def keep(self, results: Sequence[Any]) -> None:
        """Copy the results of another run into this memory."""
        new = [results[place] for place in self._places]
        if list(map(_layout, new)) != list(map(_layout, self._owned)):
            raise CaptureRefused("its results have another shape on every call")
        if self._is_shared():
            Copies(_by_storage(self._owned)).run(_by_storage(new))
        else:
            Copies(self._owned).run(new)

    @property
    def bytes(self) -> int:
        return sum({storage_id(leaf): leaf.untyped_storage().nbytes() for leaf in self._owned}.values())

    def settle(self) -> None:
        """Remember the reference counts of the results' memory before anything is returned to the caller."""
        self._users = self._counts()

    def held(self) -> bool:
        """Return True if lent memory is still referenced by the caller."""
        return self.way == "lend" and self._counts() != self._users

    def _counts(self) -> list[int | None]:
        return [compat.capture.storage_users(leaf) for leaf in self._owned]

    def hand_out(self, args: Sequence[Any]) -> tuple[Any, ...]:
        results = list(self._results)
        for place, view in self._views.items():
            results[place] = view(args)
        owned = self._copied() if self.way == "copy" else [over(result) for result in self._owned]
        for place, tensor in zip(self._places, owned, strict=True):
            results[place] = tensor
        return tuple(results)

    def _is_shared(self) -> bool:
        return len(set(map(storage_id, self._owned))) < len(self._owned)

    def _copied(self) -> list[torch.Tensor]:
        if not self._is_shared():
            copies = [empty_as(leaf) for leaf in self._owned]
            Copies(copies).run(self._owned)
            return copies
        # Preserve sharing: copy shared memory once, as a whole.
        memory = {storage_id(whole): whole.clone().untyped_storage() for whole in _by_storage(self._owned)}
        return [over(leaf, memory[storage_id(leaf)]) for leaf in self._owned]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _view(leaf: torch.Tensor, argument: torch.Tensor, index: int) -> Callable[[Sequence[Any]], torch.Tensor]:
    """Return a function that returns the same view of the caller's argument, or the argument itself."""
    if leaf is argument:
        return operator.itemgetter(index)
    if leaf.dtype != argument.dtype:
        raise CaptureRefused(f"it returns an input's memory as {leaf.dtype}")
    offset, size, stride = leaf.storage_offset() - argument.storage_offset(), leaf.shape, leaf.stride()
    return lambda args: args[index].as_strided(size, stride, args[index].storage_offset() + offset)


def _by_storage(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each distinct memory once, as bytes."""
    found = {}
    for leaf in leaves:
        storage = leaf.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        found[storage_id(leaf)] = whole.set_(storage, 0, (storage.nbytes(),), (1,))
    return list(found.values())


def over(leaf: torch.Tensor, storage: Any = None) -> torch.Tensor:
    """Return a tensor over memory that is not a view to autograd, so that the caller can write to it."""
    made = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return made.set_(storage or leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

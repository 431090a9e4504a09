"""Tensors of modules as views of storages: described for other processes, and checked and built there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import SharingError

# More tensors than any pipeline has.
_MOST = 1_000_000

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}


@dataclass
class Description:
    """The tensors of all components: which storages they view, and the names that they have."""

    # The storages that a component is the first to use, by component.
    storages: dict[str, list[torch.UntypedStorage]] = field(default_factory=dict)
    # Storage, offset, shape, strides, dtype, and for a parameter whether it requires gradients. Without memory: storage -1.
    tensors: list[list[Any]] = field(default_factory=list)
    # The number of a tensor by component and name. Tied parameters are one tensor.
    names: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "names": self.names}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers with all of their names, also those that a state dict leaves out."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def describe(modules: Mapping[str, nn.Module]) -> Description:
    """Describe the tensors of components; raise a `SharingError` for tensors that have no plain memory."""
    found = Description()
    numbers: dict[int, int] = {}
    storages: dict[int, int] = {}
    for component, module in modules.items():
        owned = found.storages.setdefault(component, [])
        names = found.names.setdefault(component, {})
        for name, tensor in named_tensors(module):
            if id(tensor) not in numbers:
                _check_plain(f"{component}.{name}", tensor)
                storage = tensor.untyped_storage()
                key = compat.tensors.storage_id(tensor)
                if storage.nbytes() and key not in storages:
                    storages[key] = len(storages)
                    owned.append(storage)
                numbers[id(tensor)] = len(found.tensors)
                found.tensors.append(_view(tensor, storages.get(key, -1)))
            names[name] = numbers[id(tensor)]
    return found


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_meta:
        kind = "a meta tensor" if plain.is_meta else f"a {type(plain).__name__} of layout {plain.layout}"
        raise SharingError(f"{name} is {kind}, whose memory cannot be passed on; load the model with plain weights")


def _view(tensor: torch.Tensor, storage: int) -> list[Any]:
    gradients = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [storage, tensor.storage_offset(), list(tensor.shape), list(tensor.stride()), dtype, gradients]


def check(message: Mapping[str, Any]) -> None:
    """Raise a `SharingError` unless every view fits into its storage and every name has a tensor."""
    sizes = [entry[-1] for entry in _storages(message)]
    tensors = message.get("tensors")
    if not isinstance(tensors, list) or len(tensors) > _MOST:
        raise _refused("it has no list of tensors")
    for entry in tensors:
        _check_view(entry, sizes)
    names = message.get("names")
    parts = list(names.values()) if isinstance(names, dict) else [None]
    numbers: list[Any] = [n for part in parts for n in (part.values() if isinstance(part, dict) else [None])]
    if not all(_is_size(number) and number < len(tensors) for number in numbers):
        raise _refused("it names tensors that it does not have")


def _storages(message: Mapping[str, Any]) -> list[list[int]]:
    where, storages = message.get("device"), message.get("storages")
    if not isinstance(where, str) or not (where == "cpu" or where.startswith("cuda:")):
        raise _refused(f"weights on {where!r} are not supported")
    width = 3 if where == "cpu" else 1
    if not isinstance(storages, list) or len(storages) > _MOST:
        raise _refused("it has no list of storages")
    for entry in storages:
        if not isinstance(entry, list) or len(entry) != width or not all(map(_is_size, entry)):
            raise _refused(f"{entry!r} is no storage")
    return storages


def _check_view(entry: Any, sizes: Sequence[int]) -> None:
    if not isinstance(entry, list) or len(entry) != 6:
        raise _refused(f"{entry!r} is no tensor")
    storage, offset, shape, strides, dtype, gradients = entry
    are_sizes = all(
        isinstance(part, list) and len(part) <= 64 and all(map(_is_size, part)) for part in (shape, strides)
    )
    if not are_sizes or len(shape) != len(strides) or not _is_size(offset):
        raise _refused(f"shape {shape!r} with strides {strides!r} at {offset!r} is no tensor")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _refused(f"there is no dtype {dtype!r}")
    is_float = DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex
    if gradients not in (None, False) and not (gradients is True and is_float):
        raise _refused(f"a parameter of {dtype} with gradients {gradients!r}")
    if type(storage) is not int or not -1 <= storage < len(sizes):
        raise _refused(f"there is no storage {storage!r}")
    elements = 0 if 0 in shape else offset + sum((s - 1) * stride for s, stride in zip(shape, strides, strict=True)) + 1
    size = 0 if storage < 0 else sizes[storage]
    if elements * DTYPES[dtype].itemsize > size:
        raise _refused(f"a tensor of {shape} at {offset} ends after its storage of {size} bytes")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _refused(why: str) -> SharingError:
    return SharingError(f"the keeper's message is refused: {why}")


# Parameters that were created in inference mode would stay inference tensors.
@torch.inference_mode(mode=False)
@torch.no_grad()
def views(message: Mapping[str, Any], storages: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Return the tensors of a message that `check` has accepted."""
    made: list[torch.Tensor] = []
    where = storages[0].device if storages else torch.device("cpu")
    for storage, offset, shape, strides, dtype, gradients in message["tensors"]:
        kind = DTYPES[dtype]
        if storage < 0:
            tensor = torch.empty_strided(shape, strides, dtype=kind, device=where)
        else:
            tensor = torch.empty(0, dtype=kind, device=where).set_(storages[storage], offset, shape, strides)
        made.append(tensor if gradients is None else nn.Parameter(tensor, requires_grad=gradients))
    return made


def assign(component: str, module: nn.Module, names: Mapping[str, int], tensors: Sequence[torch.Tensor]) -> None:
    """Give a module its tensors; raise a `SharingError` unless they are all that it has, with the same shapes."""
    expected = dict(named_tensors(module))
    if set(expected) != set(names):
        differing = sorted(set(expected) ^ set(names))
        raise _refused(
            f"{component} differs from its configuration in {len(differing)} tensors, such as {differing[0]}"
        )
    for name, before in expected.items():
        tensor = tensors[names[name]]
        if tensor.shape != before.shape or isinstance(tensor, nn.Parameter) != isinstance(before, nn.Parameter):
            raise _refused(
                f"{component}.{name} has shape {list(tensor.shape)}, and its configuration {list(before.shape)}"
            )
    for name in expected:
        place(module, name, tensors[names[name]])


def place(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer; a parameter that is another object changes no other name."""
    path, _, leaf = name.rpartition(".")
    parameters, buffers = compat.modules.tensors_of(module.get_submodule(path))
    (parameters if leaf in parameters else buffers)[leaf] = tensor

"""Memory that several processes map: sealed memory files on a CPU, CUDA IPC on a GPU.

A memory file is sealed, so no process can change or shrink it, and it is passed as a read-only descriptor. Users map it
copy-on-write: a write in place goes to pages of the writer. Memory of a GPU has no such protection.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tritium import compat, device
from tritium.errors import SharingError

# Storages start at addresses that vector instructions like, as torch's own allocations do.
_ALIGNMENT = 64

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE if hasattr(fcntl, "F_SEAL_WRITE") else 0

# The name of a memory file in /proc/PID/maps: `/memfd:tritium:NAME:COMPONENT (deleted)`.
PREFIX = "tritium"


@dataclass
class Exports:
    """The storages of a pipeline as other processes map them."""

    device: str
    # For each storage: its memory file, offset and bytes; on a GPU its bytes alone.
    storages: list[list[int]] = field(default_factory=list)
    # On a CPU: the memory files, by component.
    files: dict[str, int] = field(default_factory=dict)
    # On a GPU: the storages themselves.
    held: list[torch.UntypedStorage] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(entry[-1] for entry in self.storages)

    def to_message(self) -> dict[str, Any]:
        """Return the JSON that one more process needs; on a GPU it is valid for one process."""
        message: dict[str, Any] = {"device": self.device, "storages": self.storages}
        if self.held:
            message["handles"] = [_handle_to_json(compat.sharing.share_cuda(storage)) for storage in self.held]
        return message

    def descriptors(self) -> list[int]:
        """Return the memory files, opened for reading alone."""
        return [os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC) for file in self.files.values()]

    def close(self) -> None:
        for file in self.files.values():
            os.close(file)
        self.files, self.held = {}, []


def export(storages: Mapping[str, Sequence[torch.UntypedStorage]], keeper: str) -> Exports:
    """Make storages, by component, mappable for other processes. Those on a CPU are copied."""
    places = {str(storage.device) for owned in storages.values() for storage in owned}
    if len(places) != 1:
        listed = ", ".join(sorted(places)) or "no device"
        raise SharingError(f"the weights are on {listed}; move the pipeline to one device, by pipe.to(...)")
    where = torch.device(places.pop())
    if where.type == "cuda":
        return _on_gpu([storage for owned in storages.values() for storage in owned], where)
    if where.type != "cpu":
        raise SharingError(f"weights on {where} cannot be shared; move the pipeline to cuda or cpu")
    exports = Exports("cpu")
    try:
        for number, (component, owned) in enumerate(storages.items()):
            exports.files[component] = _sealed(f"{PREFIX}:{keeper}:{component}", owned)
            exports.storages += [[number, offset, size] for offset, size in _places(owned)]
    except BaseException:
        exports.close()
        raise
    return exports


def _on_gpu(storages: list[torch.UntypedStorage], where: torch.device) -> Exports:
    if compat.sharing.has_expandable_segments():
        raise SharingError(
            "the weights are in expandable segments, which other processes cannot map in most containers; start the "
            "keeper with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
    return Exports(f"cuda:{device.uuid(where)}", [[storage.nbytes()] for storage in storages], held=storages)


def _places(storages: Sequence[torch.UntypedStorage]) -> list[tuple[int, int]]:
    places, end = [], 0
    for storage in storages:
        places.append((end, storage.nbytes()))
        end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    return places


def _sealed(name: str, storages: Sequence[torch.UntypedStorage]) -> int:
    """Return a memory file with copies of storages, which nothing can change any more."""
    if not hasattr(os, "memfd_create"):
        raise SharingError("weights on a CPU are shared on Linux alone: this system has no memory files")
    places = _places(storages)
    size = max((offset + length for offset, length in places), default=0)
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, max(size, 1))
        with mmap.mmap(file, max(size, 1)) as memory:
            for storage, (offset, length) in zip(storages, places, strict=True):
                torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=offset).copy_(_bytes_of(storage))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError):
            raise SharingError(f"{size:,} bytes cannot be shared: {error.strerror}; free memory") from error
        raise
    return file


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def mapped(message: Mapping[str, Any], files: Sequence[int]) -> list[torch.UntypedStorage]:
    """Map the storages of another process; raise a `SharingError` if sizes do not fit, before anything is read."""
    where, entries = message["device"], message["storages"]
    if where == "cpu":
        return _from_files(entries, files)
    handles = message.get("handles")
    if not isinstance(handles, list) or len(handles) != len(entries) or files:
        raise SharingError("the keeper's message is refused: every storage on a GPU needs one handle, and no file")
    index = device.index_of(where.removeprefix("cuda:"))
    if index is None:
        raise SharingError(
            f"the keeper's weights are on the GPU {where.removeprefix('cuda:')}, which this process cannot use; "
            "see CUDA_VISIBLE_DEVICES"
        )
    mapped_here = []
    for (size,), handle in zip(entries, handles, strict=True):
        given = _handle_from_json(handle, index)
        if given[2] != size:
            raise SharingError(f"the keeper's message is refused: a handle of {given[2]} bytes for {size}")
        mapped_here.append(_on_this_gpu(given))
    return mapped_here


def _on_this_gpu(handle: compat.sharing.Handle) -> torch.UntypedStorage:
    try:
        return compat.sharing.map_cuda(handle)
    except RuntimeError as error:
        raise SharingError(
            f"memory of the keeper cannot be mapped ({str(error).splitlines()[0]}); run the keeper and this process on "
            "one machine, and in containers with one IPC namespace (--ipc=host)"
        ) from error


def _from_files(entries: list[list[int]], files: Sequence[int]) -> list[torch.UntypedStorage]:
    memories = [_map_file(file) for file in files]
    storages = []
    for number, offset, size in entries:
        if number >= len(memories) or offset % _ALIGNMENT or offset + size > len(memories[number]) or not size:
            raise SharingError(
                f"the keeper's message is refused: {size} bytes at {offset} of file {number} are not in its {len(files)} files"
            )
        part = torch.frombuffer(memories[number], dtype=torch.uint8, count=size, offset=offset)
        storages.append(part.untyped_storage())
    return storages


def _map_file(file: int) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        # The file could shrink under its users: reading it would then end the process.
        raise SharingError("the keeper's message is refused: a descriptor is no sealed memory file")
    return mmap.mmap(file, os.fstat(file).st_size, access=mmap.ACCESS_COPY)


def _handle_to_json(handle: compat.sharing.Handle) -> list[Any]:
    return [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in handle]


# The types of a handle's values; strings stand for bytes.
_TYPES = (int, str, int, int, str, int, str, bool)


def _handle_from_json(values: Any, index: int) -> compat.sharing.Handle:
    if not isinstance(values, list) or [type(value) for value in values] != list(_TYPES):
        raise SharingError("the keeper's message is refused: a handle of CUDA IPC has other values")
    if any(value < 0 for value in values if type(value) is int):
        raise SharingError("the keeper's message is refused: a handle of CUDA IPC has negative sizes")
    decoded = []
    for value in values:
        with contextlib.suppress(ValueError):
            decoded.append(base64.b64decode(value, validate=True) if isinstance(value, str) else value)
    if len(decoded) != len(values):
        raise SharingError("the keeper's message is refused: a handle of CUDA IPC is no base64")
    return index, *decoded[1:]  # type: ignore[return-value]

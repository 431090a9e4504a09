"""What a process holds while it uses a keeper's weights: a socket. When the keeper ends, the pipelines stop."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import KeeperLost, SharingError
from tritium.sharing import wire
from tritium.sharing.weights import named_tensors

# Seconds between two looks at the version counters of weights on a GPU.
_INTERVAL = 0.25

# Devices whose shared pages the system protects: a write goes to pages of the writer.
_PROTECTED = ("cpu",)

_LEASES: set[Lease] = set()


class Lease:
    """The use of one keeper's weights by the modules of one pipeline.

    It ends when the modules are gone, or when none of them uses the keeper's memory any more.
    """

    def __init__(
        self, connection: socket.socket, name: str, generation: int, storages: Sequence[torch.UntypedStorage]
    ) -> None:
        self.name, self.generation = name, generation
        self.lost = ""
        self._connection = connection
        # Kept, so that no other memory gets their addresses. They take none of this process's memory.
        self._storages = list(storages)
        self._addresses = frozenset(storage.data_ptr() for storage in storages)
        self._is_writable = any(storage.device.type not in _PROTECTED for storage in storages)
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        self._versions: list[tuple[str, weakref.ref[torch.Tensor], int]] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Stop these modules when the keeper ends, and end the lease with them."""
        self._modules = {name: weakref.ref(module) for name, module in modules.items()}
        for module in modules.values():
            weakref.finalize(module, self._module_gone)
        if self._is_writable:
            tensors = ((f"{name}.{n}", t) for name, module in modules.items() for n, t in named_tensors(module))
            self._versions = [(name, weakref.ref(t), compat.tensors.version_of(t)) for name, t in tensors]
        _LEASES.add(self)
        threading.Thread(target=self._run, name=f"tritium keeper {self.name}", daemon=True).start()

    def maps(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in the keeper's memory."""
        return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() in self._addresses

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that still exist, by component."""
        return {name: module for name, ref in self._modules.items() if (module := ref()) is not None}

    def settle(self) -> None:
        """End the lease if no module uses the keeper's memory any more."""
        if not any(self.maps(tensor) for module in self.modules().values() for _, tensor in named_tensors(module)):
            self.close()

    def close(self) -> None:
        self._closed.set()
        _LEASES.discard(self)
        with contextlib.suppress(OSError):
            # Wakes the thread that waits for it.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _module_gone(self) -> None:
        if not self.modules():
            self.close()

    def _run(self) -> None:
        try:
            reason = self._wait()
        except (OSError, ValueError, SharingError):
            # ValueError: the socket was closed while the thread was starting to wait.
            reason = ""
        if not self._closed.is_set():
            self._stop(reason or "the process that kept them has ended")

    def _wait(self) -> str:
        """Wait until the keeper ends, or says why its weights must not be used any more; return the reason."""
        while True:
            readable, _, _ = select.select([self._connection], [], [], _INTERVAL if self._is_writable else None)
            if readable:
                message, _ = wire.receive(self._connection, wire.REQUEST_LIMIT, 1.0)
                return str(message.get("error", ""))
            if written := self._written():
                wire.send(self._connection, {"version": wire.VERSION, "written": written})
                return f"{written} was written in place, in memory that other processes use"

    def _written(self) -> str:
        """Return the name of a shared tensor that was written in place, or an empty text."""
        for name, ref, version in self._versions:
            tensor = ref()
            if tensor is not None and compat.tensors.version_of(tensor) != version and self.maps(tensor):
                return name
        return ""

    def _stop(self, reason: str) -> None:
        """Let every module that uses the keeper's memory raise instead of running."""
        self.lost = reason
        error = _Stopped(
            f"the weights of keeper {self.name!r} are gone: {reason}; start it again, and then attach again"
        )
        for module in self.modules().values():
            # Inner modules first, so that the one that runs now stops soon.
            for inner in reversed(list(module.modules())):
                if any(map(self.maps, inner.parameters())) or any(map(self.maps, inner.buffers())):
                    compat.sharing.reject_calls(inner, error)
        self.close()


class _Stopped:
    """A callable that raises what happened to the weights."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise KeeperLost(self._message)


def leases() -> list[Lease]:
    """Return the leases of this process."""
    return list(_LEASES)


def unshare(module: nn.Module) -> int:
    """Copy the tensors of a module that are in a keeper's memory into this process's own; return the number of bytes.

    Call it before weights are written in place. Tensors that share a storage still share one afterwards.
    """
    return sum(_unshare(lease, module) for lease in leases())


# Parameters whose memory is replaced in inference mode would become inference tensors.
@torch.inference_mode(mode=False)
@torch.no_grad()
def _unshare(lease: Lease, module: nn.Module) -> int:
    copies = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().clone()
        for tensor in {id(tensor): tensor for _, tensor in named_tensors(module) if lease.maps(tensor)}.values()
    }
    if not copies:
        return 0
    # Also tensors of other modules, if they are tied to those of this one.
    for owner in (module, *lease.modules().values()):
        for _, tensor in named_tensors(owner):
            own = copies.get(tensor.untyped_storage().data_ptr()) if lease.maps(tensor) else None
            if own is not None:
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = empty.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
    lease.settle()
    return sum(storage.nbytes() for storage in copies.values())


def copy_before_writes() -> None:
    """Let `load_state_dict` and PEFT's merges copy shared weights before they write into them, from now on."""
    compat.sharing.before_loading(unshare)
    if unshare not in compat.peft.MERGES.before:
        compat.peft.MERGES.before.append(unshare)
        compat.peft.MERGES.watch()

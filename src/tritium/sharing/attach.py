"""Build a pipeline from a keeper's weights, and ask keepers for their state."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tritium import device
from tritium.collector import collector_paused
from tritium.errors import SharingError
from tritium.sharing import memory, skeleton, weights, wire
from tritium.sharing.lease import Lease, copy_before_writes
from tritium.sharing.skeleton import Kinds

# Seconds until a keeper must have answered; its first handles on a GPU take a few.
_PATIENCE = 30.0

# Seconds between two attempts to reach a keeper that is still loading.
_RETRY = 0.1


def attach(name: str, kinds: Kinds, wait: float) -> Any:
    """Return a pipeline with a keeper's weights; wait so many seconds for a keeper that is not ready yet."""
    deadline = time.monotonic() + wait
    while True:
        try:
            connection, message, files = _connected(name)
            break
        except _NotReady as error:
            if time.monotonic() >= deadline:
                raise SharingError(str(error)) from error
            time.sleep(_RETRY)
    try:
        return _pipeline(connection, name, message, files, kinds)
    except BaseException:
        connection.close()
        raise
    finally:
        # Mapped memory stays without its descriptor.
        wire.close_all(files)


class _NotReady(SharingError):
    """No keeper has this name, or it is still loading."""


def _pipeline(connection: socket.socket, name: str, message: dict[str, Any], files: list[int], kinds: Kinds) -> Any:
    weights.check(message)
    folder = _checked_folder(name, message)
    if message["device"] == "cpu" and len(files) != len(message.get("components", ())):
        raise SharingError(f"the keeper's message is refused: it came with {len(files)} memory files")
    starting = device.start_in_background(message["device"])
    try:
        with collector_paused():
            pipe = skeleton.build(folder)
        replaced = skeleton.restore_kinds(pipe, message["modules"], kinds)
        skeleton.restore_settings(pipe, message["settings"])
    except (KeyError, TypeError, AttributeError) as error:
        raise SharingError(f"the keeper's message is refused: it does not fit its pipeline ({error})") from error
    modules = skeleton.modules_of(pipe)
    if set(modules) != set(message["names"]):
        raise SharingError("the keeper's message is refused: it has weights of other components")
    if starting is not None:
        starting.join()
    storages = memory.mapped(message, files)
    tensors = weights.views(message, storages)
    for component, module in modules.items():
        weights.assign(component, module, message["names"][component], tensors)
    for kind, module in replaced:
        kind.finish(module)
    copy_before_writes()
    Lease(connection, name, message["generation"], storages).watch(modules)
    return pipe


def _checked_folder(name: str, message: dict[str, Any]) -> Path:
    generation = message.get("generation")
    if type(generation) is not int or generation < 1:
        raise SharingError(f"the keeper's message is refused: there is no generation {generation!r}")
    folder = wire.socket_path(name).with_suffix(".files") / str(generation)
    if not folder.is_dir() or skeleton.fingerprint(folder) != message.get("fingerprint"):
        raise SharingError(f"the keeper's message is refused: its fingerprint is not that of the files in {folder}")
    return folder


def _connected(name: str) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Return the connection to a keeper, its message and its memory files."""
    connection = _request(name, "weights")
    try:
        message, files = wire.receive(connection, wire.REPLY_LIMIT, _PATIENCE, descriptors=wire.DESCRIPTOR_LIMIT)
        _raise_refusal(message, files)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection, message, files


def _raise_refusal(message: dict[str, Any], files: list[int]) -> None:
    if "error" in message:
        wire.close_all(files)
        raise (_NotReady if message.get("state") == "loading" else SharingError)(str(message["error"]))


def _request(name: str, want: str) -> socket.socket:
    path = wire.socket_path(name)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(str(path))
        wire.peer(connection)
        wire.send(connection, {"version": wire.VERSION, "want": want})
    except BaseException as error:
        connection.close()
        if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
            raise
        raise _NotReady(
            f"there is no keeper named {name!r} in {path.parent}; start one with `tritium keep PIPELINE --name {name}`"
        ) from error
    return connection


def statuses() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the state of each keeper of this user, by name."""
    for path in sorted(wire.folder().glob("*.sock")):
        # A keeper that was killed leaves its socket.
        with contextlib.suppress(_NotReady), contextlib.closing(_request(path.stem, "status")) as connection:
            yield path.stem, wire.receive(connection, wire.REQUEST_LIMIT * 4, _PATIENCE)[0]


# A line of /proc/PID/smaps that begins the figures of a memory file of a keeper.
_MEMORY_FILE = re.compile(rf"/memfd:{memory.PREFIX}:([^:]+):(\S+)")


def pages_of(process: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Return bytes that a process has mapped and bytes that it has copied, by keeper and component, from the system."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    current = None
    try:
        lines = Path(f"/proc/{process}/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        key, _, value = line.partition(":")
        if "-" in key and " " in key:
            match = _MEMORY_FILE.search(line)
            current = (match[1], match[2]) if match else None
        elif current is not None and key in ("Size", "Anonymous"):
            size, copied = found.get(current, (0, 0))
            kilobytes = int(value.split()[0]) << 10
            found[current] = (size + kilobytes, copied) if key == "Size" else (size, copied + kilobytes)
    return found

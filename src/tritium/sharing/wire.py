"""Messages between a keeper and its users: a length and JSON over a Unix socket, and file descriptors with them.

Nothing is unpickled. A message is refused by its length before it is read, and a process of another user before anything
of it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tritium import envs
from tritium.errors import SharingError

VERSION = 1

# Bytes of a message to a keeper, and of one from it: a pipeline of 10,000 tensors takes 2 MB.
REQUEST_LIMIT = 4096
REPLY_LIMIT = 64 << 20
# File descriptors of one message: one for each component. Linux allows 253.
DESCRIPTOR_LIMIT = 64

_LENGTH = struct.Struct(">I")
_PEER = struct.Struct("3i")
# The longest path of a Unix socket on Linux, without its final zero.
_PATH_LIMIT = 107


def folder() -> Path:
    """Return the folder of this user's sockets, which other users cannot read; create it if it is missing."""
    path = envs.runtime_home()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SharingError(f"{path} must be a folder of this user alone (mode 0700); remove it, or set XDG_RUNTIME_DIR")
    return path


def socket_path(name: str) -> Path:
    """Return the socket of a keeper; raise a `SharingError` for what cannot be a name."""
    allowed = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not allowed or name.startswith((".", "-")) or len(name) > 64:
        raise SharingError(
            f"{name!r} cannot name a keeper: use up to 64 letters, digits, '-', '_' and '.', such as 'flux'"
        )
    path = folder() / f"{name}.sock"
    if len(os.fsencode(path)) > _PATH_LIMIT:
        raise SharingError(
            f"{path} is too long for a socket ({_PATH_LIMIT} bytes); set XDG_RUNTIME_DIR to a short path"
        )
    return path


def peer(connection: socket.socket) -> int:
    """Return the process at the other end; raise a `SharingError` unless it belongs to this user."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise SharingError("weights are shared on Linux alone: this system does not name the user of a socket")
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    process, user, _group = _PEER.unpack(content)
    if user != os.getuid():
        raise SharingError(
            f"process {process} belongs to user {user}, and weights are shared with user {os.getuid()} alone"
        )
    return int(process)


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with file descriptors that arrive with its first byte."""
    content = json.dumps(message, separators=(",", ":")).encode()
    content = _LENGTH.pack(len(content)) + content
    sent = socket.send_fds(connection, [content], descriptors) if descriptors else 0
    connection.sendall(content[sent:])


def receive(
    connection: socket.socket, limit: int, seconds: float, *, descriptors: int = 0
) -> tuple[dict[str, Any], list[int]]:
    """Return a message and its file descriptors; raise a `SharingError` for anything else, and close the descriptors.

    Not more than the length is read of a message whose length is over the limit.
    """
    reader = _Reader(connection, time.monotonic() + seconds, descriptors)
    try:
        length = _length(reader.take(_LENGTH.size), limit)
        return _parsed(reader.take(length)), reader.descriptors
    except BaseException:
        close_all(reader.descriptors)
        raise


class _Reader:
    """Reads bytes of a connection until a deadline."""

    def __init__(self, connection: socket.socket, deadline: float, allowed: int) -> None:
        self._connection, self._deadline, self._allowed = connection, deadline, allowed
        self.descriptors: list[int] = []

    def take(self, size: int) -> bytearray:
        content = bytearray()
        while len(content) < size:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise SharingError(f"a message stopped after {len(content)} of {size} bytes")
            self._connection.settimeout(left)
            try:
                chunk = self._chunk(min(size - len(content), 1 << 20))
            except TimeoutError:
                continue
            except OSError as error:
                raise SharingError(f"the connection broke: {error.strerror or error}") from error
            if not chunk:
                raise SharingError(f"a message ended after {len(content)} of {size} bytes")
            content += chunk
        return content

    def _chunk(self, size: int) -> bytes:
        if not self._allowed:
            # Descriptors that are not received are closed by the system.
            return self._connection.recv(size)
        chunk, found, flags, _ = socket.recv_fds(self._connection, size, self._allowed)
        self.descriptors += found
        if flags & socket.MSG_CTRUNC or len(self.descriptors) > self._allowed:
            raise SharingError(f"a message with more than {self._allowed} file descriptors is refused")
        return chunk


def _length(content: bytearray, limit: int) -> int:
    (length,) = _LENGTH.unpack(content)
    if not 2 <= length <= limit:
        raise SharingError(f"a message of {length} bytes is refused: from 2 to {limit} are allowed")
    return int(length)


def _parsed(content: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SharingError("a message is refused: it is no JSON") from error
    if not isinstance(message, dict):
        raise SharingError(f"a message is refused: it is a JSON {type(message).__name__}, not an object")
    if message.get("version") != VERSION:
        raise SharingError(
            f"a message of version {message.get('version')!r} is refused: this is version {VERSION}; "
            "use the same version of Tritium for a keeper and its users"
        )
    return message


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)

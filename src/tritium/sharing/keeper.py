"""The process that keeps weights: it loads a pipeline, and passes its memory to other processes of the same user.

Its states are loading, ready and draining. A user holds a connection; the number of connections is the number of users.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tritium import compat
from tritium.errors import SharingError
from tritium.sharing import memory, skeleton, weights, wire
from tritium.sharing.skeleton import Kinds

# Users and requests at one time.
USERS = 128

# Seconds that a user has for its request, and to take the answer.
PATIENCE = 5.0

State = Literal["loading", "ready", "draining"]


@dataclass
class Generation:
    """One version of the weights; users keep the one that they attached to."""

    number: int
    folder: Path
    message: dict[str, Any]
    exports: memory.Exports
    # On a GPU, the pipeline whose memory it is.
    pipe: Any
    users: dict[socket.socket, int] = field(default_factory=dict)

    def close(self) -> None:
        self.exports.close()
        self.pipe = None
        shutil.rmtree(self.folder, ignore_errors=True)


class Keeper:
    """Keeps the weights of one pipeline under a name; `publish` makes them available, `close` ends all users.

    Raises a `SharingError` if a keeper of that name is running.
    """

    def __init__(self, name: str, kinds: Kinds | None = None) -> None:
        self.name, self.state = name, "loading"
        # Why the weights must not be used any more, if a user wrote into them.
        self.spoiled = ""
        self._kinds = kinds or {}
        self._path = wire.socket_path(name)
        self._files = self._path.with_suffix(".files")
        self._generation: Generation | None = None
        self._older: list[Generation] = []
        self._connections: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._lock = _locked(self._path.with_suffix(".lock"), name)
        # What a keeper that was killed has left.
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self._files, ignore_errors=True)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The folder is private, so no other user can connect before the mode is set.
        self._server.bind(str(self._path))
        self._path.chmod(0o600)
        self._server.listen(USERS)
        threading.Thread(target=self._accept, name=f"tritium keeper {name}", daemon=True).start()

    @property
    def users(self) -> list[int]:
        """Return the process of each user."""
        with self._changed:
            return [process for generation in self._generations() for process in generation.users.values()]

    def _generations(self) -> list[Generation]:
        return [*self._older, *([] if self._generation is None else [self._generation])]

    def publish(self, pipe: Any) -> int:
        """Make the weights of a pipeline available; return the number of their generation.

        On a CPU, they are copied, and the pipeline is not needed any more. Users of an earlier generation keep theirs.
        """
        number = 1 if self._generation is None else self._generation.number + 1
        folder = self._files / str(number)
        try:
            generation = self._described(pipe, number, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._changed:
            if self._generation is not None:
                self._older.append(self._generation)
            self._generation, self.state = generation, "ready"
            self._forget_unused()
        return number

    def _described(self, pipe: Any, number: int, folder: Path) -> Generation:
        fingerprint = skeleton.write(pipe, folder)
        plain = skeleton.build(folder)
        differences = skeleton.differences(pipe, plain, self._kinds)
        modules = skeleton.modules_of(pipe)
        described = weights.describe(modules)
        exports = memory.export(described.storages, self.name)
        message = {
            "version": wire.VERSION,
            "state": "ready",
            "generation": number,
            "fingerprint": fingerprint,
            "components": list(exports.files) or list(modules),
            **differences,
            **described.to_message(),
        }
        return Generation(number, folder, message, exports, pipe if exports.held else None)

    @property
    def bytes(self) -> int:
        return 0 if self._generation is None else self._generation.exports.bytes

    def status(self) -> dict[str, Any]:
        """Return the state of the keeper, as `tritium doctor --sharing` shows it."""
        with self._changed:
            number = 0 if self._generation is None else self._generation.number
            users = {g.number: sorted(g.users.values()) for g in self._generations()}
        where = "" if self._generation is None else self._generation.exports.device
        return {
            "version": wire.VERSION,
            "state": self.state,
            "generation": number,
            "users": users,
            "bytes": self.bytes,
            "device": where,
            "process": os.getpid(),
        }

    def accept_no_more(self) -> int:
        """Refuse new users from now on; return the number of those that are left."""
        with self._changed:
            self.state = "draining"
            return len(self.users)

    def close(self) -> None:
        """End the connections of all users, whose pipelines then stop, and free the weights."""
        with self._changed:
            self.state = "draining"
            connections = list(self._connections)
        _shut(self._server)
        self._path.unlink(missing_ok=True)
        for connection in connections:
            _shut(connection)
        for generation in self._generations():
            generation.close()
        shutil.rmtree(self._files, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with self._changed:
                is_full = len(self._connections) >= USERS
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection, is_full), daemon=True).start()

    def _serve(self, connection: socket.socket, is_full: bool) -> None:
        """Answer one request, and hold the weights for a user until its connection ends."""
        try:
            process = wire.peer(connection)
            self._check_room(is_full)
            request, _ = wire.receive(connection, wire.REQUEST_LIMIT, PATIENCE)
            self._answer(connection, process, request)
        except SharingError as error:
            self._refuse(connection, str(error))
        except OSError:
            # The other process has ended.
            pass
        finally:
            with self._changed:
                self._connections.discard(connection)
                for generation in self._generations():
                    generation.users.pop(connection, None)
                self._forget_unused()
                self._changed.notify_all()
            connection.close()

    def _check_room(self, is_full: bool) -> None:
        if is_full:
            raise SharingError(f"keeper {self.name!r} has {USERS} users already; start a second keeper")

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        with contextlib.suppress(OSError):
            connection.settimeout(PATIENCE)
            wire.send(connection, {"version": wire.VERSION, "state": self.state, "error": reason})

    def _answer(self, connection: socket.socket, process: int, request: dict[str, Any]) -> None:
        if set(request) != {"version", "want"} or request["want"] not in ("weights", "status"):
            raise SharingError("a request is refused: it wants neither 'weights' nor 'status'")
        connection.settimeout(PATIENCE)
        if request["want"] == "status":
            wire.send(connection, self.status())
            return
        with self._changed:
            generation = self._generation
            if generation is None or self.state != "ready":
                raise SharingError(f"keeper {self.name!r} is {self.state}; attach when it is ready")
            generation.users[connection] = process
            # A handle of CUDA IPC counts its users, so each gets another one.
            message = {**generation.message, **generation.exports.to_message()}
        files = generation.exports.descriptors()
        try:
            wire.send(connection, message, files)
        finally:
            wire.close_all(files)
        connection.settimeout(None)
        self._hold(connection, process)

    def _hold(self, connection: socket.socket, process: int) -> None:
        """Wait for the end of a connection. A user can only report that the weights were written to."""
        if not connection.recv(1, socket.MSG_PEEK):
            return
        report, _ = wire.receive(connection, wire.REQUEST_LIMIT, PATIENCE)
        if set(report) != {"version", "written"}:
            raise SharingError("a message is refused: the request was answered already")
        self._spoil(f"process {process} has written into {report['written']}")

    def _spoil(self, reason: str) -> None:
        """End all users: the memory that they share has changed."""
        with self._changed:
            self.spoiled, self.state = reason, "draining"
            connections = [connection for generation in self._generations() for connection in generation.users]
            self._changed.notify_all()
        for connection in connections:
            self._refuse(connection, reason)
            _shut(connection)

    def _forget_unused(self) -> None:
        unused = [generation for generation in self._older if not generation.users]
        self._older = [generation for generation in self._older if generation.users]
        for generation in unused:
            generation.close()
            if generation.exports.device != "cpu":
                compat.sharing.collect_cuda()

    def wait(self, until: Callable[[], bool]) -> None:
        """Return when `until()` is true, checked whenever a user comes or goes, and twice a second."""
        with self._changed:
            while not until() and not self.spoiled:
                self._changed.wait(0.5)


def _locked(path: Path, name: str) -> int:
    """Return the descriptor of a locked file; the system unlocks it when this process ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise SharingError(f"a keeper named {name!r} is running already; stop it, or choose another name") from error
    return file


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()

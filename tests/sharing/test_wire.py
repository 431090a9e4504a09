"""Messages that a keeper must refuse, and how many of their bytes it reads."""

import contextlib
import json
import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from support.keepers import until
from tritium.errors import SharingError
from tritium.sharing import keeper as keepers
from tritium.sharing import wire

VERSION = wire.VERSION


def framed(content):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack(">I", len(content)) + content


def connect(keeper):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(str(wire.socket_path(keeper.name)))
    return connection


WEIGHTS = {"version": VERSION, "want": "weights"}
BAD = {
    "no length": (b"\0\0", "ended after 2 of 4 bytes"),
    "no content": (framed(WEIGHTS)[:10], "ended after 6 of"),
    "empty": (framed(b""), "of 0 bytes is refused"),
    "too long": (framed(b" " * 5000), "of 5000 bytes is refused"),
    "huge": (struct.pack(">I", 2**32 - 1), "of 4294967295 bytes is refused"),
    "no text": (framed(b"\xff\xfe{}"), "it is no JSON"),
    "no JSON": (framed(b"{version: 1}"), "it is no JSON"),
    "deep": (framed(b"[" * 4000), "it is no JSON"),
    "no object": (framed([1, 2]), "it is a JSON list"),
    "no version": (framed({"want": "weights"}), "of version None"),
    "another version": (framed({**WEIGHTS, "version": VERSION + 1}), f"of version {VERSION + 1} is refused"),
    "unknown": (framed({**WEIGHTS, "want": "pickle"}), "wants neither"),
    "more keys": (framed({**WEIGHTS, "path": "/etc/passwd"}), "wants neither"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "bytes is refused"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_keeper_refuses_a_bad_message(name, keeper):
    content, reason = BAD[name]
    with connect(keeper) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        answer, files = wire.receive(connection, wire.REPLY_LIMIT, 5, descriptors=8)
        assert reason in answer["error"]
        assert files == []
        # It closes the connection, which the system reports as broken if something was not read.
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert keeper.users == []
    assert keeper.state == "ready"


def test_of_a_message_that_is_too_long_nothing_is_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framed(b"x" * 5000))
        with pytest.raises(SharingError, match="5000 bytes"):
            wire.receive(ours, wire.REQUEST_LIMIT, 1)
        ours.settimeout(1)
        assert ours.recv(8192) == b"x" * 5000


def test_a_process_of_another_user_is_not_read(monkeypatch, keeper):
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framed(WEIGHTS))
        with pytest.raises(SharingError, match="weights are shared with user 4711 alone"):
            wire.peer(ours)
        # The keeper's own way: it answers, and has not read the request.
        thread = threading.Thread(target=keeper._serve, args=(ours, False))
        thread.start()
        thread.join(5)
        assert "belongs to user" in wire.receive(theirs, wire.REPLY_LIMIT, 5)[0]["error"]
    assert keeper.users == []


def test_a_slow_request_ends(keeper, monkeypatch):
    monkeypatch.setattr(keepers, "PATIENCE", 0.2)
    with connect(keeper) as connection:
        connection.sendall(b"\0")
        assert "stopped after 1 of 4 bytes" in wire.receive(connection, wire.REPLY_LIMIT, 5)[0]["error"]


def test_a_second_request_ends_the_first(keeper):
    with connect(keeper) as connection:
        connection.sendall(framed(WEIGHTS))
        answer, files = wire.receive(connection, wire.REPLY_LIMIT, 5, descriptors=8)
        wire.close_all(files)
        assert answer["generation"] == 1
        assert keeper.users == [os.getpid()]
        connection.sendall(framed(WEIGHTS))
        assert "answered already" in wire.receive(connection, wire.REPLY_LIMIT, 5)[0]["error"]
        assert until(lambda: keeper.users == [])


def test_only_so_many_users_are_served(keeper, monkeypatch):
    monkeypatch.setattr(keepers, "USERS", 1)
    with connect(keeper) as first:
        first.sendall(framed(WEIGHTS))
        wire.close_all(wire.receive(first, wire.REPLY_LIMIT, 5, descriptors=8)[1])
        with connect(keeper) as second:
            assert "has 1 users already" in wire.receive(second, wire.REPLY_LIMIT, 5)[0]["error"]
    assert until(lambda: keeper.users == [])


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_descriptors_than_allowed_are_closed():
    ours, theirs = socket.socketpair()
    before = open_descriptors()
    with ours, theirs:
        wire.send(theirs, {"version": VERSION}, [ours.fileno()] * 3)
        with pytest.raises(SharingError, match="more than 1 file descriptors"):
            wire.receive(ours, wire.REPLY_LIMIT, 1, descriptors=1)
    assert open_descriptors() == before - 2


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "-x", ".hidden", "a b", "ü", "x" * 65])
def test_a_name_is_no_path(name, runtime):
    with pytest.raises(SharingError, match="cannot name a keeper"):
        wire.socket_path(name)


def test_sockets_are_private(runtime, keeper, monkeypatch, tmp_path):
    path = wire.socket_path("small")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tritium").mkdir(mode=0o755)
    with pytest.raises(SharingError, match="folder of this user alone"):
        wire.folder()
    (tmp_path / "tritium").rmdir()
    (tmp_path / "tritium").symlink_to(path.parent)
    with pytest.raises(SharingError, match="folder of this user alone"):
        wire.folder()

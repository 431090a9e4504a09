"""Files: write them whole, check early that they can be written, and digest their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from pathlib import Path

from tritium.errors import ConfigError


def write(path: Path, content: str | bytes, *, make_folder: bool = False) -> None:
    """Replace a file through a temporary one: concurrent readers and writers see a whole file, old or new.

    On an `OSError` the old file stays.
    """
    temporary = _temporary_beside(path, make_folder=make_folder)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def check_writable(path: Path, *, make_folder: bool = False) -> None:
    """Raise a `ConfigError` if `write` would fail, before minutes of work; an existing file stays."""
    try:
        _temporary_beside(path, make_folder=make_folder).unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _temporary_beside(path: Path, *, make_folder: bool) -> Path:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    # mkstemp creates files that only the owner can read: set the usual permissions.
    mask = os.umask(0)
    os.umask(mask)
    Path(name).chmod(0o666 & ~mask)
    return Path(name)


def digest(*parts: str | bytes | Path) -> str:
    """Return a SHA-256 digest of some texts, bytes and files; a file counts by its content, wherever it is.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    total = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()

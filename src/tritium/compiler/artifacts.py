"""Compile artifacts as one file: a second process starts warm, on another machine of the same kind, from any folder.

    artifacts.save("flux.tritium", fingerprint)       # after the first call
    artifacts.load("flux.tritium", fingerprint)       # in the next process, before its first call

A file holds all that this process compiled or found in a warm cache: torch's own artifacts (graphs with their Triton
kernels, those of ops among them), libraries of CPU kernels, the kernels of the attentions that graphs call, and what
`explain` needs. **Artifacts are code**: whoever wrote the file can run anything in the
process that loads it. Load only files from people you trust. The checksum finds damage, not malice.

Layout, numbers in big-endian order:

    8 bytes   magic
    u32       version of the layout
    u32       length of the header
    header    JSON: the fingerprint, the sections (kind, name, size) and the SHA-256 of the payload
    32 bytes  SHA-256 of the header
    payload   the sections, one after the other

Until the fingerprint and both checksums are found right, JSON is all that is read; torch's section is unpickled by torch
after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium import compat
from tritium.compiler import libraries, observe
from tritium.errors import ArtifactError, ArtifactMismatch, FingerprintError
from tritium.fingerprint import Fingerprint
from tritium.ops import triton_launch

MAGIC = b"\x89TRITIUM"
# 2: with Triton kernels of ops. 3: without libraries of ops.
VERSION = 3

_START = struct.Struct(">8sII")
_DIGEST = hashlib.sha256().digest_size

# A name becomes a file name: nothing in it may lead out of a folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# A file of a Triton kernel: its folder, which Triton names in capitals and digits, and its name there.
_KERNEL_NAME = re.compile(r"[A-Z0-9]+\.[A-Za-z0-9_][A-Za-z0-9_.-]*")


# Inductor's C++ kernels are libraries; a Triton kernel of an op that generated code calls is several sections, one a file.
# What `explain` needs is a record.
KINDS = ("torch", "library", "kernel", "record")


@dataclass(frozen=True)
class Section:
    """One piece of the payload."""

    # One of `KINDS`.
    kind: str
    name: str
    content: bytes


@dataclass(frozen=True)
class ArtifactSummary:
    """What a file holds."""

    path: Path
    size: int
    graphs: int
    libraries: int
    # Triton kernels of ops that graphs call; those in generated code are counted with the graphs.
    kernels: int
    records: int
    # Used by this process, and gone from its cache folder before they could be saved: they will be compiled again.
    missing: int = 0

    def __str__(self) -> str:
        kernels = f", {self.kernels} kernels of ops" if self.kernels else ""
        text = f"{self.path}: {self.graphs} graphs, {self.libraries} libraries{kernels}, {self.size / 1e6:.1f} MB"
        return text + (f"; {self.missing} files were gone from the cache and are left out" if self.missing else "")


def save(path: str | os.PathLike[str], fingerprint: Fingerprint) -> ArtifactSummary:
    """Write all that this process compiled or found in its caches; the file is whole or not there."""
    _check_caching("saved")
    found = compat.cache_artifacts()
    if found is None:
        raise ArtifactError("there are no compile artifacts to save: nothing was compiled in this process")
    content, graphs = found
    kept = list(_kept())
    sections = [Section("torch", "artifacts", content), *(section for section in kept if section is not None)]
    target = Path(path)
    written = encode(fingerprint, sections, graphs)
    _write(target, written)
    return _summary(target, len(written), graphs, sections, missing=kept.count(None))


def load(path: str | os.PathLike[str], fingerprint: Fingerprint) -> ArtifactSummary:
    """Put what a file holds into this process's caches, if it was made for this fingerprint.

    Raises `ArtifactMismatch` for another fingerprint and `ArtifactError` for a file that cannot be read; nothing has
    changed then, and compiling as usual works.
    """
    _check_caching("used")
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{source} cannot be read: {error.strerror}") from error
    sections, graphs = decode(content, fingerprint, source)
    compat.start_hashing()
    for section in sections:
        _put(section, source)
    libraries.install()
    return _summary(source, len(content), graphs, sections)


def _check_caching(verb: str) -> None:
    obstacle = compat.caching_obstacle()
    if obstacle is not None:
        raise ArtifactError(f"compile artifacts cannot be {verb}: {obstacle}")


def _kept() -> Iterator[Section | None]:
    """What Tritium keeps beside Inductor's cache and this process used; None for a file that is gone."""
    store = observe.store()
    files = [("library", digest, file) for digest, file in libraries.SHELF.used.items()]
    files += [("record", key, store.path(key)) for key in observe.used()]
    of_triton = dict.fromkeys([*compat.triton_files(triton_launch.started()), *compat.launch_libraries()])
    files += [("kernel", f"{file.parent.name}.{file.name}", file) for file in of_triton]
    for kind, name, file in files:
        try:
            yield Section(kind, name, file.read_bytes())
        except FileNotFoundError:
            yield None


def _put(section: Section, source: Path) -> None:
    if section.kind == "torch":
        if not compat.load_cache_artifacts(section.content):
            raise ArtifactError(f"{source}: this torch cannot read the artifacts in it")
        return
    if section.kind == "kernel":
        folder, _, name = section.name.partition(".")
        compat.put_triton_file(folder, name, section.content, _write)
        return
    target = {
        "library": libraries.SHELF.path(section.name),
        "record": observe.store().path(section.name),
    }[section.kind]
    # Names are digests of the content's origin: what is there already is the same.
    if not target.exists():
        _write(target, section.content)


def _summary(path: Path, size: int, graphs: int, sections: list[Section], missing: int = 0) -> ArtifactSummary:
    kinds = Counter(section.kind for section in sections)
    kernels = sum(section.kind == "kernel" and section.name.endswith(".cubin") for section in sections)
    return ArtifactSummary(path, size, graphs, kinds["library"], kernels, kinds["record"], missing)


def _write(target: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes the same file."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ArtifactError(f"{target} cannot be written: {error.strerror}") from error


def encode(fingerprint: Fingerprint, sections: list[Section], graphs: int) -> bytes:
    """The bytes of a file."""
    payload = b"".join(section.content for section in sections)
    header = json.dumps(
        {
            "fingerprint": fingerprint.to_dict(),
            "graphs": graphs,
            "sections": [[section.kind, section.name, len(section.content)] for section in sections],
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
    ).encode()
    start = _START.pack(MAGIC, VERSION, len(header))
    return b"".join([start, header, hashlib.sha256(start + header).digest(), payload])


def decode(content: bytes, fingerprint: Fingerprint, source: object) -> tuple[list[Section], int]:
    """The sections of a file and how many graphs they hold, or an `ArtifactError` that says what is wrong."""
    header, payload = _header(content, source)
    try:
        there = Fingerprint.from_dict(header["fingerprint"])
        # First: another version of the package may know other sections.
        differences = fingerprint.differences(there)
        if differences:
            raise ArtifactMismatch(source, differences)
        shapes = [_shape(entry) for entry in header["sections"]]
        expected, graphs = str(header["sha256"]), int(header["graphs"])
    except (KeyError, TypeError, ValueError, FingerprintError) as error:
        raise ArtifactError(f"{source}: the header means nothing: {error}") from error
    size_written = sum(size for _, _, size in shapes)
    if len(payload) < size_written:
        raise ArtifactError(f"{source} is incomplete: {len(payload)} of {size_written} bytes")
    if len(payload) > size_written:
        raise ArtifactError(f"{source} is longer than it should be: {len(payload)} bytes instead of {size_written}")
    if hashlib.sha256(payload).hexdigest() != expected:
        raise ArtifactError(f"{source} is damaged: its checksum is not the one it was written with")
    sections, position = [], 0
    for kind, name, size in shapes:
        sections.append(Section(kind, name, bytes(payload[position : position + size])))
        position += size
    return sections, graphs


def _header(content: bytes, source: object) -> tuple[dict[str, Any], memoryview]:
    """The header, once it is known to be undamaged, and the payload."""
    if content[: len(MAGIC)] != MAGIC[: len(content)] or not content:
        raise ArtifactError(f"{source} is no file of compile artifacts")
    if len(content) < _START.size:
        raise ArtifactError(f"{source} is incomplete: it ends in the header")
    _, version, length = _START.unpack_from(content)
    if version > VERSION:
        raise ArtifactError(f"{source} has layout {version}, this version of Tritium reads up to {VERSION}")
    end = _START.size + length
    if len(content) < end + _DIGEST:
        raise ArtifactError(f"{source} is incomplete: it ends in the header")
    if hashlib.sha256(content[:end]).digest() != content[end : end + _DIGEST]:
        raise ArtifactError(f"{source} is damaged: the checksum of its header does not fit")
    try:
        header = json.loads(content[_START.size : end])
    except ValueError as error:
        raise ArtifactError(f"{source}: the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{source}: the header is no mapping")
    return header, memoryview(content)[end + _DIGEST :]


def _shape(entry: Any) -> tuple[str, str, int]:
    kind, name, size = entry
    if kind not in KINDS:
        raise ValueError(f"there are no sections of kind {kind!r}")
    if not isinstance(name, str) or (_KERNEL_NAME if kind == "kernel" else _NAME).fullmatch(name) is None:
        raise ValueError(f"a section cannot be called {name!r}")
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"a section cannot have {size!r} bytes")
    return kind, name, size

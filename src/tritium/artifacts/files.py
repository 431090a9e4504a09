"""Save compile artifacts to one file, so that processes on machines of the same kind start warm.

    artifacts.save("flux.tritium", fingerprint)       # after the first call
    artifacts.load("flux.tritium", fingerprint)       # in the next process, before its first call

A file contains everything that this process compiled or found in a warm cache: torch's artifacts (graphs with their
Triton kernels, including those of ops), libraries of CPU kernels, attention kernels that graphs call, and the data for
`explain`. **Artifacts are code**: a file can run anything in the process that loads it. Load only files from people you
trust. The checksum detects damage, not malice.

Layout, with big-endian integers:

    8 bytes   magic
    u32       version of the layout
    u32       length of the header
    header    JSON: the fingerprint, the sections (kind, name, size) and the SHA-256 of the payload
    32 bytes  SHA-256 of the header
    payload   the sections, one after the other

Only JSON is parsed until the fingerprint and both checksums have been verified. Then torch unpickles its section.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritium import compat, disk
from tritium.artifacts import libraries, observations
from tritium.artifacts.fingerprint import Fingerprint
from tritium.errors import ArtifactError, ArtifactMismatch, FingerprintError
from tritium.ops import triton_launch

MAGIC = b"\x89TRITIUM"
# 2: with Triton kernels of ops. 3: without libraries of ops.
VERSION = 3

_START = struct.Struct(">8sII")
_DIGEST = hashlib.sha256().digest_size

# Names become file names and must not lead out of a folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# A file of a Triton kernel: Triton's folder name in capitals and digits, then the file name.
_KERNEL_NAME = re.compile(r"[A-Z0-9]+\.[A-Za-z0-9_][A-Za-z0-9_.-]*")


# "library": a C++ kernel of Inductor. "kernel": one file of a Triton kernel of an op that generated code calls.
# "record": data for `explain`.
KINDS = ("torch", "library", "kernel", "record")


@dataclass(frozen=True)
class Section:
    """One piece of the payload."""

    # An entry of `KINDS`.
    kind: str
    name: str
    content: bytes


@dataclass(frozen=True)
class ArtifactSummary:
    """The content of a file."""

    path: Path
    size: int
    graphs: int
    libraries: int
    # Triton kernels of ops that graphs call; kernels in generated code are counted with the graphs.
    kernels: int
    records: int
    # Files used by this process but deleted from its cache before saving; they will be compiled again.
    missing: int = 0

    def __str__(self) -> str:
        kernels = f", {self.kernels} kernels of ops" if self.kernels else ""
        text = f"{self.path}: {self.graphs} graphs, {self.libraries} libraries{kernels}, {self.size / 1e6:.1f} MB"
        return text + (f"; {self.missing} files were gone from the cache and are left out" if self.missing else "")


def save(path: str | os.PathLike[str], fingerprint: Fingerprint) -> ArtifactSummary:
    """Save everything that this process compiled or found in its caches, completely or not at all."""
    _check_caching("saved")
    found = compat.artifacts.cache_artifacts()
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
    """Put a file's content into this process's caches, if the fingerprint matches.

    Raises `ArtifactMismatch` for another fingerprint and `ArtifactError` for an unreadable file. The caches are then
    unchanged, and compiling still works.
    """
    _check_caching("used")
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{source} cannot be read: {error.strerror}") from error
    sections, graphs = decode(content, fingerprint, source)
    compat.inductor.start_hashing()
    for section in sections:
        _put(section, source)
    libraries.install()
    return _summary(source, len(content), graphs, sections)


def _check_caching(verb: str) -> None:
    obstacle = compat.artifacts.caching_obstacle()
    if obstacle is not None:
        raise ArtifactError(f"compile artifacts cannot be {verb}: {obstacle}")


def _kept() -> Iterator[Section | None]:
    """Yield Tritium's files that this process used, as sections; None for a deleted file."""
    store = observations.store()
    files = [("library", digest, file) for digest, file in libraries.SHELF.used.items()]
    files += [("record", key, store.path(key)) for key in observations.used()]
    of_triton = dict.fromkeys(
        [*compat.triton_cache.triton_files(triton_launch.started()), *compat.triton_cache.launch_libraries()]
    )
    files += [("kernel", f"{file.parent.name}.{file.name}", file) for file in of_triton]
    for kind, name, file in files:
        try:
            yield Section(kind, name, file.read_bytes())
        except FileNotFoundError:
            yield None


def _put(section: Section, source: Path) -> None:
    if section.kind == "torch":
        if torch.compiler.load_cache_artifacts(section.content) is None:
            raise ArtifactError(f"{source}: this torch cannot read the artifacts in it")
        return
    if section.kind == "kernel":
        folder, _, name = section.name.partition(".")
        compat.triton_cache.put_triton_file(folder, name, section.content, _write)
        return
    target = {
        "library": libraries.SHELF.path(section.name),
        "record": observations.store().path(section.name),
    }[section.kind]
    # Names are digests of the content's origin: an existing file has the same content.
    if not target.exists():
        _write(target, section.content)


def _summary(path: Path, size: int, graphs: int, sections: list[Section], missing: int = 0) -> ArtifactSummary:
    kinds = Counter(section.kind for section in sections)
    kernels = sum(section.kind == "kernel" and section.name.endswith(".cubin") for section in sections)
    return ArtifactSummary(path, size, graphs, kinds["library"], kernels, kinds["record"], missing)


def _write(target: Path, content: bytes) -> None:
    try:
        disk.write(target, content, make_folder=True)
    except OSError as error:
        raise ArtifactError(f"{target} cannot be written: {error.strerror}") from error


def encode(fingerprint: Fingerprint, sections: list[Section], graphs: int) -> bytes:
    """Return the bytes of a file."""
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
    """Return a file's sections and number of graphs, or raise an `ArtifactError` with the reason."""
    header, payload = _header(content, source)
    try:
        there = Fingerprint.from_dict(header["fingerprint"])
        # Compare first: another version of the package may have other kinds of sections.
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
    """Return the header, after verifying its checksum, and the payload."""
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

"""Save compile artifacts to one file, so that processes on machines of the same kind start warm.

    artifacts.save("flux.tritium", fingerprint)       # after the first call
    artifacts.load("flux.tritium", fingerprint)       # in the next process, before its first call

A file contains everything that this process compiled or found in a warm cache: torch's artifacts (graphs with their
Triton kernels, including those of ops), libraries of CPU kernels, attention kernels that graphs call, and the data for
`explain`. **Artifacts are code**: a file can run anything in the process that loads it. Load only files from people you
trust. The checksum detects damage, not malice.

A file begins with `MAGIC` and the SHA-256 of the rest: a line of JSON (the fingerprint, and the kind, name and size of each
section), then the sections one after the other. Only JSON is parsed until checksum and fingerprint have been verified.
Then torch unpickles its section.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tritium import compat, disk
from tritium.artifacts import libraries, observations
from tritium.artifacts.fingerprint import Fingerprint
from tritium.errors import ArtifactError, ArtifactMismatch, FingerprintError
from tritium.ops import triton_launch

MAGIC = b"\x89TRITIUM"
VERSION = 4

_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Section:
    # "torch": torch's artifacts. "library": a C++ kernel of Inductor. "kernel": one file of a Triton kernel of an op that
    # generated code calls. "record": data for `explain`.
    kind: str
    name: str
    content: bytes


@dataclass(frozen=True)
class ArtifactSummary:
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
    sections = [Section("torch", "artifacts", content), *filter(None, kept)]
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
    reason = compat.artifacts.decline_caching()
    if reason is not None:
        raise ArtifactError(f"compile artifacts cannot be {verb}: {reason}")


def _kept() -> Iterator[Section | None]:
    """Yield Tritium's files that this process used, as sections; None for a deleted file."""
    store = observations.store()
    files = [("library", digest, file) for digest, file in libraries.USED.items()]
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
    target = libraries.path(section.name) if section.kind == "library" else observations.store().path(section.name)
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
    header = {
        "version": VERSION,
        "fingerprint": fingerprint.to_dict(),
        "graphs": graphs,
        "sections": [[section.kind, section.name, len(section.content)] for section in sections],
    }
    rest = b"".join([json.dumps(header).encode(), b"\n", *(section.content for section in sections)])
    return MAGIC + hashlib.sha256(rest).digest() + rest


def decode(content: bytes, fingerprint: Fingerprint, source: object) -> tuple[list[Section], int]:
    """Return a file's sections and number of graphs, or raise an `ArtifactError` with the reason."""
    if not content.startswith(MAGIC):
        raise ArtifactError(f"{source} is no file of compile artifacts")
    start = len(MAGIC) + _DIGEST
    rest = content[start:]
    if hashlib.sha256(rest).digest() != content[len(MAGIC) : start]:
        raise ArtifactError(f"{source} is incomplete or damaged: its checksum is not the one it was written with")
    line, payload = rest.split(b"\n", 1)
    header = json.loads(line)
    if header["version"] != VERSION:
        raise ArtifactError(f"{source} has layout {header['version']}, this version of Tritium reads {VERSION}")
    try:
        there = Fingerprint.from_dict(header["fingerprint"])
    except FingerprintError as error:
        raise ArtifactError(f"{source} is from another version of Tritium: {error}") from error
    if differences := fingerprint.differences(there):
        raise ArtifactMismatch(source, differences)
    sections, position = [], 0
    for kind, name, size in header["sections"]:
        sections.append(Section(kind, name, payload[position : position + size]))
        position += size
    return sections, header["graphs"]

"""Compile CUDA C++ when it is first needed, by NVRTC: the library comes with PyTorch's CUDA builds and with CUDA.

Compiled code is stored next to Inductor's cache under a digest of the text, the options and NVRTC's version.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tritium import compat, disk
from tritium.errors import ProviderError

# The major versions of CUDA whose compiler is used.
MAJORS = ("13", "12")

# "sm_90a" has Hopper's products. Functions and variables without an annotation are the device's.
OPTIONS = ("--gpu-architecture=sm_90a", "-default-device")

# The most characters of the compiler's messages that an error contains.
MOST_OF_A_LOG = 1000


def paths() -> Iterator[str]:
    """Yield where the library may be: the version that torch was built with first."""
    own = (torch.version.cuda or "").partition(".")[0]
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for major in sorted(MAJORS, key=lambda major: major != own):
        name = f"libnvrtc.so.{major}"
        yield name
        for folder in packages:
            yield from map(str, sorted(folder.glob(f"*/lib/{name}")))
        for pattern in (f"cuda*/lib64/{name}", f"cuda*/targets/*/lib/{name}"):
            yield from map(str, sorted(Path("/usr/local").glob(pattern)))


@functools.cache
def library() -> Any:
    """Return the loaded library, or None if it is not installed."""
    for path in paths():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def decline() -> str | None:
    """Return why nothing can be compiled here, or None."""
    return "NVRTC (libnvrtc of CUDA 12 or 13) was not found" if library() is None else None


@functools.cache
def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def key(text: str, options: Sequence[str]) -> str:
    """Return the digest under which the compiled code of a text is stored."""
    return disk.digest(text, *options, version())


def cubin(name: str, text: str, macros: Sequence[str] = ()) -> bytes:
    """Return the machine code of a text, from the cache if it was compiled before; raise a `ProviderError`."""
    if reason := decline():
        raise ProviderError(f"{name} cannot be compiled: {reason}")
    options = [*OPTIONS, *(f"-D{macro}" for macro in macros)]
    path = compat.inductor.cache_dir() / "tritium" / "cubin" / f"{key(text, options)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compiled(name, text, options)
    # A cache that cannot be written costs the next process the compilation, some seconds.
    with contextlib.suppress(OSError):
        disk.write(path, code, make_folder=True)
    return code


def compiled(name: str, text: str, options: Sequence[str]) -> bytes:
    """Compile a text; raise a `ProviderError` of one line with the compiler's messages."""
    nvrtc, program = library(), ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            lines = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").split("\n")
            log = "; ".join(line.strip() for line in lines if line.strip())
            raise ProviderError(f"NVRTC {version()} cannot compile {name}: {log[:MOST_OF_A_LOG]}")
        return _read(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    """Return a result of a program: its log or its code."""
    size = ctypes.c_size_t()
    _check(getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), f"nvrtcGet{what}")(program, content), f"nvrtcGet{what}")
    return content.raw


def _check(result: int, call: str) -> None:
    if result:
        raise ProviderError(f"{call} of NVRTC failed with error {result}")

"""Start kernels of CUDA C++ through the driver's library, on PyTorch's current stream.

    kernels = cuda_launch.load("name.cu", text, device, (Kernel("scale", "Pif", threads=256),))
    kernels["scale"].launch((blocks, 1, 1), tensor, count, 2.0)

A signature has a letter per parameter, as in `struct`: P a tensor or pointer, i an int, q a 64-bit int, f a float.
Loading code inside a CUDA graph capture is not allowed: call `load` before.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tritium import device
from tritium.errors import ProviderError
from tritium.ops import nvrtc

# The attribute of a function by which it may use more than 48 KiB of dynamic shared memory.
MAX_DYNAMIC_SHARED_MEMORY = 8

_LOCK = threading.Lock()
_LOADED: dict[tuple[str, str, tuple[str, ...], int], dict[str, Loaded]] = {}


@dataclass(frozen=True)
class Kernel:
    """A kernel as its text declares it."""

    name: str
    signature: str
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """A kernel in the memory of one GPU."""

    kernel: Kernel
    function: ctypes.c_void_p
    context: ctypes.c_void_p
    index: int

    def launch(self, grid: tuple[int, int, int], *arguments: torch.Tensor | float) -> None:
        """Start the kernel on the current stream of its GPU."""
        content, offsets = packed(self.kernel.signature, arguments)
        memory = ctypes.create_string_buffer(content, len(content))
        start = ctypes.addressof(memory)
        # The driver copies the parameters before it returns.
        parameters = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.index).cuda_stream)
        sizes = map(ctypes.c_uint, (*grid, self.kernel.threads, 1, 1, self.kernel.shared_bytes))
        with _current(self.context):
            _check(_driver().cuLaunchKernel(self.function, *sizes, stream, parameters, None), self.kernel.name)


@functools.cache
def offsets_of(signature: str) -> tuple[int, ...]:
    """Return the place of each parameter in memory, aligned to its size.

    >>> offsets_of("PiPfq")
    (0, 8, 16, 24, 32)
    """
    ends = (struct.calcsize(signature[: place + 1]) for place in range(len(signature)))
    return tuple(end - struct.calcsize(letter) for end, letter in zip(ends, signature, strict=True))


def packed(signature: str, arguments: Sequence[torch.Tensor | float]) -> tuple[bytes, tuple[int, ...]]:
    """Return the parameters of a launch as bytes, and the place of each."""
    if len(arguments) != len(signature):
        raise ProviderError(f"a kernel with the signature {signature!r} takes {len(signature)} arguments")
    values = (value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments)
    return struct.pack(signature, *values), offsets_of(signature)


def load(
    name: str, text: str, where: torch.device, kernels: Sequence[Kernel], macros: Sequence[str] = ()
) -> Mapping[str, Loaded]:
    """Return the kernels of a text, compiled and loaded once per process and GPU; raise a `ProviderError`."""
    index = torch.cuda.current_device() if where.index is None else where.index
    key = (name, text, tuple(macros), index)
    if (loaded := _LOADED.get(key)) is not None:
        return loaded
    if device.is_capturing():
        raise ProviderError(f"{name} cannot be loaded while a CUDA graph is captured: make one call before")
    with _LOCK:
        if key not in _LOADED:
            _LOADED[key] = _loaded(nvrtc.cubin(name, text, macros), kernels, index)
        return _LOADED[key]


def _loaded(code: bytes, kernels: Sequence[Kernel], index: int) -> dict[str, Loaded]:
    driver, context, module = _driver(), _context(index), ctypes.c_void_p()
    loaded = {}
    with _current(context):
        _check(driver.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        for kernel in kernels:
            function = ctypes.c_void_p()
            _check(driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()), kernel.name)
            limit = ctypes.c_int(kernel.shared_bytes)
            _check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_MEMORY, limit), kernel.name)
            # Otherwise a driver may load the code at the first launch, which can be inside a capture.
            if hasattr(driver, "cuFuncLoad"):
                _check(driver.cuFuncLoad(function), kernel.name)
            loaded[kernel.name] = Loaded(kernel, function, context, index)
    return loaded


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ProviderError("the driver's library libcuda.so.1 was not found") from error
    _check(driver.cuInit(0), "cuInit", driver)
    return driver


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """Return the context of a GPU that PyTorch uses too."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context


@contextmanager
def _current(context: ctypes.c_void_p) -> Iterator[None]:
    """Make a context current in this thread: a new thread, and one that uses another GPU, has another."""
    _check(_driver().cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _check(result: int, call: str, driver: Any = None) -> None:
    if not result:
        return
    words = ctypes.c_char_p()
    (driver or _driver()).cuGetErrorString(ctypes.c_int(result), ctypes.byref(words))
    reason = words.value.decode() if words.value else "unknown"
    raise ProviderError(f"CUDA's driver failed in {call}: {reason} (error {result})")

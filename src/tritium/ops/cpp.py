"""C++ kernels for the CPU: a file `kernel.cpp` in the folder of an op, built at the first call and called through ctypes.

    negate = cpp.function(Path(__file__).with_name("kernel.cpp"), "negate", (cpp.POINTER, cpp.POINTER, cpp.INTEGER))
    negate(x.data_ptr(), out.data_ptr(), x.numel())

The file gives `extern "C"` functions without a result, on raw pointers. Importing builds nothing and looks for nothing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tritium import compat
from tritium.errors import ProviderError

POINTER = ctypes.c_void_p
INTEGER = ctypes.c_int64
FLOAT = ctypes.c_double

# What `vector.h` knows.
DTYPES = (torch.float32, torch.bfloat16)

# No -ffast-math: kernels must keep NaN and infinity. Sums are reordered where a loop says `omp simd reduction`.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast")

# Fewer numbers than this are not worth waking a second thread; the same as PyTorch's own.
ONE_THREAD = 32_768

# Headers that kernels share.
HEADERS = Path(__file__).parent

# Libraries that this process loaded: what belongs into its artifacts.
_loaded: dict[Path, None] = {}

# What the code that -fopenmp generates calls to start threads: GCC's name and clang's.
_STARTS_THREADS = {False: "GOMP_parallel", True: "__kmpc_fork_call"}


def cannot_run(*tensors: torch.Tensor | None) -> str | None:
    """Why a C++ kernel cannot be built here or take these tensors, or None. Builds nothing."""
    elsewhere = {tensor.device.type for tensor in tensors if tensor is not None} - {"cpu"}
    if elsewhere:
        return f"C++ kernels run on a CPU, this graph runs on {', '.join(sorted(elsewhere))}"
    if sys.platform != "linux":
        return f"C++ kernels are built on Linux alone, this is {sys.platform}"
    if _which(_candidates()) is None:
        return f"no C++ compiler: {' or '.join(_candidates())} is not on the PATH"
    return None


def cannot_read(*dtypes: torch.dtype | None) -> str | None:
    """Why a kernel that has float32 and bfloat16 in memory cannot take these dtypes, or None."""
    other = {str(dtype) for dtype in dtypes if dtype is not None and dtype not in DTYPES}
    return f"the kernel reads and writes float32 and bfloat16, not {', '.join(sorted(other))}" if other else None


def threads(numbers: int) -> int:
    """How many threads share some numbers."""
    return 1 if numbers < ONE_THREAD else torch.get_num_threads()


@functools.cache
def function(source: Path, name: str, arguments: tuple[type[Any], ...]) -> Callable[..., None]:
    """A function of a source file, which is built and loaded first if it was not before."""
    library = build(source)
    found = getattr(ctypes.CDLL(str(library)), name)
    _loaded[library] = None
    found.argtypes, found.restype = arguments, None
    return found  # type: ignore[no-any-return]


@functools.cache
def packed(source: Path, name: str, layout: str) -> Callable[..., None]:
    """A function that takes one struct: called with the values of its fields, "q" for integers and addresses, "d" for doubles."""
    pack, found = struct.Struct(layout).pack, function(source, name, (POINTER,))
    return lambda *values: found(pack(*values))


def folder() -> Path:
    """Where libraries lie, each under a digest of what it was made of."""
    return compat.cache_dir() / "tritium" / "cpp"


def loaded() -> list[Path]:
    """The libraries that this process loaded."""
    return list(_loaded)


def build(source: Path) -> Path:
    """The shared library of a source file: the one in the cache, or a new one."""
    compiler = _compiler(_candidates())
    macros = _macros(compiler)
    linking = _linking("#define __clang__ " in macros)
    # The compiler's own macros say its version and what -march=native means on this machine.
    digest = hashlib.sha256("\0".join((compiler, *FLAGS, *linking, macros)).encode())
    for file in (source, *sorted(source.parent.glob("*.h")), *sorted(HEADERS.glob("*.h"))):
        digest.update(file.read_bytes())
    library = folder() / f"{source.parent.name}-{digest.hexdigest()[:32]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as name:
            object_file, made = Path(name) / "kernel.o", Path(name) / "kernel.so"
            _call([compiler, *FLAGS, f"-I{HEADERS}", "-c", str(source), "-o", str(object_file)])
            _call([compiler, "-shared", *linking, str(object_file), "-o", str(made)])
            # Whole or not at all, whoever else builds the same.
            made.replace(library)
    return library


def _candidates() -> tuple[str, ...]:
    """The compilers that Inductor would try, in its order: $CXX, else g++."""
    names = compat.inductor_config().cpp.cxx
    return tuple(str(name) for name in (names if isinstance(names, (list, tuple)) else [names]) if name)


@functools.cache
def _which(candidates: tuple[str, ...]) -> str | None:
    return next((path for name in candidates if (path := shutil.which(name))), None)


def _compiler(candidates: tuple[str, ...]) -> str:
    compiler = _which(candidates)
    if compiler is None:
        raise ProviderError(f"no C++ compiler: {' or '.join(candidates)} is not on the PATH")
    return compiler


@functools.cache
def _macros(compiler: str) -> str:
    return _call([compiler, *FLAGS, "-dM", "-E", "-x", "c++", "/dev/null"])


def _linking(is_clang: bool) -> tuple[str, ...]:
    """Options for the linker, so that a kernel's threads are torch's.

    A wheel of torch may bring its OpenMP runtime under a file name of its own. A library linked to the system's runtime
    would then load a second one, with a second pool of threads. Left unlinked, the symbols are found in torch's.
    """
    shared = hasattr(ctypes.CDLL(None), _STARTS_THREADS[is_clang])
    return () if shared else ("-fopenmp",)


def _call(command: list[str]) -> str:
    # The compiler is the one the user chose for Inductor.
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else f"exit {done.returncode}")
        raise ProviderError(f"{Path(command[0]).name} cannot build a kernel: {reason}")
    return done.stdout

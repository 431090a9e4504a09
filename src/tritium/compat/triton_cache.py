"""Read and fill Triton's cache of compiled kernels.

A kernel's files are in a folder named by a hash of its source, its options and the kind of device; a list among them
has the full paths of the others. The cache also has libraries from a C compiler: the driver's, and up to Triton 3.6 one
for each signature of kernel arguments.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tritium import envs

_LIST = "__grp__"

# The files that a launch reads; the others are intermediate results.
_READ = (".json", ".cubin")


def triton_files(kernels: Iterable[Any]) -> list[Path]:
    """Return the cached files that launches of kernels have read, each list after the files it names.

    The driver's library is included, since Inductor's kernels may have used it too.
    """
    found: dict[Path, None] = dict.fromkeys(_libraries(_driver().get("load_binary")))
    for kernel in kernels:
        found |= dict.fromkeys(_kernel_files(kernel))
        found |= dict.fromkeys(_of_runner(getattr(kernel, "_run", None)))
    return list(found)


def launch_libraries() -> list[Path]:
    """Return the libraries through which generated code launches users' kernels, up to Triton 3.6.

    torch's artifacts contain these kernels, but not their launchers.
    """
    cache: Any = sys.modules.get("torch._inductor.codecache")
    heuristics: Any = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if cache is None or heuristics is None:
        return []
    kernels = [
        value
        for module in getattr(getattr(cache, "PyCodeCache", None), "modules", ())
        for value in vars(module).values()
        if isinstance(value, heuristics.CachingAutotuner) and getattr(value, "custom_kernel", False)
    ]
    # A launcher is a generated function that calls Triton's launcher by this name.
    runners = [
        getattr(launcher, "__globals__", {}).get("runner") for kernel in kernels for launcher in kernel.launchers
    ]
    return list(dict.fromkeys(library for runner in runners for library in _of_runner(runner)))


def _of_runner(runner: Any) -> Iterator[Path]:
    launch = getattr(runner, "launch", None)
    # The launcher may be wrapped in a function that prepares arguments.
    yield from _libraries(launch, *(cell.cell_contents for cell in getattr(launch, "__closure__", None) or ()))


def _driver() -> Mapping[str, Any]:
    """Return the functions of the driver's library if this process has loaded it."""
    module: Any = sys.modules.get("triton.backends.nvidia.driver")
    return vars(getattr(getattr(module, "CudaUtils", None), "instance", object)) if module is not None else {}


def _kernel_files(kernel: Any) -> Iterator[Path]:
    paths = [Path(path) for path in getattr(kernel, "metadata_group", {}).values()]
    yield from (path for path in paths if path.suffix in _READ)
    yield from (path.with_name(_LIST + path.name) for path in paths if path.suffix == ".json")


def _libraries(*functions: Any) -> Iterator[Path]:
    """Yield the compiled C libraries that functions come from."""
    for function in functions:
        file = getattr(getattr(function, "__self__", None), "__file__", None)
        if file is not None:
            yield Path(file)


def triton_folder() -> Path:
    """Set and return the folder of Triton's cache, as Inductor does with its first kernel."""
    folders = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return Path(envs.set_unless_set(envs.TRITON_CACHE, folders.triton_cache_dir(index)))


def put_triton_file(folder: str, name: str, content: bytes, write: Callable[[Path, bytes], None]) -> None:
    """Write a file of a kernel's folder to Triton's cache; keep an existing file, which is equal."""
    target = triton_folder() / folder / name
    if target.exists():
        return
    if name.startswith(_LIST):
        # From Triton 3.8 on, a single missing file of the list makes the whole kernel a cache miss.
        names = [child for child in json.loads(content)["child_paths"] if Path(child).suffix in _READ]
        content = json.dumps({"child_paths": {child: str(target.with_name(child)) for child in names}}).encode()
    write(target, content)

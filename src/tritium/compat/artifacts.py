"""Compile artifacts: those of torch, and the libraries of C++ kernels, which torch does not include."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tritium.compat.inductor import inductor_config, inductor_settings
from tritium.compat.wrapping import wrap_once


def decline_caching() -> str | None:
    """Return why Inductor's cache is not used, or None."""
    config = inductor_config()
    if config.force_disable_caches:
        return "torch's compile caches are off (force_disable_caches)"
    if not config.fx_graph_cache:
        return "Inductor's graph cache is off (fx_graph_cache)"
    return None


def cache_artifacts() -> tuple[bytes, int] | None:
    """Return the contents of torch's caches for this process as bytes, and their number of graphs.

    `torch.compiler.save_cache_artifacts` writes one group of entries per call, and loading keeps only the last group: a
    second save in one process would lose the entries of the first. So all entries are written as one group, and torch's
    list of new entries is left unchanged.
    """
    manager = importlib.import_module("torch.compiler._cache").CacheArtifactManager
    seen = list(manager._seen_artifacts)
    with manager.with_fresh_cache():
        for artifact in seen:
            manager._new_cache_artifacts[artifact.type()].append(artifact)
        written = manager.serialize()
    return None if written is None else (written[0], sum(artifact.type() == "inductor" for artifact in seen))


def share_libraries(find: Callable[[str], Path | None], loaded: Callable[[str, Path], None]) -> None:
    """Search for Inductor's C++ kernels with `find` before compiling, and report loaded libraries to `loaded`.

    Inductor's key for a library is the compiler's full command line, which contains torch's folder and needs a run of
    the compiler for each vector instruction set. The key here is the source and Inductor's settings.
    """
    bindings = importlib.import_module("torch._inductor.codecache").CppPythonBindingsCodeCache

    def load_async(original: Any, cls: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(cls, main_code, *args, **kwargs).arguments
        # Subclasses build wrappers with other libraries; extra flags may name files.
        if cls is not bindings or given.get("extra_flags"):
            return original(cls, main_code, *args, **kwargs)
        request = _library_request(given)
        library = find(request)
        # Start now and not at the first call: the compiler runs in the background until then.
        started = original(cls, main_code, *args, **kwargs) if library is None else None

        @functools.cache
        def load() -> Any:
            module = _load_library(bindings, library) if library is not None else None
            if module is None:
                module = (started or original(cls, main_code, *args, **kwargs))()
            loaded(request, Path(module.__file__))
            return module

        return load

    wrap_once(bindings, "load_async", load_async)


def _library_request(given: Mapping[str, Any]) -> str:
    """Return a key with all inputs of a library except the machine: its source and its compile settings."""
    arguments = {name: value for name, value in given.items() if name not in {"cls", "submit_fn"}}
    # The choice of compiler does not change the meaning of the source.
    settings = {
        name: value
        for name, value in inductor_settings().items()
        if name.startswith(("cpp.", "aot_inductor.")) and name != "cpp.cxx"
    }
    return repr((sorted(arguments.items()), sorted(settings.items())))


def _load_library(bindings: Any, library: Path) -> Any:
    try:
        return bindings._load_library(str(library), library.stem)
    except (ImportError, OSError) as error:
        warnings.warn(
            f"tritium: {library.name} cannot be loaded and is compiled again: {error}", RuntimeWarning, stacklevel=2
        )
        return None

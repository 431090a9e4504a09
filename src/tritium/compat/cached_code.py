"""Run Dynamo's compiled code of a function, refuse to compile more, and raise limits, for one thread.

torch's stances do each of these for the whole process: they would fail or stop compilations of other threads.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any


class WouldCompile(Exception):
    """No compiled version fits a call; `reason` is the first failed guard, empty if nothing was compiled."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def only_cached(function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that runs a function's compiled versions and raises `WouldCompile` if none fits.

    `compiled` is the result of torch.compile for the function. Compiled functions that it calls compile as usual.
    """
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
    trace_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    result: Any = importlib.import_module("torch._dynamo.types").ConvertFrameReturn
    # The callback that Dynamo runs for a function made by torch.compile.
    callback = inspect.getclosurevars(compiled).nonlocals["callback"]

    def refuse(frame: Any, *_: Any, **__: Any) -> Any:
        if trace_rules.check(frame.f_code) or not convert_frame.has_tensor_in_frame(frame):
            return result()
        raise WouldCompile(_failed_guard(frame, eval_frame.innermost_backend(callback)))

    # Dynamo compares the backends of compiled versions with this one.
    refuse._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
    run: Callable[..., Any] = eval_frame._TorchDynamoContext(refuse)(function)
    return run


def _failed_guard(frame: Any, backend: Any) -> str:
    """Return the first failed guard of a frame's compiled versions, without the version's number."""
    entries = importlib.import_module("torch._C._dynamo.eval_frame")._debug_get_cache_entry_list(frame.f_code)
    if not entries:
        return ""
    explain = importlib.import_module("torch._dynamo.guards").get_and_maybe_log_recompilation_reasons
    # Earlier versions take the first of linked entries instead of a list.
    takes_list = next(iter(inspect.signature(explain).parameters)) == "cache_entries"
    reasons = explain(entries if takes_list else entries[0], frame, backend, skip_logging=True)
    first = str(reasons[0]).strip().splitlines()[0] if reasons else ""
    number, separator, guard = first.partition(": ")
    return guard if separator and number.replace("/", "").replace("_", "").isdigit() else first


# Before torch 2.13 this configuration is global to the process: overlapping changes would not be restored.
_LIMITS = threading.RLock()


@contextlib.contextmanager
def recompile_limit(least: int) -> Iterator[None]:
    """Let Dynamo keep at least `least` versions of one function inside; only one thread enters at a time."""
    config: Any = importlib.import_module("torch._dynamo.config")
    with _LIMITS:
        limit = max(int(config.recompile_limit), least)
        total = max(int(config.accumulated_recompile_limit), limit * 64)
        with config.patch(recompile_limit=limit, accumulated_recompile_limit=total):
            yield

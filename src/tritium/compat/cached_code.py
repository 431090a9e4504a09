"""Run what Dynamo has compiled of a function, refuse to compile more, and raise its limits: in one thread at a time.

torch has a stance for each of these, and a stance belongs to the process: it would fail or stop compilations of other threads.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any


class WouldCompile(Exception):
    """A call that no compiled version fits; `reason` is the first guard that failed, empty if nothing was compiled."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def only_cached(function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that runs the compiled versions of a function and raises `WouldCompile` where none fits.

    `compiled` is what torch.compile made of the function. Compiled functions that the function calls compile as usual.
    """
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
    trace_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    result: Any = importlib.import_module("torch._dynamo.types").ConvertFrameReturn
    callback = _callback_of(compiled)

    def refuse(frame: Any, *_: Any, **__: Any) -> Any:
        if trace_rules.check(frame.f_code) or not convert_frame.has_tensor_in_frame(frame):
            return result()
        raise WouldCompile(_failed_guard(frame, eval_frame.innermost_backend(callback)))

    # Dynamo compares the backends of compiled versions with this one.
    refuse._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
    run: Callable[..., Any] = eval_frame._TorchDynamoContext(refuse)(function)
    return run


def _callback_of(compiled: Any) -> Any:
    """The callback that Dynamo runs for a function made by torch.compile."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    if "callback" not in cells:
        raise RuntimeError("this version of torch keeps the callback of a compiled function elsewhere")
    return cells["callback"].cell_contents


def _failed_guard(frame: Any, backend: Any) -> str:
    """The first guard of the compiled versions of a frame that failed, without the version's number."""
    entries = importlib.import_module("torch._C._dynamo.eval_frame")._debug_get_cache_entry_list(frame.f_code)
    if not entries:
        return ""
    explain = importlib.import_module("torch._dynamo.guards").get_and_maybe_log_recompilation_reasons
    # Before it took a list it took the first of linked entries.
    takes_list = next(iter(inspect.signature(explain).parameters)) == "cache_entries"
    reasons = explain(entries if takes_list else entries[0], frame, backend, skip_logging=True)
    first = str(reasons[0]).strip().splitlines()[0] if reasons else ""
    number, separator, guard = first.partition(": ")
    return guard if separator and number.replace("/", "").replace("_", "").isdigit() else first


# Before torch 2.13 its configuration belongs to the process: overlapping changes would leave it changed.
_LIMITS = threading.RLock()


@contextlib.contextmanager
def recompile_limit(least: int) -> Iterator[None]:
    """Let Dynamo keep at least so many versions of one function, for the calls inside; threads that enter take turns."""
    config: Any = importlib.import_module("torch._dynamo.config")
    with _LIMITS:
        limit = max(int(config.recompile_limit), least)
        total = max(int(config.accumulated_recompile_limit), limit * 64)
        with config.patch(recompile_limit=limit, accumulated_recompile_limit=total):
            yield

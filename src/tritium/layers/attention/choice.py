"""Choose the candidate that computes an attention.

    runtime   the fastest in a measurement on this machine; the first request of a kind is measured, even while compiling
    static    the winner in a shipped table, otherwise by a rule
    manual    the named candidate

`TRITIUM_ATTENTION` is the name of a candidate, or `runtime` or `static`, and overrides all of them.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import torch

from tritium import compat, device, envs, fidelity, measure
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, ArgumentTypeError, nearest
from tritium.layers.attention import table
from tritium.layers.attention.candidates import Candidate, able, candidates
from tritium.layers.attention.mathematics import attention_math
from tritium.layers.attention.request import LAYOUTS, Request, draw
from tritium.layers.attention.table import Row

RUNTIME, STATIC, MANUAL = MODES = ("runtime", "static", "manual")

# PyTorch's choice is kept unless another candidate is faster by more than this share.
MARGIN = 0.02

# A candidate that is slower than the fastest by this factor in its first calls is not timed further.
HOPELESS = 2.0

# The suffix of the key of a measurement that was made during compilation.
COMPILING = "compiling=1"

# The most requests whose choice is kept in memory.
REMEMBERED = 512

# The number of queries whose result is compared with float64.
CHECKED = 128

# The most calls, identified by all sizes and strides, whose choice is kept.
CALLS = 4096

_CALLS: dict[Hashable, Candidate] = {}
_MEMORY: OrderedDict[tuple[str, str], Row] = OrderedDict()
_LOCK = threading.RLock()


def choose(request: Request, mode: str, op_type: str | None, layout: str | None, where: torch.device) -> Candidate:
    """Return the candidate for a request; raise if a named candidate cannot compute it."""
    override = envs.get(envs.ATTENTION)
    if override:
        if override in (RUNTIME, STATIC):
            mode, op_type = override, None
        else:
            return _named(request, override, layout, f"{envs.ATTENTION}={override}: ")
    if mode == MANUAL:
        return _named(request, op_type or "sdpa", layout, "")
    if mode == STATIC:
        return candidates()[_static(request, where)]
    row = _runtime(request, where)
    return candidates()[(_fastest(row, request) if row is not None else None) or _static(request, where)]


def _fastest(row: Row, request: Request) -> str | None:
    """Return the fastest candidate of a row that takes a request, or None.

    The winner may decline: a compiled graph can need more than the eager call that was measured, such as symbolic sizes.
    """
    for name in [row.winner, *sorted(row.ms, key=lambda name: row.ms[name])]:
        if name in candidates() and candidates()[name].decline(request) is None:
            return name
    return None


def _named(request: Request, name: str, layout: str | None, prefix: str) -> Candidate:
    known = candidates()
    if name not in known:
        raise ArgumentError(f"{prefix}there is no attention {name!r}; {nearest(name, known)}")
    candidate = known[name]
    if layout is not None and layout not in candidate.layouts:
        takers = ", ".join(other for other in able(request) if layout in known[other].layouts)
        raise ArgumentError(f"{prefix}attention {name!r} does not take layout {layout!r}; those that do: {takers}")
    reason = candidate.decline(request)
    if reason is not None:
        raise ArgumentError(
            f"{prefix}attention {name!r} cannot do {request.words()}: {reason}; those that can: {', '.join(able(request))}"
        )
    return candidate


def _static(request: Request, where: torch.device) -> str:
    row = table.shipped(_device_name(where), request.key())
    if row is not None and row.winner in candidates() and candidates()[row.winner].decline(request) is None:
        return row.winner
    return rule(request, device.capability(where))


def rule(request: Request, capability: tuple[int, int] | None) -> str:
    """Return the candidate for an unmeasured request: cuDNN on Hopper and later, else sdpa.

    cuDNN is the fastest there. If sdpa declines, flex, chunked and math follow.
    """
    order = ["sdpa", "flex", "chunked", "math"]
    fastest = capability is not None and capability >= (9, 0) and request.mask is None and request.width <= 128
    if fastest and not request.grad and not request.is_empty:
        order.insert(0, "cudnn")
    return next(name for name in order if candidates()[name].decline(request) is None)


def _runtime(request: Request, where: torch.device) -> Row | None:
    """Return the row of a request, measured now if there is none; None if it cannot be measured."""
    if request.is_empty:
        return None
    # Check in this thread: the thread that measures is not compiling.
    if not (compat.dynamo.is_compiling() or request.symbolic):
        return recall(where, request.key(), lambda: compare(request, where))
    # Candidates that need a compiler cannot be measured during compilation: keep these rows under another key, and prefer
    # rows of complete measurements.
    key = f"{request.key()} {COMPILING}"
    known = recall(where, request.key(), None)
    return known or recall(where, key, lambda: compare(request, where, tracing=True, key=key))


def recall(where: torch.device, key: str, measured: Callable[[], Row | None] | None) -> Row | None:
    """Return the row of a key from memory or the user's file, else measure and store it."""
    name = _device_name(where)
    with _LOCK:
        row = _known(name, key)
    if row is not None or measured is None or not _can_measure(where):
        return row
    # While this thread waited, another process or thread may have measured the same key.
    with measure.gpu_lock(where.type), _LOCK:
        row = _known(name, key)
        if row is None:
            row = _elsewhere(measured)
            if row is not None:
                _keep(name, row)
                _remember(name, row)
        return row


def _keep(name: str, row: Row) -> None:
    try:
        table.write(name, [row])
    except OSError as error:
        warnings.warn(
            f"tritium: what was measured about attention cannot be kept for the next process: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _known(name: str, key: str) -> Row | None:
    row = _MEMORY.get((name, key)) or table.measured(name, key)
    if row is not None:
        _remember(name, row)
    return row


def _remember(name: str, row: Row) -> None:
    _MEMORY[name, row.key] = row
    _MEMORY.move_to_end((name, row.key))
    while len(_MEMORY) > REMEMBERED:
        _MEMORY.popitem(last=False)


def chosen_before(call: Hashable) -> Candidate | None:
    """Return the choice for an identical earlier call, or None.

    Building a request takes the host longer than a kernel launch.
    """
    return _CALLS.get((call, envs.get(envs.ATTENTION)))


def choose_again(call: Hashable, chosen: Callable[[], Candidate]) -> Candidate:
    """Return the choice for an identical earlier call, else make it with `chosen` and keep it."""
    candidate = chosen_before(call)
    if candidate is None:
        candidate = chosen()
        if device.is_capturing():
            # Chosen without a measurement, so not kept: the next call may be measured.
            return candidate
        if len(_CALLS) >= CALLS:
            _CALLS.clear()
        _CALLS[call, envs.get(envs.ATTENTION)] = candidate
    return candidate


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def identity() -> str:
    """Return a digest of everything but the call that choices depend on, for a graph's cache key.

    Compiled code is cached by the graph that Dynamo traced, which does not contain the choice: without the digest the
    cache could return code for another choice.
    """
    digest = hashlib.sha256()
    texts = [envs.get(envs.ATTENTION) or "", *candidates(), *map(str, compat_attention.versions().items())]
    for content in [*(text.encode() for text in texts), *table.contents()]:
        digest.update(content + b"\0")
    return digest.hexdigest()[:16]


def choices() -> list[Row]:
    """Return the measured rows that this process used, the most recent last."""
    return list(_MEMORY.values())


def forget() -> None:
    """Clear the choices in memory; the files stay."""
    _MEMORY.clear()
    _CALLS.clear()


def _can_measure(where: torch.device) -> bool:
    if where.type == "cuda":
        # Nothing can be timed during a capture. Fake tensors may be on a device that this machine lacks.
        return device.cuda_available() and not device.is_capturing()
    return where.type == "cpu"


def _elsewhere(work: Callable[[], Row | None]) -> Row | None:
    """Run a function in a new thread, where no tracing, recording or gradient mode is active."""
    with ThreadPoolExecutor(1) as pool:
        # The copied context holds the GPU lock that this thread holds.
        return pool.submit(contextvars.copy_context().run, work).result()


def compare(request: Request, where: torch.device, *, tracing: bool = False, key: str | None = None) -> Row | None:
    """Time the candidates that take a request and are close to float64; None if there are none."""
    dropped: dict[str, str] = {}
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    # Set no default device: it is a mode that runs Python for every operator, and penalizes candidates of many operators.
    with torch.inference_mode():
        if where.type == "cuda":
            torch.cuda.set_device(where)
        q, k, v, mask = draw(request, where)
        scale = request.width**-0.5
        exact, allowed, rows = _yardstick(q, k, v, mask, scale, request.causal)
        for name, candidate in candidates().items():
            reason = _not_measured(candidate, request, tracing=tracing)
            if reason is None:
                run = functools.partial(candidate.run, q, k, v, mask, scale, request.causal)
                reason = _not_close(run, exact, allowed, rows)
                if reason is None:
                    runs[name] = run
            if reason is not None:
                dropped[name] = reason
        if not runs:
            warnings.warn(f"tritium: nothing computes attention of {request.words()} closely: {dropped}", stacklevel=2)
            return None
        ms = timed(runs, where.type)
    best = min(ms, key=lambda name: ms[name])
    winner = "sdpa" if ms.get("sdpa", math.inf) <= ms[best] * (1 + MARGIN) else best
    rounded = {name: round(value, 5) for name, value in ms.items()}
    return Row(key or request.key(), winner, rounded, dropped, compat_attention.versions())


def _not_measured(candidate: Candidate, request: Request, *, tracing: bool) -> str | None:
    reason = candidate.decline(request)
    if reason is None and request.device not in candidate.measured_on:
        reason = f"not measured on {request.device}"
    limited = request.device in candidate.limited_on
    if reason is None and limited and request.score_bytes > candidate.most_scores:
        reason = f"not measured: its scores would take {request.score_bytes / 2**30:.1f} GiB"
    if reason is None and candidate.compiles and tracing:
        reason = "it has to be compiled, and something else is being compiled now"
    return reason


def _yardstick(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> tuple[torch.Tensor, float, slice]:
    """Return the result of the last queries in float64, the allowed error, and the slice of these queries."""
    first = max(0, q.shape[2] - CHECKED)
    rows = slice(first, None)
    some = mask[:, :, rows] if mask is not None and mask.shape[2] > 1 else mask
    # One head at a time: for video, all heads in float64 would not fit in memory.
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        one = slice(head, head + 1)
        of_key = slice(head // group, head // group + 1)
        own = some[:, one] if some is not None and some.shape[1] > 1 else some
        given = (q[:, one, rows], k[:, of_key], v[:, of_key], own, scale, causal)
        wide = tuple(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given)
        parts.append((attention_math(*wide, first_row=first), attention_math(*given, first_row=first)))  # type: ignore[arg-type]
    exact, eager = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
    return exact, fidelity.allowed(eager, exact), rows


def _not_close(run: Callable[[], torch.Tensor], exact: torch.Tensor, allowed: float, rows: slice) -> str | None:
    try:
        out = run()
        found = fidelity.error(out[:, :, rows], exact)
    except torch.AcceleratorError:
        # No result on a broken device can be trusted.
        raise
    except Exception as error:  # noqa: BLE001 - kernels raise many types: the candidate is dropped with the reason in the table
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    # Compared this way so that NaN counts as too large.
    return None if found <= allowed else f"error {found:.2e} against float64, allowed {allowed:.2e}"


def timed(runs: dict[str, Callable[[], torch.Tensor]], device_type: str) -> dict[str, float]:
    """Return the median ms of interleaved runs; much slower ones (`HOPELESS`) run only briefly."""
    first = measure.interleave(runs, device_type, rounds=2, warmup=1)
    limit = HOPELESS * min(timing.median_ms for timing in first.values())
    close = {name: run for name, run in runs.items() if first[name].median_ms <= limit}
    rounds = measure.cycle(len(close)) * max(1, 6 // measure.cycle(len(close)))
    again = measure.interleave(close, device_type, rounds=rounds, warmup=0, burst=5 if device_type == "cuda" else 1)
    return {name: (again if name in again else first)[name].median_ms for name in runs}


@functools.cache
def _device_name(where: torch.device) -> str:
    return device.describe(where.type, where.index).name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unknown(op_type: str) -> str | None:
    """Return the error for an unknown candidate's name, or None.

    Dynamo treats the result as a constant: it cannot trace the search for installed packages.
    """
    known = candidates()
    return None if op_type in known else f"there is no attention {op_type!r}; {nearest(str(op_type), known)}"


def check_choice(mode: str, op_type: str | None, layout: str | None) -> None:
    """Raise for modes, candidates and layouts that are invalid for every request."""
    if mode not in MODES:
        raise ArgumentError(f"there is no opt_mode {mode!r}; {nearest(str(mode), MODES)}")
    if mode != MANUAL and (op_type is not None or layout is not None):
        raise ArgumentError(f"op_type and layout are for opt_mode 'manual', not for {mode!r}, which chooses by itself")
    if op_type is not None and not isinstance(op_type, str):
        raise ArgumentTypeError(f"op_type must be a name, got {op_type!r}")
    if op_type is not None and (problem := _unknown(op_type)):
        raise ArgumentError(problem)
    if layout is not None and layout not in LAYOUTS:
        raise ArgumentError(f"there is no layout {layout!r}; {nearest(str(layout), LAYOUTS)}")

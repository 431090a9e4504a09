"""Which candidate computes an attention.

    runtime   what was measured here for such a request; the first such request is measured, also while compiling
    static    what a shipped table says, otherwise a rule
    manual    the candidate that is named

`TRITIUM_ATTENTION` names a candidate, or `runtime` or `static`, and wins over all of them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import torch

from tritium import compat, device, envs, fidelity, measure, turns
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, ArgumentTypeError, nearest
from tritium.layers.attention import table
from tritium.layers.attention.candidates import Candidate, able, candidates
from tritium.layers.attention.mathematics import attention_math
from tritium.layers.attention.request import LAYOUTS, Request, draw
from tritium.layers.attention.table import Row

RUNTIME, STATIC, MANUAL = MODES = ("runtime", "static", "manual")

# PyTorch's own choice is kept unless another one beats it by this share.
MARGIN = 0.02

# A candidate that is this much slower than the fastest in its first calls is not timed further.
HOPELESS = 2.0

# What the key of a measurement ends with that was made while something was being compiled.
COMPILING = "compiling=1"

# Requests whose choice is kept in memory.
REMEMBERED = 512

# Queries whose result is compared with float64.
CHECKED = 128

# Calls, with every size and stride of theirs, whose choice is kept.
CALLS = 4096

_CALLS: dict[Hashable, Candidate] = {}
_MEMORY: OrderedDict[tuple[str, str], Row] = OrderedDict()
_LOCK = threading.RLock()


def choose(request: Request, mode: str, op_type: str | None, layout: str | None, where: torch.device) -> Candidate:
    """The candidate for a request; an error where the one that is named cannot do it."""
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
    """The winner of a row, or the next that can do what is asked: a compiled graph may ask for more than an eager call."""
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
    """What to take where nothing was measured: cuDNN on Hopper and later, where it is the fastest; else PyTorch's choice.

    Behind that come those that take what it does not.
    """
    order = ["sdpa", "flex", "chunked", "math"]
    fastest = capability is not None and capability >= (9, 0) and request.mask is None and request.width <= 128
    if fastest and not request.grad and not request.is_empty:
        order.insert(0, "cudnn")
    return next(name for name in order if candidates()[name].decline(request) is None)


def _runtime(request: Request, where: torch.device) -> Row | None:
    """The row of a request, measured now if there is none; None where nothing can be measured."""
    if request.is_empty:
        return None
    # Asked here: the thread that measures is not the one that traces.
    if not (compat.is_compiling() or request.symbolic):
        return recall(where, request.key(), lambda: compare(request, where))
    # Not everybody can take part there: what wins is kept apart, and what was measured without one goes before it.
    key = f"{request.key()} {COMPILING}"
    known = recall(where, request.key(), None)
    return known or recall(where, key, lambda: compare(request, where, tracing=True, key=key))


def recall(where: torch.device, key: str, measured: Callable[[], Row | None] | None) -> Row | None:
    """What is known about a key, in memory or in the user's file; otherwise measured now if it can be, and kept in both."""
    name = _device_name(where)
    with _LOCK:
        row = _known(name, key)
    if row is not None or measured is None or not _can_measure(where):
        return row
    # Who had the turn before may have been another process, or thread, that measured the same.
    with turns.turn(where.type), _LOCK:
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
    """What was chosen for the very same call. Describing a request costs the host more than launching a kernel."""
    return _CALLS.get((call, envs.get(envs.ATTENTION)))


def choose_again(call: Hashable, chosen: Callable[[], Candidate]) -> Candidate:
    """What was chosen for the very same call, now or before."""
    candidate = chosen_before(call)
    if candidate is None:
        candidate = chosen()
        if device.is_capturing():
            # Chosen without measuring: the next call may be measured.
            return candidate
        if len(_CALLS) >= CALLS:
            _CALLS.clear()
        _CALLS[call, envs.get(envs.ATTENTION)] = candidate
    return candidate


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def identity() -> str:
    """A digest of what choices depend on beside the call itself. It is part of a traced graph, and so of its cache key.

    Compiled code is found again by the graph that Dynamo traced, which does not hold what was chosen: without this, code
    for another choice would be found.
    """
    digest = hashlib.sha256()
    texts = [envs.get(envs.ATTENTION) or "", *candidates(), *map(str, compat_attention.versions().items())]
    for content in [*(text.encode() for text in texts), *table.contents()]:
        digest.update(content + b"\0")
    return digest.hexdigest()[:16]


def choices() -> list[Row]:
    """What this process has chosen by measuring, the most recent last."""
    return list(_MEMORY.values())


def forget() -> None:
    """Drop what is kept in memory; the files stay."""
    _MEMORY.clear()
    _CALLS.clear()


def _can_measure(where: torch.device) -> bool:
    if where.type == "cuda":
        # A graph that is being captured cannot be timed, and a tensor may pretend to be on a device that is not there.
        return device.cuda_available() and not device.is_capturing()
    return where.type == "cpu"


def _elsewhere(work: Callable[[], Row | None]) -> Row | None:
    """Run in a thread of its own, where nothing that traces, records or disables gradients is switched on."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(turns.lent(work)).result()


def compare(request: Request, where: torch.device, *, tracing: bool = False, key: str | None = None) -> Row | None:
    """Time the candidates that can do what is asked and are close enough to float64; None if none is."""
    dropped: dict[str, str] = {}
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    # No default device: that would be a mode, which Python asks about every operator, and candidates of many would look slow.
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
    """The last queries in float64, the error that is allowed there, and which queries these are."""
    first = max(0, q.shape[2] - CHECKED)
    rows = slice(first, None)
    some = mask[:, :, rows] if mask is not None and mask.shape[2] > 1 else mask
    # A head at a time: all of them in float64 would not fit for video.
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
        # Nothing that runs afterwards on a broken device could be trusted.
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel refuses: it is dropped, and the table says why
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    # Written so that an error that is no number is too large.
    return None if found <= allowed else f"error {found:.2e} against float64, allowed {allowed:.2e}"


def timed(runs: dict[str, Callable[[], torch.Tensor]], device_type: str) -> dict[str, float]:
    """Median milliseconds of each, in turns; those without hope are timed briefly."""
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
    """What is wrong with a candidate's name. Dynamo takes the answer as it is: packages cannot be searched in a graph."""
    known = candidates()
    return None if op_type in known else f"there is no attention {op_type!r}; {nearest(str(op_type), known)}"


def check_choice(mode: str, op_type: str | None, layout: str | None) -> None:
    """Raise for words that mean nothing, whatever is asked."""
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

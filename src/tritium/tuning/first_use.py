"""Choose the provider of an op that may be measured at the first call of a shape class.

A verdict comes from memory or the user's table, otherwise from a measurement: in a thread without modes of the caller,
under the GPU's lock, and stored for later processes. If nothing can be measured, the shipped table decides, then the
op's default; in a graph that a backend compiles, only stored verdicts count, and without one the site is left as it is.
`once` remembers the choice for identical calls. A graph in which the choice was made by tracing has
`identity(op)` in its cache key, for example as an argument of the traced operator.
"""

from __future__ import annotations

import contextvars
import math
import threading
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tritium import compat, device, measure, ops
from tritium.ops import Arguments, Op
from tritium.ops.op import FirstUse
from tritium.tuning import tables
from tritium.tuning.compare import compare_alone
from tritium.tuning.tables import Machine
from tritium.tuning.verdict import Key, Verdict

T = TypeVar("T")

# The suffix of the shape in verdicts that were measured while a function was being compiled.
COMPILING = "compiling=1"

# The suffix of the shape in verdicts in which lossy providers took part, and the share of time that these must save.
LOSSY, LOSSY_MARGIN = "lossy=1", 0.03

# The most calls whose choice is kept in memory.
MOST_CALLS = 4096

# The verdicts that this process used, by the name of the device and the key.
_VERDICTS: dict[tuple[str, Key], Verdict] = {}
_CALLS: dict[Hashable, Any] = {}
_LOCK = threading.RLock()


def key_of(op: Op, arguments: Arguments) -> Key:
    """Return the key of a call of an op that has a trial; it computes in the dtype of its first tensor."""
    assert op.trial is not None
    return Key.of(op.name, op.trial.shape(arguments), _tensors(arguments)[0].dtype)


def _tensors(arguments: Arguments) -> list[torch.Tensor]:
    return [leaf for leaf in compat.tensors.leaves_of(list(vars(arguments).values())) if isinstance(leaf, torch.Tensor)]


def _first_use_of(op: Op, *, lossy: bool = False) -> FirstUse:
    assert op.trial is not None
    first = op.trial.lossy_use if lossy else op.trial.first_use
    assert first is not None
    return first


def choose_at_first_use(op: Op, arguments: Arguments, *, measures: bool = True, lossy: bool = False) -> tuple[str, str]:
    """Return the provider for a call of an op with `first_use`, and the reason.

    With `measures`, the user's verdicts count, and a missing one is measured; otherwise only shipped ones do. With `lossy`,
    a lossy provider is chosen if it saves 3 % over every exact one.
    """
    key, declines = key_of(op, arguments), ops.declines(op, arguments, lossy=lossy)
    key = replace(key, shape=f"{key.shape} {LOSSY}") if lossy else key
    first = _first_use_of(op, lossy=lossy)
    verdict = _measured(op, key, arguments, declines, first) if measures else None
    too_slow = {name for name, provider in ops.providers(op).items() if provider.lossy} if lossy else set()
    provider, why = _winner(key, declines, Machine.of(_tensors(arguments)[0].device), verdict, too_slow)
    return provider or first.default(arguments), why


def choose_from_tables(op: Op, arguments: Arguments, where: torch.device) -> tuple[str | None, str]:
    """Return the provider that a stored verdict selects, the user's before a shipped one, or None; measure nothing."""
    key, versions = key_of(op, arguments), dict(_first_use_of(op).versions())
    verdict = recall(where, key, versions) or recall(where, _while_compiling(key), versions)
    return _winner(key, ops.declines(op, arguments), Machine.of(where), verdict)


def _winner(
    key: Key,
    declines: Mapping[str, str | None],
    machine: Machine,
    measured: Verdict | None,
    lossy: Collection[str] = (),
) -> tuple[str | None, str]:
    """Return the fastest provider that takes the arguments, by a verdict or else the shipped one, and the reason.

    Those that are `lossy` count only if they save a share of the time of every other.
    """
    able = [name for name, reason in declines.items() if reason is None]
    verdict, origin = measured, "measured on this machine"
    # A compiled graph can need more than the call that was measured, such as symbolic sizes: the winner may decline.
    if verdict is None or verdict.fastest(able) is None:
        verdict, origin = tables.shipped(machine).rows.get(key), "shipped"
    provider = verdict.fastest(_worth_a_loss(verdict, able, lossy)) if verdict is not None else None
    if verdict is None or provider is None:
        return None, f"{key.op} was not measured for {key.shape}"
    return provider, f"{origin}: {', '.join(f'{name} {ms:.3g} ms' for name, ms in verdict.ms.items())}"


def _worth_a_loss(verdict: Verdict, able: Iterable[str], lossy: Collection[str]) -> list[str]:
    """Return the providers among `able` without lossy ones that save too little."""
    exact = [ms for name, ms in verdict.ms.items() if name in able and name not in lossy]
    limit = min(exact, default=math.inf) * (1 - LOSSY_MARGIN)
    return [name for name in able if name not in lossy or verdict.ms.get(name, math.inf) <= limit]


def _while_compiling(key: Key) -> Key:
    """Return the key of verdicts without the providers that start a compiler: only compilations read it."""
    return replace(key, shape=f"{key.shape} {COMPILING}")


def _measured(
    op: Op, key: Key, arguments: Arguments, declines: Mapping[str, str | None], first: FirstUse
) -> Verdict | None:
    """Return this machine's verdict, measured now if there is none; None if it cannot be measured."""
    tensors = _tensors(arguments)
    where, versions, create = tensors[0].device, dict(first.versions()), first.alike(arguments)
    # Read the caller's modes in this thread: the thread that measures has none.
    is_symbolic = any(not isinstance(size, int) for tensor in tensors for size in tensor.shape)
    compiling = compat.dynamo.is_compiling() or is_symbolic
    verdict = recall(where, key, versions) if create is None or compiling else None
    if create is None or verdict is not None:
        return verdict
    reasons = declines
    if first.skip is not None:
        reasons = {name: reason or first.skip(name, arguments, compiling) for name, reason in declines.items()}
    exact = _while_compiling(key) if compiling else key
    return recall(where, exact, versions, lambda: compare_alone(op, exact, create, reasons, where, first))


def recall(
    where: torch.device,
    key: Key,
    versions: Mapping[str, str],
    compared: Callable[[], Verdict | None] | None = None,
) -> Verdict | None:
    """Return a verdict from memory or the user's table, else measure and store it; None if it cannot be measured."""
    machine = Machine.of(where)
    verdict = _known(machine, key, versions)
    if verdict is not None or compared is None or not _can_measure(where):
        return verdict
    # While this thread waited, another process or thread may have measured the same key.
    with measure.gpu_lock(where.type), _LOCK:
        verdict = _known(machine, key, versions)
        if verdict is not None:
            return verdict
        # In a new thread no mode of the caller is active. The copied context holds the GPU lock that this thread holds.
        with ThreadPoolExecutor(1) as pool:
            verdict = pool.submit(contextvars.copy_context().run, compared).result()
        if verdict is not None:
            _VERDICTS[machine.name, key] = verdict
            try:
                tables.store(tables.user_folder() / machine.file_name, machine, [verdict])
            except OSError as error:
                message = f"tritium: the verdict about {key.op} cannot be stored for later processes: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        return verdict


def _known(machine: Machine, key: Key, versions: Mapping[str, str]) -> Verdict | None:
    row = tables.own(machine).rows.get(key) if (machine.name, key) not in _VERDICTS else None
    if row is not None and row.versions == versions:
        _VERDICTS[machine.name, key] = row
    return _VERDICTS.get((machine.name, key))


def verdicts() -> list[Verdict]:
    """Return the verdicts that first calls in this process used."""
    return list(_VERDICTS.values())


def once(call: Hashable, choose: Callable[[], T]) -> T:
    """Return the choice for an identical earlier call, else choose and keep it.

    The key of a shape class takes the host longer than a kernel launch, so calls are identified by sizes and strides.
    """
    chosen: T | None = _CALLS.get(call)
    if chosen is None:
        chosen = choose()
        # During a capture nothing is measured: the next call may be.
        if not device.is_capturing():
            if len(_CALLS) >= MOST_CALLS:
                _CALLS.clear()
            _CALLS[call] = chosen
    return chosen


def forget() -> None:
    """Clear the verdicts and choices in memory; the files stay."""
    _VERDICTS.clear()
    _CALLS.clear()


def identity(op: Op) -> str:
    """Return a digest of everything but the call that choices depend on, for the cache key of a graph.

    Compiled code is cached by the graph that Dynamo traced, which does not contain the choice: without the digest the
    cache could return code for another choice.
    """
    versions = " ".join(map("=".join, _first_use_of(op).versions().items()))
    return f"{' '.join(ops.providers(op))} {versions} {tables.digest(op.name)}"


def _can_measure(where: torch.device) -> bool:
    if where.type == "cuda":
        # Nothing can be timed during a capture. Fake tensors may be on a device that this machine lacks.
        return device.cuda_available() and not device.is_capturing()
    return where.type == "cpu"

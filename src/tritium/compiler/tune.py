"""Time the providers of ops on this device, in a compiled block and alone, and write table rows.

Only `tritium tune` measures. A compilation only reads existing tables.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tritium import device, measure, ops, tuning
from tritium.compiler.explain import explain
from tritium.config import CompilationConfig
from tritium.errors import TritiumError
from tritium.ops import INDUCTOR, Op
from tritium.ops.op import Draw, count
from tritium.report import GraphRecord
from tritium.tiling.reductions import INDUCTOR_PERSISTENT
from tritium.tuning import Key, Loop, Machine, Verdict
from tritium.tuning.prediction import LONG
from tritium.tuning.tables import current_versions

# Seconds in which the variants of a block are timed, interleaved.
SECONDS = 1.5

# Small sizes that suffice to check whether a provider supports a shape.
FEW = {"tokens": 64, "pixels": 64}
# A CPU needs seconds where a GPU needs milliseconds, and its kernels gain nothing from more tokens.
CPU_MOST = {"tokens": 256, "pixels": 1 << 14}

DISTURBED = "disturbed"

CAPTURED_CALLS = 10
# Few enough launches that the device's queue never fills, which would make the host wait.
ISSUED_CALLS = 10
ISSUE_ROUNDS = 30

# Called with the key to be measured next, its index, and the number of keys.
Notify = Callable[[Key, int, int], None]


def standard_keys(names: Sequence[str], dtypes: Sequence[torch.dtype], device_type: str) -> list[Key]:
    """Return keys for the shapes of known models, for ops with an owned provider on the device."""
    catalog = ops.catalog()
    return [
        Key.of(name, shape, dtype)
        for name in names or catalog
        for dtype in dtypes
        for shape in _standard(catalog[name], dtype, device_type)
    ]


def _standard(op: Op, dtype: torch.dtype, device_type: str) -> list[Mapping[str, int | str]]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=device_type, dtype=dtype)

    if op.trial is None or op.trial.alone is None:
        return []
    alone = op.trial.alone
    able = [shape for shape in op.trial.standard if _able(op, alone(few(shape), draw))[0]]
    if device_type != "cpu":
        return able
    smaller = [few(shape, CPU_MOST) for shape in able]
    return [shape for index, shape in enumerate(smaller) if shape not in smaller[:index]]


def few(shape: Mapping[str, int | str], most: Mapping[str, int] = FEW) -> dict[str, int | str]:
    """Return a shape reduced to at most the given number of tokens or pixels."""
    return {name: min(int(size), most[name]) if name in LONG else size for name, size in shape.items()}


def compare(key: Key, device_type: str, seconds: float = SECONDS) -> Verdict:
    """Measure one key: all providers that support it, interleaved and sustained."""
    op = ops.catalog()[key.op]
    if op.trial is None or op.trial.block is None:
        raise TritiumError(f"op {key.op!r} has no trial: its providers are used where they are pinned")
    dtype: torch.dtype = getattr(torch, key.dtype)
    generator = torch.Generator(device_type).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type).to(dtype)

    try:
        with torch.inference_mode():
            return _compared(op, key, draw, device_type, seconds)
    finally:
        # All shapes share one code object: without a reset, Dynamo would reach its recompile limit.
        torch.compiler.reset()


def _compared(op: Op, key: Key, draw: Draw, device_type: str, seconds: float) -> Verdict:
    assert op.trial is not None
    assert op.trial.alone is not None
    assert op.trial.block is not None
    shape = key.sizes()
    arguments = op.trial.alone(shape, draw)
    able, remarks = _able(op, arguments)
    block, inputs = op.trial.block(shape, draw)
    sides = {name: _compiled(op, block, inputs, name) for name in (INDUCTOR, *able)}
    blocks = {name: (lambda run=run: run(*inputs)) for name, run in sides.items()}
    block_ms = _medians(blocks, device_type, seconds, 1.0)
    alone_us = _medians(_alone(op, arguments, able), device_type, seconds / 3, 1e3)
    row = Verdict(
        key=key,
        provider=INDUCTOR,
        ms=block_ms,
        alone_us=alone_us,
        # A CPU has no launches: host time is part of the block's time.
        issue_us=_issue_us(blocks, device_type) if device_type == "cuda" else {},
        looped=_looped(key, explain(sides[INDUCTOR]).records),
        bytes=least_bytes(op, arguments),
        versions=current_versions(),
        remarks=remarks,
    )
    return replace(row, provider=row.site().choose(replayed=device_type != "cuda"))


def least_bytes(op: Op, arguments: Mapping[str, Any]) -> int:
    """Return the minimum number of bytes moved: every input read once, every result written once."""
    results = op.fake(**arguments)
    flat = [part for value in arguments.values() for part in (value if isinstance(value, list) else [value])]
    tensors = {id(part): part for part in (*flat, *(results if isinstance(results, tuple) else (results,)))}
    return sum(count(part.shape) * part.element_size() for part in tensors.values() if isinstance(part, torch.Tensor))


def _able(op: Op, arguments: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    reasons = {name: provider.decline(op.bind(**arguments)) for name, provider in ops.providers(op).items()}
    able = [name for name, reason in reasons.items() if reason is None]
    return able, {name: reason for name, reason in reasons.items() if reason is not None}


def _compiled(op: Op, block: Callable[..., Any], inputs: tuple[Any, ...], provider: str) -> Callable[..., Any]:
    from tritium.compiler.backend import Backend

    config = CompilationConfig(force_provider={op.name: provider})
    compiled: Callable[..., Any] = torch.compile(block, backend=Backend(config), fullgraph=True, dynamic=False)
    compiled(*inputs)
    if provider != INDUCTOR:
        sites = [site for record in explain(compiled).records for site in record.sites if site.fusion == op.name]
        if not any(f"{provider!r}" in site.reason and site.outcome != "declined" for site in sites):
            raise TritiumError(f"the block of op {op.name!r} has no site that provider {provider!r} takes: {sites}")
    return compiled


def _alone(op: Op, arguments: Mapping[str, Any], able: list[str]) -> dict[str, Callable[[], Any]]:
    given = tuple(arguments.values())
    reference = torch.compile(op.reference, fullgraph=True, dynamic=False)
    runs: dict[str, Callable[[], Any]] = {INDUCTOR: lambda: reference(*given)}
    for name in able:
        provider = ops.providers(op)[name]
        run: Callable[..., Any] = functools.partial(op.overload, provider=name)
        if provider.traced or provider.inlined:
            run = torch.compile(run, fullgraph=True, dynamic=False)
        runs[name] = lambda run=run: run(*given)  # type: ignore[misc]
    return runs


def _medians(runs: Mapping[str, Callable[[], Any]], device_type: str, seconds: float, unit: float) -> dict[str, float]:
    """Return each run's median time in milliseconds times `unit`; on a GPU only device time."""
    calls = CAPTURED_CALLS if device_type == "cuda" else 1
    timed = {name: _captured(run, calls) for name, run in runs.items()} if device_type == "cuda" else runs
    timings = measure.interleave(timed, device_type, seconds=seconds, burst=3 if calls > 1 else 1, warmup=3)
    return {name: round(timing.median_ms / calls * unit, 4) for name, timing in timings.items()}


def _captured(run: Callable[[], Any], calls: int) -> Callable[[], Any]:
    """Capture several calls as one static graph: kernels of a few microseconds would measure the host."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def _issue_us(runs: Mapping[str, Callable[[], Any]], device_type: str) -> dict[str, float]:
    """Return the microseconds that the host needs to issue a call of each run, without synchronizing.

    Calls follow each other as in a host-bound model; the runs are interleaved.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for place in range(ISSUE_ROUNDS):
        for name in measure.order_of_round(list(runs), place):
            device.synchronize(device_type)
            start = time.perf_counter()
            for _ in range(ISSUED_CALLS):
                runs[name]()
            taken[name].append((time.perf_counter() - start) / ISSUED_CALLS * 1e6)
    device.synchronize(device_type)
    return {name: round(statistics.median(times), 2) for name, times in taken.items()}


def _looped(key: Key, records: Sequence[GraphRecord]) -> Loop | None:
    """Return the size in a key that an Inductor kernel loops over but could hold in registers elsewhere."""
    reductions = ((kernel.get("tiling") or {}).get("reduction") for record in records for kernel in record.kernels)
    looped = [found for found in reductions if found is not None and found["form"] == "looped"]
    for name, size in key.sizes().items():
        reads = [found["reads"] for found in looped if found["elements"] == size and found["reads"]]
        if reads and isinstance(size, int) and size > INDUCTOR_PERSISTENT:
            return Loop(name, max(reads))
    return None


def measure_keys(
    keys: Sequence[Key], device_type: str, path: Path, notify: Notify, seconds: float = SECONDS
) -> list[Verdict]:
    """Measure keys and write each row at once; a key that cannot be measured gets Inductor and the reason.

    If other processes used the CPU during a measurement, its row is returned with a remark and not written.
    """
    verdicts = []
    for index, key in enumerate(keys):
        notify(key, index, len(keys))
        meter = measure.LoadMeter()
        try:
            verdict = compare(key, device_type, seconds)
        except Exception as error:  # noqa: BLE001 - a kernel compiler may raise anything; the next key may still work
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            verdict = Verdict(
                key, INDUCTOR, {INDUCTOR: 0.0}, versions=current_versions(), remarks={"not measured": reason}
            )
        load = meter.read() if device_type == "cpu" else None
        if load is not None and load.disturbed:
            # Under load, threads that wait for each other become many times slower, by different factors.
            verdicts.append(
                replace(verdict, remarks={DISTURBED: f"{load.foreign_cores:.1f} cores were taken by others"})
            )
            continue
        tuning.store(path, Machine.of(device_type), [verdict])
        verdicts.append(verdict)
    return verdicts

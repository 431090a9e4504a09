"""Time the providers of ops on this device, inside a compiled block and alone, and write the rows of a table.

Only `tritium tune` measures: a compilation reads the tables that are there.
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

from tritium import compat, device, measure, ops, tuned
from tritium.compiler.choose import least_bytes, machine
from tritium.compiler.explain import explain
from tritium.config import CompilationConfig
from tritium.errors import TritiumError
from tritium.ops import INDUCTOR, Op
from tritium.ops.op import Draw
from tritium.report import GraphRecord
from tritium.tiling.reductions import INDUCTOR_PERSISTENT
from tritium.tuned import Key, Verdict
from tritium.tuned.prediction import LONG

# The variants of a block take turns for so long.
SECONDS = 1.5

# Enough to recognise a form.
FEW = {"tokens": 64, "pixels": 64}
# A CPU takes seconds where a GPU takes milliseconds, and its kernels gain nothing from more tokens.
CPU_MOST = {"tokens": 256, "pixels": 1 << 14}

DISTURBED = "disturbed"

CAPTURED_CALLS = 10
# Few enough launches that the queue of the device is never full, which would make the host wait.
ISSUED_CALLS = 10
ISSUE_ROUNDS = 30

# Called with the key that is measured next, its place, and the number of keys.
Notify = Callable[[Key, int, int], None]


def standard_keys(names: Sequence[str], dtypes: Sequence[torch.dtype], device_type: str) -> list[Key]:
    """Return the keys of the shapes of known models, for ops with an owned provider on the device."""
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

    if op.trial is None:
        return []
    able = [shape for shape in op.trial.standard if _able(op, op.trial.alone(few(shape), draw))[0]]
    if device_type != "cpu":
        return able
    smaller = [few(shape, CPU_MOST) for shape in able]
    return [shape for index, shape in enumerate(smaller) if shape not in smaller[:index]]


def few(shape: Mapping[str, int | str], most: Mapping[str, int] = FEW) -> dict[str, int | str]:
    """Return a class of the same form with at most so many tokens or pixels."""
    return {name: min(int(size), most[name]) if name in LONG else size for name, size in shape.items()}


def compare(key: Key, device_type: str, seconds: float = SECONDS) -> Verdict:
    """Measure one key: all providers that can take it, interleaved and sustained."""
    op = ops.catalog()[key.op]
    if op.trial is None:
        raise TritiumError(f"op {key.op!r} has no trial: its providers are used where they are pinned")
    dtype: torch.dtype = getattr(torch, key.dtype)
    generator = torch.Generator(device_type).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type).to(dtype)

    try:
        with torch.inference_mode():
            return _compared(op, key, draw, device_type, seconds)
    finally:
        # Blocks of many shapes are one piece of code: Dynamo would soon refuse to compile it once more.
        torch.compiler.reset()


def _compared(op: Op, key: Key, draw: Draw, device_type: str, seconds: float) -> Verdict:
    assert op.trial is not None
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
        block_ms=block_ms,
        alone_us=alone_us,
        # A CPU launches nothing: the host's time is in the block's.
        issue_us=_issue_us(blocks, device_type) if device_type == "cuda" else {},
        looped=_looped(key, explain(sides[INDUCTOR]).records),
        bytes=least_bytes(op, arguments),
        torch=compat.version_text(),
        remarks=remarks,
    )
    return replace(row, provider=tuned.winner(row, replayed=device_type != "cuda"))


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
    """Return the median time of each run, in milliseconds times a unit; on a GPU the device's time alone."""
    calls = CAPTURED_CALLS if device_type == "cuda" else 1
    timed = {name: _captured(run, calls) for name, run in runs.items()} if device_type == "cuda" else runs
    timings = measure.interleave(timed, device_type, seconds=seconds, burst=3 if calls > 1 else 1, warmup=3)
    return {name: round(timing.median_ms / calls * unit, 4) for name, timing in timings.items()}


def _captured(run: Callable[[], Any], calls: int) -> Callable[[], Any]:
    """Record some calls as one static graph: kernels of a few microseconds would otherwise measure the host."""
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
    """Return the microseconds in which the host issues a call of each run, without waiting for the device.

    Calls follow each other as they do in a model that waits for its host; the runs take turns.
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


def _looped(key: Key, records: Sequence[GraphRecord]) -> dict[str, Any]:
    """Return the size of a key that a kernel of Inductor walked over, although it might hold it in registers elsewhere."""
    reductions = ((kernel.get("tiling") or {}).get("reduction") for record in records for kernel in record.kernels)
    looped = [found for found in reductions if found is not None and found["form"] == "looped"]
    for name, size in key.sizes().items():
        reads = [found["reads"] for found in looped if found["elements"] == size and found["reads"]]
        if reads and isinstance(size, int) and size > INDUCTOR_PERSISTENT:
            return {"size": name, "reads": max(reads)}
    return {}


def measure_keys(
    keys: Sequence[Key], device_type: str, path: Path, notify: Notify, seconds: float = SECONDS
) -> list[Verdict]:
    """Measure keys and write each row at once; a key that cannot be measured gets Inductor and the reason.

    A row of a CPU that other processes used at the same time is returned with a remark, and not written.
    """
    verdicts = []
    for index, key in enumerate(keys):
        notify(key, index, len(keys))
        meter = measure.LoadMeter()
        try:
            verdict = compare(key, device_type, seconds)
        except Exception as error:  # noqa: BLE001 - a kernel compiler may raise anything; the next key may still do
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            verdict = Verdict(
                key, INDUCTOR, {INDUCTOR: 0.0}, torch=compat.version_text(), remarks={"not measured": reason}
            )
        load = meter.read() if device_type == "cpu" else None
        if load is not None and load.disturbed:
            # Threads that wait for each other are many times slower then, and not all code by the same factor.
            verdicts.append(
                replace(verdict, remarks={DISTURBED: f"{load.foreign_cores:.1f} cores were taken by others"})
            )
            continue
        tuned.write(path, machine(device_type), [verdict])
        verdicts.append(verdict)
    return verdicts

"""Compare the providers of an op: alone at a first call, or in a compiled block and alone for `tritium tune`.

A comparison in a block needs a compiler, which the caller passes: this module imports none.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tritium import compat, device, measure, ops
from tritium.errors import TritiumError, brief
from tritium.ops import INDUCTOR, Op
from tritium.ops.op import Block, FirstUse, count, draw_from
from tritium.report.explain import explain
from tritium.report.records import GraphRecord
from tritium.tuning import tables
from tritium.tuning.verdict import LONG, Key, Loop, Verdict

# A function that is slower than the fastest by this factor in its first calls is not timed further.
HOPELESS = 2.0

# The preferred provider of a first use is kept unless another is faster by more than this share.
MARGIN = 0.02

# Seconds in which the variants of a block are timed, interleaved.
SECONDS = 1.5

# Small sizes that suffice to check whether a provider supports a shape.
FEW = {"tokens": 64, "pixels": 64}
# A CPU needs seconds where a GPU needs milliseconds, and its kernels gain nothing from more tokens.
CPU_MOST = {"tokens": 256, "pixels": 1 << 14}

# The remark of a row that was measured while other processes used the CPU.
DISTURBED = "disturbed"

CAPTURED_CALLS = 10
# Few enough launches that the device's queue never fills, which would make the host wait.
ISSUED_CALLS = 10
ISSUE_ROUNDS = 30

Runs = Mapping[str, Callable[[], Any]]

# Compiles a function with this package's backend and a provider pinned by op.
Compile = Callable[[Callable[..., Any], Mapping[str, str]], Callable[..., Any]]

# Called with the key to be measured next, its index, and the number of keys.
Notify = Callable[[Key, int, int], None]


def faster(ms: Mapping[str, float], preferred: str | None) -> str:
    """Return the fastest name, or the preferred one unless another is faster by more than the margin.

    >>> faster({"sdpa": 1.01, "cudnn": 1.0}, "sdpa"), faster({"sdpa": 1.03, "cudnn": 1.0}, "sdpa")
    ('sdpa', 'cudnn')
    """
    best = min(ms, key=ms.__getitem__)
    return preferred if preferred and ms.get(preferred, math.inf) <= ms[best] * (1 + MARGIN) else best


def timed(runs: Runs, device_type: str) -> dict[str, float]:
    """Return the median ms of interleaved runs; much slower ones (`HOPELESS`) run only briefly."""
    first = measure.interleave(runs, device_type, rounds=2, warmup=1)
    limit = HOPELESS * min(timing.median_ms for timing in first.values())
    close = {name: run for name, run in runs.items() if first[name].median_ms <= limit}
    rounds = measure.cycle(len(close)) * max(1, 6 // measure.cycle(len(close)))
    again = measure.interleave(close, device_type, rounds=rounds, warmup=0, burst=5 if device_type == "cuda" else 1)
    return {name: (again if name in again else first)[name].median_ms for name in runs}


def compare_alone(
    op: Op,
    key: Key,
    create: Callable[[], Mapping[str, Any]],
    reasons: Mapping[str, str | None],
    where: torch.device,
    first: FirstUse,
) -> Verdict | None:
    """Check and time the providers without a reason to skip them; None with a warning if none is left."""
    remarks: dict[str, str] = {}
    runs: dict[str, Callable[[], Any]] = {}
    # Set no default device: it is a mode that runs Python for every operator, and penalizes providers of many operators.
    with torch.inference_mode():
        if where.type == "cuda":
            torch.cuda.set_device(where)
            # This thread uses another stream: the caller's tensors must be complete.
            torch.cuda.synchronize()
        arguments = op.bind(**create())
        check = first.check(arguments)
        for name, skipped in reasons.items():
            run = functools.partial(ops.providers(op)[name].run, arguments)
            try:
                reason = skipped or check(run())
            except torch.AcceleratorError:
                # No result on a broken device can be trusted.
                raise
            except Exception as error:  # noqa: BLE001 - kernels raise many types: the provider is dropped with the reason
                reason = brief(error)
            if reason is None:
                runs[name] = run
            else:
                remarks[name] = reason
        if not runs:
            warnings.warn(f"tritium: no provider of {op.name} is close to the reference: {remarks}", stacklevel=2)
            return None
        ms = {name: round(value, 5) for name, value in timed(runs, where.type).items()}
    return Verdict(key, faster(ms, first.preferred), ms, versions=dict(first.versions()), remarks=remarks)


def standard_keys(names: Sequence[str], dtypes: Sequence[torch.dtype], device_type: str) -> list[Key]:
    """Return keys for the shapes of known models, for ops with an owned provider on the device."""
    catalog, keys = ops.catalog(), []
    for name in names or catalog:
        op, trial = catalog[name], catalog[name].trial
        if trial is None or trial.alone is None:
            continue
        for dtype in dtypes:
            draw = functools.partial(torch.empty, device=device_type, dtype=dtype)
            declines = [ops.declines(op, op.bind(**trial.alone(few(shape), draw))) for shape in trial.standard]
            able = [shape for shape, reasons in zip(trial.standard, declines, strict=True) if None in reasons.values()]
            keys += [Key.of(name, few(shape, CPU_MOST) if device_type == "cpu" else shape, dtype) for shape in able]
    return list(dict.fromkeys(keys))


def few(shape: Mapping[str, int | str], most: Mapping[str, int] = FEW) -> dict[str, int | str]:
    """Return a shape reduced to at most the given number of tokens or pixels."""
    return {name: min(int(size), most[name]) if name in LONG else size for name, size in shape.items()}


def compare_in_block(key: Key, device_type: str, compiler: Compile, seconds: float = SECONDS) -> Verdict:
    """Measure one key: all providers that support it, interleaved and sustained."""
    op, trial = ops.catalog()[key.op], ops.catalog()[key.op].trial
    if trial is None or trial.alone is None or trial.block is None:
        raise TritiumError(f"providers of op {op.name!r} are not compared in a block: its trial has none")
    draw = draw_from(getattr(torch, key.dtype), device_type)
    try:
        with torch.inference_mode():
            arguments = trial.alone(key.sizes(), draw)
            declines = ops.declines(op, op.bind(**arguments))
            able = [name for name, reason in declines.items() if reason is None]
            block = trial.block(key.sizes(), draw)
            compiled = {name: _compiled(op, block, name, compiler) for name in (INDUCTOR, *able)}
            blocks = {name: functools.partial(run, *block[1]) for name, run in compiled.items()}
            row = Verdict(
                key=key,
                provider=INDUCTOR,
                ms=_medians(blocks, device_type, seconds, 1.0),
                alone_us=_medians(_alone(op, arguments, able), device_type, seconds / 3, 1e3),
                # A CPU has no launches: host time is part of the block's time.
                issue_us=_issue_us(blocks, device_type) if device_type == "cuda" else {},
                looped=_loop(key, explain(compiled[INDUCTOR]).records),
                bytes=_least_bytes(op, arguments),
                versions=tables.current_versions(),
                remarks={name: reason for name, reason in declines.items() if reason is not None},
            )
    finally:
        # All shapes share one code object: without a reset, Dynamo would reach its recompile limit.
        torch.compiler.reset()
    return replace(row, provider=row.site(replayed=device_type != "cuda").choose())


def _compiled(op: Op, block: Block, provider: str, compiler: Compile) -> Callable[..., Any]:
    function, inputs = block
    compiled = compiler(function, {op.name: provider})
    compiled(*inputs)
    if provider != INDUCTOR:
        sites = [site for record in explain(compiled).records for site in record.sites if site.fusion == op.name]
        if not any(f"{provider!r}" in site.reason and site.outcome != "declined" for site in sites):
            raise TritiumError(f"the block of op {op.name!r} has no site that provider {provider!r} takes: {sites}")
    return compiled


def _alone(op: Op, arguments: Mapping[str, Any], able: Sequence[str]) -> dict[str, Callable[[], Any]]:
    values = tuple(arguments.values())
    reference = torch.compile(op.reference, fullgraph=True, dynamic=False)
    runs: dict[str, Callable[[], Any]] = {INDUCTOR: functools.partial(reference, *values)}
    for name in able:
        provider = ops.providers(op)[name]
        run: Callable[..., Any] = functools.partial(op.overload, provider=name)
        if provider.traced or provider.inlined:
            run = torch.compile(run, fullgraph=True, dynamic=False)
        runs[name] = functools.partial(run, *values)
    return runs


def _medians(runs: Runs, device_type: str, seconds: float, unit: float) -> dict[str, float]:
    """Return each run's median time in milliseconds times `unit`; on a GPU only device time."""
    calls = CAPTURED_CALLS if device_type == "cuda" else 1
    replays = {name: _captured(run, calls) for name, run in runs.items()} if device_type == "cuda" else runs
    timings = measure.interleave(replays, device_type, seconds=seconds, burst=3 if calls > 1 else 1, warmup=3)
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


def _issue_us(runs: Runs, device_type: str) -> dict[str, float]:
    """Return the microseconds in which the host issues a call of each run: calls follow each other as in a host-bound model."""

    def clock(run: Callable[[], Any], calls: int) -> list[float]:
        device.synchronize(device_type)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return [(time.perf_counter() - start) / calls * 1e6]

    found = measure.interleave(runs, device_type, rounds=ISSUE_ROUNDS, warmup=0, burst=ISSUED_CALLS, stopwatch=clock)
    return {name: round(timing.median_ms, 2) for name, timing in found.items()}


def _loop(key: Key, records: Sequence[GraphRecord]) -> Loop | None:
    """Return the size in a key that an Inductor kernel loops over but could hold in registers elsewhere."""
    tilings = [kernel.tiling for record in records for kernel in record.kernels if kernel.tiling is not None]
    looped = [tiling.reduction for tiling in tilings if tiling.reduction and tiling.reduction.form == "looped"]
    for name, size in key.sizes().items():
        reads = [choice.reads for choice in looped if choice.elements == size and choice.reads]
        if reads and isinstance(size, int) and size > tables.INDUCTOR_PERSISTENT:
            return Loop(name, max(reads))
    return None


def _least_bytes(op: Op, arguments: Mapping[str, Any]) -> int:
    """Return the minimum number of bytes moved: every input read once, every result written once."""
    leaves = compat.tensors.leaves_of([dict(arguments), op.fake(**arguments)])
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(count(tensor.shape) * tensor.element_size() for tensor in tensors.values())


def measure_keys(
    keys: Sequence[Key],
    device_type: str,
    path: Path,
    notify: Notify,
    compiler: Compile,
    seconds: float = SECONDS,
) -> list[Verdict]:
    """Measure keys and write each row at once; a key that cannot be measured gets Inductor and the reason.

    If other processes used the CPU during a measurement, its row is returned with a remark and not written.
    """
    verdicts = []
    for index, key in enumerate(keys):
        notify(key, index, len(keys))
        meter = measure.LoadMeter()
        try:
            verdict = compare_in_block(key, device_type, compiler, seconds)
        except Exception as error:  # noqa: BLE001 - a kernel compiler may raise anything; the next key may still work
            remarks = {"not measured": brief(error)}
            verdict = Verdict(key, INDUCTOR, {INDUCTOR: 0.0}, versions=tables.current_versions(), remarks=remarks)
        load = meter.read() if device_type == "cpu" else None
        if load is not None and load.disturbed:
            # Under load, threads that wait for each other become many times slower, by different factors.
            verdict = replace(verdict, remarks={DISTURBED: f"{load.foreign_cores:.1f} cores were taken by others"})
        else:
            tables.store(path, tables.Machine.of(device_type), [verdict])
        verdicts.append(verdict)
    return verdicts

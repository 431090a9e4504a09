"""Time the forms of a reduction on this GPU, and write the table that the tiling policy reads.

    python benchmarks/reductions.py --json results.json --table src/tritium/tuning/nvidia-h200.json

Each function is compiled once for each form, with empty caches, by forcing the form through the policy. The calls of a
form are captured in a CUDA graph, with inputs that together exceed the L2 cache, and the forms are timed interleaved.

    rows      RMS norm with a weight, and LayerNorm with modulation: 4,096 rows, persistent against looped
    few rows  LayerNorm with modulation of 128 rows, looped against split: Inductor cuts rows above 8,192 elements
    gated     x + gate * y before the LayerNorm, as between the blocks of a transformer
    groups    GroupNorm with SiLU of one image, 32 groups of 4 to 64 MiB: split against looped

`--quick` has fewer sizes. After `--seconds` no further function is compiled, and missing ones are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tritium import compat, device, measure
from tritium.bench import results
from tritium.report.observation import ReductionChoice
from tritium.tiling import session
from tritium.tiling.policy import OFF
from tritium.tiling.reductions import MOST_PERSISTENT
from tritium.tiling.session import Session
from tritium.tuning import Limit, Machine, ReductionLimits, tables
from tritium.tuning.tables import INDUCTOR_PERSISTENT, INDUCTOR_WHOLE

ELEMENTS = (1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
ROWS = 4096
FEW_ROWS = 128
# Values of a group of 4, 16 and 64 MiB in bfloat16.
GROUPS = (1 << 21, 1 << 23, 1 << 25)

# A form is forced by a table that excludes all others. Inductor itself splits the rows whose split form is timed.
EVERYTHING = 1 << 40
FORCED = {
    "persistent": ReductionLimits(persistent_up_to=(Limit(64, MOST_PERSISTENT),), whole_up_to=EVERYTHING),
    "looped": ReductionLimits(persistent_up_to=(Limit(64, 0),), whole_up_to=EVERYTHING),
    "split": ReductionLimits(),
}

# The inputs must exceed this size together, so that each call reads from memory: twice the L2 cache of an H200.
OUT_OF_CACHE = 120 << 20
MOST_INPUTS = 8


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., torch.Tensor]
    # The reduced tensor, and the others.
    shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    rows: int
    elements: int
    forms: tuple[str, ...]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def modulated_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=1e-6) * (1 + scale) + shift


def gated_norm(
    x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    return modulated_norm(x + gate * y, scale, shift)


def group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield the cases, the most important first."""
    walked, cut = ("persistent", "looped"), ("looped", "split")
    for elements in ELEMENTS[::2] if quick else ELEMENTS:
        shape, row = (ROWS, elements), (elements,)
        yield Case("rms_norm", rms_norm, shape, (row,), ROWS, elements, walked)
        yield Case("modulated_norm", modulated_norm, shape, (row, row), ROWS, elements, walked)
    for elements in (16384,) if quick else (12288, 16384, 32768):
        shape, row = (FEW_ROWS, elements), (elements,)
        yield Case("few_rows", modulated_norm, shape, (row, row), FEW_ROWS, elements, cut)
    for elements in GROUPS[1:2] if quick else GROUPS:
        side = 1 << (elements.bit_length() - 3) // 2
        shape = (1, 128, side, elements // 4 // side)
        yield Case("group_norm", group_norm, shape, ((128,), (128,)), 32, elements, cut)
    for elements in (5120,) if quick else (3072, 5120, 8192, 16384):
        shape, row = (ROWS, elements), (elements,)
        yield Case("gated_norm", gated_norm, shape, (shape, row, row, row), ROWS, elements, walked)


def compiled(case: Case, form: str, inputs: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], Session]:
    """Return the function with its reductions in one form, after one call."""
    torch._dynamo.reset()
    policy = dataclasses.replace(OFF, choose_reduction=True, reduction_limits=FORCED[form])
    with session.active(policy) as decisions, compat.inductor.inductor_patched({"fx_graph_cache": False}):
        function = torch.compile(case.function, fullgraph=True, dynamic=False)
        function(*inputs)
    return function, decisions


def taken(decisions: Session, case: Case, form: str) -> ReductionChoice | None:
    """Return the choice for the rows of a case if it has the requested form, else None."""
    choices = [kernel.reduction for kernel in decisions.kernels if kernel.reduction is not None]
    if form == "split":
        cut = [choice for choice in choices if choice.rows is not None and choice.rows > case.rows]
        return cut[0] if cut and len(choices) > 1 else None
    whole = [choice for choice in choices if (choice.rows, choice.elements) == (case.rows, case.elements)]
    return next((choice for choice in whole if choice.form == form), None)


def captured(function: Callable[..., Any], inputs: Iterable[Sequence[torch.Tensor]]) -> torch.cuda.CUDAGraph:
    """Capture one call per input as a single launch: a call takes the host longer than the device."""
    inputs = list(inputs)
    for each in inputs:
        function(*each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in inputs:
            function(*each)
    return graph


def timed(case: Case, seconds: float) -> dict[str, Any]:
    first = torch.randn(case.shape, device="cuda", dtype=torch.bfloat16)
    others = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in case.others]
    copies = max(2, min(MOST_INPUTS, -(-OUT_OF_CACHE // first.nbytes)))
    inputs = [(first.clone(), *others) for _ in range(copies)]
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    remarks: dict[str, str] = {}
    kernels: dict[str, int] = {}
    reads = 1
    expected = case.function(*inputs[0]).float()
    for form in case.forms:
        try:
            function, decisions = compiled(case, form, inputs[0])
            choice = taken(decisions, case, form)
            if choice is None:
                remarks[form] = "Inductor generates no such kernel for it"
                continue
            torch.testing.assert_close(function(*inputs[0]).float(), expected, rtol=0.05, atol=0.05)
            graphs[form] = captured(function, inputs)
        except Exception as error:  # noqa: BLE001 - a failing form is a result
            remarks[form] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            continue
        kernels[form] = len(decisions.kernels)
        reads = max(reads, choice.reads or 1)
    replays = {form: graph.replay for form, graph in graphs.items()}
    found = measure.interleave(replays, "cuda", seconds=seconds) if replays else {}
    ms = {form: round(timing.median_ms / copies, 5) for form, timing in found.items()}
    # Every tensor is read once, and the result written once.
    moved = 2 * first.nbytes + sum(other.nbytes for other in others)
    return {
        "case": case.name,
        "rows": case.rows,
        "elements": case.elements,
        "reads": reads,
        "ms": ms,
        "gb_per_s": {form: round(moved / taken_ms / 1e6) for form, taken_ms in ms.items()},
        "kernels": kernels,
        "remarks": remarks,
    }


def line(row: dict[str, Any]) -> str:
    forms = "   ".join(f"{form} {ms * 1e3:8.1f} us {row['gb_per_s'][form]:5d} GB/s" for form, ms in row["ms"].items())
    remarks = "".join(f"   {form}: {remark}" for form, remark in row["remarks"].items())
    return f"{row['case']:15} {row['rows']:5} x {row['elements']:9,}  {forms}{remarks}"


# A form must be this much faster to be chosen, and may be this much slower for rows before a longer one.
GAIN = 0.02
TIE = 0.01


def limits_of(rows: Sequence[Mapping[str, Any]], versions: Mapping[str, str]) -> ReductionLimits:
    """Return the limits of a device that follow from measured rows."""
    limits = []
    for reads in sorted({row["reads"] for row in rows if "persistent" in row["ms"]}):
        longest = _longest([row for row in rows if row["reads"] == reads], "persistent", "looped")
        limits.append(Limit(reads, longest or INDUCTOR_PERSISTENT))
    return ReductionLimits(
        persistent_up_to=tuple(limits),
        whole_up_to=_longest(rows, "looped", "split") or INDUCTOR_WHOLE,
        versions=versions,
    )


def _longest(rows: Sequence[Mapping[str, Any]], form: str, other: str) -> int | None:
    """Return the longest row for which a form is faster, if it is not slower for any shorter one."""
    longest = None
    for row in sorted(rows, key=lambda row: row["elements"]):
        if {form, other} <= row["ms"].keys():
            ratio = row["ms"][form] / row["ms"][other]
            if ratio > 1 + TIE:
                break
            if ratio < 1 - GAIN:
                longest = int(row["elements"])
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--seconds", type=float, default=80.0, help="nothing is compiled after so many seconds")
    parser.add_argument("--each", type=float, default=0.2, help="seconds of timing for each function")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--table", type=Path, help="the device's table, which gets the limits")
    arguments = parser.parse_args()
    if not device.cuda_available():
        raise SystemExit("there is no GPU to time reductions on")
    reason = compat.tiling.decline_tiling()
    if reason is not None:
        raise SystemExit(reason)
    start, rows, missing = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        # Kernels of an earlier run would hide the compile time of a form.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for case in cases(quick=arguments.quick):
            if time.perf_counter() - start > arguments.seconds:
                missing.append(f"{case.name} {case.rows} x {case.elements}")
                continue
            rows.append(timed(case, arguments.each))
            print(line(rows[-1]), flush=True)
    machine, limits = Machine.of("cuda"), limits_of(rows, tables.current_versions())
    print(f"\n{time.perf_counter() - start:.0f} s" + (f"; no time for {', '.join(missing)}" if missing else ""))
    entry = limits.to_dict()
    print(f"{machine.name}: {json.dumps(entry)}")
    if arguments.json is not None:
        about = {"device": machine.name, "torch": torch.__version__, "commit": results.commit()}
        content = {**about, "rows": rows, "missing": missing, "table": entry}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.table is not None:
        tables.store(arguments.table, machine, reductions=limits)


if __name__ == "__main__":
    main()

"""Find the fastest way to cut blocks in the sparse attention kernel on this GPU; compare with cuDNN.

    PYTHONPATH=src python3 benchmarks/sparse_attention.py --json benchmarks/results/sparse-attention/h200.json

The shape is Wan's self-attention at 81 frames of 480 x 832, with random lists of blocks. All candidates are compiled
first, in threads. Each is checked on a few rows against float32, then they are timed interleaved with cuDNN, because a
GPU under load lowers its clock. Ratio = cuDNN's time divided by the candidate's; TFLOP/s count the listed blocks.
Candidates that cannot be compiled or launched are reported and skipped. Copy the winner to `launch_options` of the
kernel's module.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tritium.bench import results
from tritium.ops.block_sparse_attention import OP
from tritium.ops.block_sparse_attention import triton as kernel

TOKENS, HEADS, BLOCK = 32_760, 40, 128
DENSITIES = (0.5, 0.25)
# The float32 reference has a negligible error; bfloat16 rounds the weights, the values and the result.
LIMIT = 1e-2

Options = dict[str, Any]
Case = tuple[int, float]


def options(tile: int, *, tables: bool, warps: int, stages: int, part: int = 32) -> Options:
    cut = {"TILE": tile, "PART": part, "TABLES": tables, "PRECISION": "tf32"}
    return {**cut, "num_warps": warps, "num_stages": stages}


CANDIDATES: dict[int, list[Options]] = {
    128: [
        options(128, tables=True, warps=8, stages=3),
        options(64, tables=True, warps=8, stages=4),
        options(64, tables=False, warps=8, stages=3),
    ],
    64: [
        options(128, tables=True, warps=8, stages=3),
        options(128, tables=True, warps=4, stages=3),
        options(64, tables=True, warps=4, stages=3),
        options(64, tables=False, warps=4, stages=3),
    ],
}


def label(chosen: Options) -> str:
    how = "copy engine" if chosen["TABLES"] else "pointers"
    return f"{how}, {chosen['TILE']} keys, {chosen['num_warps']} warps, {chosen['num_stages']} stages"


def lists(tokens: int, heads: int, density: float, device: str) -> dict[str, torch.Tensor]:
    """Create random lists of equal length for each block of queries; they may include the short last."""
    edges = torch.arange(0, tokens + BLOCK, BLOCK, device=device, dtype=torch.int32).clamp(max=tokens)
    blocks = edges.shape[0] - 1
    drawn = torch.rand(1, heads, blocks, blocks, device=device).argsort(-1)
    seen = max(1, round(density * blocks))
    short = blocks - 1 if tokens % BLOCK else -1
    # Whole blocks must come first in a list.
    kept = drawn[..., :seen]
    order = (kept == short).to(torch.uint8).argsort(dim=-1, stable=True)
    indices = torch.cat([kept.gather(-1, order), drawn[..., seen:]], -1).to(torch.int32)
    listed = torch.full((1, heads, blocks), seen, device=device)
    counts = torch.stack([listed - (kept == short).sum(-1), listed], -1).to(torch.int32)
    return {"counts": counts, "indices": indices.contiguous(), "q_edges": edges, "k_edges": edges}


def operations(given: dict[str, Any]) -> float:
    """Return the operations of the two products over the listed blocks."""
    edges = given["k_edges"].double()
    lengths = edges[1:] - edges[:-1]
    counts, indices = given["counts"][..., 1], given["indices"].long()
    places = torch.arange(indices.shape[-1], device=indices.device)
    keys = (lengths[indices] * (places < counts.unsqueeze(-1))).sum(-1)
    return float((keys * lengths).sum()) * 4 * given["q"].shape[-1]


def error_on_rows(out: torch.Tensor, given: dict[str, Any]) -> float:
    """Return the relative L2 error of some rows and heads against float32: first, last, and two between."""
    q, k, v, edges = given["q"], given["k"], given["v"], given["k_edges"].tolist()
    found, exact = [], []
    for head in {0, q.shape[2] // 2, q.shape[2] - 1}:
        for token in (0, q.shape[1] // 3, q.shape[1] // 2, q.shape[1] - 1):
            row = token // BLOCK
            count = int(given["counts"][0, head, row, 1])
            kept = given["indices"][0, head, row, :count].tolist()
            seen = torch.cat([torch.arange(edges[one], edges[one + 1], device=q.device) for one in kept])
            keys, values = (t[0, seen, head].float() for t in (k, v))
            weights = torch.softmax(keys @ q[0, token, head].float() * given["scale"], 0)
            found.append(out[0, token, head].float())
            exact.append(weights @ values)
    left, right = torch.stack(found), torch.stack(exact)
    return float((left - right).norm() / right.norm())


def dense(given: dict[str, Any]) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (given[name].transpose(1, 2) for name in "qkv")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=given["scale"])


def sparse(given: dict[str, Any], chosen: Options) -> torch.Tensor:
    return kernel.run_triton(OP.bind(**given), chosen)


def reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


def compile_all(widths: list[int], dropped: dict[tuple[int, str], str]) -> None:
    """Compile every candidate on a few blocks, in threads; strides and values allow reuse of the code."""
    small, tokens = {}, 16 * BLOCK - 8
    for width in widths:
        q, k, v = (torch.randn(1, tokens, HEADS, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        few = lists(tokens, HEADS, 0.5, "cuda")
        small[width] = {"q": q, "k": k, "v": v, **few, "block": BLOCK, "scale": width**-0.5, "causal": False}

    def first(width: int, chosen: Options) -> str | None:
        try:
            found = error_on_rows(sparse(small[width], chosen), small[width])
        except Exception as error:  # noqa: BLE001 - any compiler error goes into the table
            return reason(error)
        return None if found < LIMIT else f"differs from float32 by {found:.1e}"

    jobs = [(width, chosen) for width in widths for chosen in CANDIDATES[width]]
    # The first one runs alone and fills the caches that all compilations share.
    reasons = [first(*jobs[0])]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        reasons += pool.map(first, *zip(*jobs[1:], strict=True))
    dropped |= {(width, label(chosen)): why for (width, chosen), why in zip(jobs, reasons, strict=True) if why}


def timed(runs: dict[str, Callable[[], torch.Tensor]], seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each function, timed interleaved in rotating order."""
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    names, end, turn = list(runs), time.perf_counter() + seconds, 0
    while turn < 3 or time.perf_counter() < end:
        marks = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            marks[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[name][0].record()
            runs[name]()
            marks[name][1].record()
        torch.cuda.synchronize()
        for name, (before, after) in marks.items():
            taken[name].append(before.elapsed_time(after))
        turn += 1
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(width: int, density: float, seconds: float, dropped: dict[tuple[int, str], str]) -> list[dict[str, Any]]:
    torch.manual_seed(int(1000 * density) + width)
    q, k, v = (torch.randn(1, TOKENS, HEADS, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    given = {"q": q, "k": k, "v": v, **lists(TOKENS, HEADS, density, "cuda")}
    given |= {"block": BLOCK, "scale": width**-0.5, "causal": False}
    runs: dict[str, Callable[[], torch.Tensor]] = {"cuDNN, dense": functools.partial(dense, given)}
    errors: dict[str, float] = {}
    for chosen in CANDIDATES[width]:
        name = label(chosen)
        if (width, name) in dropped:
            continue
        try:
            errors[name] = error_on_rows(sparse(given, chosen), given)
        except Exception as error:  # noqa: BLE001 - any launch error goes into the table
            dropped[width, name] = reason(error)
            continue
        if not errors[name] < LIMIT:
            dropped[width, name] = f"differs from float32 by {errors[name]:.1e} at density {density}"
            continue
        runs[name] = functools.partial(sparse, given, chosen)
    ms = timed(runs, seconds)
    work = dict.fromkeys(runs, operations(given)) | {"cuDNN, dense": 4.0 * TOKENS**2 * HEADS * width}
    rows = [
        {
            "width": width,
            "density": work[name] / work["cuDNN, dense"],
            "variant": name,
            "ms": round(took, 4),
            "tflops": round(work[name] / took / 1e9, 1),
            "ratio": round(ms["cuDNN, dense"] / took, 3),
            "relative_l2": errors.get(name),
        }
        for name, took in ms.items()
    ]
    return sorted(rows, key=lambda row: float(row["ms"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring a width and density")
    parser.add_argument(
        "--width", type=int, choices=sorted(CANDIDATES), action="append", help="of heads; both if not given"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this is about a GPU, and there is none")
    began = time.perf_counter()
    widths, dropped = arguments.width or sorted(CANDIDATES, reverse=True), {}
    compile_all(widths, dropped)
    print(f"compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    rows = []
    for width in widths:
        for density in DENSITIES:
            found = measure(width, density, arguments.seconds, dropped)
            rows += found
            print(f"heads of {width}, density {density}")
            for row in found:
                print(f"  {row['variant']:48} {row['ms']:8.3f} ms {row['tflops']:7.1f} TFLOP/s {row['ratio']:6.2f}x")
            sys.stdout.flush()
    for (width, name), why in dropped.items():
        print(f"left out: heads of {width}, {name}: {why}")
    if arguments.json is not None:
        import triton

        content = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "commit": results.commit(),
            "tokens": TOKENS,
            "heads": HEADS,
            "block": BLOCK,
            "rows": rows,
            "left_out": [{"width": width, "variant": name, "why": why} for (width, name), why in dropped.items()],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

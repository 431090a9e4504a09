"""Find the best size of `wide_attention`'s score buffer on this GPU, and time the steps of the op.

    PYTHONPATH=src python3 benchmarks/wide_attention.py --json wide-attention.json

One head of 512 in bfloat16: the middle of an AutoencoderKL at 512, 1024 and 2048 pixels. Each variant is checked on the
last rows against float64 and then timed interleaved with the others, because a GPU under load lowers its clock. Copy
the winner to `SCORES_BYTES` of the op's `products.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from tritium import measure
from tritium.compat.products import multiply_into
from tritium.ops.attention import attention_math
from tritium.ops.wide_attention import products

WIDTH = 512
TOKENS = (4096, 16384, 65536)
MEBIBYTES = (64, 128, 256, 512, 1024)
CHECKED = 64


def held(mebibytes: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    products.SCORES_BYTES = mebibytes << 20
    return products.run_products(q, k, v, WIDTH**-0.5)


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return the three steps on one piece of the queries, in order."""
    keys = k.shape[2]
    rows = min(q.shape[2], (256 << 20) // (4 * keys))
    scores = torch.empty(1, rows, keys, dtype=torch.float32, device=q.device)
    weights = torch.empty(1, rows, keys, dtype=q.dtype, device=q.device)
    some, out = q[:, 0, :rows], torch.empty(1, rows, WIDTH, dtype=q.dtype, device=q.device)
    return {
        f"scores of {rows} rows": lambda: multiply_into(some, k[:, 0].transpose(1, 2), scores),
        f"softmax of {rows} rows": lambda: products.softmax_rows(scores, weights, keys, WIDTH**-0.5),
        f"values of {rows} rows": lambda: multiply_into(weights, v[:, 0], out),
    }


def compare(tokens: int, seconds: float) -> list[dict[str, Any]]:
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(1, 1, tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    runs: dict[str, Callable[[], Any]] = {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v)}
    # Buffers larger than all scores make no difference.
    rooms = [size for size in MEBIBYTES if size << 20 <= 4 * tokens**2] or [MEBIBYTES[0]]
    for size in rooms:
        runs[f"products, {size} MiB"] = lambda size=size: held(size, q, k, v)
    exact = attention_math(q[:, :, -CHECKED:].double(), k.double(), v.double(), None, WIDTH**-0.5, False)
    errors = {}
    for name, run in runs.items():
        last = run()[:, :, -CHECKED:].double()
        errors[name] = float((last - exact).norm() / exact.norm())
    timings = measure.interleave(runs, "cuda", seconds=seconds)
    timings |= measure.interleave(parts(q, k, v), "cuda", seconds=seconds / 3)
    base = timings["sdpa"].median_ms
    return [
        {
            "tokens": tokens,
            "variant": name,
            "ms": round(timing.median_ms, 4),
            "ratio": round(base / timing.median_ms, 3) if name in errors else None,
            "relative_l2": errors.get(name),
        }
        for name, timing in timings.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of tokens")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    rows = []
    with torch.inference_mode():
        for tokens in given.tokens:
            for row in compare(tokens, given.seconds):
                ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} x, error {row['relative_l2']:.1e}"
                print(f"{row['tokens']:>6} tokens  {row['variant']:<22} {row['ms']:9.3f} ms  {ratio}", flush=True)
                rows.append(row)
    if given.json:
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measure each kernel of GroupNorm with SiLU against a copy, to show the share of memory bandwidth.

    python benchmarks/group_norm.py --json results/group-norm/h200.json

A copy reads and writes a tensor. Statistics only read one, so their lower bound is half a copy; normalising reads and
writes, so its lower bound is a copy. Times are the profiler's, for kernels only. `--sweep` also tries other ways to cut
the statistics.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812

from tritium.bench import results
from tritium.bench.profile import profile
from tritium.ops import group_norm_silu as group_norm
from tritium.ops.group_norm_silu import OP, Options

# Larger than an L2 cache of 60 MiB, as at the end of a decoder: 1024 and 512 pixels.
SHAPES = ((1, 128, 1024, 1024), (1, 256, 1024, 1024), (1, 256, 512, 512), (1, 512, 512, 512))
GROUPS, EPS = 32, 1e-6

# Programs, values per step, and warps of the statistics.
SWEEP = tuple(itertools.product((528, 1056, 2112), (2048, 4096, 8192), (4, 8, 16)))


def kernel_us(call: Callable[[], Any]) -> dict[str, float]:
    """Return microseconds by kernel, longest first."""
    return {row["name"]: row["us"] for row in profile(call, "cuda") or ()}


def measured(shape: tuple[int, ...], *, channels_last: bool) -> dict[str, Any]:
    x, weight, bias = arguments(shape, channels_last=channels_last)
    out = torch.empty_like(x)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: F.silu(F.group_norm(x, GROUPS, weight, bias, EPS)), dynamic=False)
    copy = sum(kernel_us(lambda: out.copy_(x)).values())
    own = kernel_us(lambda: group_norm.run_triton(OP.bind(x, GROUPS, weight, bias, EPS, None)))
    statistics = sum(us for name, us in own.items() if "statistics" in name)
    return {
        "shape": list(shape),
        "layout": "channels-last" if channels_last else "contiguous",
        "copy_us": round(copy, 1),
        "kernels_us": own,
        "inductor_us": kernel_us(lambda: compiled(x)),
        # Relative to copy bandwidth: this time reads one tensor, the copy's time moves two.
        "statistics_share": round(copy / 2 / statistics, 3),
        # Two reads and one write.
        "whole_share": round(1.5 * copy / sum(own.values()), 3),
    }


def arguments(shape: tuple[int, ...], *, channels_last: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    weight, bias = torch.randn(2, shape[1], device="cuda", dtype=torch.bfloat16)
    return x, weight, bias


def swept(shape: tuple[int, ...], *, channels_last: bool) -> Iterator[tuple[float, tuple[int, int, int]]]:
    """Yield the microseconds of the statistics for each way to cut them."""
    x, weight, bias = arguments(shape, channels_last=channels_last)
    by_run, by_pixels = group_norm.launch_options_run, group_norm.launch_options_pixel_statistics
    for programs, tile, warps in SWEEP:

        def run(tile: int = tile, warps: int = warps) -> Options:
            cut, options = by_run()
            return {**cut, "COLUMNS": tile}, {**options, "num_warps": warps}

        def pixels(channels: int, tile: int = tile, warps: int = warps) -> Options:
            cut, options = by_pixels(channels)
            return {**cut, "ROWS": max(1, tile // cut["COLUMNS"])}, {**options, "num_warps": warps}

        with (
            mock.patch.object(group_norm, "STATISTICS_PROGRAMS", programs),
            mock.patch.object(group_norm, "launch_options_run", run),
            mock.patch.object(group_norm, "launch_options_pixel_statistics", pixels),
        ):
            own = kernel_us(lambda: group_norm.run_triton(OP.bind(x, GROUPS, weight, bias, EPS, None)))
        yield sum(us for name, us in own.items() if "statistics" in name), (programs, tile, warps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--sweep", action="store_true", help="also try other ways to cut the statistics, of one shape")
    given = parser.parse_args()
    rows = []
    with torch.inference_mode():
        for shape, last in itertools.product(SHAPES, (False, True)):
            row = measured(shape, channels_last=last)
            rows.append(row)
            print(
                f"{shape!s:24} {row['layout']:13} statistics at {row['statistics_share']:.0%}, all at "
                f"{row['whole_share']:.0%} of copy bandwidth; {sum(row['kernels_us'].values()):.0f} us, Inductor "
                f"{sum(row['inductor_us'].values()):.0f} us",
                flush=True,
            )
        for last in (False, True) if given.sweep else ():
            found = sorted(swept(SHAPES[0], channels_last=last))
            print(
                "channels-last" if last else "contiguous",
                "(us, (programs, numbers, warps)):",
                *found[:4],
                "...",
                found[-1],
            )
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": results.commit()}
        content = {**about, "rows": rows}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

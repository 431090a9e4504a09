"""Measure the loss of lossy settings on the example pipeline: images of 8 jobs against eager ones with all steps.

    python benchmarks/loss.py --json benchmarks/results/cpu-2-cores-loss.json

The settings are those of `tritium bench pipeline flux` and have its names. Nothing is timed, so no code is generated: the
engine is `eager`, whose images differ from those of generated code by the order of sums alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from pathlib import Path
from typing import Any

from recipes import STEPS, jobs_of

import tritium
from tritium import CompilationConfig, Plan, Skip, compat, device, disk, quality
from tritium.bench import generation, results
from tritium.pipelines.generation import Image, generate

WINDOW = Skip.window(steps=STEPS, runs=14)
SETTINGS: dict[str, dict[str, Any]] = {
    "tritium optimize": {},
    "tritium fp8": {"quantize": "fp8"},
    "tritium int8": {"quantize": "int8"},
    "tritium skip": {"skip": WINDOW},
    "tritium fp8 skip": {"quantize": "fp8", "skip": WINDOW},
}


def row_of(variant: str, images: list[Image], references: list[Image]) -> dict[str, Any]:
    """Return the losses of a setting: medians, and the worst of all jobs."""
    found = [image.difference(reference) for image, reference in zip(images, references, strict=True)]
    worst = quality.worst(found)
    median = {name: statistics.median(getattr(each, name) for each in found) for name in ("psnr", "ssim", "latent_l2")}
    return {
        "workload": f"example, {STEPS} steps",
        "variant": variant,
        "jobs": len(found),
        **{f"{name}_median": finite(value) for name, value in median.items()},
        **{f"{name}_worst": finite(getattr(worst, name)) for name in median},
    }


def finite(value: float) -> float | None:
    """Return a figure for JSON, which has no infinity: the PSNR of equal images is None."""
    return value if math.isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=8)
    arguments = parser.parse_args()
    where = device.default()
    pipe, jobs = generation.load(generation.EXAMPLE, where), jobs_of(arguments.jobs)
    references = [generate(pipe, job) for job in jobs]
    rows = []
    for variant, settings in SETTINGS.items():
        config = CompilationConfig(engine="eager")
        with tritium.optimize(pipe, Plan(progress=False, config=config, **settings)):
            rows.append(row_of(variant, [generate(pipe, job) for job in jobs], references))
        print(rows[-1], flush=True)
    if arguments.json is not None:
        about = {
            "device": device.describe(where).to_dict(),
            "versions": compat.versions.versions(),
            "commit": results.commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        disk.write(arguments.json, json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

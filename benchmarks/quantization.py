"""Measure the example pipeline with quantized linears: images against unquantized ones, the example's scorer, and speed.

    python benchmarks/quantization.py --json benchmarks/results/cpu-2-cores-quantize.json

Each format has two rows: `example` is an image, from prompt to pixels, `example denoiser` a call of the denoiser. Ratios are
against torch.compile. `psnr` is the median of eight images against those of the unquantized pipeline, compiled by Tritium as
well; the remark has the lowest one, and the share of images of held-out prompts with the right colours in the right halves.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tritium import CompilationConfig, compat, measure
from tritium.api import Handle, optimize
from tritium.bench.results import INDUCTOR, TRITIUM, Results, Row
from tritium.example import PROMPTS, load_example
from tritium.pipelines import trial
from tritium.pipelines.generation import Image, Job, generate
from tritium.pipelines.plan import Plan
from tritium.quality import Difference
from tritium.techniques.choice import Choice
from tritium.techniques.quantize import Quantize

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))
import score

PART = "transformer"
STEPS = 8

# Four prompts of the example's, and four with combinations that were held out of its training.
MORE = tuple(score.unseen(4)[1])
JOBS = tuple(
    Job(prompt=prompt, steps=STEPS, seed=seed, extra={"max_sequence_length": 512})
    for seed, prompt in enumerate((*PROMPTS, *MORE))
)

# Stored weights would also be those of the text encoders: every variant quantizes copies of the denoiser only.
CONFIGS = {
    "fp8": Quantize("fp8"),
    "int8": Quantize("int8"),
    "int8-rotated": Quantize("int8-rotated"),
    "int8-weights": Quantize("int8-weights", keep="device"),
    "int4-weights": Quantize("int4-weights", keep="device"),
}

NOTE = "8 steps of 128 x 128; psnr is the median of 8 images against the unquantized pipeline"


def choices() -> dict[str, Choice]:
    quantized = {f"{TRITIUM} {name}": Choice(quantize=config) for name, config in CONFIGS.items()}
    return {INDUCTOR: Choice(how="inductor"), TRITIUM: Choice(), **quantized}


def scores(pipe: Any, count: int) -> dict[str, float]:
    """Return the share of images with the right colours in the right halves, by variant."""
    scenes, prompts = score.unseen(count)
    # Without code generation: the operators are the same, and a batch would compile each variant again.
    plan = Plan(config=CompilationConfig(engine="eager"), progress=False, components={"vae": "eager"})
    found = {}
    with optimize(pipe, plan) as handle:
        for name, choice in choices().items():
            if name != INDUCTOR:
                handle.use({PART: choice})
                drawn = score.pictures(pipe, prompts, 128, 128, STEPS, length=32)
                found[name] = score.means(score.check(drawn, scenes))["halves"]
                print(f"{name}: colours in the right halves {found[name]:.3f}", file=sys.stderr, flush=True)
    return found


def images(handle: Handle) -> tuple[dict[str, list[Image]], dict[str, float], trial.Call]:
    """Return the images of each variant, the seconds of its first one, and a call of the denoiser."""
    calls: list[trial.Call] = []
    drawn: dict[str, list[Image]] = {}
    first: dict[str, float] = {}
    for name, choice in choices().items():
        handle.use({PART: choice})
        if not calls:
            handle.part(PART).before_first = lambda args, kwargs: calls.append(
                compat.tensors.map_tensors(torch.clone, (args, kwargs))
            )
        drawn[name] = [generate(handle.pipe, job) for job in JOBS]
        first[name] = drawn[name][0].seconds
        psnr = statistics.median(
            image.difference(other).psnr for image, other in zip(drawn[name], drawn[next(iter(drawn))], strict=True)
        )
        print(f"{name}: first image {first[name]:.1f} s, PSNR {psnr:.1f} dB", file=sys.stderr, flush=True)
    return drawn, first, calls[0]


def timed(run: Callable[[], Any], handle: Handle, seconds: float, burst: int) -> tuple[dict[str, Any], bool | None]:
    """Time every variant interleaved; return the timings, and whether other processes disturbed them."""
    meter = measure.LoadMeter()
    timings = measure.interleave(
        dict.fromkeys(choices(), run),
        handle.pipe.device.type,
        seconds=seconds,
        warmup=1,
        burst=burst,
        prepare=lambda name: handle.use({PART: choices()[name]}),
    )
    load = meter.read()
    return timings, load.disturbed if load is not None else None


def rows_of(
    workload: str, times: tuple[dict[str, Any], bool | None], fields: Mapping[str, Mapping[str, Any]], shapes: Any
) -> list[Row]:
    timings, disturbed = times
    return [
        Row(
            workload=workload,
            variant=name,
            mode="default",
            dtype="float32",
            shrunk=False,
            note=NOTE,
            shapes=shapes,
            ratio=timings[INDUCTOR].median_ms / timing.median_ms,
            disturbed=disturbed,
            first_call_cold=False,
            peak_memory_bytes=None,
            **asdict(timing),
            **fields[name],
        )
        for name, timing in timings.items()
    ]


def fields_of(name: str, found: Sequence[Difference], first: float, right: Mapping[str, float]) -> dict[str, Any]:
    psnr = statistics.median(entry.psnr for entry in found)
    remark = f"lowest PSNR {min(entry.psnr for entry in found):.1f} dB"
    remark += f", colours in the right halves {right[name]:.3f}" if name in right else ""
    latents = [entry.latent_l2 for entry in found if entry.latent_l2 is not None]
    return {
        "psnr": None if psnr == float("inf") else psnr,
        "ssim": statistics.median(entry.ssim for entry in found),
        "relative_l2": statistics.median(latents),
        "first_call_s": first,
        "remark": remark,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing, for each workload")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts of the scorer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    pipe = load_example(options.device)
    pipe.set_progress_bar_config(disable=True)
    # Only the denoiser is compiled: the rest is the same in each variant.
    with optimize(pipe, Plan(progress=False, components={"vae": "eager"})) as handle:
        drawn, first, call = images(handle)
        differences = {
            name: [image.difference(other) for image, other in zip(made, drawn[TRITIUM], strict=True)]
            for name, made in drawn.items()
        }
        denoise = functools.partial(handle.part(PART).run, *call[0], **call[1])
        with torch.no_grad():
            calls = timed(denoise, handle, options.seconds, burst=5)
        whole = timed(lambda: generate(pipe, JOBS[0]), handle, options.seconds, burst=1)
    right = scores(pipe, options.prompts)
    fields = {name: fields_of(name, found, first[name], right) for name, found in differences.items()}
    shapes = {"pixels": list(drawn[TRITIUM][0].pixels.shape)}
    rows = [*rows_of("example denoiser", calls, fields, shapes), *rows_of("example", whole, fields, shapes)]
    for row in rows:
        print(
            f"{row.workload:17} {row.variant:22} {row.median_ms:9.2f} ms {row.ratio:5.2f}x PSNR {row.psnr} {row.remark}"
        )
    if options.json:
        Results.now(rows, options.device).save(options.json)


if __name__ == "__main__":
    main()

"""Whole pipelines as workloads: `example`, or a local folder. The time is that of an image, from prompt to pixels.

One pipeline serves all variants: its parts are switched between eager, torch.compile and Tritium, untimed, before each
turn. Both compiled variants compile the same parts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritium import envs, measure, quality
from tritium.api import Handle, optimize
from tritium.bench import generation
from tritium.bench.comparison import PREPARED, Comparison, start_compiler
from tritium.bench.results import EAGER, GRAPHS, INDUCTOR, REDUCE_OVERHEAD, TRITIUM, Row
from tritium.bench.settings import Notify, Settings, quantized
from tritium.errors import ConfigError
from tritium.pipelines.generation import Image, Job, generate
from tritium.pipelines.plan import Plan
from tritium.techniques.choice import Choice
from tritium.techniques.quantize import Quantize

# Images of one variant in a row, as users generate them: the first one after another variant has to allocate again.
_BURST = 3

# Images that take fewer seconds are generated several times for a comparison.
_QUICK = 3.0

# Processes started with artifacts. The median counts: a few seconds are easily disturbed.
_RESTARTS = 3

# Seconds until the first image of a process, at most.
_PATIENCE = 1800

Choices = Mapping[str, Choice]

# The beginnings of names of parts that `--quantize` concerns.
DENOISERS = ("transformer", "unet")


def is_pipeline(name: str) -> bool:
    """Return True for the name of a pipeline: the example, or a folder."""
    return name == generation.EXAMPLE or (Path(name) / "model_index.json").is_file()


def run(name: str, settings: Settings, notify: Notify) -> list[Row]:
    """Measure a pipeline: time of an image, first images cold and with artifacts, differences from eager."""
    settings.refuse_options_of_models(name, "is a whole pipeline")
    label = name if name == generation.EXAMPLE else Path(name).name
    notify(f"{label}: loading", 0.0)
    pipe = generation.load(name, settings.device_type, settings.dtype)
    sizes = None if settings.size is None else [settings.size]
    jobs = generation.jobs_for(name, sizes=sizes, steps=settings.steps)
    images: dict[str, list[Image]] = {}
    restart: dict[str, float] = {}
    comparison = Comparison(workload=label, settings=settings, notify=notify, shrunk=False, inference_mode=False)
    # torch.compile compiles the parts that Tritium compiles by default.
    with optimize(pipe, Plan(progress=False)) as handle:
        choices = _choices(handle, settings)
        start_compiler(settings)
        for variant in sorted(choices, key=[EAGER, TRITIUM, GRAPHS, settings.quantized, INDUCTOR].index):
            handle.use(choices[variant])
            comparison.add(variant, lambda: generate(pipe, jobs[0]))
            images[variant] = [generate(pipe, job) for job in jobs]
        # Engine `eager` generates no code, so there is nothing to keep.
        if settings.cold and handle.plan.config.engine == "inductor":
            restart = _restart_times(name, label, jobs[0], settings, notify)
        # CUDA graphs of `reduce-overhead` need a mark for every step of a pipeline.
        timed = [variant for variant in settings.variants if variant != REDUCE_OVERHEAD]
        comparison.variants = {variant: comparison.variants[variant] for variant in timed}
        comparison.time(warmup=1, burst=_BURST, prepare=lambda variant: handle.use(choices[variant]))
        for variant, measured in comparison.variants.items():
            handle.use(choices[variant])
            measured.fields["peak_memory_bytes"] = comparison.peak_memory(variant)
            measured.fields |= _differences(images[variant], images[EAGER])
    if TRITIUM in comparison.variants:
        comparison.variants[TRITIUM].fields |= restart
    pixels = images[EAGER][0].pixels
    height, width = pixels.shape[-2:]
    comparison.shapes = {"pixels": list(pixels.shape)}
    of_steps = "" if settings.steps is None else f" in {settings.steps} steps"
    comparison.note = f"an image of {width} x {height}{of_steps}; differences are the worst of {len(jobs)} images"
    rows = comparison.rows()
    settings.on_rows(rows)
    return rows


def _choices(handle: Handle, settings: Settings) -> dict[str, Choices]:
    """Map each variant to a choice for each part. Eager always runs: differences are against it."""
    ours = handle.choices
    inductor = {name: choice if choice.how == "eager" else Choice(how="inductor") for name, choice in ours.items()}
    captured = {
        name: choice.with_(graphs="with_compile") if choice.how == "tritium" else choice
        for name, choice in ours.items()
    }
    choices: dict[str, Choices] = {EAGER: _all_eager(handle), INDUCTOR: inductor, TRITIUM: ours, GRAPHS: captured}
    if settings.quantize is not None:
        choices[settings.quantized] = _quantized(handle, quantized(settings.quantize))
    return {name: choice for name, choice in choices.items() if name in settings.variants or name == EAGER}


def _quantized(handle: Handle, config: Quantize) -> Choices:
    """Return the choices of a handle, with linears of its compiled denoisers quantized."""
    ours = handle.choices
    denoisers = [name for name, choice in ours.items() if name.startswith(DENOISERS) and choice.how == "tritium"]
    if not denoisers:
        raise ConfigError(f"--quantize: {type(handle.pipe).__name__} has no denoiser that Tritium compiles")
    return {name: choice.with_(quantize=config) if name in denoisers else choice for name, choice in ours.items()}


def _all_eager(handle: Handle) -> Choices:
    return dict.fromkeys(handle.choices, Choice(how="eager", parallel=False))


def compare(pipe: Any, handle: Handle, job: Job, *, once: bool = False) -> tuple[Image, Image]:
    """Generate the image of a job eagerly and optimized; seconds are medians of interleaved runs.

    Several images of each: a single one would mostly time memory that the other variant has just freed. With `once`, as
    many as every other rank generates.
    """
    ours = handle.choices
    choices = {EAGER: _all_eager(handle), TRITIUM: ours}
    images: dict[str, Image] = {}
    for name, choice in choices.items():
        handle.use(choice)
        images[name] = generate(pipe, job)
    quick = not once and max(image.seconds for image in images.values()) < _QUICK
    timings = measure.interleave(
        dict.fromkeys(choices, lambda: generate(pipe, job)),
        pipe.device.type,
        rounds=2 if quick else 1,
        warmup=0,
        burst=_BURST if quick else 1,
        prepare=lambda name: handle.use(choices[name]),
    )
    handle.use(ours)
    timed = {name: replace(image, seconds=timings[name].median_ms / 1e3) for name, image in images.items()}
    return timed[EAGER], timed[TRITIUM]


def _differences(images: Sequence[Image], references: Sequence[Image]) -> dict[str, Any]:
    pairs = list(zip(images, references, strict=True))
    worst = quality.worst([image.difference(reference) for image, reference in pairs])
    l2 = worst.latent_l2
    if l2 is None:
        l2 = max(measure.relative_l2(image.pixels, reference.pixels) for image, reference in pairs)
    return {"relative_l2": l2, "psnr": worst.to_dict()["psnr"], "ssim": worst.ssim}


def _restart_times(name: str, label: str, job: Job, settings: Settings, notify: Notify) -> dict[str, float]:
    """Time the first images of other processes: with empty caches, then with the artifacts that the first one saved."""
    with tempfile.TemporaryDirectory() as folder:
        saved, moved = Path(folder) / "saved", Path(folder) / "moved"
        notify(f"{label}: first image of another process, with empty caches", PREPARED)
        cold = _first_image_of_a_process(name, settings, job, save=saved)
        saved.rename(moved)
        notify(f"{label}: first image of another process, with artifacts; {cold:.1f} s with empty caches", PREPARED)
        restarts = [_first_image_of_a_process(name, settings, job, artifacts=moved) for _ in range(_RESTARTS)]
    return {"cold_start_s": cold, "restart_s": statistics.median(restarts)}


def _first_image_of_a_process(name: str, settings: Settings, job: Job, **files: Path) -> float:
    """Return the seconds to the first image of a new process with empty caches; `files` to `save` or with `artifacts`."""
    order = {"name": name, "device": settings.device_type, "dtype": settings.dtype_text, "job": job.to_dict()}
    order |= {what: str(path) for what, path in files.items()}
    with tempfile.TemporaryDirectory() as cache:
        # Also Triton's folder, which holds the kernels of ops.
        folders = {"TORCHINDUCTOR_CACHE_DIR": cache, envs.TRITON_CACHE: str(Path(cache) / "triton")}
        # Both the interpreter and the program are this package's.
        child = subprocess.run(
            [sys.executable, "-m", "tritium.bench.first_image"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
            env=envs.child_environment(folders),
        )
    if child.returncode != 0:
        raise ConfigError(f"{name}: the second process failed: {child.stderr.strip().splitlines()[-1]}")
    return float(json.loads(child.stdout.strip().splitlines()[-1])["seconds"])

"""Whole pipelines as workloads: `example`, or a local folder. The time is that of an image, from prompt to pixels.

One pipeline serves all variants: its parts are switched between eager, torch.compile and Tritium, untimed, before each
turn. Both compiled variants compile the same parts.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tritium import compat, envs, measure
from tritium.api import Handle, optimize
from tritium.bench import generation, quality
from tritium.bench.generation import Image, Job
from tritium.bench.results import OURS, YARDSTICK, Row
from tritium.bench.run import EAGER, GRAPHS, PREPARED, TREES, Notify, Outcome, Settings, start_compiler
from tritium.errors import ConfigError
from tritium.example import PROMPTS
from tritium.pipelines.plan import Choice, Plan

# Images of one variant in a row, as users generate them: the first one after another variant has to allocate again.
_BURST = 3

# Images that take fewer seconds are generated several times for a comparison.
_QUICK = 3.0

# Processes started with artifacts. The median counts: a few seconds are easily disturbed.
_RESTARTS = 3

# Seconds until the first image of a process, at most.
_PATIENCE = 1800


def is_pipeline(name: str) -> bool:
    """Return True for the name of a pipeline: the example, or a folder."""
    return name == generation.EXAMPLE or (Path(name) / "model_index.json").is_file()


def jobs_for(name: str) -> list[Job]:
    """List the jobs of a pipeline: its plain call, on prompts it was trained for."""
    if name == generation.EXAMPLE:
        return [Job(prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    prompts = ("a red apple on a wooden table", "a lighthouse at night, long exposure")
    return [Job(prompt=prompt, seed=seed) for seed, prompt in enumerate(prompts)]


def run(name: str, settings: Settings, notify: Notify) -> Outcome:
    """Measure a pipeline: time of an image, first images cold and with artifacts, differences from eager."""
    settings.refuse_options_of_models(name, "is a whole pipeline")
    label = name if name == generation.EXAMPLE else Path(name).name
    notify(f"{label}: loading", 0.0)
    pipe = generation.load(name, settings.device_type, settings.dtype)
    pipe.set_progress_bar_config(disable=True)
    jobs = jobs_for(name)
    images: dict[str, list[Image]] = {}
    first: dict[str, float] = {}
    restart: dict[str, Any] = {}
    # torch.compile compiles the parts that Tritium compiles by default.
    with optimize(pipe, Plan(progress=False)) as handle, tempfile.TemporaryDirectory() as folder:
        ways = _ways(handle, settings)
        # Engine `eager` generates no code, so there is nothing to keep.
        keeps = settings.cold and handle.plan.config.engine == "inductor"
        if settings.cold:
            start_compiler(settings.device_type)
        for index, variant in enumerate(sorted(ways, key=[EAGER, OURS, GRAPHS, YARDSTICK].index)):
            notify(f"{label}: first image, {variant}", PREPARED * index / len(ways))
            handle.use(ways[variant])
            with compat.inductor.empty_cache() if settings.cold and variant != EAGER else contextlib.nullcontext():
                first[variant] = generation.generate(pipe, jobs[0]).seconds
            images[variant] = [generation.generate(pipe, job) for job in jobs]
        if keeps:
            saved, moved = Path(folder) / "saved", Path(folder) / "moved"
            for field, what, files in (
                ("cold_start_s", "with empty caches", {"save": saved}),
                ("restart_s", "with artifacts", {"artifacts": moved}),
            ):
                if saved.exists():
                    saved.rename(moved)
                notify(f"{label}: first image of another process, {what}", PREPARED)
                starts = [
                    _restart(name, settings, jobs[0], **files) for _ in range(_RESTARTS if "artifacts" in files else 1)
                ]
                restart[field] = statistics.median(starts)
                notify(f"{label}: {', '.join(f'{seconds:.1f}' for seconds in starts)} s {what}", PREPARED)
        timings, load = _timed(label, pipe, handle, ways, jobs[0], settings, notify)
        rows = []
        for variant in _variants(settings):
            handle.use(ways[variant])
            rows.append(
                Row(
                    workload=label,
                    variant=variant,
                    mode=None if variant == EAGER else settings.mode,
                    dtype=str(settings.dtype).removeprefix("torch."),
                    shrunk=False,
                    note=_note(images[EAGER][0], len(jobs)),
                    shapes={"pixels": list(images[EAGER][0].pixels.shape)},
                    **asdict(timings[variant]),
                    ratio=timings[YARDSTICK].median_ms / timings[variant].median_ms if YARDSTICK in timings else None,
                    first_call_s=first[variant],
                    first_call_cold=settings.cold,
                    peak_memory_bytes=measure.peak_memory(
                        lambda: generation.generate(pipe, jobs[0]), settings.device_type
                    ),
                    disturbed=load.disturbed if load is not None else None,
                    **(restart if variant == OURS else {}),
                    **_differences(images[variant], images[EAGER]),
                )
            )
    settings.on_rows(rows)
    return Outcome(rows, dict.fromkeys(ways, pipe))


def _ways(handle: Handle, settings: Settings) -> dict[str, dict[str, Choice]]:
    """Map each variant to a choice for each part. Eager always runs: differences are against it."""
    eager = Choice(how="eager")
    ours = handle.choices
    theirs = {name: choice if choice.how == "eager" else Choice(how="inductor") for name, choice in ours.items()}
    captured = {
        name: replace(choice, graphs="with_compile") if choice.how == "tritium" else choice
        for name, choice in ours.items()
    }
    ways = {EAGER: dict.fromkeys(ours, eager), YARDSTICK: theirs, OURS: ours, GRAPHS: captured}
    return {name: way for name, way in ways.items() if name in settings.variants or name == EAGER}


def _variants(settings: Settings) -> list[str]:
    """List the variants without `reduce-overhead`, whose graphs need a mark for every step of a pipeline."""
    return [variant for variant in settings.variants if variant != TREES]


@dataclass(frozen=True)
class Compared:
    """Images of one job, eager and optimized, with the median seconds of interleaved runs."""

    eager: Image
    ours: Image


def compare(pipe: Any, handle: Handle, job: Job) -> Compared:
    """Generate the image of a job eagerly and optimized.

    Several images of each: a single one would mostly time memory that the other side has just freed.
    """
    ours = handle.choices
    ways = {EAGER: dict.fromkeys(ours, Choice(how="eager")), OURS: ours}
    images: dict[str, Image] = {}
    for name, way in ways.items():
        handle.use(way)
        images[name] = generation.generate(pipe, job)
    quick = max(found.seconds for found in images.values()) < _QUICK
    timings = measure.interleave(
        dict.fromkeys(ways, lambda: generation.generate(pipe, job)),
        pipe.device.type,
        rounds=2 if quick else 1,
        warmup=0,
        burst=_BURST if quick else 1,
        prepare=lambda name: handle.use(ways[name]),
    )
    handle.use(ours)
    timed = {name: replace(found, seconds=timings[name].median_ms / 1e3) for name, found in images.items()}
    return Compared(timed[EAGER], timed[OURS])


def _timed(
    label: str,
    pipe: Any,
    handle: Handle,
    ways: Mapping[str, Mapping[str, Choice]],
    job: Job,
    settings: Settings,
    notify: Notify,
) -> tuple[dict[str, measure.Timing], measure.Load | None]:
    variants = _variants(settings)
    what = f"{label}: timing {', '.join(variants)} in turns"
    meter = measure.LoadMeter()
    timings = measure.interleave(
        dict.fromkeys(variants, lambda: generation.generate(pipe, job)),
        settings.device_type,
        seconds=settings.seconds,
        warmup=1,
        burst=_BURST,
        prepare=lambda name: handle.use(ways[name]),
        on_round=lambda share: notify(what, PREPARED + (1 - PREPARED) * share),
    )
    return timings, meter.read()


def _differences(images: list[Image], reference: list[Image]) -> dict[str, Any]:
    found = [
        quality.difference(ours.pixels, theirs.pixels, None if ours.latents is None else (ours.latents, theirs.latents))  # type: ignore[arg-type]
        for ours, theirs in zip(images, reference, strict=True)
    ]
    worst = quality.worst(found)
    l2 = worst.latent_l2
    if l2 is None:
        l2 = max(measure.relative_l2(a.pixels, b.pixels) for a, b in zip(images, reference, strict=True))
    return {"relative_l2": l2, "psnr": worst.to_dict()["psnr"], "ssim": worst.ssim}


def _note(images: Image, jobs: int) -> str:
    height, width = images.pixels.shape[-2:]
    return f"a picture of {width} x {height}; differences are the worst of {jobs} pictures"


def _restart(
    name: str, settings: Settings, job: Job, *, artifacts: Path | None = None, save: Path | None = None
) -> float:
    """Return the seconds to the first image of a new process with empty caches, or with artifacts."""
    order = {
        "name": name,
        "device": settings.device_type,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "job": job.to_dict(),
        "artifacts": str(artifacts) if artifacts is not None else None,
        "save": str(save) if save is not None else None,
    }
    with tempfile.TemporaryDirectory() as cache:
        # Both the interpreter and the program are this package's.
        child = subprocess.run(
            [sys.executable, "-m", "tritium.bench.first_image"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
            # Also Triton's folder, which holds the kernels of ops.
            env=envs.child_environment(
                {"TORCHINDUCTOR_CACHE_DIR": cache, envs.TRITON_CACHE: str(Path(cache) / "triton")}
            ),
        )
    if child.returncode != 0:
        raise ConfigError(f"{name}: the second process failed: {child.stderr.strip().splitlines()[-1]}")
    return float(json.loads(child.stdout.strip().splitlines()[-1])["seconds"])

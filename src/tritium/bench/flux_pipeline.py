"""A pipeline with the shape of FLUX.1-dev and random weights: eager, as diffusers documents compiling it, and optimized.

The text encoders are left out: the pipeline takes prompt embeddings. All sizes run on the same compiled pipelines, so
that a first image of the second and third size includes the cost of a new size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritium import measure, quality
from tritium.api import Handle, optimize
from tritium.bench.comparison import Comparison, optimized, twin
from tritium.bench.decoders import KL_DECODE, autoencoder_kl
from tritium.bench.models import MODELS, cast_as_loading_does, diffusers, seeded
from tritium.bench.results import EAGER, INDUCTOR, OPTIMIZED, Row
from tritium.bench.settings import Notify, Settings
from tritium.bench.suite import Clock, Suite, Task
from tritium.bench.workload import SEED, Normals
from tritium.config import CompilationConfig
from tritium.pipelines.plan import Plan

# Steps of a variant before it is timed: a capture waits for some ordinary ones.
_SETTLING_STEPS = 16

# A size starts only if this much time is left on a GPU, first images included. It takes at most twice as long.
_SECONDS = 120.0


@dataclass(frozen=True)
class Scale:
    """The size of the pipeline and of its images."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    sizes: Sequence[int]
    steps: int
    text: int
    note: str
    # The timed images of each variant; None times for the seconds of the settings.
    rounds: int | None = None
    eager: bool = True


FULL = Scale(
    transformer=MODELS["flux"].published,
    vae=KL_DECODE.full.config,
    sizes=(1024, 512, 768),
    steps=8,
    text=512,
    note="19 double + 38 single blocks, width 3072, AutoencoderKL, 512 prompt tokens, 8 steps, random weights",
)
# As users run FLUX.1-dev. Eager takes longest and is in the results of 8 steps.
LONG = replace(
    FULL,
    sizes=(1024,),
    steps=28,
    note="19 double + 38 single blocks, width 3072, AutoencoderKL, 512 prompt tokens, 28 steps, random weights",
    rounds=3,
    eager=False,
)
SMALL = Scale(
    # The pipeline packs 2 x 2 pixels of four channels.
    transformer={**MODELS["flux"].tiny.config, "in_channels": 16},
    vae=KL_DECODE.small.config,
    sizes=(64,),
    steps=2,
    text=16,
    note="1 double + 1 single block, width 32, a small AutoencoderKL, 16 prompt tokens, 2 steps, random weights",
)


def build(scale: Scale, device: str, dtype: torch.dtype) -> Any:
    package = diffusers()
    scaling = {"use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159}
    vae = seeded(lambda: autoencoder_kl({**scale.vae, **scaling}), device)
    cast_as_loading_does(vae, dtype)
    pipe = package.FluxPipeline(
        scheduler=package.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=MODELS["flux"].build(scale.transformer, device, dtype),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass
class PipelineVariant:
    """A pipeline as one variant runs it."""

    pipe: Any
    handle: Handle | None = None
    # Bytes on a GPU that this variant allocated and still holds, such as the memory of captured graphs.
    held_bytes: int = 0


def compile_pipeline(pipe: Any, variant: str, settings: Settings) -> PipelineVariant:
    """Return the pipeline, or a twin of it that is compiled for a variant."""
    if variant == EAGER:
        return PipelineVariant(pipe)
    # The twins of transformer and VAE share the weights; the other components are shared.
    pipe = type(pipe)(**{**pipe.components, "transformer": twin(pipe.transformer), "vae": twin(pipe.vae)})
    pipe.set_progress_bar_config(disable=True)
    if variant == OPTIMIZED:
        return PipelineVariant(pipe, optimized(pipe, settings))
    if variant in settings.lossy:
        config = settings.config or CompilationConfig()
        plan = Plan(progress=False, config=config, **settings.lossy[variant])
        return PipelineVariant(pipe, optimize(pipe, plan))
    pipe.transformer.compile_repeated_blocks()
    pipe.vae.decode = torch.compile(pipe.vae.decode)
    return PipelineVariant(pipe)


def tasks(settings: Settings, stack: contextlib.ExitStack, scale: Scale = FULL) -> list[Task]:
    """Make one task a size; all sizes run on the same compiled pipelines."""
    if settings.small:
        small = replace(SMALL, steps=scale.steps, rounds=scale.rounds, eager=scale.eager)
        scale = SMALL if scale is FULL else small
    variants: dict[str, PipelineVariant] = {}
    measured: list[int] = []

    def measure_size(size: int, clock: Clock, notify: Notify) -> list[Row]:
        del clock
        if not variants:
            notify("flux pipeline: building", 0.0)
            pipe = build(scale, settings.device_type, settings.dtype)
            others = [EAGER] * scale.eager + [INDUCTOR] * (INDUCTOR in settings.against)
            for name in (*others, OPTIMIZED, *settings.lossy):
                variants[name] = compile_pipeline(pipe, name, settings)
                if (handle := variants[name].handle) is not None:
                    stack.enter_context(handle)
        when = f"after {', '.join(map(str, measured))} px" if measured else "first size of this process"
        rows = _measure(scale, size, variants, when, settings, notify)
        measured.append(size)
        return rows

    return [Task(f"flux pipeline {size}", _SECONDS, functools.partial(measure_size, size)) for size in scale.sizes]


def _measure(
    scale: Scale, size: int, variants: Mapping[str, PipelineVariant], when: str, settings: Settings, notify: Notify
) -> list[Row]:
    where = settings.device_type
    images: dict[str, torch.Tensor] = {}
    name = f"flux pipeline {size}" + f", {scale.steps} steps" * (scale.rounds is not None)
    note = f"{scale.note}; {size} x {size} pixels"
    comparison = Comparison(
        workload=name, settings=settings, notify=notify, note=note, shrunk=settings.small, inference_mode=False
    )
    for variant, pipeline in variants.items():
        before = measure.allocated_bytes(where)

        def settle(call: Callable[[], Any], variant: str = variant) -> None:
            for _ in range(max(1, _SETTLING_STEPS // scale.steps)):
                images[variant] = call().float().cpu()

        # Each variant draws the same prompts.
        normal = Normals(settings.device_type, settings.dtype)
        added = comparison.add(variant, generator(scale, size, pipeline.pipe, normal), settle=settle)
        others = sum(other.held_bytes for other in variants.values() if other is not pipeline)
        peak = comparison.peak_memory(variant)
        pipeline.held_bytes += measure.allocated_bytes(where) - before
        reference = images[next(iter(images))]
        difference = quality.difference(images[variant], reference).to_dict()
        parts = [] if pipeline.handle is None else pipeline.handle.components
        added.fields |= {
            "mode": "default" if variant == INDUCTOR else None,
            "peak_memory_bytes": None if peak is None else peak - others,
            "relative_l2": measure.relative_l2(images[variant], reference),
            "psnr": difference["psnr"],
            "ssim": difference["ssim"],
            "remark": "; ".join([f"first image: {when}", *(f"{part.name}: {part.what}" for part in parts)]),
        }
    comparison.shapes = {"pixels": list(reference.shape)}
    comparison.time(warmup=0, **({} if scale.rounds is None else {"seconds": None, "rounds": scale.rounds}))
    return comparison.rows()


def generator(scale: Scale, size: int, pipe: Any, normal: Normals) -> Callable[[], torch.Tensor]:
    """Return a function that generates an image; every call starts from the same noise."""
    config = pipe.transformer.config
    arguments = {
        "prompt_embeds": normal(1, scale.text, config.joint_attention_dim),
        "pooled_prompt_embeds": normal(1, config.pooled_projection_dim),
        "height": size,
        "width": size,
        "num_inference_steps": scale.steps,
        "guidance_scale": 3.5,
        "output_type": "pt",
    }
    # A generator of the CPU means the same noise on every device.
    return lambda: pipe(**arguments, generator=torch.Generator().manual_seed(SEED)).images


SUITE = Suite(tasks, "flux", keeps_code=True)

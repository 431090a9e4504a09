"""A pipeline with the shape of FLUX.1-dev and random weights: eager, as diffusers documents compiling it, and optimized.

The text encoders are left out: the pipeline takes prompt embeddings. Sizes are measured from the largest to the
smallest, so that a first image includes the cost of a new size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tritium import compat, measure
from tritium.api import Handle
from tritium.bench import quality, sides
from tritium.bench.results import YARDSTICK, Row
from tritium.bench.run import EAGER, Notify, Settings, start_compiler
from tritium.bench.sides import OPTIMIZED
from tritium.bench.store import Clock, Store
from tritium.bench.transformers import cast_as_loading_does, diffusers, seeded
from tritium.bench.workload import SEED, drawing

# Images of a side before it is timed: a capture waits for some ordinary steps.
_SETTLING_IMAGES = 2


@dataclass(frozen=True)
class Scale:
    """The size of the pipeline and of its images."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    sizes: Sequence[int]
    steps: int
    text: int
    note: str
    # Seconds that one size takes at most, first images included; none is started with less than half of it left.
    budget: float


_VAE = {"use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159}
FULL = Scale(
    transformer={"guidance_embeds": True},
    vae={
        **_VAE,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "sample_size": 1024,
    },
    sizes=(1024, 768, 512),
    steps=8,
    text=512,
    note="19 double + 38 single blocks, width 3072, AutoencoderKL, 512 prompt tokens, 8 steps, random weights",
    budget=240.0,
)
SMALL = Scale(
    transformer={
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (8, 12, 12),
        "guidance_embeds": True,
    },
    vae={
        **_VAE,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 8,
        "mid_block_add_attention": False,
        "sample_size": 64,
    },
    sizes=(64,),
    steps=2,
    text=16,
    note="1 double + 1 single block, width 64, a small AutoencoderKL, 16 prompt tokens, 2 steps, random weights",
    budget=240.0,
)


def scale(settings: Settings) -> Scale:
    """Choose the scale: the small one on a CPU."""
    return SMALL if settings.device_type == "cpu" else FULL


def build(chosen: Scale, device: str, dtype: torch.dtype) -> Any:
    """Make a seeded pipeline on the device."""
    package = diffusers()
    transformer = seeded(lambda: package.FluxTransformer2DModel(**chosen.transformer), device)
    cast_as_loading_does(transformer, dtype)
    vae = seeded(lambda: package.AutoencoderKL(**chosen.vae), device)
    cast_as_loading_does(vae, dtype)
    pipe = package.FluxPipeline(
        scheduler=package.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass
class Side:
    """A pipeline as one variant runs it."""

    pipe: Any
    handle: Handle | None = None
    # Bytes on a GPU that this side allocated and still holds, such as the memory of captured graphs.
    held_bytes: int = 0

    @property
    def remark(self) -> str:
        parts = [] if self.handle is None else self.handle.components
        return "; ".join(f"{part.name}: {part.what}" for part in parts)


def run(settings: Settings, store: Store, clock: Clock, notify: Notify) -> list[str]:
    """Measure every size that the store lacks; return those for which no time was left."""
    chosen, dtype = scale(settings), str(settings.dtype).removeprefix("torch.")
    missing = [size for size in chosen.sizes if not store.has(_name(size), dtype)]
    if not missing:
        return []
    notify("flux pipeline: building", 0.0)
    pipe = build(chosen, settings.device_type, settings.dtype)
    if settings.cold:
        start_compiler(settings.device_type)
    made = {variant: _side(pipe, variant, settings) for variant in _variants(settings)}
    try:
        for index, size in enumerate(missing):
            if clock.left <= (chosen.budget / 2 if settings.device_type == "cuda" else 0):
                return [_name(later) for later in missing[index:]]

            def share(what: str, done: float, index: int = index) -> None:
                notify(what, (index + done) / len(missing))

            before = "first size of this process" if not index else f"after {', '.join(map(str, missing[:index]))} px"
            store.add(_measure(chosen, size, made, settings, share, before))
    finally:
        for side in made.values():
            if side.handle is not None:
                side.handle.remove()
    return []


def _name(size: int) -> str:
    return f"flux pipeline {size}"


def _variants(settings: Settings) -> list[str]:
    return [EAGER, *[YARDSTICK] * (YARDSTICK in settings.against), OPTIMIZED]


def _side(pipe: Any, variant: str, settings: Settings) -> Side:
    if variant == EAGER:
        return Side(pipe)
    pipe = sides.twin_pipeline(pipe, "transformer", "vae")
    pipe.set_progress_bar_config(disable=True)
    if variant == OPTIMIZED:
        return Side(pipe, sides.optimized(pipe, settings.config))
    pipe.transformer.compile_repeated_blocks()
    pipe.vae.decode = torch.compile(pipe.vae.decode)
    return Side(pipe)


def _drawing(chosen: Scale, size: int, pipe: Any, settings: Settings) -> Callable[[], torch.Tensor]:
    draw = drawing(settings.device_type, settings.dtype)
    config = pipe.transformer.config
    embeddings = {
        "prompt_embeds": draw(1, chosen.text, config.joint_attention_dim),
        "pooled_prompt_embeds": draw(1, config.pooled_projection_dim),
    }

    def image() -> torch.Tensor:
        # A generator of the CPU means the same noise on every device.
        drawn = pipe(
            **embeddings,
            height=size,
            width=size,
            num_inference_steps=chosen.steps,
            guidance_scale=3.5,
            generator=torch.Generator().manual_seed(SEED),
            output_type="pt",
        )
        pixels: torch.Tensor = drawn.images
        return pixels

    return image


def _measure(
    chosen: Scale, size: int, made: Mapping[str, Side], settings: Settings, notify: Notify, before: str
) -> list[Row]:
    calls = {variant: _drawing(chosen, size, side.pipe, settings) for variant, side in made.items()}
    first: dict[str, float] = {}
    recompiles: dict[str, int] = {}
    images: dict[str, torch.Tensor] = {}
    peaks: dict[str, int | None] = {}
    for index, (variant, call) in enumerate(calls.items()):
        notify(f"{_name(size)}: first image, {variant}", 0.7 * index / len(calls))
        before_bytes = sides.allocated(settings.device_type)
        with sides.cold_caches(settings):
            first[variant] = measure.first_call(call, settings.device_type)
            compiled = compat.dynamo.graphs_compiled()
            for _ in range(_SETTLING_IMAGES):
                images[variant] = call().float().cpu()
            recompiles[variant] = compat.dynamo.graphs_compiled() - compiled
            others = sum(side.held_bytes for name, side in made.items() if name != variant)
            peak = measure.peak_memory(call, settings.device_type)
            peaks[variant] = None if peak is None else peak - others
        made[variant].held_bytes += sides.allocated(settings.device_type) - before_bytes
    notify(f"{_name(size)}: timing {', '.join(calls)} in turns", 0.7)
    meter = measure.LoadMeter()
    timings = measure.interleave(calls, settings.device_type, seconds=settings.seconds, warmup=0)
    load = meter.read()
    rows = []
    for variant, timing in timings.items():
        found = quality.difference(images[variant], images[EAGER]).to_dict()
        rows.append(
            Row(
                workload=_name(size),
                variant=variant,
                mode=None if variant != YARDSTICK else "default",
                dtype=str(settings.dtype).removeprefix("torch."),
                shrunk=chosen is SMALL,
                note=f"{chosen.note}; {size} x {size} pixels",
                shapes={"pixels": list(images[EAGER].shape)},
                **asdict(timing),
                ratio=timings[YARDSTICK].median_ms / timing.median_ms if YARDSTICK in timings else None,
                first_call_s=first[variant],
                first_call_cold=settings.cold,
                peak_memory_bytes=peaks[variant],
                relative_l2=measure.relative_l2(images[variant], images[EAGER]),
                psnr=found["psnr"],
                ssim=found["ssim"],
                recompiles=recompiles[variant],
                disturbed=load.disturbed if load is not None else None,
                remark="; ".join(filter(None, (f"first image: {before}", made[variant].remark))),
            )
        )
    return rows

"""Run a job of a pipeline: keep pixels, latents and seconds."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritium import device, quality
from tritium.errors import ConfigError
from tritium.quality import Difference

# Image sizes are multiples of this: a VAE's factor of 8 and patches of 2.
MULTIPLE = 16

# A square of this side has 4 gigapixels, so a larger number is a typing error.
LONGEST_SIDE = 2**16

# The range that torch.Generator.manual_seed accepts.
SEEDS = range(-(2**63), 2**64)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a pipeline. Sizes and steps of None mean the pipeline's defaults."""

    prompt: str
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    seed: int = 0
    # Further arguments of the pipeline's call.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            size = getattr(self, name)
            if size is not None and (size < MULTIPLE or size % MULTIPLE):
                raise ConfigError(f"{name} {size} is not a multiple of {MULTIPLE}")
            if size is not None and size > LONGEST_SIDE:
                raise ConfigError(f"{name} {size}: a side has at most {LONGEST_SIDE} pixels")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        if self.seed not in SEEDS:
            raise ConfigError(f"seed {self.seed} is out of range: torch takes -2**63 to 2**64 - 1")

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "extra": dict(self.extra)}


@dataclass(frozen=True)
class Image:
    """The result of a job."""

    # [B, C, H, W] in 0..1; the frames of a video are a batch.
    pixels: Tensor
    # After the last step, before decoding; None for a pipeline that does not expose them.
    latents: Tensor | None
    seconds: float

    def difference(self, reference: Image, *, perceptual: bool = False) -> Difference:
        """Compare with another image of the same job, and with its latents if both have them."""
        latents = None
        if self.latents is not None and reference.latents is not None:
            latents = (self.latents, reference.latents)
        return quality.difference(self.pixels, reference.pixels, latents, perceptual=perceptual)


def generate(pipe: Any, job: Job) -> Image:
    """Run a job. The same job on the same pipeline starts from the same noise."""
    latents: Tensor | None = None

    def keep(_pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        nonlocal latents
        latents = values["latents"]
        return values

    taken = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {"prompt": job.prompt, "output_type": "pt", **job.extra}
    # On the host, so that every device starts from the same noise.
    arguments["generator"] = torch.Generator("cpu").manual_seed(job.seed)
    asked = {"width": job.width, "height": job.height, "num_inference_steps": job.steps}
    arguments |= {name: value for name, value in asked.items() if value is not None}
    if "callback_on_step_end" in taken:
        arguments["callback_on_step_end"] = keep
    unknown = [name for name in arguments if name not in taken]
    if unknown:
        raise ConfigError(f"{type(pipe).__name__} takes no {', '.join(unknown)}")
    device.synchronize(pipe.device.type)
    start = time.perf_counter()
    output = pipe(**arguments)
    device.synchronize(pipe.device.type)
    seconds = time.perf_counter() - start
    found = output.images if hasattr(output, "images") else output.frames
    pixels = found if isinstance(found, Tensor) else torch.stack(list(found))
    # A video: [B, F, C, H, W].
    pixels = pixels.flatten(0, 1) if pixels.dim() == 5 else pixels
    pixels = pixels.detach().float().cpu().clamp(0, 1)
    return Image(pixels, latents.detach().clone() if latents is not None else None, seconds)
